"""Runs an MCP server and ends it with us: `python -I -S guard.py LIFE COMMAND ...`.

The server gets this process's standard streams and a session of its own. LIFE is the descriptor of
a pipe that nobody writes to: its end, however we ended, kills the server with all that it started.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from typing import NoReturn


def _become(command: list[str]) -> NoReturn:
    """The server itself."""
    os.setsid()
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGPIPE, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    try:
        if sys.platform == "linux":
            import ctypes

            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        os.execvp(command[0], command)  # noqa: S606  # the operator's own command, word by word
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode(errors="backslashreplace"))
    os._exit(127)


def _kill(child: int) -> None:
    """The server, which is not reaped yet, and what it started."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(OSError):  # it has no group yet, or has ended
            kill(child, signal.SIGKILL)


def main() -> NoReturn:
    """Ends with the server, or with us."""
    life, command = int(sys.argv[1]), sys.argv[2:]
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    child = os.fork()
    if child == 0:
        os.close(life)
        _become(command)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    looked_at = select.poll()  # `select` refuses descriptors above 1023, as a busy server has
    for descriptor in (life, woken):
        looked_at.register(descriptor, select.POLLIN)
    while True:
        ready = [descriptor for descriptor, _ in looked_at.poll()]
        ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if life in ready or ended is not None:
            _kill(child)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            os._exit(code if code >= 0 else 128 - code)
        os.read(woken, 64)


if __name__ == "__main__":
    main()
