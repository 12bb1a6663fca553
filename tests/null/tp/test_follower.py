"""When a rank takes the next step: at once where steps overlap, behind the end of the one before
where rank 0 reads each before it begins the next. And when it meets what a step raises late."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllmx_core.errors import RankLostError
from vllmx_core.plan import I32, StepPlan, StepResult
from vllmx_testing.plans import Row, make_plan, sampling_rows
from vllmx_tp.channel import Reader, Sender
from vllmx_tp.executor import RankedModel
from vllmx_tp.frames import Frame, SentFrame
from vllmx_tp.messages import INLINE, NOTICE, Call
from vllmx_tp.pipeline import PipelinedModel
from vllmx_tp.rank_process import Follower, StageFollower
from vllmx_tp.region import NUM_CHECKSUMS, Region
from vllmx_tp.sampled_ids import SampledIds, sampled_frame

from tests.waiting import PATIENCE_S

FRAME = Frame(make_plan([Row([5], 0, [1])], 16), sampling_rows(1))


class Model:
    """Writes down what it is asked for."""

    info: Any = None

    def __init__(self, events: list[str]) -> None:
        self._events, self._num_begun = events, 0

    def step(self, plan: object, rows: object) -> Handle:
        self._events.append(f"begins {self._num_begun}")
        self._num_begun += 1
        return Handle(self._events, self._num_begun - 1)

    def forward(self, plan: object) -> Model:
        return self

    def sample(self, rows: object) -> Handle:
        return self.step(None, rows)

    def encode(self, plan: StepPlan, begin: float = 0.0, end: float = 1.0) -> None:
        self._events.append(f"sees {plan.tokens.tolist()} from {begin} to {end}")

    def close(self) -> None: ...


class Handle:
    def __init__(self, events: list[str], number: int) -> None:
        self._events, self._number = events, number

    def result(self) -> StepResult:
        self._events.append(f"ends {self._number}")
        return StepResult(np.zeros(1, np.int32), None, None, 0.0)


class Faulty(Model):
    """Its steps fail where they are read, as those of devices do."""

    def __init__(self) -> None:
        super().__init__([])

    def step(self, plan: object, rows: object) -> Handle:
        return FaultyHandle([], 0)


class FaultyHandle(Handle):
    def result(self) -> StepResult:
        raise RuntimeError("a fault of the device")


class Calls:
    """A `Reader` of these calls, None where none comes for a while; writes down for how long it was
    to look for each."""

    has_more = False
    drawn: Iterator[SentFrame] = iter([])

    def __init__(self, calls: Sequence[Call | None], events: list[str]) -> None:
        self._calls, self._events = iter([*calls, Call.CLOSE]), events
        self._words: I32 = np.frombuffer(FRAME.to_bytes(), np.int32)

    def read(self, spin_s: float, most_s: float | None) -> tuple[Call, I32]:
        if spin_s:
            self._events.append(f"looks for {spin_s}")
        call = next(self._calls)
        if call is None:
            assert most_s, "nothing wakes it until a call comes"
            raise TimeoutError
        if call is Call.SAMPLED:
            return call, np.frombuffer(next(self.drawn).to_bytes(), np.int32)
        return call, self._words

    def release(self) -> None: ...


@pytest.fixture
def region() -> Iterator[Region]:
    found = Region.create(2)
    yield found
    found.close()


def events_of(calls: Sequence[Call | None], region: Region, spin_s: float = 0.25) -> list[str]:
    events: list[str] = []
    Follower(Model(events), region, 1, spin_s).run(Calls(calls, events))  # type: ignore[arg-type]
    return events


def test_steps_that_overlap_are_taken_at_once(region: Region) -> None:
    found = events_of([Call.NEXT, Call.STEP, Call.STEP], region)
    assert found == ["begins 0", "begins 1", "ends 0", "begins 2", "ends 1"]


def test_a_rank_that_waits_for_the_next_step_looks_for_it(region: Region) -> None:
    """From the second step on that nothing overlaps, and until one does."""
    found = events_of([Call.NEXT, Call.NEXT, Call.NEXT, Call.STEP, Call.STEP], region)
    assert found == [
        "begins 0", "begins 1", "ends 0", "ends 1", "looks for 0.25",
        "begins 2", "ends 2", "looks for 0.25",
        "begins 3", "begins 4", "ends 3",
    ]  # fmt: skip


def test_ranks_that_share_cores_sleep(region: Region) -> None:
    found = events_of([Call.NEXT] * 3, region, spin_s=0.0)
    assert found == ["begins 0", "begins 1", "ends 0", "ends 1", "begins 2", "ends 2"]


def test_a_step_that_no_other_follows_is_read(region: Region) -> None:
    """Rank 0 may wait for this rank, and sends nothing more until it knows that the step failed."""
    found = events_of([Call.NEXT, None, Call.STEP, Call.STEP, None, Call.STEP], region)
    assert found == [
        "begins 0", "ends 0",
        "begins 1", "begins 2", "ends 1", "ends 2",
        "begins 3",
    ]  # fmt: skip


def test_a_rank_without_a_step_sleeps_until_a_call_comes(region: Region) -> None:
    with pytest.raises(AssertionError, match="nothing wakes it"):
        events_of([Call.NEXT, None, None], region)


@pytest.mark.parametrize(
    ("kind", "rank", "stages"),
    [(Follower, 1, 1), (StageFollower, 1, 3), (StageFollower, 2, 3), (StageFollower, 3, 2)],
)
def test_a_rank_meets_what_its_last_step_raises(
    kind: type[Follower], rank: int, stages: int
) -> None:
    """A stage in the middle, the last one, and the second rank of the last one among them."""
    region = Region.create(4 if stages == 2 else 3, stages)
    ours, theirs = socket.socketpair()
    Sender(region, [rank], [ours], lambda: None).send(Call.NEXT, FRAME)
    patience = threading.Timer(PATIENCE_S, ours.close)
    patience.start()
    with pytest.raises(RuntimeError, match="a fault of the device"):
        kind(Faulty(), region, rank).run(Reader(theirs, region, rank))
    patience.cancel()
    ours.close()
    theirs.close()
    region.close()


class Sent:
    """A `Group` that writes calls down."""

    failure = None

    def __init__(self, region: Region, calls: list[Call]) -> None:
        self.region, self._calls = region, calls
        self.ranks = range(1, 2)

    def send(self, call: Call, frame: object) -> None:
        self._calls.append(call)

    def guarded(self) -> threading.Lock:
        return threading.Lock()

    def check(self) -> None: ...

    def lost(self, text: str) -> RankLostError:
        return RankLostError(text)

    def close(self) -> None: ...


def test_rank_0_says_whether_it_waits_for_each_step(region: Region) -> None:
    calls: list[Call] = []
    model = RankedModel(Model([]), Sent(region, calls), None)  # type: ignore[arg-type]
    plan, rows = make_plan([Row([5], 0, [1])], 16), sampling_rows(1)
    model.step(plan, rows).result()
    first = model.step(plan, rows)
    second = model.step(plan, rows)
    first.result()
    half = model.forward(plan)
    second.result()
    half.sample(rows).result()
    model.step(plan, rows).result()
    assert calls == [Call.NEXT, Call.NEXT, Call.STEP, Call.FORWARD, Call.SAMPLE, Call.NEXT]


def test_rank_0_meets_what_its_own_stage_raises() -> None:
    """No answer of the last stage will come, which gets nothing of that step."""
    region, looks = Region.create(2, 2), 0

    class Looking(Sent):
        def check(self) -> None:
            nonlocal looks
            looks += 1
            assert looks < 3, "it waits for an answer alone"

    info: Any = SimpleNamespace(num_stages=2)
    model = PipelinedModel(Faulty(), Looking(region, []), info)  # type: ignore[arg-type]
    step = model.step(make_plan([Row([5], 0, [1])], 16), sampling_rows(1))
    with pytest.raises(RuntimeError, match="a fault of the device"):
        step.result()
    region.aborted[0] = 1  # and the thread that takes answers ends
    model._thread.join(PATIENCE_S)
    region.close()


SAME, OTHER = np.zeros(1, np.int32), np.ones(1, np.int32)
"""Ids that `Model` draws, and others."""


def test_rank_0_sees_that_another_one_draws_other_ids(
    region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whichever step it is: places of checksums come again."""
    monkeypatch.setenv("VLLMX_TP_COMPARE", "1")
    model = RankedModel(Model([]), Sent(region, []), None)  # type: ignore[arg-type]
    plan, rows = make_plan([Row([5], 0, [1])], 16), sampling_rows(1)
    other = SampledIds(region, 1)
    for _ in range(NUM_CHECKSUMS + 1):
        other.tell(SAME)
        model.step(plan, rows).result()
    other.tell(OTHER)
    number = NUM_CHECKSUMS + 2
    with pytest.raises(
        RankLostError, match=f"rank 1 sampled other ids than rank 0 in step {number}$"
    ):
        model.step(plan, rows).result()


