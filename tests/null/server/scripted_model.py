"""A model that answers from a script, two characters a token, and notes what it was asked."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from vllmx_core.output_format import OutputFormat
from vllmx_engine.client.answers import AnswerReaders
from vllmx_engine.wire.outputs import CompletionOutput, RequestMetrics, RequestOutput
from vllmx_models.output_formats import HERMES, THINK

from .conftest import Served

QWEN = OutputFormat("qwen", THINK.thinking, HERMES.calls)
PROMPT_TOKENS = 10


class CutAnswer(str):
    """An answer of the model that a stop string ended."""


class ScriptedStream:
    """An answer of the model, two characters a token."""

    def __init__(self, text: str, tools: Any, tokenizer: Any) -> None:
        readers = AnswerReaders(QWEN, tokenizer, "prompt", [1], tools)
        params = SimpleNamespace(n=1)
        core = [SimpleNamespace(max_tokens=100)]
        self.request = SimpleNamespace(params=params, readers=readers, core=core)
        self.prompt_token_ids = [1] * PROMPT_TOKENS
        self._pieces = [text[at : at + 2] for at in range(0, len(text), 2)]
        self._stop = "X" if isinstance(text, CutAnswer) else None

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self._outputs()

    async def _outputs(self) -> AsyncIterator[RequestOutput]:
        now_s = time.monotonic()
        times = RequestMetrics(now_s, now_s, now_s, len(self._pieces))
        for number, piece in enumerate(self._pieces):
            last = number == len(self._pieces) - 1
            choice = CompletionOutput(
                index=0,
                text=piece,
                token_ids=[5],
                finish_reason="stop" if last else None,
                stop_reason=self._stop if last else None,
            )
            yield RequestOutput(
                request_id="r",
                prompt="prompt",
                prompt_token_ids=[],
                outputs=[choice],
                finished=last,
                metrics=times,
            )

    def abort(self) -> None: ...

    def divert(self, sink: Any) -> None: ...

    def fail(self, error: Exception) -> None: ...


class Script:
    """The model's answers, and what it was asked each time."""

    def __init__(self, served: Served, *answers: str | Exception) -> None:
        self._answers = list(answers)
        self._tokenizer = served.llm.tokenizer
        self.asked: list[list[dict[str, Any]]] = []
        self.options: list[Any] = []
        self.params: list[Any] = []
        served.llm.submit_chat = self.submit  # type: ignore[method-assign,assignment]

    async def submit(self, conversation: Any, params: Any, *, chat: Any, **_: Any) -> Any:
        self.asked.append(conversation)
        self.options.append(chat)
        self.params.append(params)
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return ScriptedStream(answer, chat.tools, self._tokenizer)
