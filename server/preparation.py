"""Check a version and bring it into the page cache, in a child process: the arbiter's loop never waits.

One pass over the bytes does both. What the child found comes back as one JSON object on a pipe.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

PR_SET_PDEATHSIG = 1
REPORT_BYTES = 4096  # one pipe write of this size is atomic and never blocks on an empty pipe
DETAIL_BYTES = 600


@dataclass(frozen=True)
class Refusal:
    """Why a version cannot be served: one snake_case word, and a sentence naming file or field."""

    reason: str
    detail: str

    @classmethod
    def of(cls, error: BaseException, otherwise: str) -> Refusal:
        """Name *error* by its own ``reason`` where it has one."""
        reason = str(getattr(error, "reason", otherwise))
        text = str(error) or type(error).__name__
        return cls(reason, text.encode(errors="replace")[:DETAIL_BYTES].decode(errors="ignore"))


class Preparation:
    """A child that runs *check* once. It dies with the arbiter, and at its deadline."""

    def __init__(self, version: str, check: Callable[[], object], *, timeout_s: float) -> None:
        self.version = version
        self.started = time.monotonic()
        self.deadline = self.started + timeout_s
        self._timed_out = False
        self._reader, writer = os.pipe()
        os.set_blocking(self._reader, False)
        parent = os.getpid()
        try:
            self.pid = os.fork()
        except OSError:
            os.close(self._reader)
            os.close(writer)
            raise
        if self.pid == 0:
            _run(check, writer, parent)
        os.close(writer)

    def expire(self, now: float) -> None:
        """End the child once its time is over; it is reaped like any other."""
        if now > self.deadline and not self._timed_out:
            self._timed_out = True
            self.cancel()

    def cancel(self) -> None:
        """End the child and whatever it started; nobody wants its answer any more."""
        for end in (os.killpg, os.kill):
            try:
                end(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def outcome(self, status: int) -> Refusal | None:
        """Return why the version is refused, or None; *status* is what waitpid gave for the child."""
        report = self._read_report()
        if self._timed_out:
            seconds = self.deadline - self.started
            return Refusal("prepare_timeout", f"checking {self.version} took longer than {seconds:g} s")
        code = os.waitstatus_to_exitcode(status)
        if report:
            try:
                return Refusal(**json.loads(report))
            except (ValueError, TypeError):
                return Refusal("prepare_failed", report.decode(errors="replace")[:DETAIL_BYTES])
        if code != 0:
            return Refusal("prepare_crashed", f"checking {self.version} ended with {name_exit(code)}")
        return None

    def _read_report(self) -> bytes:
        # Never waiting: a process that the family started may hold the other end for as long as it likes.
        try:
            return os.read(self._reader, REPORT_BYTES)
        except BlockingIOError:
            return b""
        finally:
            os.close(self._reader)


def name_exit(code: int) -> str:
    """Return ``exit_3`` or ``SIGKILL`` for an exit code as `os.waitstatus_to_exitcode` gives it."""
    if code >= 0:
        return f"exit_{code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal_{-code}"


def die_with_parent(parent: int, sig: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to send *sig* to this process when the arbiter ends, however it ends (prctl(2))."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(sig))
    if os.getppid() != parent:  # it ended before the request was made
        os._exit(1)


def _run(check: Callable[[], object], writer: int, parent: int) -> NoReturn:
    code = 1
    try:
        os.setpgid(0, 0)  # what it starts ends with it
        die_with_parent(parent)
        for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
            signal.signal(sig, signal.SIG_DFL)
        check()
        code = 0
    except BaseException as error:
        if not hasattr(error, "reason"):
            traceback.print_exc(file=sys.stderr)
        refusal = Refusal.of(error, "prepare_failed")
        os.write(
            writer, json.dumps(refusal.__dict__, ensure_ascii=False).encode(errors="replace")[:REPORT_BYTES]
        )
    finally:
        sys.stderr.flush()
        os._exit(code)
