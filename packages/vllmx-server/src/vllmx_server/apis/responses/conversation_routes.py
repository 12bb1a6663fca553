"""/v1/conversations: OpenAI's conversations, which responses go on with."""

from __future__ import annotations

from functools import partial
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from vllmx_server.apis.responses.answers import ConversationObject, DeletedConversation, ItemList
from vllmx_server.apis.responses.as_chat import check_items
from vllmx_server.apis.responses.conversation_store import Conversations
from vllmx_server.apis.responses.items import named, shown
from vllmx_server.apis.responses.routes import ITEM_PAGES
from vllmx_server.apis.responses.schema import (
    ADD,
    CREATE,
    UPDATE,
    AddItems,
    CreateConversation,
    InputItem,
    UpdateConversation,
)
from vllmx_server.apis.responses.store import KeptResponses
from vllmx_server.generating.api import keyed
from vllmx_server.generating.reading import body_bytes, checked, read_json
from vllmx_server.generating.served import served_of
from vllmx_server.http.client import client_of, owner_of
from vllmx_server.http.operation import BODY, HELLO, INCLUDE, Media
from vllmx_server.http.pages import answer, check_query, newest_first, number, page
from vllmx_server.store.database import new_id, now

Body = TypeVar("Body", CreateConversation, AddItems)
_INCLUDE = ("include", "include[]")


def _place(request: Request) -> tuple[Conversations, str, str]:
    """The stored conversations, and the owner and id of the request's."""
    conversations = served_of(request).store(KeptResponses).conversations
    return conversations, owner_of(request), request.path_params["id"]


async def _body(request: Request, decoder: msgspec.json.Decoder[Body]) -> Body:
    """The checked body. Raises InvalidRequestError for items that are not served."""
    served = served_of(request)

    def parse(data: bytes) -> Body:
        body = checked(data, served, decoder)
        check_items(body.items or (), "items")
        return body

    served.check_admission()
    return await read_json(request, served, parse)


async def create(request: Request) -> Response:
    """Creates a conversation, with items if some are given."""
    body = await _body(request, CREATE)
    made = ConversationObject(id=new_id("conv_"), created_at=now(), metadata=body.metadata or {})
    items = named(body.items or ())
    kept = served_of(request).store(KeptResponses)
    await kept.conversations.create(owner_of(request), made, items)
    return answer(made)


async def retrieve(request: Request) -> Response:
    """Answers with a conversation."""
    conversations, owner, name = _place(request)
    return answer(await conversations.get(owner, name))


async def update(request: Request) -> Response:
    """Replaces the metadata of a conversation."""
    served = served_of(request)
    body = await read_json(request, served, partial(checked, served=served, decoder=UPDATE))
    conversations, owner, name = _place(request)
    return answer(await conversations.update(owner, name, body.metadata or {}))


async def delete(request: Request) -> Response:
    """Deletes a conversation with its items."""
    conversations, owner, name = _place(request)
    await conversations.delete(owner, name)
    return answer(DeletedConversation(id=name))


async def add_items(request: Request) -> Response:
    """Appends items to a conversation."""
    check_query(request, *_INCLUDE)
    body = await _body(request, ADD)
    conversations, owner, name = _place(request)
    items = await conversations.add(owner, name, named(body.items))
    return await _listed(request, items, False, body_bytes(request))


async def list_items(request: Request) -> Response:
    """Lists the items of a conversation."""
    check_query(request, "limit", "order", "after", *_INCLUDE)
    conversations, owner, name = _place(request)
    limit = number(request, "limit", 1, 100, 20)
    after = request.query_params.get("after")
    found, has_more, num_bytes = await conversations.page(
        owner, name, after, limit, newest_first(request), served_of(request).config.max_body_bytes
    )
    return await _listed(request, found, has_more, num_bytes)


async def _listed(
    request: Request, items: list[InputItem], has_more: bool, num_bytes: int
) -> Response:
    """A list of items, encoded on a thread because it may be long."""
    return await served_of(request).llm.text.run(
        client_of(request),
        num_bytes,
        lambda _: page(ItemList, [shown(item) for item in items], has_more),
    )


async def item(request: Request) -> Response:
    """Answers with one item of a conversation."""
    check_query(request, *_INCLUDE)
    conversations, owner, name = _place(request)
    return answer(shown(await conversations.item(owner, name, request.path_params["item"])))


async def delete_item(request: Request) -> Response:
    """Deletes one item and answers with its conversation."""
    conversations, owner, name = _place(request)
    return answer(await conversations.delete_item(owner, name, request.path_params["item"]))


_TAG = "Conversations"
_ONE = "/v1/conversations/{id}"
_ITEM = "/v1/conversations/{id}/items/{item}"
ROUTES = (
    keyed(
        "POST",
        "/v1/conversations",
        create,
        _TAG,
        ConversationObject,
        CreateConversation,
        statuses=BODY,
        example={"items": HELLO, "metadata": {"topic": "demo"}},
    ),
    keyed("GET", _ONE, retrieve, _TAG, ConversationObject, statuses=(404,)),
    keyed(
        "POST",
        _ONE,
        update,
        _TAG,
        ConversationObject,
        UpdateConversation,
        statuses=(*BODY, 404),
        example={"metadata": {"topic": "demo"}},
    ),
    keyed("DELETE", _ONE, delete, _TAG, DeletedConversation, statuses=(404,)),
    keyed(
        "POST",
        "/v1/conversations/{id}/items",
        add_items,
        _TAG,
        ItemList,
        AddItems,
        query=INCLUDE,
        statuses=(*BODY, 404),
        example={"items": HELLO},
    ),
    keyed(
        "GET",
        "/v1/conversations/{id}/items",
        list_items,
        _TAG,
        ItemList,
        query=ITEM_PAGES,
        statuses=(404,),
    ),
    keyed("GET", _ITEM, item, _TAG, Media(("application/json",)), query=INCLUDE, statuses=(404,)),
    keyed("DELETE", _ITEM, delete_item, _TAG, ConversationObject, statuses=(404,)),
)