@pytest.mark.parametrize(("env", "told"), [("", 0), ("1", 3)])
def test_rank_0_tells_other_hosts_what_it_drew(
    region: Region, monkeypatch: pytest.MonkeyPatch, env: str, told: int
) -> None:
    monkeypatch.setenv("VLLMX_TP_COMPARE", env)
    calls: list[Call] = []
    group = Sent(region, calls)
    group.ranks = range(1, 1)  # rank 1 is elsewhere
    model = RankedModel(Model([]), group, None)  # type: ignore[arg-type]
    plan, rows = make_plan([Row([5], 0, [1])], 16), sampling_rows(1)
    for _ in range(3):
        model.step(plan, rows).result()
    assert calls.count(Call.SAMPLED) == told


@pytest.mark.parametrize("late", [False, True])
def test_a_rank_sees_that_rank_0_drew_other_ids(region: Region, late: bool) -> None:
    """Whether it has read that step or not, also while the next one is in flight."""
    events, calls = list[str](), [Call.NEXT, Call.STEP, Call.SAMPLED, Call.SAMPLED]
    rank = Follower(Model(events), region, 1)
    between = [None] if late else []
    reader = Calls([*calls[:2], *between, *calls[2:]], events)
    reader.drawn = iter([sampled_frame(1, SAME), sampled_frame(2, OTHER)])
    with pytest.raises(RankLostError, match=r"rank 1 sampled other ids than rank 0 in step 2$"):
        rank.run(reader)  # type: ignore[arg-type]
    assert events == ["begins 0", "begins 1", "ends 0", "ends 1"]
    assert region.cause(1) == "rank 1 sampled other ids than rank 0 in step 2"
    assert region.aborted[0]


