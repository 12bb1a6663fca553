"""Lines of `vllmx complete`. Inputs: prompts of a flag, lines of text, JSON lines, OpenAI batches.
Outputs: JSON lines, and those of an OpenAI batch.

A JSON line has "prompt" or "messages" and sampling parameters of its own; a line of an OpenAI batch
file has them in its "body". Unknown keys are refused with the number of their line.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vllmx_core.config_values import nearest
from vllmx_core.errors import ConfigError, InvalidRequestError, shown
from vllmx_core.records import Record, field

if TYPE_CHECKING:
    from vllmx_engine.wire.outputs import CompletionOutput, RequestOutput

SEPARATOR = " | "
CHAT_URL, TEXT_URL = "/v1/chat/completions", "/v1/completions"
_BATCH_KEYS = {"custom_id", "method", "url", "body"}
_SERVER_FIELDS = {"model", "stream", "user", "metadata", "store"}
"""Fields of a body that do not affect the text and are ignored."""


class Task(Record):
    """One prompt with the parameters that its line names."""

    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    custom_id: str | None = None
    """The name that a line of an OpenAI batch has."""

    @property
    def shown(self) -> str:
        """The text to show before an answer in a terminal; empty for a chat."""
        return self.prompt if isinstance(self.prompt, str) else ""


def split_prompts(text: str) -> list[Task]:
    """The prompts of `--prompts`: parts between " | "; a bar without spaces belongs to its
    prompt."""
    return [Task(part.strip()) for part in text.split(SEPARATOR) if part.strip()]


def read_lines(text: str) -> list[Task]:
    """Reads each line as a prompt or a JSON object. Raises ConfigError with the line's number."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        if not line.startswith("{"):
            found.append(Task(line))
            continue
        try:
            found.append(_task(_object(line)))
        except (ConfigError, InvalidRequestError) as error:
            raise ConfigError(f"line {number}: {error.message}") from None
    return found


def _object(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        raise ConfigError("it begins with { but is not a JSON object") from None
    assert isinstance(found, dict), "JSON that begins with { is an object"
    return found


def _task(record: dict[str, Any]) -> Task:
    if "body" not in record:
        return _from_fields(record, None)
    unknown = record.keys() - _BATCH_KEYS
    url, body = record.get("url"), record["body"]
    if unknown or not isinstance(body, dict) or not isinstance(record.get("custom_id"), str):
        wrong = f"the unknown key {min(unknown)!r}" if unknown else "no custom_id or body"
        raise ConfigError(f"a batch line has custom_id, method, url and body; this has {wrong}")
    if record.get("method", "POST") != "POST" or url not in (CHAT_URL, TEXT_URL):
        raise ConfigError(
            f"a line of a batch must be a POST to {CHAT_URL} or {TEXT_URL}, got"
            f" {shown(record.get('method'))} to {shown(url)}"
        )
    if body.get("stream"):
        raise ConfigError("stream: a batch is not streamed, leave it out")
    wanted = "messages" if url == CHAT_URL else "prompt"
    if wanted not in body:
        raise ConfigError(f"a body for {url} needs {wanted!r}")
    fields = {name: value for name, value in body.items() if name not in _SERVER_FIELDS}
    return _from_fields(fields, record["custom_id"])


def _from_fields(record: dict[str, Any], custom_id: str | None) -> Task:
    from vllmx_core.sampling import SamplingParams
    from vllmx_core.structured import StructuredOutputsParams

    sampling = {name: value for name, value in record.items() if value is not None}
    prompt, messages = sampling.pop("prompt", None), sampling.pop("messages", None)
    if "max_completion_tokens" in sampling:
        sampling["max_tokens"] = sampling.pop("max_completion_tokens")
    known = [
        each.name for each in dataclasses.fields(SamplingParams) if "logprobs" not in each.name
    ]
    for name in sampling:
        if name not in known:
            raise ConfigError(f"the unknown key {shown(name)}{nearest(name, known)}")
    form = sampling.get("structured_outputs")
    if form is not None:
        names = [each.name for each in dataclasses.fields(StructuredOutputsParams)]
        if not isinstance(form, dict) or not form.keys() <= set(names):
            raise ConfigError(
                f"structured_outputs must be an object with keys of {', '.join(names)}, got"
                f" {shown(form)}"
            )
        sampling["structured_outputs"] = StructuredOutputsParams(**form)
    SamplingParams(**sampling)
    if (prompt is None) == (messages is None):
        raise ConfigError('it needs either "prompt" or "messages"')
    if messages is not None and not _is_chat(messages):
        raise ConfigError('"messages" must be a list of objects with a role')
    if prompt is not None and not _is_prompt(prompt):
        raise ConfigError('"prompt" must be a text or a list of token ids')
    return Task(prompt, messages, sampling, custom_id)


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, dict) and isinstance(each.get("role"), str) for each in value
    )


def _is_prompt(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list) and bool(value) and all(type(each) is int for each in value)
    )


def repeated(tasks: list[Task], times: int) -> Iterator[Task]:
    """Yields each task `times` times in a row."""
    for task in tasks:
        yield from [task] * times


# --- outputs --------------------------------------------------------------------------------------
def records(task: Task, output: RequestOutput, model: str) -> Iterator[dict[str, Any]]:
    """Yields the output lines of one task: one line for a batch, else one for each choice."""
    if task.custom_id is not None:
        yield _batch_record(task, output, model)
        return
    asked = {"prompt": task.prompt} if task.messages is None else {"messages": task.messages}
    for choice in output.outputs:
        yield {
            **asked,
            "text": choice.text,
            "finish_reason": choice.finish_reason,
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": len(choice.token_ids),
        }


def _batch_record(task: Task, output: RequestOutput, model: str) -> dict[str, Any]:
    """A line of the output file of OpenAI's batch API."""
    prompt_tokens = len(output.prompt_token_ids)
    completion_tokens = sum(len(choice.token_ids) for choice in output.outputs)
    chat = task.messages is not None
    body = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{output.request_id}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [_choice(choice, chat) for choice in output.outputs],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }
    failed = None if output.error is None else {"code": "failed", "message": output.error}
    response = {"status_code": 200, "request_id": output.request_id, "body": body}
    return {
        "id": f"batch_req_{output.request_id}",
        "custom_id": task.custom_id,
        "response": None if failed else response,
        "error": failed,
    }


def _choice(choice: CompletionOutput, chat: bool) -> dict[str, Any]:
    message = {"role": "assistant", "content": choice.text}
    text = {"message": message} if chat else {"text": choice.text}
    return {
        "index": choice.index,
        **text,
        "logprobs": None,
        "finish_reason": choice.finish_reason,
    }
