"""Answers of llama.cpp's /completion: an object for each prompt, or events with pieces of it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from msgspec import UNSET
from vllmx_engine.client.logprob_rows import LogprobRows
from vllmx_engine.text.tokenizer import Tokenizer
from vllmx_engine.wire.outputs import CompletionOutput, RequestOutput

from vllmx_server.apis.llamacpp.schema import CompletionRequest
from vllmx_server.generating.generate import Answer
from vllmx_server.generating.generation import Generation, phases_s
from vllmx_server.generating.logprobs import finite
from vllmx_server.generating.served import Served
from vllmx_server.schema.record import Items, encode, json_pieces

_SETTINGS = (
    "seed", "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty",
    "stop", "ignore_eos",
)  # fmt: skip


class LlamaAnswer(Answer):
    """Makes the wire format of one request's outputs."""

    def __init__(
        self, served: Served, body: CompletionRequest, request_id: str, generation: Generation
    ) -> None:
        self._state = served
        self._body = body
        self._generation = generation
        self._num_choices = body.n or 1
        self._counts = [0] * (len(generation.prompt_token_ids) * self._num_choices)
        self._has_new_line = [False] * len(self._counts)

    async def whole(self) -> Iterator[bytes]:
        finals = await self._generation.finals()
        found = (
            self._final(index, output, choice)
            for index, output in enumerate(finals)
            for choice in output.outputs
        )
        return json_pieces(Items(found) if self._body.is_batch else next(found))

    async def events(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._generation.outputs()) as outputs:
            async for index, output in outputs:
                for choice in output.outputs:
                    number = self._number(index, choice)
                    if choice.text or choice.token_ids:
                        rows = self._probabilities(choice)
                        yield self._event(index, number, choice.text, choice.token_ids, rows)
                    if choice.finish_reason is not None:
                        final = self._final(index, output, choice, is_end=True)
                        yield b"data: %b\n\n" % encode(final)

    @property
    def has_middle(self) -> bool:
        return not self._body.n_probs

    def middle(self, text: str, ids: list[int]) -> bytes:
        return self._event(0, 0, text, ids, {}) if text or ids else b""

    def _number(self, index: int, choice: CompletionOutput) -> int:
        return index * self._num_choices + choice.index

    def _event(
        self, index: int, number: int, text: str, ids: Sequence[int], rows: dict[str, Any]
    ) -> bytes:
        self._counts[number] += len(ids)
        self._has_new_line[number] |= "\n" in text
        found = {
            "index": number,
            "content": text,
            "tokens": ids,
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": self._counts[number],
            "tokens_evaluated": len(self._generation.prompt_token_ids[index]),
        }
        return b"data: %b\n\n" % encode(found | rows)

    def _final(
        self, index: int, output: RequestOutput, choice: CompletionOutput, *, is_end: bool = False
    ) -> dict[str, Any]:
        """The object of an ended answer; `is_end`: its text was sent before."""
        number, llm = self._number(index, choice), self._state.llm
        ids = self._generation.prompt_token_ids[index]
        count = self._counts[number] if is_end else len(choice.token_ids)
        word = choice.stop_reason if isinstance(choice.stop_reason, str) else ""
        stop_type = "limit" if choice.finish_reason == "length" else "word" if word else "eos"
        found = {
            "index": number,
            "content": "" if is_end else choice.text,
            "tokens": choice.token_ids if self._body.return_tokens and not is_end else [],
            "id_slot": -1,
            "stop": True,
            "model": llm.config.name,
            "tokens_predicted": count,
            "tokens_evaluated": len(ids),
            "generation_settings": self._settings(index),
            "prompt": llm.tokenizer.decode(ids, skip_special_tokens=False),
            "has_new_line": self._has_new_line[number] or "\n" in choice.text,
            "truncated": stop_type == "limit" and len(ids) + count >= llm.info.max_model_len,
            "stop_type": stop_type,
            "stopping_word": word,
            "tokens_cached": len(ids) + count,
            "timings": self._timings(index, output.num_cached_tokens, len(ids), count),
            **({} if is_end else self._probabilities(choice)),
        }
        wanted = self._body.response_fields
        return dict(_at(found, wanted)) if wanted else found

    def _settings(self, index: int) -> dict[str, Any]:
        request, _ = self._generation.requests[index]
        params = request.params
        found = {name: getattr(params, name) for name in _SETTINGS}
        limit = request.core[0].max_tokens
        biases = [{"token": token, "bias": bias} for token, bias in params.logit_bias.items()]
        return {
            **found,
            "n_predict": limit,
            "repeat_penalty": params.repetition_penalty,
            "logit_bias": biases,
        }

    def _timings(self, index: int, cached: int, num_prompt: int, count: int) -> dict[str, float]:
        prompt_s, rest_s = phases_s(self._generation, index)
        found: dict[str, float] = {"cache_n": cached}
        computed, later = num_prompt - cached, max(0, count - 1)  # the first comes with the prompt
        for name, number, timed, seconds in (
            ("prompt", computed, computed, prompt_s),
            ("predicted", count, later, rest_s),
        ):
            found[f"{name}_n"], found[f"{name}_ms"] = number, seconds * 1000
            found[f"{name}_per_token_ms"] = seconds * 1000 / timed if timed else 0.0
            found[f"{name}_per_second"] = timed / seconds if seconds else 0.0
        return found

    def _probabilities(self, choice: CompletionOutput) -> dict[str, Any]:
        if not self._body.n_probs or choice.logprobs is None:
            return {}
        assert isinstance(choice.logprobs, LogprobRows)
        tokenizer, top = self._state.llm.tokenizer, self._body.n_probs
        rows = [
            {
                **_token(tokenizer, row.token, row.logprob),
                "top_logprobs": [_token(tokenizer, *each) for each in list(row.ranked())[:top]],
            }
            for row in choice.logprobs.rows
            if row is not None
        ]
        return {"completion_probabilities": rows}


def _at(found: dict[str, Any], paths: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """The values at these paths, without those that lead nowhere."""
    for path in paths:
        value: Any = found
        for name in path.split("/"):
            value = value.get(name, UNSET) if isinstance(value, dict) else UNSET
        if value is not UNSET:
            yield path, value


def _token(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    text, data = tokenizer.token_text(token), list(tokenizer.token_bytes(token))
    return {"id": token, "token": text, "bytes": data, "logprob": finite(logprob)}
