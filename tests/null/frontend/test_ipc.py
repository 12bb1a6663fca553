"""Frames: every message survives, whatever the cuts; nothing else is accepted."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllmx_core.config import EngineConfig
from vllmx_core.errors import CapacityError, PluginClashError, QueueFullError, VllmxError
from vllmx_core.plugins.hooks import hookimpl
from vllmx_core.plugins.registry import Registry
from vllmx_core.plugins.specs import BackendSpec, ModelImplSpec
from vllmx_core.sampling import SamplingParams
from vllmx_engine.wire import ipc
from vllmx_engine.wire.ipc import KnownSpecs
from vllmx_engine.wire.messages import (
    CoreOutput,
    CoreRequest,
    CoreStats,
    ReplicaLoad,
    TokenLogprobs,
    pack_ids,
)

REQUEST = CoreRequest(
    request_id="7.0",
    prompt=pack_ids([1, 2, 300_000]),
    params=SamplingParams(
        n=3,
        seed=(1 << 64) - 1,
        stop=("a", "é"),
        logit_bias={5: -1.5},
        allowed_token_ids=(1, 2),
        bad_words=("x",),
    ),
    stop_ids=[2, 0],
    bad_words_ids=[[1, 2]],
    max_tokens=9,
    seed=(1 << 64) - 1,
    leader="6.0",
)
LOGPROBS = TokenLogprobs(5, -0.25, 1, [5, 6], [-0.25, -1.5])
OUTPUT = CoreOutput(
    request_id="7.0", ids=[5], logprobs=[LOGPROBS], prompt_logprobs=[LOGPROBS], stop_id=5
)


def start_message(registry: Registry) -> ipc.Start:
    config = EngineConfig(model="m", max_model_len=64, num_kv_blocks=7)
    specs = KnownSpecs.of(registry)
    return ipc.Start(config=config, path="/m", specs=specs, progress=False, log_level=20)


@pytest.mark.parametrize(
    "message",
    [ipc.AddRequest(REQUEST), ipc.AbortRequests(["a", "b"]), ipc.Call(3, "pause", "keep")],
)
def test_messages_to_the_core_survive(message: ipc.ToCore) -> None:
    reader = ipc.FrameReader(ipc.to_core_decoder)
    assert list(reader.feed(ipc.encode_frame(message))) == [message]


@pytest.mark.parametrize(
    "message",
    [
        ipc.Outputs([OUTPUT, CoreOutput(request_id="8.1", ids=[], finish_reason="length")]),
        ipc.Stats(CoreStats(num_steps=3, step_seconds=0.5)),
        ipc.Called(3, False),
        ipc.Announced(bytes(32), b"", ReplicaLoad(2, 1, queued_s=0.5)),
        ipc.Failed(ipc.ErrorRecord.of(CapacityError("too large", param="max_model_len"))),
    ],
)
def test_messages_from_the_core_survive(message: ipc.FromCore) -> None:
    reader = ipc.FrameReader(ipc.from_core_decoder)
    assert list(reader.feed(ipc.encode_frame(message))) == [message]


def test_start_brings_the_registry(registry: Registry) -> None:
    message = start_message(registry)
    (got,) = ipc.FrameReader(ipc.to_core_decoder).feed(ipc.encode_frame(message))
    assert got == message
    assert isinstance(got, ipc.Start)
    rebuilt = got.specs.registry()
    assert rebuilt.get(BackendSpec, "fake") == registry.get(BackendSpec, "fake")
    assert KnownSpecs.of(rebuilt) == message.specs


def test_a_conflict_and_its_decision_reach_the_core() -> None:
    registry = Registry()
    for key in ("first:p", "second:p"):
        spec = BackendSpec("x", f"{key[:-2]}:X", probe="os:getpid", priority=0)
        registry.add(SimpleNamespace(vllmx_backends=_backends(spec)), key)
    with pytest.raises(PluginClashError, match="first:p and second:p"):
        KnownSpecs.of(registry).registry().get(BackendSpec, "x")
    registry.prefer(["second"])
    rebuilt = KnownSpecs.of(registry).registry()
    assert rebuilt.get(BackendSpec, "x").implementation == "second:X"


def _backends(spec: BackendSpec) -> Callable[[], tuple[BackendSpec, ...]]:
    @hookimpl
    def vllmx_backends() -> tuple[BackendSpec, ...]:
        return (spec,)

    return vllmx_backends


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60))
def test_each_message_is_out_as_soon_as_its_last_byte_is_in(cuts: list[int]) -> None:
    messages: list[ipc.ToCore] = [
        ipc.AddRequest(REQUEST),
        ipc.AbortRequests(["x"]),
        ipc.Shutdown(),
        ipc.AddRequest(REQUEST),
        ipc.Shutdown(),
    ]
    frames = [bytes(ipc.encode_frame(message)) for message in messages]
    ends = [sum(map(len, frames[: i + 1])) for i in range(len(frames))]
    stream = b"".join(frames)
    reader = ipc.FrameReader(ipc.to_core_decoder)
    got: list[ipc.ToCore] = []
    fed = 0
    for cut in itertools.cycle(cuts):
        got += reader.feed(stream[fed : fed + cut])
        fed += cut
        assert got == messages[: sum(end <= fed for end in ends)]
        if fed >= len(stream):
            break


@given(st.binary(min_size=4, max_size=200))
def test_bytes_that_are_no_message_are_refused(payload: bytes) -> None:
    reader = ipc.FrameReader(ipc.to_core_decoder)
    with pytest.raises(ipc.FrameError):
        list(reader.feed(struct.pack("<I", len(payload)) + payload))


def test_a_length_over_the_limit_is_refused_before_the_bytes_come() -> None:
    reader = ipc.FrameReader(ipc.to_core_decoder)
    with pytest.raises(ipc.FrameError, match="exceeds"):
        list(reader.feed(struct.pack("<I", ipc.MAX_FRAME_BYTES + 1)))


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": "9"},
        {"prompt": [1, 2]},
        {"params": {"temperature": float("nan")}},
        {"params": {"top_p": 3.0}},
        {"params": {"n": True}},
        {"seed": None},
    ],
)
def test_values_of_the_wrong_type_or_range_are_refused(fields: dict[str, object]) -> None:
    good = msgspec.to_builtins(ipc.AddRequest(REQUEST))
    bad = {**good, "request": {**good["request"], **fields}}
    payload = msgspec.msgpack.encode(bad)
    reader = ipc.FrameReader(ipc.to_core_decoder)
    with pytest.raises(ipc.FrameError):
        list(reader.feed(struct.pack("<I", len(payload)) + payload))


def test_a_message_that_is_too_large_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc, "MAX_FRAME_BYTES", 100)
    with pytest.raises(ipc.FrameTooLargeError):
        ipc.encode_frame(ipc.AddRequest(REQUEST))


def test_errors_keep_their_type() -> None:
    for error in (CapacityError("a", param="b"), QueueFullError("c"), VllmxError("d")):
        rebuilt = ipc.ErrorRecord.of(error).rebuild()
        assert (type(rebuilt), rebuilt.message, rebuilt.param) == (
            type(error),
            error.message,
            error.param,
        )


@pytest.mark.parametrize("name", ["annotations", "KeyError", "nothing"])
def test_an_error_type_that_is_not_ours_becomes_the_base(name: str) -> None:
    assert type(ipc.ErrorRecord(name, "text").rebuild()) is VllmxError


def test_who_runs_models_is_known_to_the_process_that_loads_them() -> None:
    spec = ModelImplSpec("borrowed", "a:B", "far", "a:probe", "slow")
    registry = Registry()
    registry.add(SimpleNamespace(vllmx_model_impls=hookimpl(lambda: (spec,))), "one:p")
    sent = msgspec.msgpack.encode(KnownSpecs.of(registry))
    rebuilt = msgspec.msgpack.decode(sent, type=KnownSpecs).registry()
    assert rebuilt.all(ModelImplSpec) == [spec]
