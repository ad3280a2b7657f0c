"""One accepted connection of a worker, and what can be asked of its socket. Knows nothing of requests."""

from __future__ import annotations

import errno
import json
import select
import socket
import struct
from typing import Any

from gunicorn.workers.gthread import TConn

from server.errors import Overloaded, openai_error, retry_headers

NEVER = float("inf")
OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Connection(TConn):  # type: ignore[misc]
    """An accepted connection. Deadlines are on the monotonic clock; ``NEVER`` is none."""

    def __init__(self, cfg: Any, sock: socket.socket, client: Any, server: Any, *, admin: bool) -> None:
        super().__init__(cfg, sock, client, server)
        self.admin = admin
        self.holds_place = False
        self.computing = False  # its place comes back from the thread that computes
        self.expires = NEVER  # until it has spoken, or, waiting for a place, until it is refused
        self.grace = NEVER  # how long it holds its place before it has spoken
        self.read_deadline = NEVER  # for the whole request to be here
        self.send_deadline = NEVER  # for the whole response to be taken


class NoRoom(Exception):
    """This process, or the machine, has no descriptor or memory for one more connection."""


def accept(listener: Any, cfg: Any, *, admin: bool, stall_s: float) -> Connection | None:
    """Accept one connection; None if another worker took it or the client has gone.

    A send that makes no progress for *stall_s* seconds fails.

    Raises:
        NoRoom: there is no descriptor for it.
    """
    try:
        sock, client = listener.accept()
    except OSError as error:
        if error.errno in OUT_OF_DESCRIPTORS:
            raise NoRoom from error
        return None
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(stall_s), 0))
    return Connection(cfg, sock, client, listener.getsockname(), admin=admin)


def has_data(sock: socket.socket) -> bool:
    """Tell whether reading would not wait: bytes are there, or the end is."""
    try:
        sock.setblocking(False)
        sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True  # reset: let the request's thread find out
    return True


def has_left(sock: socket.socket) -> bool:
    """Tell whether the client has closed its side; one that only says it sends no more counts too."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return bool(poll.poll(0))


def reset(sock: socket.socket) -> None:
    """End the connection with a reset: before HTTP/1.1 a plain end means that the response was whole."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def hang_up(sock: socket.socket, how: int) -> None:
    """Wake the thread that reads from *sock* (SHUT_RD) or also writes to it (SHUT_RDWR)."""
    try:
        sock.shutdown(how)
    except OSError:
        pass  # it has gone already


def say_overloaded(sock: socket.socket) -> None:
    """Send 503 and end our side, without waiting for the client to take it."""
    error = Overloaded("the queue is full", retry_after_s=1)
    body = json.dumps(openai_error(error)).encode()
    headers = {"Connection": "close", "Content-Type": "application/json", "Content-Length": str(len(body))}
    lines = [f"{name}: {value}\r\n" for name, value in {**headers, **retry_headers(error)}.items()]
    sock.setblocking(False)
    try:
        sock.send(b"HTTP/1.1 503 Service Unavailable\r\n" + "".join(lines).encode() + b"\r\n" + body)
        sock.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # it has gone already
