"""What a chat template makes of an assistant's turn: conversations with words that occur nowhere
else, rendered, and the turn cut out of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllmx_core.errors import VllmxError, excerpt

from vllmx_engine.formats.writer import WrittenCall
from vllmx_engine.text.chat_template import ChatTemplate

NAMES = ("zqnamea", "zqnameb", "zqnamec")
KEYS = ("zqkeya", "zqkeyb")
VALUES = ("zqvala", "zqvalb")
CONTENT = "Zqcontent"
REASONING = "Zqreasoning"
_PARAMETERS = {
    "type": "object",
    "properties": {key: {"type": "string", "description": "d"} for key in KEYS},
    "required": [],
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": "d", "parameters": _PARAMETERS},
    }
    for name in NAMES
]
_USER = {"role": "user", "content": "Zquser"}


class NotDerivedError(Exception):
    """Why a template does not tell how answers are written, in words."""


class Renderings:
    """Turns of an assistant as one template writes them.

    Raises (constructor): NotDerivedError where it does not write plain answers.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._eos = template.special_tokens.get("eos_token", "")
        self._plain = self._render({"role": "assistant", "content": CONTENT})
        at = self._plain.rfind(CONTENT)
        if at < 0:
            raise NotDerivedError("it leaves out an answer's content")
        self._end = self._plain[at + len(CONTENT) :]

    def calls(self, calls: Sequence[WrittenCall], content: str = "") -> str:
        """What stands where the content of a plain answer would, without the end of the turn.
        Raises NotDerivedError for a conversation that the template refuses."""
        turn = {
            "role": "assistant",
            "content": content,
            "tool_calls": [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": dict(call.arguments)},
                }
                for call in calls
            ],
        }
        text = self._render(turn)
        shared = common_prefix(text, self._plain)
        found = text[len(shared) - len(open_tag(shared)) :].removesuffix(self._end)
        return found.partition(self._eos)[0] if self._eos else found

    def thoughts(self, reasoning: str, content: str) -> str:
        """A whole conversation that ends with thoughts and content, without the end of the turn."""
        turn = {"role": "assistant", "content": content, "reasoning_content": reasoning}
        return self._render(turn).removesuffix(self._end)

    def _render(self, turn: Mapping[str, Any]) -> str:
        try:
            return self._template.render([_USER, turn], TOOLS, add_generation_prompt=False)
        except VllmxError as error:
            raise NotDerivedError(f"it fails: {excerpt(error.message)}") from error


def common_prefix(left: str, right: str) -> str:
    """The beginning that two texts share."""
    pairs = enumerate(zip(left, right, strict=False))
    size = next((at for at, (a, b) in pairs if a != b), min(len(left), len(right)))
    return left[:size]


def open_tag(text: str) -> str:
    """The beginning of a tag at the end of a text, whose rest is elsewhere."""
    at = max(text.rfind("<"), text.rfind("["))
    closing = ">" if text[at : at + 1] == "<" else "]"
    tail = text[at:] if at >= 0 else ""
    return tail if tail and closing not in tail and " " not in tail and "\n" not in tail else ""


def call(number: int, arguments: Mapping[str, Any] | None = None) -> WrittenCall:
    """A call whose name and id occur nowhere else."""
    return WrittenCall(NAMES[number], arguments or {}, f"zqid0000{number}")
