"""Ranks that live and keep the others waiting."""

from __future__ import annotations

import pytest
from vllmx_tp.liveness import WAIT_S, CallDeadlines
from vllmx_tp.region import Region, Word


def arrive(region: Region, **counts: int) -> None:
    """Writes how many calls ranks have begun, by `r0`, `r1` ..."""
    for name, count in counts.items():
        region.word(int(name[1:]), Word.ARRIVED)[0] = count & 0xFFFFFFFF


@pytest.mark.parametrize("first", [0, -1, 1 << 31])  # a count begins again at 0
def test_who_is_waited_for_too_long_is_named(first: int) -> None:
    region = Region.create(3)
    arrive(region, r0=first + 1, r1=first, r2=first + 1)
    waits = CallDeadlines(region)
    waits.look(0.0)
    assert waits.look(WAIT_S - 1) is None
    assert waits.look(2.0) == "rank 1 lives, but others have waited for it for 60 s within a step"
    region.close()


def test_each_call_begins_a_wait_of_its_own() -> None:
    region = Region.create(2)
    waits = CallDeadlines(region)
    for count in range(1, 5):
        arrive(region, r0=count, r1=count - 1)
        waits.look(0.0)
        assert waits.look(WAIT_S - 1) is None
    region.close()


def test_ranks_that_have_nothing_to_do_wait_for_nobody() -> None:
    region = Region.create(2)
    arrive(region, r0=7, r1=7)
    waits = CallDeadlines(region)
    assert [waits.look(WAIT_S) for _ in range(3)] == [None] * 3
    region.close()


def test_stages_go_on_at_their_own_pace() -> None:
    """Ranks of two stages do not wait for each other in calls; alone in a stage, a rank counts
    pieces."""
    region = Region.create(4, 2)
    arrive(region, r0=5, r1=5, r2=2, r3=2)
    waits = CallDeadlines(region)
    assert [waits.look(WAIT_S) for _ in range(3)] == [None] * 3
    arrive(region, r2=3)
    waits.look(0.0)
    assert str(waits.look(WAIT_S)).startswith("rank 3 ")
    region.close()
    pieces = Region.create(2, 2)
    arrive(pieces, r0=9)
    assert [CallDeadlines(pieces).look(WAIT_S) for _ in range(3)] == [None] * 3
    pieces.close()
