"""Requests that go before one that does not fit, and what is charged after a preemption."""

from __future__ import annotations

import pytest
from vllmx_core.plan import I32
from vllmx_engine.core.sequence import Sequence

from .harness import QUIET, Harness


def blocked(num_blocks: int = 8, **config: int | str) -> tuple[Harness, str]:
    """One sequence runs with half of the blocks, and one waits that needs nearly all of them."""
    harness = Harness(rules=QUIET, model={"num_blocks": num_blocks}, config=config)
    harness.add([1] * 30, 30)
    harness.step()
    large = harness.add([2] * 45, 3)
    for _ in range(3):
        harness.step()
    assert large not in harness.first
    return harness, large


def running(harness: Harness) -> set[str]:
    return {sequence.request_id for sequence in harness.core._scheduler.running}


@pytest.mark.parametrize("policy", ["priority", "fcfs"])
@pytest.mark.parametrize("client", ["", "other"])
def test_a_small_request_passes_one_that_does_not_fit(policy: str, client: str) -> None:
    harness, large = blocked(scheduling_policy=policy)
    small = harness.add([3] * 5, 2, client=client)
    harness.run()
    assert harness.order == ["r0", small, large]
    harness.check_outputs()
    harness.check_idle()


def test_it_is_passed_a_bounded_number_of_times() -> None:
    """Three small requests go before it while they keep coming: as many as run at once. Then it is
    its turn, as soon as the blocks are there."""
    harness, large = blocked(max_num_seqs=3)
    small = [harness.add([3 + index] * 5, 2) for index in range(20)]
    while large not in harness.first:
        harness.step()
    harness.run()
    assert harness.order[:5] == ["r0", *small[:3], large]
    assert set(harness.last) == set(harness.requests)
    harness.check_outputs()


def test_a_lower_priority_passes_nobody() -> None:
    harness, large = blocked()
    small = harness.add([3] * 5, 2, priority=1)
    harness.run()
    assert harness.order == ["r0", large, small]


def test_nobody_passes_who_was_preempted() -> None:
    harness = Harness(rules=QUIET, model={"num_blocks": 9})
    old, new = harness.add([1] * 20, 40), harness.add([2] * 35, 20)
    while not harness.core.stats().num_preemptions:
        harness.step()
    assert running(harness) == {old}
    small = harness.add([3] * 3, 2)
    while old not in harness.last:
        harness.step()
        assert running(harness) <= {old, new}
    harness.run()
    assert harness.order == [old, new, small]


def test_fair_share_decides_who_passes() -> None:
    harness, _ = blocked(max_num_seqs=2)
    served = harness.add([3] * 5, 2, client="served")
    while served not in harness.last:
        harness.step()
    again = harness.add([4] * 5, 2, client="served")
    new = harness.add([5] * 5, 2, client="new")
    harness.run()
    assert harness.order.index(new) < harness.order.index(again)
    harness.check_outputs()


def test_a_step_looks_at_few_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    harness, large = blocked()
    for index in range(50):
        harness.add([index % 40] * 45, 3)
    looked_at: list[str] = []
    prefixes = harness.core._scheduler.prefixes
    look = prefixes.look

    def counted(sequence: Sequence) -> I32:
        looked_at.append(sequence.request_id)
        return look(sequence)

    monkeypatch.setattr(prefixes, "look", counted)
    harness.core.step()
    assert looked_at == [large, "r2", "r3", "r4"]


def test_recomputation_is_not_charged_again() -> None:
    """Each client's service is the tokens of its requests, once, whoever had to make room."""
    harness = Harness(rules=QUIET, model={"num_blocks": 9}, config={"enable_prefix_caching": False})
    share = harness.core._scheduler.share
    for client in ("a", "b", "c", "d"):
        share.enter(client)  # so that all stay live to the end
    for client in ("a", "b", "c"):
        harness.add([1] * 10, 40, client=client)
    harness.run()
    assert harness.core.stats().num_preemptions >= 2
    tokens = 10 + 40 - 1  # the last one is never computed
    in_vain = 1  # a step that was under way when the last token came
    for client in ("a", "b", "c"):
        assert tokens <= share.service(client) <= tokens + in_vain
