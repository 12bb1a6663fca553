"""Standard error for a server: a full disk, a full pipe or a closed end costs lines, nothing else.

Whoever logs must not wait for whoever reads the log. So a thread writes, and what it cannot get rid
of is dropped and counted.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque

_MAX_LINES = 10_000
_LAST_WORDS_S = 1.0
_DESCRIPTOR = 2


class StandardError:
    """A text stream (`write` and `flush`) that never raises and never waits."""

    def __init__(self, descriptor: int = _DESCRIPTOR, max_lines: int = _MAX_LINES) -> None:
        self._descriptor = descriptor
        self._max_lines = max_lines
        self._texts: deque[bytes] = deque()
        self._num_dropped = 0
        self._changed = threading.Condition()
        self._writing = False
        self._thread: threading.Thread | None = None

    def write(self, text: str) -> int:
        """Takes a line, or several, in one call."""
        if sys.is_finalizing():  # the thread is gone, perhaps with the lock: nobody would write it
            return len(text)
        with self._changed:
            if len(self._texts) >= self._max_lines:
                self._num_dropped += 1
                return len(text)
            self._texts.append(text.encode(errors="backslashreplace"))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="vllmx-log", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return len(text)

    def flush(self) -> None:
        """Does nothing: logging calls it after every line."""

    def finish(self, timeout_s: float = _LAST_WORDS_S) -> None:
        """Waits until everything is written, or the time is up. For the end of a process."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._texts or self._writing), timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._texts)
                text = b"".join(self._texts)
                if self._num_dropped:
                    text += b"(%d lines of the log were dropped here)\n" % self._num_dropped
                self._texts.clear()
                self._num_dropped, self._writing = 0, True
            self._write(text)

    def _write(self, text: bytes) -> None:
        view = memoryview(text)
        try:
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError:  # a full disk, or nobody reads any more; later lines may have more luck
            pass


def hold_standard_streams() -> None:
    """Opens /dev/null where a program was started with closed standard streams: the next file or
    socket would get that number, and logs would go there."""
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened == descriptor:
                os.set_inheritable(descriptor, True)
            else:
                os.dup2(opened, descriptor)
                os.close(opened)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))
