"""The router's choices, and that its bookkeeping loses no count."""

from __future__ import annotations

from hashlib import blake2b

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllmx_engine.replicas.router import ReplicaLoad, Router

SIZE = 16
IDLE = ReplicaLoad(token_s=1e-3, free_rows=8, free_blocks=100, turn_s=1.0, turn_blocks=10.0)


def digests(name: str, count: int) -> list[bytes]:
    return [blake2b(f"{name} {i}".encode(), digest_size=16).digest() for i in range(count)]


def router(count: int = 3, load: ReplicaLoad = IDLE) -> Router:
    made = Router(SIZE)
    for replica in range(count):
        made.add(replica)
        made.load(replica, load, 0.0)
    return made


def changed(**fields: float) -> ReplicaLoad:
    return ReplicaLoad(**{name: getattr(IDLE, name) for name in IDLE.__struct_fields__} | fields)


def test_a_prompt_goes_where_its_blocks_are_until_waiting_costs_more() -> None:
    made, prompt = router(), digests("system", 10)
    made.filed(1, prompt)
    choice = made.choose(prompt, 170, now_s=0.0)
    assert (choice.replica, choice.num_cached_tokens) == (1, 160)
    assert choice.first_token_s == pytest.approx(0.010)
    made.load(1, changed(queued_s=0.5), 0.0)
    assert made.choose(prompt, 170, now_s=0.0).replica != 1
    assert made.choose(prompt, 170, now_s=0.45).replica == 1  # most of it is computed by now
    made.load(1, IDLE, 1.0)
    made.evicted(1, prompt[5:])
    assert made.choose(prompt, 170, now_s=1.0).num_cached_tokens == 80
    made.filed(2, prompt[:7])
    assert made.choose(prompt, 170, now_s=1.0).replica == 2


def test_each_replica_is_judged_by_its_own_costs() -> None:
    made = router(2)
    made.load(0, changed(token_s=4e-3), 0.0)
    assert made.choose([], 100, now_s=0.0).replica == 1
    made.load(1, changed(stretch=6.0), 0.0)  # its decodes take most of each step
    assert made.choose([], 100, now_s=0.0).replica == 0
    made.load(0, changed(work_s=1e-3), 0.0)
    assert made.choose([], 100, now_s=0.0).replica == 1
    made.load(0, changed(), 0.0)
    made.load(1, changed(num_running=7, row_s=1e-4), 0.0)  # seven would be slowed
    assert made.choose([], 100, now_s=0.0).replica == 0


def test_a_replica_without_room_makes_wait() -> None:
    made = router(2)
    made.load(0, changed(free_blocks=3), 0.0)
    assert made.choose([], 160, now_s=0.0).replica == 1
    made.load(1, changed(free_rows=0), 0.0)
    assert made.choose([], 160, now_s=0.0).replica == 0  # 0.7 of a turn, not a whole one


def test_one_that_has_measured_nothing_is_no_better_than_the_others() -> None:
    made = router(2)
    made.filed(0, digests("a", 4))
    made.load(1, ReplicaLoad(), 0.0)
    assert made.choose(digests("a", 4), 70, now_s=0.0).replica == 0


def test_requests_that_no_report_includes_yet_count() -> None:
    """A burst between two reports spreads, and a shared new prompt is sent to one replica."""
    made = router(3)
    for number in range(6):
        made.started(f"{number}", made.choose([], 100, now_s=0.0))
    assert sorted(made._ahead[1]) == [2, 2, 2]
    shared = digests("shared", 20)
    first = made.choose(shared, 321, now_s=0.0)
    made.started("first", first)
    second = made.choose([*shared, *digests("own", 2)], 353, now_s=0.0)
    assert (second.replica, second.num_cached_tokens) == (first.replica, 320)
    made.finished("first")  # and never filed
    assert made.choose(shared, 321, now_s=0.0).num_cached_tokens == 0


