"""LLM and Engine: the core in this process."""

from __future__ import annotations

import _thread
import errno
import mmap
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllmx_core.config import EngineConfig
from vllmx_core.errors import (
    ConfigError,
    ContextLengthError,
    EngineDeadError,
    InvalidRequestError,
    ModelNotFoundError,
    PluginError,
)
from vllmx_core.plugins.registry import Registry
from vllmx_core.sampling import SamplingParams
from vllmx_engine.client.chat import Message
from vllmx_engine.engine import Engine
from vllmx_engine.llm import LLM, Progress
from vllmx_testing.fake import FakeRules, expected_tokens

GREEDY = SamplingParams(temperature=0.0, max_tokens=20)


@pytest.fixture
def llm(folder: str, registry: Registry) -> Iterator[LLM]:
    with LLM(folder, registry=registry, backend="fake", max_num_seqs=4, seed=3) as llm:
        yield llm


def expected(prompt: str, n: int = 20) -> list[int]:
    return expected_tokens(list(prompt.encode()), n, rules=FakeRules(vocab_size=259))


def test_outputs_are_right_and_in_order(llm: LLM) -> None:
    prompts = [f"prompt {i}" for i in range(10)]
    outputs = llm.generate(prompts, GREEDY)
    assert [output.prompt for output in outputs] == prompts
    assert [output.outputs[0].token_ids for output in outputs] == list(map(expected, prompts))
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}


def test_one_prompt_in_every_form(llm: LLM) -> None:
    ids = list(b"hi")
    forms: list[Any] = ["hi", ids, np.array(ids), {"prompt": "hi"}]
    forms += [["hi"], [ids], [np.array(ids)], [{"prompt_token_ids": ids}]]
    for form in forms:
        (output,) = llm.generate(form, GREEDY)
        assert output.outputs[0].token_ids == expected("hi")


def test_params_for_each_prompt(llm: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=n) for n in (1, 5)]
    outputs = llm.generate(["a", "b"], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 5]
    with pytest.raises(InvalidRequestError, match="2 sampling_params were given for 1"):
        llm.generate(["a"], params)


def test_a_bad_prompt_starts_nothing(llm: LLM) -> None:
    with pytest.raises(ContextLengthError):
        llm.generate(["fine", "x" * 600], GREEDY)
    assert llm.generate("hi", GREEDY)[0].outputs[0].token_ids == expected("hi")


def test_chat(llm: LLM) -> None:
    conversation: list[Any] = [{"role": "user", "content": "hi"}]
    one = llm.chat(conversation, GREEDY)
    two = llm.chat([conversation, [Message("user", "ho")]], GREEDY)
    assert one[0].prompt == "<|user|>hi<|end|><|assistant|>"
    assert one[0].prompt_token_ids == [257, 104, 105, 256, 258]
    assert two[0].outputs == one[0].outputs
    assert two[1].prompt == "<|user|>ho<|end|><|assistant|>"
    (default,) = llm.chat(conversation)  # as many tokens as the context holds, or the end
    choice = default.outputs[0]
    assert choice.finish_reason == "stop" or len(choice.token_ids) == 512 - 5
    assert len(choice.token_ids) > 16


def test_choices_of_a_seed_differ_and_repeat(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=11, max_tokens=12)
    first, second = (llm.generate("hi", params)[0].outputs for _ in range(2))
    assert first == second
    assert len({tuple(choice.token_ids) for choice in first}) == 3
    alone = llm.generate("hi", SamplingParams(seed=11, max_tokens=12))[0].outputs[0]
    assert alone.token_ids == first[0].token_ids


def test_best_of(llm: LLM) -> None:
    params = SamplingParams(n=4, seed=11, max_tokens=12, logprobs=0)
    everything = llm.generate("hi", params)[0].outputs
    best = llm.generate("hi", SamplingParams(best_of=4, seed=11, max_tokens=12))[0].outputs
    likeliest = max(everything, key=lambda choice: choice.cumulative_logprob or 0.0)
    assert [choice.token_ids for choice in best] == [likeliest.token_ids]


def test_named_ids_have_log_probabilities_and_no_rank(llm: LLM) -> None:
    """They need no `logprobs`, and ids that are named twice come once."""
    params = SamplingParams(temperature=0.0, max_tokens=2, logprob_token_ids=(9, 7, 9))
    (choice,) = llm.generate("hi", params)[0].outputs
    assert choice.logprobs is not None
    for token, found in zip(choice.token_ids, choice.logprobs, strict=True):
        assert list(found) == list(dict.fromkeys((token, 9, 7)))
        assert found[token].rank == 1
        assert all(found[other].rank is None for other in (9, 7) if other != token)


