"""POST /tokenize and /detokenize."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from vllmx_core.errors import InvalidRequestError

from vllmx_server.body import read_body
from vllmx_server.schema.decode import decode
from vllmx_server.schema.text import DETOKENIZE, TOKENIZE, TokenizeRequest
from vllmx_server.state import ServerState, state_of

_encode = msgspec.json.Encoder().encode


async def tokenize(request: Request) -> Response:
    """Token ids of a text or of a rendered conversation."""
    state = state_of(request)
    body = decode(await read_body(request, state.config), TOKENIZE)
    state.check_model(body.model)
    body.check()
    text, special = await _text_of(state, body)
    tokens = await state.llm.encode(text, special)
    # On a thread: a body may hold millions of tokens.
    answer = await asyncio.to_thread(_tokenized, state, tokens, bool(body.return_token_strs))
    return Response(answer, media_type="application/json")


def _tokenized(state: ServerState, tokens: list[int], with_strings: bool) -> bytes:
    text_of = state.llm.tokenizer.token_text
    return _encode(
        {
            "count": len(tokens),
            "max_model_len": state.llm.info.max_model_len,
            "tokens": tokens,
            "token_strs": [text_of(token) for token in tokens] if with_strings else None,
        }
    )


async def _text_of(state: ServerState, body: TokenizeRequest) -> tuple[str, bool]:
    if body.prompt is not None:
        return body.prompt, body.add_special_tokens is not False
    messages = body.messages or []
    conversation = [message.for_template(index) for index, message in enumerate(messages)]
    options = body.chat_options()
    text = await asyncio.to_thread(state.llm.render_chat, conversation, options)
    return text, bool(body.add_special_tokens)


async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    state = state_of(request)
    body = decode(await read_body(request, state.config), DETOKENIZE)
    state.check_model(body.model)
    vocab_size = state.llm.info.vocab_size
    wrong = next((token for token in body.tokens if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise InvalidRequestError(
            f"token id {wrong} is not in the vocabulary of {vocab_size} tokens", param="tokens"
        )
    text = await state.llm.decode(body.tokens, bool(body.skip_special_tokens))
    return Response(_encode({"prompt": text}), media_type="application/json")
