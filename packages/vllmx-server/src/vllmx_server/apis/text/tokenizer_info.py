"""GET /tokenizer_info."""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from vllmx_server.generating.api import Api
from vllmx_server.generating.served import Served, served_of
from vllmx_server.http.client import client_of
from vllmx_server.http.operation import TEXT, Media, Operation
from vllmx_server.http.route import Right, Route

_FOLDERS = ("name_or_path", "tokenizer_file", "vocab_file", "merges_file", "cache_dir")
"""Entries that name files of whoever wrote the tokenizer."""


async def tokenizer_info(request: Request) -> Response:
    """The configuration of the tokenizer, as tokenizer_config.json has it, and the chat template
    that is in use. Raises ForbiddenError for a key that may not use the model."""
    served = served_of(request)
    served_of(request).holder(request).check_model(*served.names)
    data = await served.llm.text.run(client_of(request), 0, lambda _: _encoded(served))
    return Response(data, media_type="application/json")


def _encoded(served: Served) -> bytes:
    tokenizer = served.llm.tokenizer
    found: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.config}
    for name in _FOLDERS:
        found.pop(name, None)
    if served.llm.chat_template is not None:
        found["chat_template"] = served.llm.chat_template
    # The standard library's, for such files hold integers of more than 64 bits.
    return json.dumps(found).encode()


class TokenizerInfoApi(Api):
    routes = (
        Route(
            "GET",
            "/tokenizer_info",
            tokenizer_info,
            Operation(
                TEXT,
                Media(("application/json",)),
                text="There under `--enable-tokenizer-info-endpoint` alone.",
            ),
            right=Right.HOLDERS,
        ),
    )
