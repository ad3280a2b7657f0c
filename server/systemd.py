"""The service manager's side of things: READY only once warm, RELOADING around a swap (sd_notify(3)).

One datagram a message; without NOTIFY_SOCKET everything here is nothing.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import MutableMapping


class Notifier:
    """Sends to one notify socket. ``watchdog_s`` is how often it wants to hear from us; 0 is never."""

    def __init__(self, address: str | None, watchdog_s: float = 0.0) -> None:
        self._address = address
        self._every_s = watchdog_s / 2
        self._last_beat = 0.0
        self.said_ready = False

    @classmethod
    def take_from(cls, environ: MutableMapping[str, str]) -> Notifier:
        """Take NOTIFY_SOCKET out of *environ*: gunicorn would say READY=1 before any worker boots.

        It stays in the environment that a binary upgrade starts from (gunicorn keeps a copy).
        """
        address = environ.pop("NOTIFY_SOCKET", None)
        # After a binary upgrade the variable still names the master before.
        meant_for = str(os.getpid()) if "GUNICORN_PID" in environ else environ.get("WATCHDOG_PID")
        ours = meant_for in (None, str(os.getpid()))
        watchdog_s = int(environ.get("WATCHDOG_USEC", "0")) / 1e6 if ours else 0.0
        return cls(address, watchdog_s)

    def ready(self, status: str) -> None:
        """The service is up: after the first boot, and after every swap however it ended."""
        self.said_ready = True
        self._send(f"READY=1\nSTATUS={status}\nMAINPID={os.getpid()}")

    def reloading(self) -> None:
        """A swap begins. Both lines in one datagram, as Type=notify-reload asks."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        """The service ends."""
        self._send("STOPPING=1")

    def extend(self, seconds: float) -> None:
        """Loading goes on: do not time out for *seconds* more."""
        self._send(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    def beat(self, now: float) -> None:
        """The arbiter's loop turns; said at most twice in a watchdog period."""
        if self._every_s and now - self._last_beat >= self._every_s:
            self._last_beat = now
            self._send("WATCHDOG=1")

    def _send(self, message: str) -> None:
        if self._address is None:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.connect(address)
                sender.send(message.encode())
        except OSError:
            pass  # a manager that does not listen must not end the service
