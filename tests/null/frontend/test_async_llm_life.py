"""How an `AsyncLLM` starts, drains, is shut down, and what it leaves when it cannot start."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from vllmx_core.errors import (
    CapacityError,
    ConfigError,
    EngineDeadError,
    ModelNotFoundError,
    UnsupportedModelError,
    VllmxError,
)
from vllmx_core.sampling import SamplingParams
from vllmx_core.structured import StructuredOutputsParams
from vllmx_engine import async_core
from vllmx_engine.core_start import ThreadFrontend
from vllmx_engine.link.process_frontend import ProcessFrontend
from vllmx_engine.wire.ipc import Called

from tests.waiting import PATIENCE_S, until

from .test_async_llm import GREEDY, LONG, MakeEngine, both, collect


async def test_drain_finishes_what_is_in_flight(make_engine: MakeEngine, slow_folder: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    async with make_engine(model=slow_folder) as llm:
        task = asyncio.create_task(collect(llm, "hi", params))
        await until(lambda: llm.num_in_flight > 0)
        assert not await llm.drain(timeout_s=0.0)
        assert not llm.is_ready
        with pytest.raises(EngineDeadError, match="shutting down"):
            await llm.submit("hi")
        assert await llm.drain(timeout_s=PATIENCE_S)
        assert len((await task)[1]) == 100


@both
async def test_shutdown_ends_what_is_in_flight(
    make_engine: MakeEngine, slow_folder: str, in_process: bool
) -> None:
    async with make_engine(in_process=in_process, model=slow_folder) as llm:
        stream = await llm.submit("hi", LONG)
        await anext(stream)
        await llm.shutdown()
        assert [output async for output in stream][-1].outputs[0].finish_reason == "abort"
        await llm.shutdown()


@both
@pytest.mark.parametrize(
    ("config", "error", "text"),
    [
        ({"model": "nowhere"}, ModelNotFoundError, "nowhere"),
        ({"max_model_len": 513}, ConfigError, "512"),
        ({"tokenizer": "nowhere"}, ModelNotFoundError, "nowhere"),
        ({"max_model_len": 100, "kv_cache_memory_bytes": 128}, CapacityError, "100"),
    ],
)
async def test_load_errors_keep_their_type(
    make_engine: MakeEngine,
    in_process: bool,
    config: dict[str, Any],
    error: type[VllmxError],
    text: str,
) -> None:
    with pytest.raises(error, match=text):
        async with make_engine(in_process=in_process, **config):
            pass


@both
async def test_what_is_wrong_after_loading_leaves_no_core_behind(
    make_engine: MakeEngine,
    make_folder: Callable[..., str],
    in_process: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[object] = []
    for kind in (ThreadFrontend, ProcessFrontend):
        monkeypatch.setattr(kind, "close", _noting(kind.close, closed))
    model = make_folder("wrong")
    (Path(model) / "generation_config.json").write_text('{"eos_token_id": ["x"]}')
    with pytest.raises(ConfigError, match="eos_token_id"):
        async with make_engine(in_process=in_process, model=model, tokenizer=make_folder("good")):
            pass
    assert len(closed) == 1


def _noting(close: Callable[[Any], Awaitable[None]], closed: list[object]) -> Any:
    async def noting(frontend: object) -> None:
        await close(frontend)
        closed.append(frontend)

    return noting


async def test_an_architecture_that_the_core_finds_wanting(
    make_engine: MakeEngine, folder: str
) -> None:
    path = Path(folder) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["Perceptron"]}))
    with pytest.raises(UnsupportedModelError, match="Perceptron"):
        async with make_engine(in_process=False):
            pass


async def test_a_dead_thread_is_reported(
    make_engine: MakeEngine, make_folder: Callable[..., str]
) -> None:
    folder = make_folder("dead", fail_steps=list(range(100)))
    async with make_engine(model=folder) as llm:
        for _ in range(10):
            with pytest.raises(VllmxError):
                await collect(llm, "hi", GREEDY)
            if llm.errored:
                break
        assert llm.errored
        assert not llm.is_ready
        with pytest.raises(EngineDeadError, match="start the engine again"):
            await llm.submit("hi")


@both
async def test_a_resume_ends_a_pause_that_waits(
    make_engine: MakeEngine, slow_folder: str, in_process: bool
) -> None:
    async with make_engine(in_process=in_process, model=slow_folder) as llm:
        stream = await llm.submit("hi", LONG)
        await anext(stream)
        pausing = asyncio.create_task(llm.pause("wait"))
        while not await llm.is_paused():
            await asyncio.sleep(0.01)
        await llm.resume()
        await asyncio.wait_for(pausing, PATIENCE_S)
        assert not await llm.is_paused()
        assert llm.num_in_flight == 1
        stream.abort()


async def test_counters_of_a_paused_core(make_engine: MakeEngine, slow_folder: str) -> None:
    """`/sleep` with several workers goes by them."""
    async with make_engine(model=slow_folder) as llm:
        running = await llm.submit("hi", LONG)
        await anext(running)
        await llm.pause("keep")
        later = await llm.submit("hi", GREEDY, kind="final")
        await until(lambda: (llm.stats.num_running, llm.stats.num_waiting) == (1, 1))
        await llm.pause("abort")
        await until(lambda: (llm.stats.num_running, llm.stats.num_waiting) == (0, 1))
        await llm.resume()
        assert len((await later.last()).outputs[0].token_ids) == 20


async def test_an_answer_to_a_call_that_was_just_cancelled(make_engine: MakeEngine) -> None:
    """It comes before the task that called has run again."""
    async with make_engine() as llm:
        frontend = llm._frontend
        assert isinstance(frontend, ThreadFrontend)
        for end in (
            lambda number: frontend._take(Called(number, True)),
            lambda _: frontend._tell_lost(EngineDeadError("gone")),
        ):
            calling = asyncio.create_task(llm.is_paused())
            await asyncio.sleep(0)
            (number,) = frontend._calls
            calling.cancel()
            end(number)
            with pytest.raises(asyncio.CancelledError):
                await calling
        assert not await llm.is_paused()


async def test_grammars_are_prepared_before_the_first_of_them(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_core, "PREPARE_S", 0.0)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[ab]{3}"))
    async with make_engine() as llm:
        assert llm.grammars.pid is None
        llm.prepare_grammars_later()
        await until(lambda: llm.grammars.pid is not None and llm._streams._core_knows_vocabulary)
        pid = llm.grammars.pid
        text, _ = await collect(llm, "hi", params)
        assert llm.grammars.pid == pid
        assert text
        assert set(text) <= {"a", "b"}
    async with make_engine() as llm:
        monkeypatch.setattr(async_core, "PREPARE_S", PATIENCE_S)
        llm.prepare_grammars_later()  # and it ends with the engine
