"""Conversations in the OpenAPI document."""

from __future__ import annotations

from vllmx_server.answers.conversations import ConversationObject, DeletedConversation
from vllmx_server.answers.responses import ItemList
from vllmx_server.openapi.operation import (
    AFTER,
    BODY,
    INCLUDE,
    LIMIT,
    ORDER,
    Endpoint,
    Media,
    Operation,
    Query,
)
from vllmx_server.routes import conversations as routes
from vllmx_server.schema import conversations as bodies

_TAG = "Conversations"
_HELLO = [{"role": "user", "content": "Hello!"}]
CONVERSATIONS: dict[Endpoint, Operation] = {
    routes.create: Operation(
        _TAG,
        ConversationObject,
        bodies.CreateConversation,
        statuses=BODY,
        example={"items": _HELLO, "metadata": {"topic": "demo"}},
    ),
    routes.retrieve: Operation(_TAG, ConversationObject, statuses=(404,)),
    routes.update: Operation(
        _TAG,
        ConversationObject,
        bodies.UpdateConversation,
        statuses=(*BODY, 404),
        example={"metadata": {"topic": "demo"}},
    ),
    routes.delete: Operation(_TAG, DeletedConversation, statuses=(404,)),
    routes.add_items: Operation(
        _TAG,
        ItemList,
        bodies.AddItems,
        query=INCLUDE,
        statuses=(*BODY, 404),
        example={"items": _HELLO},
    ),
    routes.list_items: Operation(
        _TAG,
        ItemList,
        query=(
            Query("limit", "Items of a page.", {**LIMIT, "maximum": 100}),
            ORDER,
            AFTER,
            *INCLUDE,
        ),
        statuses=(404,),
    ),
    routes.item: Operation(_TAG, Media(("application/json",)), query=INCLUDE, statuses=(404,)),
    routes.delete_item: Operation(_TAG, ConversationObject, statuses=(404,)),
}
