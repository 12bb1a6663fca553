"""What stands in front of an answer's form, by the format of the model."""

from __future__ import annotations

import pytest
from vllmx_core.config import EngineConfig
from vllmx_core.errors import ConfigError
from vllmx_core.plugins.registry import load_registry
from vllmx_core.sampling import SamplingParams
from vllmx_demo.source import MODEL_FOLDER
from vllmx_engine.client.chat import ChatRenderer, free_part
from vllmx_engine.client.chat_options import ChatOptions
from vllmx_engine.text.tokenizer import Tokenizer
from vllmx_engine.wire.grammars import FreePart
from vllmx_models.output_formats import HARMONY, HERMES, MUSE_GLIMMER, THINK

EOS = (7, 8)
THINKING, ANSWER = ChatOptions(template_kwargs={"enable_thinking": True}), "assistant\n"
GOES_ON = ChatOptions(continue_final_message=True)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(MODEL_FOLDER)


def test_thoughts(tokenizer: Tokenizer) -> None:
    begin, end = tokenizer.marker("<think>"), tokenizer.marker("</think>")
    opened = free_part(THINK, ANSWER + "<think>\n", ChatOptions(), tokenizer, EOS, thinks=False)
    assert opened == FreePart((end,), (), EOS)
    assert free_part(THINK, ANSWER, ChatOptions(), tokenizer, EOS, thinks=False) is None
    asked = free_part(THINK, ANSWER, THINKING, tokenizer, EOS, thinks=True)
    assert asked == FreePart((end,), begin, EOS)
    closed = ANSWER + "<think>\n\n</think>\n\n"
    assert free_part(THINK, closed, THINKING, tokenizer, EOS, thinks=True) is None
    assert free_part(THINK, ANSWER + "Well", GOES_ON, tokenizer, EOS, thinks=True) is None
    assert free_part(HERMES, ANSWER, THINKING, tokenizer, EOS, thinks=True) is None


def test_messages_with_headers(tokenizer: Tokenizer) -> None:
    """The form is that of the final message; calls of tools are answers, too."""
    found = free_part(HARMONY, "<|start|>assistant", ChatOptions(), tokenizer, EOS, thinks=False)
    assert found is not None
    texts = [tokenizer.decode(list(end), skip_special_tokens=False) for end in found.ends]
    assert texts == [
        "<|channel|>final<|message|>",
        "<|channel|>final <|constrain|>json<|message|>",
    ]
    assert tokenizer.decode(list(found.begin_ids), skip_special_tokens=False) == "<|channel|>"
    assert found.held_ids == EOS
    tools = ChatOptions(tools=[{"type": "function", "function": {"name": "f"}}])
    beside = free_part(HARMONY, "<|start|>assistant", tools, tokenizer, EOS, thinks=False)
    assert beside is not None
    assert beside.held_ids == ()
    assert free_part(HARMONY, "x", GOES_ON, tokenizer, EOS, thinks=False) is None


def test_messages_whose_first_header_the_prompt_begins(tokenizer: Tokenizer) -> None:
    """Thoughts may come before the message that has the form."""
    prompt, header = "Hi<|eot|><|start|>assistant", " to=user<|message|>"
    found = free_part(MUSE_GLIMMER, prompt, ChatOptions(), tokenizer, EOS, thinks=False)
    assert found == FreePart((tokenizer.marker(header),), (), EOS)
    goes_on = free_part(MUSE_GLIMMER, prompt + header, GOES_ON, tokenizer, EOS, thinks=False)
    assert goes_on is None


@pytest.mark.parametrize(
    ("template_kwargs", "thinks"),
    [
        ({}, False),
        ({"enable_thinking": True}, True),
        ({"thinking": True}, True),
        ({"enable_thinking": False}, False),
        ({"reasoning_effort": "high"}, True),
        ({"reasoning_effort": "none"}, False),
    ],
)
def test_who_asks_for_thoughts(template_kwargs: dict[str, object], thinks: bool) -> None:
    assert ChatOptions(template_kwargs=template_kwargs).thinks is thinks


def test_a_budget_for_the_analysis(tokenizer: Tokenizer) -> None:
    config = EngineConfig(tool_parser="harmony", reasoning_parser="harmony")
    renderer = ChatRenderer(tokenizer, config=config, registry=load_registry())
    found = renderer.thoughts(SamplingParams(thinking_token_budget=9), "<|start|>assistant")
    assert found is not None
    assert found.most_tokens == 9
    begin = tokenizer.decode(list(found.begin_ids), skip_special_tokens=False)
    assert begin == "<|channel|>analysis<|message|>"
    assert tokenizer.decode(list(found.end_ids), skip_special_tokens=False) == "<|end|>"


ECHO = "{{ messages[0].content }}:{{ enable_thinking|default('unset') }}:{{ more|default('') }}"


def test_the_operators_variables_are_those_of_chats_that_set_none(tokenizer: Tokenizer) -> None:
    config = EngineConfig(default_chat_template_kwargs='{"enable_thinking": false, "more": 1}')
    renderer = ChatRenderer(tokenizer, ECHO, config=config)
    messages = [{"role": "user", "content": "hello"}]
    assert renderer.render(messages) == "hello:False:1"
    own = ChatOptions(template_kwargs={"enable_thinking": True})
    assert renderer.render(messages, own) == "hello:True:1"
    for text, error in (
        ("[]", "must be a JSON object"),
        ("{", "must be a JSON object"),
        ('{"tools": []}', "may not hold 'tools'"),
    ):
        bad = EngineConfig(default_chat_template_kwargs=text)
        with pytest.raises(ConfigError, match=f"--default-chat-template-kwargs {error}"):
            ChatRenderer(tokenizer, config=bad)
