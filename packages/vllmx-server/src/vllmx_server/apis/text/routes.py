"""POST /tokenize and /detokenize, GET /tokenizer_info."""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from vllmx_server.apis.text.schema import (
    DETOKENIZE,
    TOKENIZE,
    Detokenized,
    DetokenizeRequest,
    Tokenized,
    TokenizeRequest,
)
from vllmx_server.generating.api import Api, keyed
from vllmx_server.generating.chat_call import check_template, prompt_tokens
from vllmx_server.generating.reading import check_ids, checked, counted, most_tokens, read_json
from vllmx_server.generating.served import Served, served_of
from vllmx_server.http.client import client_of
from vllmx_server.http.disconnect import while_there
from vllmx_server.http.operation import BODY, TEXT, Media
from vllmx_server.schema.record import Items, encode, json_pieces


async def tokenize(request: Request) -> Response:
    """Token ids of a text or of a rendered conversation."""
    served = served_of(request)
    client = client_of(request)

    def parse(data: bytes) -> tuple[TokenizeRequest, list[dict[str, Any]]]:
        body = checked(data, served, TOKENIZE)
        check_template(served, body.chat_template)
        return body, [each.for_template(index) for index, each in enumerate(body.messages or ())]

    body, conversation = await read_json(request, served, parse)
    async with counted(request) as admitted:
        if body.prompt is None:
            special = bool(body.add_special_tokens)
            options = body.chat_options()
            tokens = await prompt_tokens(request, served, conversation, options, special)
        else:
            special, limit = body.add_special_tokens is not False, most_tokens(served)
            encoding = served.llm.encode(body.prompt, special, client=client, limit=limit)
            tokens = await while_there(request.receive, encoding)
        admitted.num_tokens = len(tokens)

    def answer(_: object) -> bytes:
        made = _tokenized(served, tokens, bool(body.return_token_strs))
        # Here, for to free a million small values takes the loop as long as to make them.
        for values in (tokens, conversation, body.messages or []):
            values.clear()
        return made

    return Response(
        await served.llm.text.run(client, len(tokens), answer), media_type="application/json"
    )


def _tokenized(served: Served, tokens: list[int], with_strings: bool) -> bytes:
    made = encode(
        Tokenized(
            count=len(tokens),
            max_model_len=served.llm.info.max_model_len,
            tokens=tokens,
            token_strs=None,
        )
    )
    if not with_strings:
        return made
    # The last field, in pieces: a million texts at once would hold up all other threads.
    entry = served.llm.tokenizer.id_to_token
    strings = json_pieces(Items(entry(token) or "" for token in tokens))
    return b"".join((made.removesuffix(b"null}"), *strings, b"}"))


async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    served = served_of(request)
    client = client_of(request)

    def parse(data: bytes) -> DetokenizeRequest:
        body = checked(data, served, DETOKENIZE)
        check_ids(body.tokens, served.llm.info.vocab_size)
        return body

    body = await read_json(request, served, parse)
    async with counted(request) as admitted:
        text = await served.llm.decode(body.tokens, bool(body.skip_special_tokens), client=client)
        admitted.num_tokens = len(body.tokens)

    def answer(_: object) -> bytes:
        body.tokens.clear()  # as above
        return encode(Detokenized(prompt=text))

    return Response(
        await served.llm.text.run(client, len(text), answer), media_type="application/json"
    )


class TextApi(Api):
    routes = (
        keyed(
            "POST",
            "/tokenize",
            tokenize,
            TEXT,
            Tokenized,
            TokenizeRequest,
            statuses=(*BODY, 404),
            example={"prompt": "Hello!"},
            of_model=True,
        ),
        keyed(
            "POST",
            "/detokenize",
            detokenize,
            TEXT,
            Detokenized,
            DetokenizeRequest,
            statuses=(*BODY, 404),
            example={"tokens": [72, 105]},
            of_model=True,
        ),
    )


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
        keyed(
            "GET",
            "/tokenizer_info",
            tokenizer_info,
            TEXT,
            Media(("application/json",)),
            text="There under `--enable-tokenizer-info-endpoint` alone.",
        ),
    )