def test_the_last_stage_sees_that_its_ranks_draw_other_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first rank tells rank 0 alone, which has nothing to compare."""
    monkeypatch.setenv("VLLMX_TP_COMPARE", "1")
    region, events = Region.create(4, 2), list[str]()
    other = SampledIds(region, 3)
    for ids in (SAME, OTHER):
        other.tell(ids)
    first = StageFollower(Model(events), region, 2)
    with pytest.raises(RankLostError, match="rank 3 sampled other ids than rank 2 in step 2"):
        first.run(Calls([Call.STEP] * 3, events))  # type: ignore[arg-type]
    assert events == ["begins 0", "ends 0", "begins 1", "ends 1"]
    assert region.cause(2) == "rank 3 sampled other ids than rank 2 in step 2"
    assert region.aborted[0]
    region.close()


def test_a_pass_of_the_tower_outlasts_its_place(region: Region) -> None:
    """Its parts come one by one, steps between them, while others take its place in the ring."""
    ours, theirs = socket.socketpair()
    events: list[str] = []
    sender = Sender(region, [1], [ours], lambda: None)

    class Ring(Sent):
        def send(self, call: Call, frame: Any) -> None:
            super().send(call, frame)
            sender.send(call, frame)

    calls: list[Call] = []
    model = RankedModel(Model([]), Ring(region, calls), None)  # type: ignore[arg-type]
    plan, rows = make_plan([Row([5], 0, [1])], 16), sampling_rows(1)
    other = make_plan([Row([6, 7], 0, [1])], 16)
    follower = Follower(Model(events), region, 1)
    thread = threading.Thread(target=follower.run, args=(Reader(theirs, region, 1),), daemon=True)
    thread.start()
    model.encode(plan, 0.0, 0.3)
    model.step(other, rows).result()
    model.encode(plan, 0.3, 1.0)
    model.encode(other)
    sender.tell(NOTICE.pack(Call.CLOSE, 0, INLINE))
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert calls == [Call.PASS, Call.ENCODE, Call.NEXT, Call.ENCODE, Call.PASS, Call.ENCODE]
    assert events == [
        "sees [5] from 0.0 to 0.3", "begins 0",
        "sees [5] from 0.3 to 1.0", "sees [6, 7] from 0.0 to 1.0",
    ]  # fmt: skip
    ours.close()
    theirs.close()


def test_who_looks_for_a_step_gets_it_or_hears_of_the_end(region: Region) -> None:
    """However long it was to look."""
    ours, theirs = socket.socketpair()
    reader = Reader(theirs, region, 1)
    data = FRAME.to_bytes()
    ours.sendall(NOTICE.pack(Call.NEXT, len(data), INLINE) + data)
    call, words = reader.read(3600.0)
    assert call is Call.NEXT
    assert words.tobytes() == data
    ours.close()
    with pytest.raises(EOFError):
        reader.read(3600.0)
    theirs.close()


def test_a_call_that_has_come_is_not_asked_for(region: Region) -> None:
    """Quick steps pay nothing for the time after which a reader gives up."""
    ours, theirs = socket.socketpair()
    reader, asked = Reader(theirs, region, 1), list[float]()
    reader._poll = SimpleNamespace(poll=asked.append)  # type: ignore[assignment]
    data = FRAME.to_bytes()
    ours.sendall(NOTICE.pack(Call.STEP, len(data), INLINE) + data)
    assert reader.read(most_s=0.25)[0] is Call.STEP
    assert not asked
    with pytest.raises(TimeoutError):
        reader.read(most_s=0.25)
    assert asked == [250.0]
    ours.close()
    theirs.close()


def test_who_gives_up_for_a_while_misses_nothing(region: Region) -> None:
    ours, theirs = socket.socketpair()
    reader = Reader(theirs, region, 1)
    with pytest.raises(TimeoutError):
        reader.read(most_s=0.001)
    data = FRAME.to_bytes()
    ours.sendall(NOTICE.pack(Call.STEP, len(data), INLINE) + data)
    assert reader.read(most_s=PATIENCE_S)[0] is Call.STEP
    ours.close()
    with pytest.raises(EOFError):
        reader.read(most_s=PATIENCE_S)
    theirs.close()


def test_who_has_looked_long_enough_sleeps(region: Region) -> None:
    """A step that comes later wakes it."""
    ours, theirs = socket.socketpair()
    data = FRAME.to_bytes()
    late = threading.Timer(0.05, lambda: ours.sendall(NOTICE.pack(1, len(data), INLINE) + data))
    late.start()
    assert Reader(theirs, region, 1).read(1e-4)[0] is Call.STEP
    late.join()
    ours.close()
    theirs.close()
