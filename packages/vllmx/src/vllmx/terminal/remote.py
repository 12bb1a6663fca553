"""A model of a running server, over OpenAI's API."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllmx_core.errors import ConfigError, ContextLengthError, InvalidRequestError, excerpt
from vllmx_core.sampling import SamplingParams

from vllmx.terminal.rounds import Messages, Round, shown

if TYPE_CHECKING:
    from vllmx_engine.formats.events import ReadAnswer
    from vllmx_engine.wire.outputs import ToolCall

_TIMEOUT_S = 600
"""Seconds without a byte after which a server counts as gone."""
_GONE = (OSError, http.client.HTTPException)


class RemoteModel:
    """A server and one of its models; see `ChatModel`.

    Args:
        model: its name; None: the server's first.

    Raises:
        ConfigError: the address is not that of a server, or the model is not one of its models.
    """

    def __init__(
        self, url: str, api_key: str | None, model: str | None, template_arguments: dict[str, Any]
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(
                f"--url must begin with http:// or https://, got {url!r}", param="url"
            )
        self._base = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._template_arguments = template_arguments
        with self._send("/v1/models", None) as answer:
            try:
                names = [card["id"] for card in json.loads(answer.read())["data"]]
            except (ValueError, LookupError, TypeError):
                names = []
        if not names or (model is not None and model not in names):
            listed = ", ".join(map(str, names)) or "nothing"
            raise ConfigError(f"{url} does not serve {model or 'a model'}: it serves {listed}")
        self._model = model or names[0]
        self.title = f"{self._model} at {self._base}."

    def begin(self, messages: Messages, sampling: dict[str, Any], functions: Messages) -> Round:
        body: dict[str, Any] = {
            **{name: value for name, value in sampling.items() if value is not None},
            "model": self._model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if functions:
            body["tools"] = functions
        if self._template_arguments:
            body["chat_template_kwargs"] = self._template_arguments
        return RemoteRound(self._send("/v1/chat/completions", body))

    def check(self, sampling: dict[str, Any]) -> None:
        SamplingParams(**{name: value for name, value in sampling.items() if value is not None})

    def speculate(self, drafter: str) -> str:
        raise ConfigError("the server decides how it drafts: start it with --speculate")

    def close(self) -> None: ...

    def _send(self, path: str, body: dict[str, Any] | None) -> Any:
        """The answer of the server. Raises InvalidRequestError with its message."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, self._headers)  # noqa: S310
        try:
            return urllib.request.urlopen(request, timeout=_TIMEOUT_S)  # noqa: S310
        except urllib.error.HTTPError as error:
            raise _refusal(error.read(1 << 16), f"{error.code} {error.reason}") from None
        except _GONE as error:
            reason = getattr(error, "reason", error)
            raise ConfigError(
                f"no server answers at {self._base} ({reason}): start `vllmx serve`, or check --url"
            ) from None


def _refusal(body: bytes, status: str) -> InvalidRequestError:
    try:
        found = json.loads(body)["error"]
        message, code = str(found["message"]), found.get("code")
    except (ValueError, LookupError, TypeError, AttributeError):
        message, code = f"the server answers {status}", None
    kind = ContextLengthError if code == ContextLengthError.code else InvalidRequestError
    return kind(excerpt(message, 1000))


class RemoteRound:
    """One streamed answer; see `Round`."""

    def __init__(self, answer: Any) -> None:
        from vllmx_engine.formats.events import ReadAnswer

        self._answer = answer
        self.found: ReadAnswer = ReadAnswer()
        self._count = 0
        self._ended: str | None = None

    @property
    def num_tokens(self) -> int:
        return self._count

    @property
    def is_cut(self) -> bool:
        return self._ended == "length"

    def pieces(self) -> Iterator[str]:
        try:
            for line in self._answer:
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    return
                if data.startswith(b"{"):
                    yield from self._take(json.loads(data))
        except (*_GONE, ValueError) as error:
            raise InvalidRequestError(f"the server ended the answer: {error}") from None
        if self._ended is None:
            raise InvalidRequestError("the server ended the answer: it is gone, or restarts")

    def _take(self, chunk: dict[str, Any]) -> Iterator[str]:
        from vllmx_engine.formats.events import (
            ArgumentsPiece,
            CallBegin,
            ContentPiece,
            ReasoningPiece,
        )

        if "error" in chunk:
            raise _refusal(json.dumps(chunk).encode(), "with an error")
        self._count = (chunk.get("usage") or {}).get("completion_tokens", self._count)
        for choice in chunk.get("choices", ()):
            self._ended = choice.get("finish_reason") or self._ended
            delta, events = choice.get("delta") or {}, list[Any]()
            if thought := delta.get("reasoning_content") or delta.get("reasoning"):
                events.append(ReasoningPiece(thought))
            if text := delta.get("content"):
                events.append(ContentPiece(text))
            for call in delta.get("tool_calls") or ():
                function = call.get("function") or {}
                if call.get("id"):
                    events.append(CallBegin(call["index"], call["id"], function.get("name", "")))
                if function.get("arguments"):
                    events.append(ArgumentsPiece(call["index"], function["arguments"]))
            self._count += bool(events)
            yield from shown(self.found, events)

    def calls(self) -> list[ToolCall]:
        return self.found.tool_calls if self._ended == "tool_calls" else []

    def close(self) -> None:
        self._answer.close()
