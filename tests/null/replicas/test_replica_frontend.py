"""`ReplicaFrontend` over cores that a test plays: moves, bounds, calls to all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
from vllmx_core.errors import EngineDeadError, InvalidRequestError
from vllmx_core.sampling import SamplingParams
from vllmx_engine.link.frontend import CoreFrontend, Listener
from vllmx_engine.replicas import frontend as frontend_module
from vllmx_engine.replicas.digests import PromptDigests
from vllmx_engine.replicas.flights import MAX_MOVES
from vllmx_engine.replicas.frontend import ReplicaFrontend
from vllmx_engine.wire.grammars import Vocabulary
from vllmx_engine.wire.ipc import AbortRequests, AddRequest, Announced, Call, LoadAdapter
from vllmx_engine.wire.messages import (
    AdapterInfo,
    CoreInfo,
    CoreOutput,
    CoreRequest,
    CoreStats,
    ReplicaLoad,
    TokenLogprobs,
    choices_of,
    pack_ids,
)

from tests.waiting import until

LOST = EngineDeadError("the engine core was killed by SIGKILL")


class PlayedCore(CoreFrontend):
    """Records what it is sent."""

    def __init__(self, number: int, told: Listener) -> None:
        super().__init__()
        self.listener = told
        self.sent: list[Any] = []
        self.is_silent = self.is_slow = False
        self.info = CoreInfo(
            model="m", path="", architecture="", max_model_len=100 + number, vocab_size=9,
            backend="", device="", dtype="f32", kv_cache_dtype="f32", block_size=16,
            num_kv_blocks=10, max_num_seqs=4, max_num_batched_tokens=8, weight_bytes=1,
            kv_cache_bytes=1, load_seconds=0.0, cache_model="m", id_prefix=f"{number + 1}:",
        )  # fmt: skip

    @property
    def silent_s(self) -> float:
        return 9.0 if self.is_silent else 0.0

    async def close(self) -> None:
        self.status = "closed"

    def _send(self, message: Any) -> None:
        self.sent.append(message)
        if isinstance(message, Call | LoadAdapter) and not self.is_slow:
            self.answer()

    def answer(self) -> None:
        for call in self._calls.values():
            call.set_result(True)

    @property
    def added(self) -> AddRequest:
        """The newest request."""
        return [one for one in self.sent if isinstance(one, AddRequest)][-1]

    def say(self, request_id: str, *ids: int, **fields: Any) -> None:
        assert self.listener is not None
        self.listener.outputs([CoreOutput(request_id=request_id, ids=list(ids), **fields)])

    def die(self) -> None:
        self.status = "restarting"
        self._tell_lost(LOST)

    def live(self) -> None:
        assert self.listener is not None
        self.status = "ready"
        self.listener.restarted(self.info)


class Seen:
    """What the user of the frontend is told."""

    def __init__(self, frontend: ReplicaFrontend, cores: list[PlayedCore]) -> None:
        self.frontend, self.cores = frontend, cores
        self.outputs: list[CoreOutput] = []
        self.stats = CoreStats()
        self.lost: list[Any] = []
        frontend.listener = Listener(
            outputs=self.outputs.extend,
            stats=partial(setattr, self, "stats"),
            lost=self.lost.append,
            restarted=lambda info: None,
            dead=lambda: None,
        )

    def ids(self, name: str) -> list[int]:
        return [one for output in self.outputs if output.request_id == name for one in output.ids]

    def holder(self) -> PlayedCore:
        """The core of the only call."""
        (number,) = {flight.call.replica for flight in self.frontend._dispatch.flights.values()}
        return self.cores[number]


@pytest.fixture
async def seen() -> AsyncIterator[Seen]:
    cores: list[PlayedCore] = []

    async def start(number: int, told: Listener) -> PlayedCore:
        cores.append(PlayedCore(number, told))
        return cores[-1]

    made = await ReplicaFrontend.start(b"k" * 32, 3, start)
    yield Seen(made, cores)
    await made.close()


def request(name: str = "r", **fields: Any) -> CoreRequest:
    params = SamplingParams(max_tokens=9, **fields)
    prompt = pack_ids(range(40))
    return CoreRequest(request_id=name, prompt=prompt, params=params, max_tokens=9, seed=1)


async def test_a_lost_replica_hands_its_requests_on(seen: Seen) -> None:
    seen.frontend.add([request()])
    first = seen.holder()
    prefix = first.info.id_prefix
    assert first.added.request.request_id == f"{prefix}r"
    assert len(first.added.request.digests) == 16 * 3  # the root and two full blocks
    first.say(f"{prefix}r", 4, 5)
    first.die()
    second = seen.holder()
    assert second is not first
    moved = second.added.request
    assert moved.generated == pack_ids([4, 5])
    assert moved.request_id == f"{second.info.id_prefix}r~1"
    first.say(f"{prefix}r", 8)  # too late
    second.say(moved.request_id, 6, finish_reason="length")
    assert seen.ids("r") == [4, 5, 6]
    assert seen.outputs[-1].finish_reason == "length"
    assert not seen.lost
    assert not seen.frontend._dispatch.flights
    assert not seen.frontend._dispatch.router._requests


async def test_choices_move_together_behind_one_that_leads(seen: Seen) -> None:
    call = choices_of(request("a", prompt_logprobs=1), [])
    call += [choice for name in "bc" for choice in choices_of(request(name), [])]
    call[1:] = [type(one)(**{n: getattr(one, n) for n in one.__struct_fields__} | {"leader": "a"})
                for one in call[1:]]  # fmt: skip
    seen.frontend.add(call)
    first = seen.holder()
    assert [one.request_id[2:] for one in first.added.followers] == ["b", "c"]
    rows = [TokenLogprobs(one, -1.0, 1, [], []) for one in range(4)]
    name = first.added.request.request_id
    first.say(name, prompt_logprobs=rows[:3])
    first.die()
    second = seen.holder()
    assert second.added.request.params.prompt_logprobs == 1
    name = second.added.request.request_id
    second.say(name, prompt_logprobs=rows[:2])  # known
    second.say(name, prompt_logprobs=rows[2:])
    second.say(name, 7, prompt_logprobs=[])
    scored = [one.prompt_logprobs for one in seen.outputs if one.prompt_logprobs]
    assert scored == [rows[:3], rows[3:]]
    second.say(name, finish_reason="stop")
    second.say(second.added.followers[0].request_id, 3)
    second.die()
    third = seen.holder()
    assert third.added.request.leader is None
    assert third.added.request.request_id.endswith("b~2")
    assert third.added.request.generated == pack_ids([3])
    assert [one.request_id[2:] for one in third.added.followers] == ["c~2"]


async def test_a_request_that_ends_replicas_ends_itself(seen: Seen) -> None:
    seen.frontend.add([request()])
    for _ in range(MAX_MOVES):
        core = seen.holder()
        core.die()
        core.live()
        await until(lambda: all(seat.serves for seat in seen.frontend._seats.values()))
    assert not seen.outputs
    seen.holder().die()
    assert seen.outputs[-1].finish_reason == "error"
    assert "SIGKILL; 4 replicas were lost with it" in (seen.outputs[-1].error or "")
    assert seen.frontend.status == "ready"


async def test_none_is_left(seen: Seen) -> None:
    seen.frontend.add([request()])
    for core in seen.cores:
        core.die()
    assert seen.outputs[-1].error_code == EngineDeadError.code
    assert seen.lost == [LOST]
    assert seen.frontend.status == "restarting"
    with pytest.raises(EngineDeadError):
        seen.frontend.add([request("other")])
    seen.cores[1].live()
    await until(lambda: seen.frontend.status == "ready")
    seen.frontend.add([request("third")])
    assert seen.holder() is seen.cores[1]


async def test_a_silent_one_is_left_and_comes_back(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frontend_module, "_LOOK_S", 0.0)
    seen.frontend.add([request()])
    first = seen.holder()
    first.is_silent = True
    await until(lambda: seen.holder() is not first)
    assert first.sent[-1] == AbortRequests([f"{first.info.id_prefix}r"])
    second = seen.holder()
    seen.frontend.abort(["r", "unknown"])
    assert second.sent[-1] == AbortRequests([f"{second.info.id_prefix}r~1"])
    assert seen.frontend.silent_s == 0
    first.is_silent = False
    assert len(seen.frontend._dispatch.able("")) == 3


async def test_calls_reach_all_and_are_repeated_for_one_that_starts_again(seen: Seen) -> None:
    vocabulary = Vocabulary(tokens=[], special_ids=[], eos_ids=[], tokenizer="")
    seen.frontend.tell(vocabulary)
    await seen.frontend.change_adapters("sql", "adapters/sql")
    await seen.frontend.call("update_weights", "new")
    await seen.frontend.call("pause", "keep")
    core = seen.cores[0]
    core.die()
    core.sent.clear()
    core.live()
    await until(lambda: seen.frontend._seats[0].serves)
    assert core.sent[0] is vocabulary
    calls = [(one.what, one.text) for one in core.sent if isinstance(one, Call)]
    assert calls == [("pause", "wait"), ("update_weights", "new")]
    assert [(one.name, one.path) for one in core.sent if isinstance(one, LoadAdapter)] == [
        ("sql", "adapters/sql")
    ]
    with pytest.raises(InvalidRequestError, match="no replica 5"):
        await seen.frontend.drain(5, 0.0)


async def test_replicas_wake_unpaused_and_one_holds_the_files(seen: Seen) -> None:
    levels: list[int] = []
    for core in seen.cores:

        async def sleep(level: int, core: PlayedCore = core) -> None:
            levels.append(level)
            core.status = "asleep"

        async def wake(core: PlayedCore = core) -> None:
            core.live()

        vars(core).update(sleep=sleep, wake=wake)
    await seen.frontend.call("pause", "abort")
    await seen.frontend.sleep(1)
    assert levels == [1, 2, 2]
    for core in seen.cores:
        core.sent.clear()
    await seen.frontend.wake()
    await until(lambda: all(seat.serves for seat in seen.frontend._seats.values()))
    assert not any(isinstance(one, Call) for core in seen.cores for one in core.sent)


async def test_an_adapters_requests_go_where_it_is(seen: Seen) -> None:
    core = seen.cores[2]
    assert core.listener is not None
    core.listener.stats(CoreStats(adapters=[AdapterInfo("sql", "p", 8, "d")], num_running=1))
    named = request()
    named = CoreRequest(
        **{n: getattr(named, n) for n in named.__struct_fields__} | {"adapter": "sql"}
    )
    seen.frontend.add([named])
    assert seen.holder() is core
    assert seen.stats.num_running == 1
    assert seen.stats.adapters == [AdapterInfo("sql", "p", 8, "d")]
    assert list(seen.stats.replicas) == ["0", "1", "2"]
    assert seen.frontend.info.max_num_seqs == 12
    assert seen.frontend.info.max_model_len == 100


async def test_announcements_decide(seen: Seen) -> None:
    seen.frontend.add([request()])
    digests = seen.holder().added.request.digests
    seen.frontend.abort(["r"])
    for core in seen.cores:
        assert core.listener is not None
        filed = digests[16:] if core is seen.cores[1] else b""
        core.listener.announced(Announced(filed, b"", ReplicaLoad(num_taken=1, token_s=1e-3)))
    for name in ("s", "t"):
        seen.frontend.add([request(name)])
        assert seen.cores[1].added.request.request_id.endswith(name)
        assert seen.holder() is seen.cores[1]
        seen.frontend.abort([name])


async def test_what_is_said_while_others_start_counts() -> None:
    """An API process that starts again learns what warm cores have."""
    cores: list[PlayedCore] = []

    async def start(number: int, told: Listener) -> PlayedCore:
        core = PlayedCore(number, told)
        if number == 1:
            filed = b"".join(PromptDigests(b"k" * 32, "m", core.info, str).of(request())[1:])
            told.stats(CoreStats(num_waiting=3))
            told.announced(Announced(filed, b"", ReplicaLoad(token_s=1e-3)))
        cores.append(core)
        return core

    made = await ReplicaFrontend.start(b"k" * 32, 3, start)
    seen = Seen(made, cores)
    made.add([request()])
    assert seen.holder() is cores[1]
    assert made._seats[1].stats.num_waiting == 3
    await made.close()


async def test_one_that_starts_while_others_change_changes_too(seen: Seen) -> None:
    late, slow = seen.cores[0], seen.cores[1]
    late.status = "restarting"
    slow.is_slow = True
    loading = asyncio.ensure_future(seen.frontend.call("update_weights", "new"))
    await until(lambda: bool(slow.sent))
    late.live()
    await until(lambda: seen.frontend._seats[0].serves)
    assert not late.sent
    slow.answer()
    assert await loading
    await until(lambda: bool(late.sent) and seen.frontend._seats[0].serves)
    assert [(one.what, one.text) for one in late.sent] == [("update_weights", "new")]
