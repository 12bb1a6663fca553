"""What the document says of each route; a route that is not here fails a test."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from vllmx_core.bounds import MAX_LIFETIME_S

from vllmx_server.answers import chat, completions, kept, messages, pooling, responses, status
from vllmx_server.answers.responses_events import ResponsesEvent
from vllmx_server.metrics import CONTENT_TYPE
from vllmx_server.openapi.conversations import CONVERSATIONS
from vllmx_server.openapi.message_batches import MESSAGE_BATCHES
from vllmx_server.openapi.operation import (
    AFTER,
    BODY,
    GENERATES,
    INCLUDE,
    LIMIT,
    ORDER,
    Endpoint,
    Events,
    Form,
    Media,
    Operation,
    Query,
)
from vllmx_server.routes import admin as admin_routes
from vllmx_server.routes import batches as batch_routes
from vllmx_server.routes import chat as chat_routes
from vllmx_server.routes import completions as completion_routes
from vllmx_server.routes import document as document_routes
from vllmx_server.routes import files as file_routes
from vllmx_server.routes import invocations as invocation_routes
from vllmx_server.routes import key_usage as usage_routes
from vllmx_server.routes import messages as message_routes
from vllmx_server.routes import pooling as pooling_routes
from vllmx_server.routes import response_input as input_routes
from vllmx_server.routes import responses as response_routes
from vllmx_server.routes import status as status_routes
from vllmx_server.routes import tei as tei_routes
from vllmx_server.routes import text as text_routes
from vllmx_server.routes import tokenizer_info as tokenizer_routes
from vllmx_server.routes import web as web_routes
from vllmx_server.schema import batches as batch_bodies
from vllmx_server.schema import chat as chat_bodies
from vllmx_server.schema import completions as completion_bodies
from vllmx_server.schema import messages as message_bodies
from vllmx_server.schema import pooling as pooling_bodies
from vllmx_server.schema import response_input as input_bodies
from vllmx_server.schema import responses as response_bodies
from vllmx_server.schema import tei as tei_bodies
from vllmx_server.schema import text as text_bodies

GENERATING, VECTORS, KEPT = "Generating", "Vectors and scores", "Files and batches"
STORED, TEXT, STATUS, PAGES = "Stored responses", "Texts and tokens", "Status", "Pages"
COUNTED = (GENERATING, VECTORS, TEXT)
"""Groups whose requests count against the limits of a key."""
_KNOWN = {304: None}
_HELLO = [{"role": "user", "content": "Hello!"}]
_ADMIN = "For holders of a key of `--admin-key`, or of one with `admin` in the file of keys."
_RANKING = {"query": "a question", "documents": ["an answer", "another one"]}
_INVOKED = (
    chat_bodies.ChatCompletionRequest,
    completion_bodies.CompletionRequest,
    pooling_bodies.EmbeddingsRequest,
    pooling_bodies.ClassifyRequest,
    pooling_bodies.PoolingRequest,
    pooling_bodies.ScoreRequest,
    pooling_bodies.RerankRequest,
    tei_bodies.RankTextsRequest,
    tei_bodies.EmbedRequest,
)
"""The bodies of all routes that /invocations stands for."""
_INVOKED_ANSWERS = (
    chat.ChatCompletion,
    completions.TextCompletion,
    pooling.EmbeddingList,
    pooling.ClassifiedList,
    pooling.PooledList,
    pooling.ScoreList,
    pooling.Ranking,
    list[pooling.RankedByTEI],
    list[list[float]],
)
_POOLING_TEXT = "Of models that make vectors or scores; one that generates text answers 400."
_LINE = (
    '{"custom_id": "one", "method": "POST", "url": "/v1/chat/completions",'
    ' "body": {"model": "demo", "messages": [{"role": "user", "content": "Hello!"}]}}'
)
_FILE = Form(
    {
        "file": {"contentMediaType": "application/octet-stream"},
        "purpose": {"enum": list(file_routes.PURPOSES)},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": {
            "type": "integer",
            "minimum": 1,
            "maximum": MAX_LIFETIME_S,
        },
    },
    ("file", "purpose"),
)

OPERATIONS: Mapping[Endpoint, Operation] = MappingProxyType(
    {
        chat_routes.chat_completions: Operation(
            GENERATING,
            chat.ChatCompletion,
            chat_bodies.ChatCompletionRequest,
            events=Events(chat.ChatChunk, is_named=False, ends_with="[DONE]"),
            statuses=GENERATES,
            example={"messages": _HELLO, "max_tokens": 16},
            task="generate",
        ),
        completion_routes.completions: Operation(
            GENERATING,
            completions.TextCompletion,
            completion_bodies.CompletionRequest,
            events=Events(completions.TextChunk, is_named=False, ends_with="[DONE]"),
            statuses=GENERATES,
            example={"prompt": "Once upon a time", "max_tokens": 16},
            task="generate",
        ),
        message_routes.messages: Operation(
            GENERATING,
            messages.Message,
            message_bodies.MessagesRequest,
            events=Events(messages.MessagesEvent, is_named=True),
            statuses=GENERATES,
            example={"messages": _HELLO, "max_tokens": 16},
            is_anthropic=True,
            task="generate",
        ),
        message_routes.count_tokens: Operation(
            TEXT,
            messages.CountedTokens,
            message_bodies.CountTokensRequest,
            statuses=(*BODY, 404),
            example={"messages": _HELLO},
            is_anthropic=True,
            task="generate",
        ),
        response_routes.create: Operation(
            GENERATING,
            responses.Response,
            response_bodies.ResponsesRequest,
            events=Events(ResponsesEvent, is_named=True),
            statuses=GENERATES,
            example={"input": "Hello!", "max_output_tokens": 16},
            task="generate",
        ),
        input_routes.input_tokens: Operation(
            TEXT,
            responses.CountedInput,
            input_bodies.InputTokensRequest,
            statuses=(*BODY, 404),
            example={"input": "Hello!"},
            task="generate",
        ),
        input_routes.compact: Operation(
            GENERATING,
            responses.Compaction,
            input_bodies.CompactRequest,
            statuses=GENERATES,
            example={"input": "Hello!"},
            task="generate",
        ),
        response_routes.retrieve: Operation(
            STORED,
            responses.Response,
            query=(
                Query(
                    "stream",
                    "The events of one that runs in the background, or was made with `background`"
                    " and `stream`.",
                    {"enum": ["true", "false"]},
                ),
                Query(
                    "starting_after",
                    "The number of the last event that is known.",
                    {"type": "integer", "minimum": 0, "maximum": 1 << 29},
                ),
                *INCLUDE,
                Query("include_obfuscation", "Accepted and ignored."),
            ),
            events=Events(ResponsesEvent, is_named=True),
            statuses=(404,),
        ),
        response_routes.delete: Operation(STORED, kept.Deleted, statuses=(404,)),
        response_routes.cancel: Operation(STORED, responses.Response, statuses=(404,)),
        response_routes.input_items: Operation(
            STORED,
            responses.ItemList,
            query=(
                Query("limit", "Items of a page.", {**LIMIT, "maximum": 100}),
                ORDER,
                AFTER,
                *INCLUDE,
            ),
            statuses=(404,),
        ),
        pooling_routes.embeddings: Operation(
            VECTORS,
            pooling.EmbeddingList,
            pooling_bodies.EmbeddingsRequest,
            _POOLING_TEXT,
            statuses=GENERATES,
            example={"input": ["a text", "another one"]},
            task="embed",
        ),
        pooling_routes.pooling: Operation(
            VECTORS,
            pooling.PooledList,
            pooling_bodies.PoolingRequest,
            _POOLING_TEXT,
            statuses=GENERATES,
            example={"input": ["a text", "another one"]},
            task="pool",
        ),
        pooling_routes.classify: Operation(
            VECTORS,
            pooling.ClassifiedList,
            pooling_bodies.ClassifyRequest,
            _POOLING_TEXT,
            statuses=GENERATES,
            example={"input": ["a text", "another one"]},
            task="classify",
        ),
        pooling_routes.score: Operation(
            VECTORS,
            pooling.ScoreList,
            pooling_bodies.ScoreRequest,
            _POOLING_TEXT,
            statuses=GENERATES,
            example={"text_1": "a question", "text_2": ["an answer", "another one"]},
            task="score",
        ),
        pooling_routes.rerank: Operation(
            VECTORS,
            pooling.Ranking,
            pooling_bodies.RerankRequest,
            _POOLING_TEXT,
            statuses=GENERATES,
            example=_RANKING,
            task="score",
        ),
        tei_routes.rerank: Operation(
            VECTORS,
            (pooling.Ranking, list[pooling.RankedByTEI]),
            (pooling_bodies.RerankRequest, tei_bodies.RankTextsRequest),
            _POOLING_TEXT,
            statuses=GENERATES,
            example=_RANKING,
            task="score",
        ),
        tei_routes.embed: Operation(
            VECTORS,
            list[list[float]],
            tei_bodies.EmbedRequest,
            _POOLING_TEXT,
            statuses=GENERATES,
            example={"inputs": ["a text", "another one"]},
            task="embed",
        ),
        **CONVERSATIONS,
        **MESSAGE_BATCHES,
        file_routes.upload: Operation(
            KEPT,
            kept.FileObject,
            _FILE,
            statuses=BODY,
            example={"file": _LINE, "purpose": "batch"},
        ),
        file_routes.list_files: Operation(
            KEPT,
            kept.FileList,
            query=(
                Query("purpose", "Those of one purpose."),
                Query("limit", "Files of a page.", {**LIMIT, "maximum": 10_000}),
                ORDER,
                AFTER,
            ),
        ),
        file_routes.retrieve: Operation(KEPT, kept.FileObject, statuses=(404,)),
        file_routes.delete: Operation(KEPT, kept.Deleted, statuses=(404,)),
        file_routes.content: Operation(KEPT, Media(("application/octet-stream",)), statuses=(404,)),
        batch_routes.create: Operation(
            KEPT,
            kept.BatchObject,
            batch_bodies.CreateBatch,
            statuses=(*BODY, 404),
            example={"input_file_id": "file-0123", "endpoint": "/v1/chat/completions"},
        ),
        batch_routes.list_batches: Operation(
            KEPT,
            kept.BatchList,
            query=(AFTER, Query("limit", "Batches of a page.", {**LIMIT, "maximum": 100})),
        ),
        batch_routes.retrieve: Operation(KEPT, kept.BatchObject, statuses=(404,)),
        batch_routes.cancel: Operation(KEPT, kept.BatchObject, statuses=(404,)),
        text_routes.tokenize: Operation(
            TEXT,
            status.Tokenized,
            text_bodies.TokenizeRequest,
            statuses=(*BODY, 404),
            example={"prompt": "Hello!"},
        ),
        text_routes.detokenize: Operation(
            TEXT,
            status.Detokenized,
            text_bodies.DetokenizeRequest,
            statuses=(*BODY, 404),
            example={"tokens": [72, 105]},
        ),
        tokenizer_routes.tokenizer_info: Operation(
            TEXT,
            Media(("application/json",)),
            text="There under `--enable-tokenizer-info-endpoint` alone.",
        ),
        invocation_routes.invocations: Operation(
            GENERATING,
            _INVOKED_ANSWERS,
            _INVOKED,
            "A model that generates takes chats and texts, one that makes vectors or scores the"
            " others. The answer is that of the route.",
            events=Events(
                chat.ChatChunk | completions.TextChunk, is_named=False, ends_with="[DONE]"
            ),
            statuses=GENERATES,
            example={"messages": _HELLO},
        ),
        admin_routes.load: Operation(
            STATUS,
            status.ModelState,
            admin_routes.NamedModel,
            _ADMIN,
            statuses=(*BODY, 404),
            example={"model": "demo"},
        ),
        admin_routes.unload: Operation(
            STATUS,
            status.ModelState,
            admin_routes.NamedModel,
            _ADMIN,
            statuses=(*BODY, 404),
            example={"model": "demo"},
        ),
        admin_routes.sleep: Operation(STATUS, status.ModelState, text=_ADMIN),
        admin_routes.wake: Operation(STATUS, status.ModelState, text=_ADMIN),
        admin_routes.reset_prefix_cache: Operation(STATUS, status.PrefixCachesReset, text=_ADMIN),
        admin_routes.shutdown: Operation(STATUS, status.Health, text=_ADMIN),
        status_routes.models: Operation(STATUS, status.ModelList),
        status_routes.model: Operation(STATUS, status.ModelCard, statuses=(404,)),
        status_routes.live: Operation(STATUS, status.Health, answers={503: status.Health}),
        status_routes.ready: Operation(STATUS, status.Health, answers={503: status.Health}),
        status_routes.metrics: Operation(STATUS, Media((CONTENT_TYPE.partition(";")[0],))),
        status_routes.version: Operation(STATUS, status.Version),
        usage_routes.usage: Operation(
            STATUS, status.KeyUsedList, text="Of all keys for one that says `admin`."
        ),
        document_routes.document: Operation(PAGES, Media(("application/json",))),
        document_routes.page: Operation(PAGES, Media(("text/html",))),
        document_routes.file: Operation(
            PAGES, Media(("text/css", "text/javascript")), statuses=(404,)
        ),
        web_routes.page: Operation(PAGES, Media(("text/html",)), statuses=(404,), answers=_KNOWN),
        web_routes.file: Operation(
            PAGES,
            Media(("text/css", "text/javascript", "image/svg+xml", "text/plain", "text/html")),
            statuses=(404,),
            answers=_KNOWN,
        ),
    }
)
