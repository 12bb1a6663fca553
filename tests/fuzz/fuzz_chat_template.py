"""Fuzz target: any text as a chat template, compiled and rendered on conversations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from vllmx_core.errors import VllmxError
from vllmx_engine.text.chat_template import ChatTemplate

DATA = Path(__file__).parents[1] / "data" / "templates"
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
]
CONVERSATIONS: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "hi"}],
    [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "content": "r", "tool_call_id": "1"},
    ],
)
WORDS = (
    "{{", "}}", "{%", "%}", "{%-", "-%}", "{#", "#}", " for ", " in ", " if ", " else ", " set ",
    "endfor", "endif", "endmacro", "macro f(x)", "f(f)", "block b", "endblock", "call f()",
    "endcall", "namespace(a=1)", "ns.a", " recursive ", "loop", "loop(", "loop.index",
    "messages", "message", "message['content']", "['role']", ".content", "tools",
    "range(9999999)", "range(3)",
    " * 99999999", " ** 9999", "'a' * 9", " ~ ", " + ", "|tojson", "|join", "|length",
    "|replace('', 'aaaa')",
    "|center(99999999)", "|batch(2)", "|list", "|map('upper')", "|indent(9999999)", ".format(1)",
    "'%99999999d' % 1", "'{:99999999}'.format(1)", "__class__", "|attr('__class__')", "import 'x'",
    "include 'x'", "extends 'x'", "raise_exception('no')", "strftime_now('%Y')", "loop.cycle(1)",
    "is defined", "is none", "none", "true", "[", "]", "(", ")", "{", "}", "'", ",", ":", ".", " ",
    "1", "x", "\n", "generation", "endgeneration", "break", "continue", "filter upper", "endfilter",
    "autoescape true", "endautoescape", "trans", "do", "\ud800", "\0",
)  # fmt: skip


def one_input(data: bytes) -> bool:
    """Whether `data` is a template that writes at least one of the conversations. Only errors made
    for users are expected."""
    try:
        source = data.decode("utf-8", "surrogatepass")
        template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    except (VllmxError, UnicodeDecodeError):
        return False
    written = 0
    for messages in CONVERSATIONS:
        for tools in (None, TOOLS):
            try:
                assert isinstance(template.render(messages, tools), str)
                written += 1
            except VllmxError:
                continue
    return written > 0


def mutations() -> st.SearchStrategy[bytes]:
    """Real templates with words put in, taken out or swapped, and words alone."""
    words = st.sampled_from(WORDS)
    alone = st.lists(words, min_size=1, max_size=12).map("".join)
    inside = words.map(lambda word: "{{ " + word + " }}")
    loops = st.tuples(words, alone).map(
        lambda pair: "{% for x in " + pair[0] + " %}" + pair[1] + "{% endfor %}"
    )
    cuts = st.lists(st.tuples(st.integers(0, 8000), st.integers(0, 40), words), max_size=3)
    texts = [seed.decode() for seed in seeds()]
    changed = st.builds(_changed, st.sampled_from(texts), cuts)
    return st.one_of(alone, inside, loops, changed).map(
        lambda text: text.encode("utf-8", "surrogatepass")
    )


def _changed(text: str, cuts: list[tuple[int, int, str]]) -> str:
    for at, length, word in cuts:
        place = at % (len(text) + 1)
        text = text[:place] + word + text[place + length :]
    return text


def seeds() -> list[bytes]:
    return [path.read_bytes() for path in sorted(DATA.glob("*.jinja"))]
