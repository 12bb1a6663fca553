"""Fields that name what is not built: the values that change nothing, and what to do instead.

Clients and frameworks send all fields of their models, most of them null or at their defaults. Such
a value is accepted, because the answer is the one that it asks for; any other is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec
from vllmx_core.errors import InvalidRequestError, shown

from vllmx_server.generating.fields import StructuredFields


class UnservedFields(StructuredFields, kw_only=True, forbid_unknown_fields=True):
    """vLLM's fields of both completions of which only harmless values are served."""

    use_beam_search: Any = None
    length_penalty: Any = None
    truncation_side: Any = None
    logits_processors: Any = None
    mm_processor_kwargs: Any = None
    kv_transfer_params: Any = None
    vllm_xargs: Any = None
    repetition_detection: Any = None


UNSERVED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "use_beam_search": ((), "sample, or take the best of several choices with best_of"),
    "length_penalty": ((0, 1), "it belongs to beam search: leave it out"),
    "truncation_side": (("left",), 'prompts lose their beginning: use "left" or leave it out'),
    "logits_processors": (([],), "no code of clients is run: use logit_bias or bad_words"),
    "mm_processor_kwargs": (({},), "prompts are text: leave it out"),
    "kv_transfer_params": (({},), "one process prefills and decodes: leave it out"),
    "vllm_xargs": (({},), "there are no such extensions: leave it out"),
    "repetition_detection": (({},), "use repetition_penalty or frequency_penalty"),
    # of chats
    "modalities": ((["text"],), 'answers are text: use ["text"] or leave it out'),
    "audio": ((), "answers are text: leave it out"),
    "verbosity": (("medium",), 'say in the prompt how long the answer may be; use "medium"'),
    "web_search_options": ((), "nothing is searched: leave it out"),
    "functions": (([],), "give tools instead"),
    "function_call": (("none", "auto"), "its functions are not served: leave it out"),
    "media_io_kwargs": (({},), "prompts are text: leave it out"),
    # of texts
    "prompt_embeds": (([],), "give prompt as text or token ids"),
}


@cache
def _unserved(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    return tuple(name for name in kind.__struct_fields__ if name in UNSERVED)


def check_unserved(body: msgspec.Struct) -> None:
    """Raises InvalidRequestError for a field whose value would change the answer."""
    for name in _unserved(type(body)):
        value = getattr(body, name)
        if value is None or value is False:
            continue
        harmless, remedy = UNSERVED[name]
        if value not in harmless:
            raise InvalidRequestError(
                f"{name} = {shown(value)} is not served: {remedy}", param=name
            )
