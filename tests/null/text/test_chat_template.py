"""Chat templates: equal to Hugging Face transformers, for every template at hand."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from vllmx_core.errors import InvalidRequestError, TemplateError
from vllmx_engine.text.chat_template import ChatTemplate
from vllmx_engine.text.tokenizer import Tokenizer

DATA = Path(__file__).parents[2] / "data" / "templates"
SHARED = Path(__file__).parents[4] / "shared"
SOURCES = {path.stem: path for path in DATA.glob("*.jinja")} | {
    f"{path.parent.name}/{path.stem}": path for path in SHARED.glob("templates/*/*.jinja")
}
MARKS = {"bos_token": "<s>", "eos_token": "</s>"}

Chat = list[dict[str, Any]]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str | None, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def tool_call(arguments: Any) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": arguments}
    return {"id": "abcdefgh1", "type": "function", "function": function}


SYSTEM = {"role": "system", "content": "You are <b>helpful</b> & kind."}
RESULT = {
    "role": "tool",
    "tool_call_id": "abcdefgh1",
    "name": "get_weather",
    "content": '{"temp": 21}',
}
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "The <city> & so on, z. B. Köln"},
        "unit": {"type": "string", "enum": ["c", "f"]},
    },
    "required": ["city"],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'Weather, "now" or later',
            "parameters": PARAMETERS,
        },
    }
]
ROUND = [
    SYSTEM,
    user("Weather in Paris?"),
    assistant("", tool_calls=[tool_call({"city": "Paris", "unit": "c"})]),
    RESULT,
]
CASES: dict[str, tuple[Chat, list[dict[str, Any]] | None, dict[str, Any]]] = {
    "plain": ([user("Hello!")], None, {}),
    "turns": ([SYSTEM, user("Hi  "), assistant("Yes?"), user("Fine — 你好")], None, {}),
    "tools": ([user("Weather in Paris?")], TOOLS, {}),
    "tool result": ([*ROUND[1:]], TOOLS, {}),
    "tool round": ([*ROUND, assistant("21 degrees."), user("Thanks")], TOOLS, {}),
    "reasoning": (
        [user("2+2?"), assistant("4", reasoning_content="easy"), user("3+3?")],
        None,
        {"chat_template_kwargs": {"enable_thinking": False}},
    ),
    "no prompt": ([user("Hello!"), assistant("Hi.")], None, {"add_generation_prompt": False}),
    "continued": (
        [user("Hello!"), assistant("Hi, I am")],
        None,
        {"add_generation_prompt": False, "continue_final_message": True},
    ),
}
# What each template cannot do, as Hugging Face's rendering cannot either.
REFUSALS = re.compile(
    r"^the chat template (refuses the conversation: .+"
    r"|fails on this conversation: .+ \(line \d+\)"
    r"|leaves out the end of the last message, so it cannot be continued)$",
    re.DOTALL,
)


@pytest.mark.parametrize("name", SOURCES)
def test_equal_to_transformers(name: str) -> None:
    module = pytest.importorskip("transformers.utils.chat_template_utils")
    source = SOURCES[name].read_text()
    template = ChatTemplate(source, MARKS)
    num_rendered = 0
    for messages, tools, options in CASES.values():
        options = {"add_generation_prompt": True, **options}
        expected = their_prompt(module, messages, tools, source, dict(options))
        if expected is not None and re.search(r"CALLS] ?\[{&#34;", expected):  # text alone suits it
            expected = their_prompt(module, with_text_arguments(messages), tools, source, options)
        ours, refusal = our_prompt(template, messages, tools, options)
        num_rendered += ours is not None
        if ours is None:
            assert REFUSALS.match(refusal)
        assert expected is None or ours == expected
    assert num_rendered


def with_text_arguments(messages: Chat) -> Chat:
    found: Chat = json.loads(json.dumps(messages))
    for message in found:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return found


def their_prompt(
    module: Any, messages: Chat, tools: Any, source: str, options: dict[str, Any]
) -> str | None:
    """Hugging Face's prompt, None where its rendering fails."""
    options.update(options.pop("chat_template_kwargs", {}))
    try:
        prompts, _ = module.render_jinja_template(
            [messages], tools=tools, chat_template=source, **MARKS, **options
        )
    except Exception:  # whatever a template or its sandbox raises
        return None
    return str(prompts[0])


