"""Tokens that a sink takes in place of the stream's consumer, fed by hand."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest
from vllmx_core.sampling import SamplingParams
from vllmx_engine.client.request import RequestBuilder
from vllmx_engine.client.request_state import ChoiceState
from vllmx_engine.client.request_stream import RequestStream
from vllmx_engine.client.request_table import RequestTable
from vllmx_engine.text.tokenizer import Tokenizer
from vllmx_engine.wire.messages import CoreInfo, CoreOutput

WORDS = "aé€😀b".encode()


@dataclass
class Shown:
    """What came of a stream, by way of the sink or of its consumer."""

    ready: bool = True
    fault: Exception | None = None
    text: str = ""
    ids: list[int] = field(default_factory=list)
    ways: list[str] = field(default_factory=list)
    reason: str | None = None

    def is_ready(self) -> bool:
        return self.ready

    def take(self, text: str, ids: list[int], now_s: float) -> None:
        if self.fault is not None:
            raise self.fault
        self._add("sink", text, ids)

    def _add(self, way: str, text: str, ids: list[int]) -> None:
        self.text += text
        self.ids += ids
        self.ways.append(way)

    async def read(self, stream: RequestStream) -> None:
        async for output in stream:
            choice = output.outputs[0]
            self._add("consumer", choice.text, choice.token_ids)
            self.reason = choice.finish_reason


class Fed:
    """A diverted stream with a consumer that waits, and a table that is fed."""

    def __init__(self, tokenizer: Tokenizer, info: CoreInfo, **params: object) -> None:
        self.shown = Shown()
        self.table = RequestTable(tokenizer)
        builder = RequestBuilder(tokenizer, info)
        self.request = builder.build("hi", SamplingParams(**params))  # type: ignore[arg-type]
        stream = RequestStream(self.request, lambda _: None, lambda *_: None)
        self.state = self.table.add(self.request, "delta", stream.wake)
        stream.attach(self.state)
        stream.divert(self.shown)
        self.consumer = asyncio.ensure_future(self.shown.read(stream))

    def feed(self, ids: bytes, **fields: object) -> list[str]:
        core_id = self.request.core[0].request_id
        output = CoreOutput(request_id=core_id, ids=list(ids), **fields)  # type: ignore[arg-type]
        return self.table.take([output])


@pytest.mark.parametrize("stop", [(), ("never",)])
@pytest.mark.parametrize("size", [1, 2, 3])
async def test_a_sink_takes_all_but_the_end(
    tokenizer: Tokenizer, info: CoreInfo, stop: tuple[str, ...], size: int
) -> None:
    """Characters over several tokens, several tokens at a time, and stop strings included."""
    fed = Fed(tokenizer, info, stop=stop)
    for start in range(0, len(WORDS), size):
        await asyncio.sleep(0)
        fed.feed(WORDS[start : start + size])
    fed.feed(b"!", finish_reason="length")
    await fed.consumer
    assert fed.shown.ids == list(WORDS + b"!")
    assert fed.shown.text == WORDS.decode() + "!"
    assert set(fed.shown.ways[:-1]) == {"sink"}
    assert (fed.shown.ways[-1], fed.shown.reason) == ("consumer", "length")
    assert fed.state.metrics.num_generation_tokens == len(WORDS) + 1


async def test_what_a_sink_does_not_take_keeps_its_place(
    tokenizer: Tokenizer, info: CoreInfo
) -> None:
    """A sink that is ready again gets nothing before the consumer has what was gathered."""
    fed = Fed(tokenizer, info)
    await asyncio.sleep(0)
    for number, byte in enumerate(WORDS):
        fed.shown.ready = number % 3 != 1
        fed.feed(bytes([byte]))
        if number % 2:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
    fed.feed(b"", finish_reason="length")
    await fed.consumer
    assert fed.shown.ids == list(WORDS)
    assert fed.shown.text == WORDS.decode()
    assert {"sink", "consumer"} == set(fed.shown.ways)


async def test_a_plain_token_is_not_gathered(
    tokenizer: Tokenizer, info: CoreInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed = Fed(tokenizer, info)
    await asyncio.sleep(0)
    with monkeypatch.context() as patch:
        patch.setattr(ChoiceState, "take", None)
        assert fed.feed(b"ab") == []
    assert fed.shown.ways == ["sink"]
    fed.feed(b"", finish_reason="stop")
    await fed.consumer


async def test_a_fault_of_a_sink_ends_that_request_alone(
    tokenizer: Tokenizer, info: CoreInfo
) -> None:
    fed = Fed(tokenizer, info)
    await asyncio.sleep(0)
    fed.shown.fault = RuntimeError("boom")
    assert fed.feed(b"a") == [fed.request.core[0].request_id]
    assert fed.state.error is not None
    assert "boom" not in fed.state.error.message
    with pytest.raises(type(fed.state.error)):
        await fed.consumer
    assert len(fed.table) == 0
