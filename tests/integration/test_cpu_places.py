"""Threads of a step that begins after a pause have a processor each, and are free behind it."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time

import pytest
from vllmx import LLM

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads keep apart on Linux alone")

ALLOWED = os.sched_getaffinity(0) if sys.platform == "linux" else set()


def threads() -> set[int]:
    return set(map(int, os.listdir("/proc/self/task")))


def places(before: set[int]) -> set[frozenset[int]]:
    """The processors of the threads that were not there before."""
    found = set()
    for thread in threads() - before:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            found.add(frozenset(os.sched_getaffinity(thread)))
    return found


@pytest.mark.skipif(len(ALLOWED) < 2, reason="there is one processor")
@pytest.mark.parametrize("fewer", [0, 1])
def test_threads_keep_apart_while_a_step_runs_after_a_pause(fewer: int) -> None:
    """With fewer of them than processors there is something to choose from, and nobody is held."""
    before = threads()
    seen: set[frozenset[int]] = set()
    with LLM("demo", backend="cpu", num_threads=len(ALLOWED) - fewer) as llm:
        params = llm.sampling_params(max_tokens=1)
        prompt = {"prompt_token_ids": [300 + number % 2000 for number in range(1500)]}
        ended = threading.Event()

        def watch() -> None:
            while not ended.is_set():
                seen.update(places(before))
                time.sleep(0.001)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            time.sleep(0.01)
            llm.generate([prompt], params, use_tqdm=False)
        finally:
            ended.set()
            watcher.join()
        assert places(before) == {frozenset(ALLOWED)}
    held = {frozenset({each}) for each in ALLOWED}
    assert seen == ({frozenset(ALLOWED)} if fewer else {frozenset(ALLOWED), *held})
