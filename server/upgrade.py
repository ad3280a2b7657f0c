"""A binary upgrade (USR2): a new master beside the old one, on the same sockets.

gunicorn's own lets a failed exec fall into the child's copy of the arbiter's loop, which ends the old
master's workers, and it numbers the descriptors of socket activation anew.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from server.listeners import hand_over

LOG = logging.getLogger("warmserve")


def start_new_master(arbiter: Any) -> int:
    """Fork and exec the command that started *arbiter*; return the new master's pid.

    A master that cannot be started ends with 1 and touches nothing of the old one's.
    """
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        arbiter.cfg.pre_exec(arbiter)
        environ = hand_over(arbiter.cfg.env_orig, arbiter.LISTENERS, parent, by_systemd=arbiter.systemd)
        os.chdir(arbiter.START_CTX["cwd"])
        os.execvpe(arbiter.START_CTX[0], arbiter.START_CTX["args"], environ)
    except BaseException:
        LOG.error("the new master could not be started", exc_info=True)
    finally:
        os._exit(1)
