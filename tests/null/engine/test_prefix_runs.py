"""A look that goes through runs of blocks finds what one that goes through each block does."""

from __future__ import annotations

import random

import pytest
from vllmx_engine.core.prefixes import Prefixes
from vllmx_engine.core.sequence import Sequence
from vllmx_testing.fake import FakeRules

from .harness import VOCAB_SIZE, Harness


def looked_up(prefixes: Prefixes, sequence: Sequence) -> tuple[object, ...]:
    """What a first look finds."""
    sequence.found, sequence.digests = None, []
    hit = prefixes.look(sequence)
    blocks = tuple(group.tolist() for group in hit.blocks)
    entries: list[int] = [] if sequence.found is None else list(map(id, sequence.found.entries))
    return hit.num_blocks, blocks, entries, sequence.digests


@pytest.mark.parametrize(
    ("windows", "run_blocks"),
    [((None,), 1), ((None,), 4), ((None, 20), 3), ((None, None, 9), 4)],
)
def test_runs_and_single_blocks_find_the_same(
    windows: tuple[int | None, ...], run_blocks: int
) -> None:
    rng = random.Random(run_blocks)
    harness = Harness(
        rules=FakeRules(VOCAB_SIZE, windows=windows), max_model_len=200, model={"num_blocks": 90}
    )
    scheduler = harness.core._scheduler
    prefixes, longest = scheduler.prefixes, 0
    prompts = [[rng.randrange(3)] * 100 for _ in range(3)]
    for _ in range(30):
        base = rng.choice(prompts)
        prompt = base[: rng.randrange(1, len(base))] + [5] * rng.randrange(1, 30)
        prompts.append(prompt + [rng.randrange(9)] * rng.randrange(1, 30))
        prompts = prompts[-12:]
        harness.add(prompt[:150], rng.randrange(1, 20))
        sequence = list(scheduler.live.values())[-1]
        prefixes.run_blocks = 1 << 30
        single = looked_up(prefixes, sequence)
        prefixes.run_blocks = run_blocks
        assert looked_up(prefixes, sequence) == single
        longest = max(longest, prefixes.look(sequence).num_blocks)
        harness.run()
    assert longest >= 2 * run_blocks
    assert scheduler.cache._runs
    assert scheduler.reset_prefix_cache()
    assert not scheduler.cache._runs
    assert not scheduler.cache._run_begins
