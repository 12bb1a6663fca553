"""Prompts that one replica computes for another, over cores that a test plays."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import msgspec
import pytest
from vllmx_core.config import Role
from vllmx_core.errors import ConfigError
from vllmx_engine.link.frontend import Listener
from vllmx_engine.replicas.frontend import ReplicaFrontend
from vllmx_engine.wire.ipc import AbortRequests, Announced
from vllmx_engine.wire.messages import ReplicaLoad, choices_of, pack_ids

from .test_replica_frontend import PlayedCore, Seen, request

BUSY = ReplicaLoad(
    token_s=1e-3, num_running=3, stretch=4.0, free_rows=8, free_blocks=100, turn_s=1.0
)
IDLE = ReplicaLoad(token_s=1e-3, free_rows=8, free_blocks=100, turn_s=1.0)


async def started(
    roles: Sequence[Role], of: Sequence[str] = ("one", "one", "one"), least: int = 16
) -> Seen:
    cores: list[PlayedCore] = []

    async def start(number: int, told: Listener) -> PlayedCore:
        core = PlayedCore(number, told)
        core.info = msgspec.structs.replace(core.info, role=roles[number], blocks_of=of[number])
        cores.append(core)
        return core

    made = await ReplicaFrontend.start(
        b"k" * 32, len(roles), start, least_remote=least, address=lambda at: f"place {at}"
    )
    seen = Seen(made, cores)
    for number, role in enumerate(roles):
        report(seen, number, IDLE if role == "prefill" else BUSY)
    return seen


def report(seen: Seen, number: int, load: ReplicaLoad, filed: bytes = b"") -> None:
    listener = seen.cores[number].listener
    assert listener is not None
    listener.announced(Announced(filed, b"", load))


@pytest.fixture
async def seen() -> AsyncIterator[Seen]:
    made = await started(["prefill", "decode", "decode"])
    yield made
    await made.frontend.close()


def check_idle(seen: Seen) -> None:
    dispatch = seen.frontend._dispatch
    assert not dispatch.flights
    assert not dispatch.router._requests
    assert not any(seat.flights for seat in seen.frontend._seats.values())


async def test_a_prompt_is_computed_first_and_continued_elsewhere(seen: Seen) -> None:
    seen.frontend.add(choices_of(request(logprobs=2), []))
    prefill = seen.cores[0].added.request
    assert prefill.request_id == "1:r~p"
    assert (prefill.max_tokens, prefill.params.logprobs, prefill.source) == (1, None, "")
    assert prefill.prompt == request().prompt
    decoder = seen.holder()
    assert decoder is not seen.cores[0]
    there = decoder.added.request
    assert (there.source, there.source_id) == ("place 0", "1:r~p")
    assert 0.0 < there.source_s < 1.0
    assert (there.max_tokens, there.params.logprobs) == (9, 2)
    seen.cores[0].say("1:r~p", 7)
    seen.cores[0].say("1:r~p", finish_reason="length")
    assert seen.ids("r") == []
    decoder.say(there.request_id, 3, 4)
    decoder.die()  # the next one fetches the blocks too, and goes on
    other = seen.holder()
    moved = other.added.request
    assert other not in (decoder, seen.cores[0])
    assert (moved.source, moved.generated) == ("place 0", pack_ids([3, 4]))
    other.say(moved.request_id, 5, finish_reason="length")
    assert seen.ids("r") == [3, 4, 5]
    check_idle(seen)


async def test_choices_share_a_prompt_that_is_computed_elsewhere(seen: Seen) -> None:
    call = choices_of(request("a"), [])
    call += [msgspec.structs.replace(request("b"), leader="a")]
    seen.frontend.add(call)
    assert not seen.cores[0].added.followers
    decoder = seen.holder()
    assert len(decoder.added.followers) == 1
    assert decoder.added.request.source == "place 0"
    seen.frontend.abort(["a"])
    assert AbortRequests(["1:a~p"]) not in seen.cores[0].sent
    seen.frontend.abort(["b"])
    assert AbortRequests(["1:a~p"]) in seen.cores[0].sent
    check_idle(seen)


@pytest.mark.parametrize("end", ["killed", "error", "drained", "late"])
async def test_a_prefill_that_fails_costs_time_alone(end: str, seen: Seen) -> None:
    seen.frontend.add([request()])
    prefiller, first = seen.cores[0], seen.holder()
    if end == "late":
        first.say(first.added.request.request_id, 2)
    if end in ("killed", "late"):
        prefiller.die()
    elif end == "error":
        prefiller.say("1:r~p", finish_reason="error", error="no room")
    else:
        await seen.frontend.drain(0, 0.0)
    decoder = seen.holder()
    assert decoder is not prefiller
    moved = end in ("killed", "drained")
    assert decoder.added.request.request_id.endswith("r~1" if moved else "r")
    if moved:
        assert decoder.added.request.source == ""
        assert any(isinstance(one, AbortRequests) for one in first.sent)
    decoder.say(decoder.added.request.request_id, 1, finish_reason="stop")
    prefiller.say("1:r~p", finish_reason="length")  # too late
    assert seen.ids("r") == [2, 1] if end == "late" else [1]
    check_idle(seen)


async def test_an_aborted_prefill_leaves_nothing(seen: Seen) -> None:
    seen.frontend.add([request()])
    seen.frontend.abort(["r"])
    assert AbortRequests(["1:r~p"]) in seen.cores[0].sent
    seen.cores[0].say("1:r~p", finish_reason="length")
    check_idle(seen)


async def test_prompts_stay_where_that_is_sooner(seen: Seen) -> None:
    def goes_to(name: str) -> PlayedCore:
        """The core that computes the prompt."""
        seen.frontend.add([request(name)])
        core = seen.holder()
        is_apart = bool(core.added.request.source)
        seen.frontend.abort([name])
        return seen.cores[0] if is_apart else core

    assert goes_to("a") is seen.cores[0]
    report(seen, 0, msgspec.structs.replace(IDLE, queued_s=60.0))
    assert goes_to("b") is not seen.cores[0]
    report(seen, 0, IDLE)
    for number in (1, 2):
        report(seen, number, IDLE)
    assert goes_to("c") is not seen.cores[0], "decoders with nothing to do compute it at once"
    for number in (1, 2):
        report(seen, number, BUSY)
    assert goes_to("d") is seen.cores[0]
    slow = msgspec.structs.replace(BUSY, pull_byte_s=60.0)
    for number in (1, 2):
        report(seen, number, slow)
    assert goes_to("d2") is not seen.cores[0], "its blocks would need a minute"
    for number in (1, 2):
        report(seen, number, BUSY)
    digests = seen.cores[0].added.request.digests
    report(seen, 1, BUSY, digests[16:])
    assert goes_to("e") is seen.cores[1], "fewer than 16 tokens are not cached there"
    seen.frontend.add([request("f", prompt_logprobs=1)])
    assert not seen.holder().added.request.source


async def test_the_only_one_left_generates(seen: Seen) -> None:
    for core in seen.cores[1:]:
        core.die()
    seen.frontend.add([request()])
    assert seen.cores[0].added.request.max_tokens == 9
    assert [one.role for one in seen.frontend.replicas()] == ["prefill", "decode", "decode"]


async def test_roles_that_do_not_go_together() -> None:
    for roles in (["prefill", "prefill"], ["decode", "decode"], ["prefill", "decode", "both"]):
        with pytest.raises(ConfigError, match="start at least one with --role prefill, and all"):
            await started(roles)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"replica 2 keeps KV blocks of two, and .* 0 of one: st"):
        await started(["prefill", "decode", "decode"], ["one", "one", "two"])
