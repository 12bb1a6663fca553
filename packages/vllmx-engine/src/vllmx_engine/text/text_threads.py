"""Threads for text: clients take turns, and what waits or is worked on has a budget.

Rendering and tokenising a long text takes seconds and hundreds of megabytes, and a library call
cannot be interrupted. So one thread is kept for small texts, which a long one then never holds up,
one for small texts of others while a single client has both, and what may wait is counted, for each
client and in all.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from vllmx_core.errors import QueueFullError
from vllmx_core.records import MutableRecord, field

from vllmx_engine.text.gauge import Alone, Gauge

T = TypeVar("T")
Stopped = Callable[[], bool]
"""True once no caller waits for the work."""

_TRIM_BYTES = 1 << 20
"""Work on a text of this size leaves the allocator with memory worth giving back."""


@dataclass(frozen=True, slots=True)
class TextLimits:
    """Bytes of text that may wait or be worked on at a time. A client with nothing else in flight
    is never refused for its own limit, and a quarter of each is kept for small texts."""

    client_bytes: int = 64 << 20
    all_bytes: int = 256 << 20
    small_bytes: int = 64 << 10
    """Texts up to this size take a few milliseconds."""


class TextThreads:
    """Runs functions on two threads, one of them for small texts alone, and on a third one small
    texts of other clients while both work for the same client.

    The client with the fewest bytes served is next. Its small texts pass a large one, until their
    sizes add up to the large one's.
    """

    def __init__(self, limits: TextLimits = TextLimits()) -> None:
        self._limits = limits
        self.gauge: Gauge = Alone()
        """The gauge of the bytes of all clients."""
        self._lock = threading.Lock()
        self._clients: dict[str, _Client] = {}
        self._bytes = 0
        self._served = 0
        """Bytes that the client of the last turn was served: where a new client begins."""
        self._any = ThreadPoolExecutor(1, "vllmx-text")
        self._small = ThreadPoolExecutor(1, "vllmx-small-text")
        self._others = ThreadPoolExecutor(1, "vllmx-others-text")
        self._at_work: dict[ThreadPoolExecutor, str] = {}
        """The client that each thread works for now."""

    @property
    def num_bytes(self) -> int:
        """Bytes of texts that wait or are worked on."""
        return self._bytes

    async def run(self, client: str, size: int, function: Callable[[Stopped], T]) -> T:
        """Runs `function` on a thread when it is the client's turn, and returns or raises its
        result.

        Cancelling removes it if it has not begun; otherwise its `Stopped` becomes true, and its
        result is dropped.

        Args:
            size: of the text, in bytes.

        Raises:
            QueueFullError: too much text is in flight, of this client or of all.
        """
        job = _Job(client, size, function)
        self._enter(job)
        self._any.submit(self._work, self._any)
        if self._is_small(size):
            self._small.submit(self._work, self._small)
            self._serve_others()
        try:
            return await asyncio.wrap_future(job.future)
        except asyncio.CancelledError:
            job.stopped = True
            if job.future.cancel():
                self._leave(job)
            raise

    def close(self) -> None:
        """Drops waiting work, and asks running work to stop."""
        with self._lock:
            jobs = [job for client in self._clients.values() for job in client.jobs()]
        for job in jobs:
            job.stopped = True
            if job.future.cancel():
                self._leave(job)
        for pool in (self._any, self._small, self._others):
            pool.shutdown(wait=False, cancel_futures=True)

    # --- inside -----------------------------------------------------------------------------------
    def _is_small(self, size: int) -> bool:
        return size <= self._limits.small_bytes

    def _enter(self, job: _Job) -> None:
        with self._lock:
            client = self._clients.get(job.client) or _Client(self._served)
            if client.num_bytes:
                self._check(job, client.num_bytes, self._limits.client_bytes, "of this client")
            taken = self._bytes + self.gauge.elsewhere
            if taken:
                self._check(job, taken, self._limits.all_bytes, "of all clients")
            if not client.waits:
                client.served = max(client.served, self._served)
            job.due = client.served + job.size
            client.num_bytes += job.size
            self._bytes += job.size
            self.gauge.set(self._bytes)
            (client.small if self._is_small(job.size) else client.large).append(job)
            self._clients[job.client] = client

    def _check(self, job: _Job, taken: int, limit: int, whose: str) -> None:
        usable = limit if self._is_small(job.size) else limit - limit // 4
        if taken + job.size > usable:
            raise QueueFullError(
                f"{taken} bytes of text {whose} wait for the tokenizer and this request has"
                f" {job.size}, at most {usable} are taken: send it again in a moment"
            )

    def _leave(self, job: _Job) -> None:
        """The job is done or taken back: its bytes are free again, and its text too."""
        job.function = None
        with self._lock:
            if job.left:
                return
            job.left = True
            client = self._clients[job.client]
            client.drop(job)
            client.num_bytes -= job.size
            self._bytes -= job.size
            self.gauge.set(self._bytes)
            if not client.num_bytes and not client.waits:
                del self._clients[job.client]

    def _work(self, thread: ThreadPoolExecutor) -> None:
        """One turn, if somebody still waits for one."""
        job = self._next(thread)
        if job is None:
            return
        assert job.function is not None
        self._serve_others()
        function, result, error = job.function, None, None
        try:
            result = function(lambda: job.stopped)
        except BaseException as raised:  # the library's panics among them
            error = raised
        del function
        with self._lock:
            self._at_work.pop(thread, None)
        self._leave(job)
        self._serve_others()
        if job.size >= _TRIM_BYTES:
            _give_back_memory()
        if error is not None:
            job.future.set_exception(error)
            error = None  # else it and this frame would hold each other
        else:
            job.future.set_result(result)

    def _serve_others(self) -> None:
        """Has a small text of another client done, where one has both threads."""
        with self._lock:
            holder = self._at_work.get(self._any)
            is_held = holder is not None and holder == self._at_work.get(self._small)
            if is_held and self._others not in self._at_work and self._waiting(self._others):
                with contextlib.suppress(RuntimeError):  # closed meanwhile
                    self._others.submit(self._work, self._others)

    def _waiting(self, thread: ThreadPoolExecutor) -> list[_Client]:
        """The clients that a thread may work for."""
        small_only = thread is not self._any
        return [
            client
            for name, client in self._clients.items()
            if client.first(small_only)
            and (thread is not self._others or name not in self._at_work.values())
        ]

    def _next(self, thread: ThreadPoolExecutor) -> _Job | None:
        """Takes the job whose turn it is."""
        small_only = thread is not self._any
        with self._lock:
            while waiting := self._waiting(thread):
                client = min(waiting, key=lambda c: c.served)
                job = client.first(small_only)
                assert job is not None
                client.drop(job)
                if job.future.set_running_or_notify_cancel():
                    self._served = client.served
                    client.served += job.size
                    self._at_work[thread] = job.client
                    return job
        return None


class _Job(MutableRecord, eq=False):
    client: str
    size: int
    function: Callable[[Stopped], Any] | None
    future: Future[Any] = field(default_factory=Future)
    due: int = 0
    """The bytes of service at which a large one is due: no small one passes it once its client was
    served so many."""
    stopped: bool = False
    left: bool = False


class _Client(MutableRecord, eq=False):
    served: int
    num_bytes: int = 0
    """The number of bytes in flight."""
    small: deque[_Job] = field(default_factory=deque)
    large: deque[_Job] = field(default_factory=deque)

    @property
    def waits(self) -> bool:
        return bool(self.small or self.large)

    def jobs(self) -> list[_Job]:
        return [*self.small, *self.large]

    def first(self, small_only: bool) -> _Job | None:
        if small_only or not self.large:
            return self.small[0] if self.small else None
        large = self.large[0]
        return self.small[0] if self.small and self.served < large.due else large

    def drop(self, job: _Job) -> None:
        for jobs in (self.small, self.large):
            if job in jobs:
                jobs.remove(job)


def _give_back_memory() -> None:
    """glibc keeps what threads have freed, gigabytes of it, until it is asked."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
