"""A long prompt is bytes from the frontend to the table of rows: no list of it is ever made between
two steps."""

from __future__ import annotations

import tracemalloc
from array import array
from collections.abc import Sequence as List

import pytest
from vllmx_core.sampling import SamplingParams
from vllmx_engine.core.logit_rules import Counts
from vllmx_engine.wire.ipc import AddRequest, encode_frame
from vllmx_engine.wire.messages import CoreRequest, pack_ids

from .harness import QUIET, VOCAB_SIZE, Harness

LENGTH = 400_000


def long_request(**params: float) -> CoreRequest:
    return CoreRequest(
        request_id="long",
        prompt=pack_ids([token % VOCAB_SIZE for token in range(LENGTH)]),
        params=SamplingParams(max_tokens=4, **params),  # type: ignore[arg-type]
        max_tokens=4,
        seed=0,
    )


def test_a_frame_holds_four_bytes_for_each_token() -> None:
    assert len(encode_frame(AddRequest(long_request()))) < 4 * LENGTH + 1000


@pytest.mark.parametrize("params", [{}, {"frequency_penalty": 0.5}])
def test_the_core_copies_it_once(params: dict[str, float]) -> None:
    """The copy holds tokens as 32 bits; a list or an array of 64 bits would be twice that."""
    harness = Harness(max_model_len=LENGTH + 10, model={"num_blocks": LENGTH // 8 + 2})
    request = long_request(**params)
    tracemalloc.start()
    try:
        harness.core.add(request)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "long" in harness.core._scheduler.live
    assert peak < 6 * LENGTH


def test_ids_for_penalties_are_gathered_once_as_the_first_token_is_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gathered: list[int] = []
    monkeypatch.setattr(
        "vllmx_engine.core.logit_rules._distinct",
        lambda ids, size: gathered.append(ids.size) or array("i", sorted({*ids.tolist()})),
    )
    harness = Harness(rules=QUIET, max_model_len=600)  # chunks of 32 tokens
    harness.add([3] * 250, 4, params={"frequency_penalty": 0.5})
    for _ in range(3):
        harness.core.step()
    assert gathered == []
    harness.run()
    assert gathered == [250]


def test_counts_of_a_prompt_and_an_answer() -> None:
    in_prompt = array("i", [2, 5, 9])
    counts, other = Counts(in_prompt), Counts(in_prompt)
    for token in (5, 7, 5, 1, 7, 2, 30, 5):
        counts.add(token)
    found = dict(zip(counts.ids, counts.output_counts, strict=True))
    assert found == {2: 1, 5: 3, 9: 0, 7: 2, 1: 1, 30: 1}
    assert other.ids == in_prompt == array("i", [2, 5, 9])
    assert other.output_counts == array("i", [0, 0, 0])


def test_a_further_look_at_a_cached_prefix_begins_where_the_last_one_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = Harness(rules=QUIET, max_model_len=1000, model={"num_blocks": 200})
    harness.add([3] * 800, 2)
    harness.run()
    harness.add([3] * 810, 2)
    scheduler = harness.core._scheduler
    (sequence,) = scheduler.live.values()
    looked_up: list[bytes] = []
    known = scheduler.cache.known

    def counted(parent: bytes, content: bytes) -> tuple[bytes, List[int]] | None:
        looked_up.append(content)
        return known(parent, content)

    monkeypatch.setattr(scheduler.cache, "known", counted)
    # the first one, 36 of a hundred blocks behind a run, and one that is not there
    for count in (38, 1, 1):
        first = scheduler.prefixes.look(sequence).blocks[0]
        assert (first.size, len(looked_up)) == (100, count)
        looked_up.clear()
    scheduler.pool.allocate(scheduler.pool.num_available - 40)  # forgets the tail of the chain
    left = scheduler.prefixes.look(sequence).blocks[0]
    assert left.tolist() == first[: left.size].tolist()
    assert (left.size, len(looked_up)) == (40, 1)
