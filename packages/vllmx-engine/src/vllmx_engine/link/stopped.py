"""Whether a process of ours was stopped, as its parent is told of no other silence: one that has
just been started says nothing yet."""

from __future__ import annotations

import os

PATIENCE_S = 3.0
"""A process that was stopped for so long is not waited for where others wait for it."""


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped a child of this process, which goes on no more; False where the
    system does not tell."""
    if not hasattr(os, "waitid"):
        return False
    try:
        found = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # it has ended
        return False
    return found is not None
