"""Requests that wait for their first row only so long."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Mapping

from vllmx_core.errors import QueueTimeoutError

from vllmx_engine.core.sequence import Sequence

Clock = Callable[[], float]


class QueueDeadlines:
    """Sequences that wait with a deadline; those without one are not kept here.

    Args:
        live: sequences that have not ended, by request id.
        clock: seconds, which never go back.
    """

    def __init__(self, live: Mapping[str, Sequence], clock: Clock = time.monotonic) -> None:
        self._live = live
        self._clock = clock
        self._due: list[tuple[float, int, str]] = []
        """A heap of times, with the arrivals and the ids of the sequences: those of sequences that
        have ended or run by now stay in it until they are due, or too many."""

    def __bool__(self) -> bool:
        return bool(self._due)

    def add(self, sequence: Sequence) -> None:
        """Begins to watch a live sequence, if it has a deadline. A call's first choice decides for
        all: once that runs, the call has had its turn."""
        timeout_s = sequence.request.queue_timeout_s
        if not timeout_s or sequence.request.leader is not None:
            return
        entry = (self._clock() + timeout_s, sequence.arrival, sequence.request_id)
        heapq.heappush(self._due, entry)
        if len(self._due) > 2 * len(self._live) + 64:
            self._due = [entry for entry in self._due if self._waiting(entry) is not None]
            heapq.heapify(self._due)

    def expired(self) -> list[Sequence]:
        """Sequences that have waited too long, each once."""
        now_s, found = self._clock(), list[Sequence]()
        while self._due and self._due[0][0] <= now_s:
            sequence = self._waiting(heapq.heappop(self._due))
            if sequence is not None:
                found.append(sequence)
        return found

    def _waiting(self, entry: tuple[float, int, str]) -> Sequence | None:
        """The sequence of an entry, if it has never had a row."""
        _, arrival, request_id = entry
        sequence = self._live.get(request_id)
        if sequence is None or sequence.arrival != arrival:
            return None
        return None if sequence.row >= 0 or sequence.was_preempted else sequence


def timed_out(sequence: Sequence) -> QueueTimeoutError:
    """The error of a sequence that has waited too long."""
    return QueueTimeoutError(
        f"the request waited {sequence.request.queue_timeout_s:g} s for its turn, which is as long"
        " as --queue-timeout-s lets it: send it again later"
    )
