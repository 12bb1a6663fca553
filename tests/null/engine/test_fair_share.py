"""Virtual token counters of clients."""

from __future__ import annotations

import numpy as np
from vllmx_engine.core.waiting import FairShare


def charge(share: FairShare, **tokens: int) -> None:
    slots = np.array([share.slot(client) for client in tokens])
    share.charge(slots, np.array(list(tokens.values()), np.float64))


def test_counts_tokens_of_each_client() -> None:
    share = FairShare()
    for client in ("a", "b", "a"):
        share.enter(client)
    charge(share, a=3, b=5)
    charge(share, a=4)
    assert (share.service("a"), share.service("b")) == (7, 5)
    assert len(share) == 2


def test_a_newcomer_starts_with_the_least_served() -> None:
    share = FairShare()
    share.enter("a")
    share.enter("b")
    charge(share, a=30, b=50)
    share.enter("c")
    assert share.service("c") == 30


def test_leaving_for_a_moment_does_not_wipe_out_what_one_had() -> None:
    share = FairShare()
    for client in ("a", "b"):
        share.enter(client)
    charge(share, a=90, b=20)
    share.leave({"a": 1})
    share.enter("a")
    assert share.service("a") == 90
    charge(share, b=100)
    share.leave({"a": 1})
    share.enter("a")
    assert share.service("a") == 120


def test_many_clients_come_and_go() -> None:
    share = FairShare()
    for index in range(100):
        share.enter(f"c{index}")
    assert len({share.slot(f"c{index}") for index in range(100)}) == 100
    for index in range(100):
        share.leave({f"c{index}": 1})
    assert len(share) == 0
    share.enter("again")
    assert share.service("again") == 0