def test_stop_string(llm: LLM) -> None:
    text = llm.generate("hi", GREEDY)[0].outputs[0].text
    stop = text[4:7]
    (output,) = llm.generate("hi", SamplingParams(temperature=0.0, max_tokens=20, stop=(stop,)))
    assert output.outputs[0].text == text[: text.index(stop)]
    assert output.outputs[0].stop_reason == stop


def test_progress(llm: LLM) -> None:
    seen: list[Progress] = []
    llm.generate(["a", "b"], GREEDY, progress=seen.append)
    assert (seen[-1].num_done, seen[-1].num_total, seen[-1].generated_tokens) == (2, 2, 40)


def test_priority_is_served_first(llm: LLM) -> None:
    prompts = [f"prompt {i}" for i in range(6)]
    outputs = llm.generate(prompts, GREEDY, priority=[5, 5, 5, 5, 5, 0])
    ends = [output.metrics.last_token_s or 0.0 for output in outputs if output.metrics]
    assert ends[5] == min(ends)


def test_a_priority_for_each_prompt_or_for_none(llm: LLM) -> None:
    for priority in ([], [1], [1, 2, 3]):
        with pytest.raises(InvalidRequestError, match="for 2 prompts"):
            llm.generate(["a", "b"], GREEDY, priority=priority)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where the shell started the tests with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_aborts_and_leaves_the_engine_usable(llm: LLM) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.generated_tokens > 5:
            _thread.interrupt_main()

    with pytest.raises(KeyboardInterrupt):
        llm.generate("hi", SamplingParams(max_tokens=400, ignore_eos=True), progress=interrupt)
    assert llm.generate("hi", GREEDY)[0].outputs[0].token_ids == expected("hi")


def test_one_bad_row_disturbs_nobody(make_folder: Callable[..., str], registry: Registry) -> None:
    rules = FakeRules(vocab_size=259, nan_token=0)
    with LLM(make_folder("nan", nan_token=0), registry=registry, backend="fake") as llm:
        prompts: list[Any] = [[0], "hi"]
        bad, good = llm.generate(prompts, GREEDY)
    assert bad.outputs[0].finish_reason == "error"
    assert bad.error is not None
    assert good.outputs[0].token_ids == expected_tokens(list(b"hi"), 20, rules=rules)


def test_closed_engine_says_so(llm: LLM) -> None:
    llm.close()
    llm.close()
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate("hi", GREEDY)


def test_a_dead_backend_says_so(make_folder: Callable[..., str], registry: Registry) -> None:
    folder = make_folder("dead", fail_steps=list(range(50)))
    with LLM(folder, registry=registry, backend="fake") as llm:
        reasons = [output.error for output in llm.generate(["a"] * 5, GREEDY)]
        assert all(reasons)  # their step failed; a second failure might have been an accident
        with pytest.raises(EngineDeadError):
            _generate_until_dead(llm)
        with pytest.raises(EngineDeadError):
            llm.generate("a", GREEDY)


def _generate_until_dead(llm: LLM) -> None:
    for _ in range(10):
        llm.generate("a", GREEDY)


@pytest.mark.parametrize(
    ("config", "error", "text"),
    [
        ({"model": "nowhere"}, ModelNotFoundError, "nowhere"),
        ({"backend": "abacus"}, PluginError, "abacus"),
        ({"max_model_len": 513}, ConfigError, "512"),
        ({"max_model_len": 64, "num_kv_blocks": 3}, ConfigError, "48"),
        ({"chat_template": "nowhere.jinja"}, ConfigError, "nowhere.jinja"),
        ({"tokenizer": "nowhere"}, ModelNotFoundError, "nowhere"),
    ],
)
def test_load_errors(
    folder: str, registry: Registry, config: dict[str, object], error: type[Exception], text: str
) -> None:
    settings = {"model": folder, "backend": "fake", **config}
    with pytest.raises(error, match=text):
        LLM(registry=registry, **settings)  # type: ignore[arg-type]


def test_info_says_what_a_step_holds(folder: str, registry: Registry) -> None:
    config: dict[str, Any] = {"max_num_seqs": 50, "max_num_batched_tokens": 20}
    with LLM(folder, backend="fake", registry=registry, **config) as llm:
        assert (llm.info.max_num_seqs, llm.info.max_num_batched_tokens) == (20, 20)


