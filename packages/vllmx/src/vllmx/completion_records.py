"""The JSON lines that `vllmx complete` writes: its own, and those of an OpenAI batch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllmx.prompt_lines import Task

if TYPE_CHECKING:
    from vllmx_engine.wire.outputs import CompletionOutput, RequestOutput


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