def our_prompt(
    template: ChatTemplate, messages: Chat, tools: Any, options: dict[str, Any]
) -> tuple[str | None, str]:
    """Our prompt or the text of the refusal."""
    try:
        return template.render(messages, tools, **options), ""
    except TemplateError as error:
        return None, str(error)


# These write something else for an assistant without content.
ASKING_FOR_NONE = ("R1-Distill-Qwen-32B", "deepseek-r1-distill", "rwkv-world")


@pytest.mark.parametrize("name", SOURCES)
def test_tool_calls_as_clients_send_them(name: str) -> None:
    """Content null or absent and arguments as JSON text: the prompt of content "" and an object."""
    template = ChatTemplate(SOURCES[name].read_text(), MARKS)
    try:
        expected = template.render(ROUND[1:], TOOLS)
    except TemplateError:
        return
    call = tool_call('{"city": "Paris", "unit": "c"}')
    for message in (
        assistant(None, tool_calls=[call]),
        {"role": "assistant", "tool_calls": [call]},
    ):
        prompt = template.render([ROUND[1], message, RESULT], TOOLS)
        if not name.endswith(ASKING_FOR_NONE):
            assert prompt == expected
        assert prompt.count("None") == expected.count("None")


def test_qwen3_literally() -> None:
    template = ChatTemplate((DATA / "qwen3.jinja").read_text())
    prompt = template.render([SYSTEM, user("Hi")], chat_template_kwargs={"enable_thinking": False})
    assert prompt == (
        "<|im_start|>system\nYou are <b>helpful</b> & kind.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_conventions_of_the_environment() -> None:
    def render(source: str, **kwargs: Any) -> str:
        return ChatTemplate(source, MARKS).render([user("x")], chat_template_kwargs=kwargs)

    assert render("{{ bos_token }}|{{ pad_token }}") == "<s>|"
    assert render("{{ {'b': '<é>', 'a': 1} | tojson }}") == '{"b": "<é>", "a": 1}'
    assert render("{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"
    assert (
        render("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}")
        == "1"
    )
    assert render("a{% generation %}b{% endgeneration %}c") == "abc"
    assert render("{{ strftime_now('%Y') }}") == str(datetime.now().year)
    assert render("{{ tools is none }} {{ documents is none }}") == "True True"
    assert render("{{ enable_thinking }}", enable_thinking=False) == "False"
    assert render("{% if true %}\n  x\n  {% endif %}\ny") == "  x\ny"
    assert render("{{ messages[0].content ~ 1 ~ '%s-%d' % ('a', 2) }}") == "x1a-2"
    assert render("{{ '{}/{a}'.format(1, a=2) }}{{ '-'.join(['p', 'q']) }}") == "1/2p-q"


def test_named_templates() -> None:
    template = ChatTemplate(
        {"default": "plain", "tool_use": "tools", "rag": "{{ documents[0].t }}"}
    )
    assert template.render([user("x")]) == "plain"
    assert template.render([user("x")], TOOLS) == "tools"
    assert template.render([user("x")], template="rag", documents=[{"t": "doc"}]) == "doc"
    with pytest.raises(TemplateError, match="no chat template named 'nope'; it has default, tool"):
        template.render([user("x")], template="nope")


def test_text_parts_where_a_template_reads_them_in_some_turns_alone() -> None:
    source = (
        "{{- messages[0].content | trim + '|' }}{%- for m in messages[1:] %}"
        "{%- if m.content is string %}{{- m.content }}{%- else %}"
        "{%- for part in m.content %}[{{- part.text }}]{%- endfor %}{%- endif %}{%- endfor %}"
    )

    def parts(*texts: str) -> list[dict[str, Any]]:
        return [{"type": "text", "text": text} for text in texts]

    template = ChatTemplate({"default": source}, {})
    for role in ("system", "developer"):
        chat = [{"role": role, "content": parts("a", "b")}, {"role": "user", "content": parts("c")}]
        assert template.render(chat) == "a\nb|c"
    assert template.render([user("a"), {"role": "user", "content": parts("c", "d")}]) == "a|[c][d]"


def test_text_parts() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]}
    plain = ChatTemplate("{{ messages[0].content }}")
    looping = ChatTemplate("{% for p in messages[0].content %}[{{ p.text }}]{% endfor %}")
    assert plain.render([parts]) == "a\nb"
    assert looping.render([parts]) == "[a][b]"
    assert looping.render([user("c")]) == "[c]"
    with pytest.raises(InvalidRequestError, match="part of type 'image_url'"):
        plain.render([{"role": "user", "content": [{"type": "image_url"}]}])
    mixed = [{"role": "user", "content": ["a", {"type": "text", "text": "b", "cache_control": 1}]}]
    assert (plain.render(mixed), looping.render(mixed)) == ("a\nb", "[a][b]")