def test_a_session_stays_unless_that_costs_more() -> None:
    made = router(3)
    home = made.choose([], 50, "agent", now_s=0.0)
    made.started("a", home)
    made.finished("a")
    for _ in range(4):
        assert made.choose([], 50, "agent", now_s=0.0).replica == home.replica
    assert len({made.choose([], 50, now_s=0.0).replica for _ in range(6)}) == 3
    made.load(home.replica, changed(queued_s=1.0), 0.0)
    assert made.choose([], 50, "agent", now_s=0.0).replica != home.replica
    made.remove(home.replica)
    assert made.choose([], 50, "agent", now_s=0.0).replica != home.replica


def test_no_replica_is_left() -> None:
    made = router(1)
    with pytest.raises(LookupError):
        made.choose([], 5, now_s=0.0, among=())
    made.remove(0)
    with pytest.raises(LookupError):
        made.choose([], 5, now_s=0.0)


OPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "remove", "file", "evict", "start", "finish", "load"]),
        st.integers(0, 3),
        st.integers(0, 7),
        st.integers(0, 7),
    ),
    max_size=80,
)


@settings(max_examples=150, deadline=None)
@given(OPS)
def test_no_count_is_lost(ops: list[tuple[str, int, int, int]]) -> None:
    """Against plain sets: whatever comes in whatever order, hits are those of the announced and
    expected blocks, and nothing is left when all have gone."""
    made = Router(SIZE)
    held: dict[int, set[bytes]] = {}
    sent: dict[str, tuple[int, list[bytes], int]] = {}
    counts: dict[int, int] = {}
    taken: dict[int, int] = {}
    chain = digests("chain", 8)
    for step, (op, replica, a, b) in enumerate(ops):
        part = chain[min(a, b) : max(a, b) + 1]
        if op == "add":
            made.add(replica)
        elif op == "remove":
            made.remove(replica)
            held.pop(replica, None)
        elif op == "file":
            made.filed(replica, part)
            if replica in held:
                held[replica].update(part)
        elif op == "evict":
            made.evicted(replica, part)
            held.get(replica, set()).difference_update(part)
        elif op == "load":
            if replica in held:
                taken[replica] = min(taken[replica] + a, counts[replica])
                made.load(replica, ReplicaLoad(num_taken=taken[replica]), float(step))
        elif op == "finish":
            made.finished(f"{a}")
            sent.pop(f"{a}", None)
        elif held and f"{a}" not in sent:
            choice = made.choose(chain[:b], SIZE * b + 1, now_s=float(step))
            best = choice.replica
            hit = choice.num_cached_tokens // SIZE
            has = set(held[best])
            known = chain[:hit]
            pending = {one for at, missing, _ in sent.values() if at == best for one in missing}
            assert set(known) <= has | pending
            made.started(f"{a}", choice)
            counts[best] += 1
            sent[f"{a}"] = best, list(choice.missing), counts[best]
        if op in ("add", "remove"):
            sent = {name: one for name, one in sent.items() if one[0] != replica}
            if op == "add":
                held[replica], counts[replica], taken[replica] = set(), 0, 0
        for one, slot in made._slots.items():
            unseen = sum(at == one and n > taken[one] for at, _, n in sent.values())
            assert made._ahead[1, slot] == unseen
    for one, blocks in held.items():
        assert made._held[made._slots[one]] == blocks
    for name in list(sent):
        made.finished(name)
    for replica in range(4):
        made.evicted(replica, chain)
    assert not made._where
    assert not made._expected
    assert not made._requests
    assert abs(made._ahead).max(initial=0.0) < 1e-9


def test_hits_of_many_replicas_are_each_their_own() -> None:
    made, prompt = router(1000), digests("long", 128)
    for replica in range(1000):
        made.filed(replica, prompt[: replica % 128])
        made.load(replica, changed(token_s=1e-3 + 1e-9 * abs(replica - 763)), 0.0)
    choice = made.choose(prompt, 2049, now_s=0.0)
    assert (choice.replica, choice.num_cached_tokens) == (767, 127 * SIZE)
    some = made.choose(prompt, 2049, now_s=0.0, among=[3, 260, 5])
    assert (some.replica, some.num_cached_tokens) == (5, 5 * SIZE)
