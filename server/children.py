"""Signalling and collecting child processes that may have ended already."""

from __future__ import annotations

import os
import signal


def tell(pid: int, sig: signal.Signals) -> None:
    """Send *sig* to the child *pid*; one that has ended is about to be reaped."""
    try:
        os.kill(pid, sig)
    except ProcessLookupError:
        pass


def wait_for_any_child() -> tuple[int, int] | None:
    """Return the pid and status of a child that has ended; None when there is none."""
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, status) if pid else None
