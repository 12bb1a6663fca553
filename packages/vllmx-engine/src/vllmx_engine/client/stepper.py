"""Runs steps on a thread of its own while others wait for their results.

Who waits can then be interrupted, and can give up on a step that never comes back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from vllmx_core.records import MutableRecord, field


class _Waiter(MutableRecord):
    done: Callable[[], bool]
    over: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


class Stepper:
    """Several threads may wait at once; a step serves them all.

    The thread ends soon after the last of them has what it wanted, so that an engine that nobody
    uses is freed like any object.

    Args:
        step: computes one step. All threads that wait get what it raises.
        more: whether another step would compute anything.
    """

    LINGER_S = 0.01
    """How long the thread goes on for nobody, or waits where there is nothing to do. A reader of a
    stream comes back at once, and then the next token is already under way: waking two threads for
    each would cost a tenth of a millisecond a token."""

    def __init__(self, step: Callable[[], None], more: Callable[[], bool]) -> None:
        self._step = step
        self._more = more
        self._left_s = 0.0
        """The time when the last waiting thread had its result."""
        self._change = threading.Condition()
        self._waiters: list[_Waiter] = []
        self._running = False
        self._thread: threading.Thread | None = None

    @property
    def is_current(self) -> bool:
        """Whether this is the thread of the steps."""
        return self._thread is threading.current_thread()

    def wait(
        self, done: Callable[[], bool], look: Callable[[], None], interval_s: float | None
    ) -> None:
        """Steps until `done()`, which is asked before each step and on the thread of the steps.
        Calls `look` here every `interval_s` meanwhile; what it raises ends the wait."""
        waiter = _Waiter(done)
        with self._change:
            self._waiters.append(waiter)
            if self._running:
                self._change.notify()
            else:
                self._running = True
                self._thread = threading.Thread(target=self._run, name="vllmx-steps", daemon=True)
                self._thread.start()
        try:
            while not waiter.over.wait(interval_s):
                look()
        finally:
            with self._change:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
        if waiter.error is not None:
            raise waiter.error

    def _run(self) -> None:
        while self._somebody_waits():
            try:
                self._step()
            except BaseException as error:  # raised again by everybody who waits
                with self._change:
                    waiters, self._waiters = self._waiters, []
                for waiter in waiters:
                    waiter.error = error
                    waiter.over.set()

    def _somebody_waits(self) -> bool:
        """Releases the threads that have their result; False when this one must end."""
        with self._change:
            while True:
                for waiter in [waiter for waiter in self._waiters if waiter.done()]:
                    self._waiters.remove(waiter)
                    waiter.over.set()
                    self._left_s = time.monotonic()
                if self._waiters:
                    return True
                if time.monotonic() - self._left_s < self.LINGER_S and self._more():
                    return True
                woken = self._change.wait(self.LINGER_S)
                if not (woken or self._waiters):  # one may have come as the time was up
                    self._running = False
                    return False