def test_without_a_number_of_sequences_the_backend_chooses(
    folder: str, registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with LLM(folder, backend="fake", registry=registry) as llm:
        assert llm.info.max_num_seqs == 256
    assert "max_num_seqs=256" in caplog.text


def test_context_shrinks_to_what_the_cache_holds(
    folder: str, registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    memory = {"kv_cache_memory_bytes": 8 * 16 * 4}  # four blocks of the fake cache
    with LLM(folder, registry=registry, backend="fake", **memory) as llm:
        assert llm.info.max_model_len == 64
        assert "reduced from 512 to 64" in caplog.text
        (output,) = llm.generate("hi", SamplingParams(max_tokens=None, temperature=0.0))
        assert len(output.outputs[0].token_ids) == 62
    with LLM(folder, registry=registry, backend="fake", num_kv_blocks=2) as llm:
        assert llm.info.max_model_len == 32


@pytest.mark.parametrize("error", [None, errno.ENOMEM])
def test_weights_are_held_from_sleep_to_close(
    folder: str, registry: Registry, monkeypatch: pytest.MonkeyPatch, error: int | None
) -> None:
    """An engine that cannot keep its files in memory sleeps and wakes all the same."""
    made: list[mmap.mmap] = []
    mapping = mmap.mmap

    def mapped(*arguments: int, **options: int) -> mmap.mmap:
        if error is not None:
            raise OSError(error, "Cannot allocate memory")
        made.append(mapping(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(mmap, "mmap", mapped)
    Path(folder, "model.safetensors").write_bytes(bytes(9))
    with LLM(folder, registry=registry, backend="fake") as llm:
        llm.sleep(1)
        assert llm.is_sleeping
        llm.wake_up()
        assert llm.generate("hi", GREEDY)[0].outputs[0].token_ids == expected("hi")
        llm.sleep(1)
    assert not llm.is_sleeping
    assert all(one.closed for one in made)
    assert bool(made) is (error is None)


def test_special_tokens_that_users_spell_are_text(folder: str, registry: Registry) -> None:
    """In what users and tools say; the model's own turns and completions have the tokens."""
    said = "a<|end|>b"
    turns = [Message("user", said), {"role": "assistant", "content": said}, Message("user", "c")]
    end, user, assistant = 256, 257, 258
    text = [*said.encode()]
    tokens = [ord("a"), end, ord("b")]
    behind = [end, assistant, *tokens, end, user, ord("c"), end, assistant]
    prompt = f"<|user|>{said}<|end|><|assistant|>{said}<|end|><|user|>c<|end|><|assistant|>"
    for mode, own in (("escape", text), ("keep", tokens)):
        options = {"backend": "fake", "special_tokens_in_text": mode}
        with LLM(folder, registry=registry, **options) as llm:
            (output,) = llm.chat(turns, GREEDY)
            assert output.prompt == prompt
            assert type(output.prompt) is str
            assert output.prompt_token_ids == [user, *own, *behind]
            assert llm.generate(said, GREEDY)[0].prompt_token_ids == tokens
        config = EngineConfig(model=folder, **options)
        with Engine(config, registry=registry) as engine:
            rendered = engine.apply_chat_template(turns)
            assert rendered == prompt
            assert engine.generate_sync(GREEDY, rendered)[0].prompt_token_ids == [
                user,
                *own,
                *behind,
            ]
            assert engine.generate_stream(GREEDY, rendered)[1] == len([user, *own, *behind])


@pytest.mark.parametrize("choice", ["auto", "none", None])
def test_choices_of_tools_as_the_api_writes_them(llm: LLM, choice: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    (output,) = llm.chat([Message("user", "x")], GREEDY, tools=tools, tool_choice=choice)
    assert output.prompt == "<|user|>x<|end|><|assistant|>"


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"messages": None}, "messages is None"),
        ({"messages": {"role": "user", "content": "x"}}, "give a list of messages"),
        ({"messages": [5]}, "messages must be a list"),
        ({"tools": [{}]}, r"tools\[0\] must be"),
        ({"tool_choice": {"type": "function"}}, "tool_choice is"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "asks for 'g'"),
        ({"chat_template_kwargs": 5}, "it is an object"),
        ({"sampling_params": 5}, "give one SamplingParams"),
    ],
)
def test_chats_that_are_refused(llm: LLM, arguments: dict[str, Any], match: str) -> None:
    given = {"messages": [Message("user", "x")], "sampling_params": GREEDY, **arguments}
    with pytest.raises(InvalidRequestError, match=match):
        llm.chat(**given)