def test_the_templates_own_message_reaches_the_user() -> None:
    template = ChatTemplate((DATA / "mistral-v3.jinja").read_text(), MARKS)
    with pytest.raises(
        TemplateError, match=r"refuses the conversation: .* must start with a user"
    ) as caught:
        template.render([assistant("first")])
    assert caught.value.http_status == 400


def test_callers_messages_are_left_alone() -> None:
    messages = [user("x"), assistant(None, tool_calls=[tool_call("{}")], reasoning="r")]
    before = json.dumps(messages)
    ChatTemplate("{{ messages[1].reasoning_content }}").render(messages)
    assert json.dumps(messages) == before


def test_continuing_a_message() -> None:
    source = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    messages = [user("a"), assistant("b ")]
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    assert ChatTemplate(source).render(messages, **options) == "<a><b "
    trimming = ChatTemplate(source.replace("m.content", "m.content | trim"))
    assert trimming.render(messages, **options) == "<a><b"
    with pytest.raises(TemplateError, match="leaves out"):
        ChatTemplate("{{ messages[0].content }}").render(messages, **options)
    with pytest.raises(InvalidRequestError, match="exclude"):
        trimming.render(messages, continue_final_message=True)


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([], "at least one"),
        ("text", "list"),
        ([{"content": "x"}], r"messages\[0\] must be an object with a role"),
        ([user("x"), 3], r"messages\[1\]"),
        ([{"role": "user", "content": object()}], "only JSON values"),
        ([{"role": "user", 3: 4}], "not a string"),
    ],
)
def test_bad_messages(messages: Any, match: str) -> None:
    with pytest.raises(InvalidRequestError, match=match):
        ChatTemplate("x").render(messages)


def test_deep_messages_are_refused() -> None:
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(InvalidRequestError, match="nested more than 64 deep"):
        ChatTemplate("x").render([{"role": "user", "content": deep}])


def test_reserved_variables() -> None:
    with pytest.raises(InvalidRequestError, match="must not set 'messages'"):
        ChatTemplate("x").render([user("x")], chat_template_kwargs={"messages": []})


def test_model_without_template(byte_level: Tokenizer) -> None:
    with pytest.raises(TemplateError, match="--chat-template"):
        ChatTemplate.from_tokenizer(byte_level)


def test_demo_model(shared: Path) -> None:
    tokenizer = Tokenizer.from_folder(shared / "demo-model")
    prompt = ChatTemplate.from_tokenizer(tokenizer).render([user("Hi")])
    assert prompt.startswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.encode(prompt)[0] == tokenizer.token_to_id("<|im_start|>")


def test_one_template_renders_in_several_threads() -> None:
    template = ChatTemplate((DATA / "smollm3.jinja").read_text(), MARKS)
    chats = [[user(f"question {number}")] for number in range(64)]
    expected = [template.render(chat) for chat in chats]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(template.render, chats)) == expected
