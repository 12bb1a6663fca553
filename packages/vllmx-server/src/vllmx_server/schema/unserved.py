"""Fields that name what is not built: the values that change nothing, and what to do instead.

Clients and frameworks send all fields of their models, most of them null or at their defaults. Such
a value is accepted, because the answer is the one that it asks for; any other is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from vllmx_core.errors import InvalidRequestError


class UnservedFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's fields of both completions of which only harmless values are served."""

    use_beam_search: Any = None
    length_penalty: Any = None
    truncation_side: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_decoding_backend: Any = None
    guided_whitespace_pattern: Any = None
    logits_processors: Any = None
    logprob_token_ids: Any = None
    mm_processor_kwargs: Any = None
    kv_transfer_params: Any = None
    vllm_xargs: Any = None
    repetition_detection: Any = None
    thinking_token_budget: Any = None


_NO_GRAMMAR = "answers follow no grammar: say in the prompt what they should look like"
UNSERVED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "use_beam_search": ((), "sample, or take the best of several choices with best_of"),
    "length_penalty": ((0, 1), "it belongs to beam search: leave it out"),
    "truncation_side": (("left",), 'prompts lose their beginning: use "left" or leave it out'),
    "structured_outputs": (({},), _NO_GRAMMAR),
    "guided_json": ((), _NO_GRAMMAR),
    "guided_regex": ((), _NO_GRAMMAR),
    "guided_choice": (([],), _NO_GRAMMAR),
    "guided_grammar": ((), _NO_GRAMMAR),
    "guided_decoding_backend": ((), _NO_GRAMMAR),
    "guided_whitespace_pattern": ((), _NO_GRAMMAR),
    "logits_processors": (([],), "no code of clients is run: use logit_bias or bad_words"),
    "logprob_token_ids": ((), "ask for the likeliest with logprobs and top_logprobs"),
    "mm_processor_kwargs": (({},), "prompts are text: leave it out"),
    "kv_transfer_params": (({},), "one process prefills and decodes: leave it out"),
    "vllm_xargs": (({},), "there are no such extensions: leave it out"),
    "repetition_detection": (({},), "use repetition_penalty or frequency_penalty"),
    "thinking_token_budget": ((-1,), "bound the whole answer with max_tokens"),
    # of chats
    "modalities": ((["text"],), 'answers are text: use ["text"] or leave it out'),
    "audio": ((), "answers are text: leave it out"),
    "verbosity": (("medium",), 'say in the prompt how long the answer may be; use "medium"'),
    "web_search_options": ((), "nothing is searched: leave it out"),
    "functions": (([],), "give tools instead"),
    "function_call": (("none", "auto"), "its functions are not served: leave it out"),
    "include_reasoning": ((True,), "reasoning is part of the text: leave it out"),
    "chat_template": ((), "the operator chooses the template with --chat-template"),
    "media_io_kwargs": (({},), "prompts are text: leave it out"),
    # of texts
    "prompt_embeds": (([],), "give prompt as text or token ids"),
    "suffix": (("",), "nothing is filled into the middle of a text: leave it out"),
}


def check_unserved(body: msgspec.Struct) -> None:
    """Raises InvalidRequestError for a field whose value would change the answer."""
    for name in body.__struct_fields__:
        value = getattr(body, name)
        if name not in UNSERVED or value is None or value is False:
            continue
        harmless, remedy = UNSERVED[name]
        if value not in harmless:
            raise InvalidRequestError(
                f"{name} = {repr(value)[:200]} is not served: {remedy}", param=name
            )


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: str = "text"
    json_schema: Any = None


def check_response_format(wanted: ResponseFormat | None) -> None:
    """Raises InvalidRequestError for any but plain text."""
    if wanted is not None and wanted.type != "text":
        raise InvalidRequestError(
            f"response_format type {wanted.type[:200]!r} is not served: use"
            ' {"type": "text"} or leave it out',
            param="response_format",
        )
