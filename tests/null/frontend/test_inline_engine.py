"""Engine: streams over the core in this process, and engines that nobody closes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from vllmx_core.config import EngineConfig
from vllmx_core.errors import (
    EngineDeadError,
    InvalidRequestError,
    NonFiniteLogitsError,
)
from vllmx_core.plugins.registry import Registry
from vllmx_core.sampling import SamplingParams
from vllmx_engine.client.chat import Message
from vllmx_engine.client.inline import InlineEngine
from vllmx_engine.core.engine_core import EngineCore
from vllmx_engine.engine import Engine
from vllmx_engine.llm import LLM

from tests.waiting import PATIENCE_S, wait_until

from .test_llm import GREEDY, expected


@pytest.fixture
def engine(folder: str, registry: Registry) -> Iterator[Engine]:
    with Engine(EngineConfig(model=folder, backend="fake"), registry=registry) as engine:
        yield engine


def test_engine_streams(engine: Engine) -> None:
    seq_id, prompt_length, stream = engine.generate_stream(GREEDY, "hi")
    other_id, _, other = engine.generate_stream(GREEDY, [104, 111])
    assert prompt_length == 2
    assert seq_id != other_id
    pieces = [next(stream), next(other), *stream]
    assert all(pieces)
    whole, whole_other = engine.generate_sync(GREEDY, ["hi", "ho"])
    assert pieces[0] + "".join(pieces[2:]) == whole.outputs[0].text
    assert pieces[1] + "".join(other) == whole_other.outputs[0].text
    assert stream.token_ids == expected("hi")
    assert stream.finish_reason == "length"


def test_engine_cancel(engine: Engine) -> None:
    seq_id, _, stream = engine.generate_stream(
        SamplingParams(max_tokens=400, ignore_eos=True), "hi"
    )
    next(stream)
    assert engine.cancel(seq_id)
    assert not engine.cancel(seq_id)
    list(stream)  # what was computed before
    assert stream.finish_reason == "abort"
    assert len(stream.token_ids) < 400


def test_an_error_that_comes_while_a_stream_is_read_is_raised(engine: Engine) -> None:
    """The step after an update that is read may fail before it is handed out."""
    _, _, stream = engine.generate_stream(SamplingParams(max_tokens=400, ignore_eos=True), "hi")
    next(stream)
    frontend, state = engine._engine, stream._state
    while not state.has_update():  # computed ahead
        frontend._wait(state.has_update)
    read: list[object] = []

    def reader() -> None:
        try:
            read.append(frontend.next_output(state))
        except NonFiniteLogitsError as error:
            read.append(error)

    with frontend._verdict:
        thread = threading.Thread(target=reader)
        thread.start()
        thread.join(0.1)  # it has seen that there is an update
        state.error = NonFiniteLogitsError("as the test ordered")
    thread.join(PATIENCE_S)
    assert read == [state.error]
    state.error = None
    frontend.abort(state)


def test_engine_refuses_several_choices_in_a_stream(engine: Engine) -> None:
    with pytest.raises(InvalidRequestError, match="one sequence"):
        engine.generate_stream(SamplingParams(n=2), "hi")


def test_engine_stream_raises_the_request_s_error(
    make_folder: Callable[..., str], registry: Registry
) -> None:
    config = EngineConfig(model=make_folder("nan", nan_token=0), backend="fake")
    with Engine(config, registry=registry) as engine:
        _, _, stream = engine.generate_stream(GREEDY, [0])
        with pytest.raises(NonFiniteLogitsError):
            next(stream)


def test_engine_text(engine: Engine) -> None:
    prompt = engine.apply_chat_template([Message("user", "hi")])
    assert prompt == "<|user|>hi<|end|><|assistant|>"
    bare = engine.apply_chat_template([Message("user", "hi")], add_generation_prompt=False)
    assert bare == "<|user|>hi<|end|>"
    ids = engine.tokenize(prompt)
    assert ids == [257, 104, 105, 256, 258]
    assert engine.detokenize(ids, skip_special_tokens=False) == prompt


def test_engine_threads_take_turns(make_folder: Callable[..., str], registry: Registry) -> None:
    """A thread that starts later must not wait until another one's stream has ended, which here
    would take minutes."""
    folder = make_folder("slow", step_s=0.01, max_model_len=40_000)
    params = SamplingParams(max_tokens=30_000, temperature=0.0, ignore_eos=True)
    found: list[list[int]] = []

    def short(engine: Engine) -> None:
        outputs = engine.generate_sync(GREEDY, ["a", "b", "c"])
        found.extend(output.outputs[0].token_ids for output in outputs)

    with Engine(EngineConfig(model=folder, backend="fake"), registry=registry) as engine:
        seq_id, _, long = engine.generate_stream(params, "long")
        thread = threading.Thread(target=short, args=(engine,))
        next(long)
        thread.start()
        while thread.is_alive():
            next(long)
        ids = list(long.token_ids)
        assert engine.cancel(seq_id)
    assert found == [expected(prompt) for prompt in "abc"]
    assert ids == expected("long", len(ids))


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The threads on which cores were closed."""
    found: list[str] = []
    close = EngineCore.close

    def noted(core: EngineCore) -> None:
        found.append(threading.current_thread().name)
        close(core)

    monkeypatch.setattr(EngineCore, "close", noted)
    return found


def test_a_dropped_llm_is_closed(folder: str, registry: Registry, closed: list[str]) -> None:
    before = set(threading.enumerate())
    llm = LLM(folder, registry=registry, backend="fake")
    llm.generate("hi", GREEDY)
    del llm
    assert len(closed) == 1  # at once, without a pass of the collector
    wait_until(lambda: set(threading.enumerate()) <= before)
    with LLM(folder, registry=registry, backend="fake"):
        pass
    assert len(closed) == 2  # and not again


def test_a_stream_keeps_its_engine(folder: str, registry: Registry, closed: list[str]) -> None:
    engine = Engine(EngineConfig(model=folder, backend="fake"), registry=registry)
    _, _, stream = engine.generate_stream(GREEDY, "hi")
    del engine
    next(stream)
    assert not closed
    del stream
    assert len(closed) == 1


def test_an_engine_dropped_in_the_middle_of_its_step(
    folder: str, registry: Registry, closed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the collector happens to run on the thread of the steps, which has the turn."""
    engine, step = (
        InlineEngine(EngineConfig(model=folder, backend="fake"), registry),
        EngineCore.step,
    )

    def dropping(core: EngineCore) -> Any:
        engine.drop()
        return step(core)

    monkeypatch.setattr(EngineCore, "step", dropping)
    state = engine.submit(engine.builder.build("hi", GREEDY))
    try:
        engine.run([state])
    except EngineDeadError:
        assert state.finished
    wait_until(lambda: len(closed) == 1)
