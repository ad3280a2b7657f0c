"""The two kinds of listener: data and admin. Bound by the arbiter, listening once a worker is warm.

Knows nothing of workers or requests.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from gunicorn import sock, systemd, util

TCP_INFO_BYTES = 104
TCP_INFO = struct.Struct("8B24I")
UNACKED = 12  # tcpi_unacked: on a listening socket, the connections waiting to be accepted

UPGRADE_KIND = "GUNICORN_SYSTEMD"  # beside gunicorn's own variables: whose sockets they are

NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY = 20
NLM_F_REQUEST = 1
UDIAG_SHOW_RQLEN = 0x10
UNIX_DIAG_RQLEN = 4
NLMSG_HEADER = struct.Struct("=IHHII")
UNIX_REQUEST = struct.Struct("=BBHIIIII")
UNIX_REPLY_BYTES = 16
ATTRIBUTE = struct.Struct("=HH")


class _BoundOnly:
    """Bind without listening: the kernel refuses connections until the first warm worker listens."""

    @staticmethod
    def _is_listening(_socket: socket.socket) -> bool:
        return True


class _DataTCP(_BoundOnly, sock.TCPSocket):  # type: ignore[misc]
    def set_options(self, sock: socket.socket, bound: bool = False) -> socket.socket:
        # A connection that has sent nothing stays in the kernel and takes no worker's capacity.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, 10)
        listener: socket.socket = super().set_options(sock, bound=bound)
        return listener


class _DataTCP6(_DataTCP):
    FAMILY = socket.AF_INET6
    __str__ = sock.TCP6Socket.__str__


class _DataUnix(_BoundOnly, sock.UnixSocket):  # type: ignore[misc]
    pass


def bind_data(cfg: Any, log: Any, descriptors: Iterable[int] = ()) -> list[Any]:
    """Bind gunicorn's addresses, or take over *descriptors*, without listening.

    Raises:
        OSError: an address is in use or not of this machine.
    """
    # What a master hands over counts more than fd://N of the command line, which was closed by the exec.
    inherited = list(descriptors) or [address for address in cfg.address if isinstance(address, int)]
    if inherited:
        return [_adopt(fd, cfg, log) for fd in inherited]
    return [_data_class(address)(address, cfg, log) for address in cfg.address]


def bind_admin(address: str, cfg: Any, log: Any, descriptor: int | None = None) -> Any:
    """Bind the admin address and listen at once: probes are answered while models load."""
    parsed = descriptor if descriptor is not None else util.parse_address(address, 8001)
    if isinstance(parsed, int):
        name, family = _name_and_family(parsed)
        return _plain_class(name, family)(name, cfg, log, fd=parsed)
    return _plain_class(parsed)(parsed, cfg, log)


def queued(listener: Any) -> int:
    """Return how many connections wait in the kernel to be accepted from *listener*."""
    if listener.FAMILY == socket.AF_UNIX:
        return _queued_unix(os.fstat(listener.fileno()).st_ino)
    raw = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
    return int(TCP_INFO.unpack(raw)[UNACKED])


@dataclass(frozen=True)
class Handed:
    """Descriptors that another process bound: a master before a binary upgrade, or systemd."""

    data: tuple[int, ...] = ()
    admin: int | None = None
    by_systemd: bool = False


def hand_over(
    environ: Mapping[str, str], sockets: Sequence[Any], master: int, *, by_systemd: bool
) -> dict[str, str]:
    """Return the environment of a new master beside *master*, on the same *sockets*: data, then admin."""
    numbers = ",".join(str(listener.fileno()) for listener in sockets)
    return {
        **environ,
        "GUNICORN_PID": str(master),
        "GUNICORN_FD": numbers,
        UPGRADE_KIND: str(int(by_systemd)),
    }


def handed_over(environ: MutableMapping[str, str]) -> Handed:
    """Return the descriptors named in *environ*, and take their names out of it.

    A master hands over its data listeners, then its admin listener. systemd hands over data listeners,
    and an admin listener where LISTEN_FDNAMES calls one ``admin``.
    """
    if "GUNICORN_PID" in environ:
        given = [int(fd) for fd in environ.pop("GUNICORN_FD").split(",")]
        return Handed(tuple(given[:-1]), given[-1], environ.pop(UPGRADE_KIND, "0") == "1")
    names = environ.get("LISTEN_FDNAMES", "").split(":")
    count = systemd.listen_fds()
    given = [systemd.SD_LISTEN_FDS_START + n for n in range(count)]
    admin = next((fd for fd, name in zip(given, names, strict=False) if name == "admin"), None)
    return Handed(tuple(fd for fd in given if fd != admin), admin, bool(count))


def _adopt(fd: int, cfg: Any, log: Any) -> Any:
    name, family = _name_and_family(fd)
    return _data_class(name, family)(name, cfg, log, fd=fd)


def _name_and_family(fd: int) -> tuple[Any, int]:
    # A copy: the caller's descriptor stays open, and gunicorn closes the one it is given.
    with socket.socket(fileno=os.dup(fd)) as inherited:
        return inherited.getsockname(), inherited.family


def _data_class(address: Any, family: int | None = None) -> Any:
    if isinstance(address, (str, bytes)):
        return _DataUnix
    return _DataTCP6 if _is_ipv6(address, family) else _DataTCP


def _plain_class(address: Any, family: int | None = None) -> Any:
    if isinstance(address, (str, bytes)):
        return sock.UnixSocket
    return sock.TCP6Socket if _is_ipv6(address, family) else sock.TCPSocket


def _is_ipv6(address: Any, family: int | None) -> bool:
    return family == socket.AF_INET6 if family is not None else bool(util.is_ipv6(address[0]))


def _queued_unix(inode: int) -> int:
    """Ask the kernel (sock_diag(7), UDIAG_SHOW_RQLEN) for the accept queue of one unix listener."""
    request = UNIX_REQUEST.pack(
        socket.AF_UNIX, 0, 0, 0xFFFFFFFF, inode, UDIAG_SHOW_RQLEN, 0xFFFFFFFF, 0xFFFFFFFF
    )
    header = NLMSG_HEADER.pack(NLMSG_HEADER.size + len(request), SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, 1, 0)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, NETLINK_SOCK_DIAG) as diag:
            diag.settimeout(1)
            diag.sendto(header + request, (0, 0))
            reply = diag.recv(4096)
    except OSError:
        return 0  # forbidden here (RestrictAddressFamilies): then only the backlog is a limit
    length, kind, *_ = NLMSG_HEADER.unpack_from(reply)
    if kind != SOCK_DIAG_BY_FAMILY:
        return 0  # not a listener any more
    offset = NLMSG_HEADER.size + UNIX_REPLY_BYTES
    while offset + ATTRIBUTE.size <= length:
        size, attribute = ATTRIBUTE.unpack_from(reply, offset)
        if attribute == UNIX_DIAG_RQLEN:
            (waiting,) = struct.unpack_from("=I", reply, offset + ATTRIBUTE.size)
            return int(waiting)
        offset += (size + 3) & ~3
    return 0
