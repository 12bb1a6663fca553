"""/v1/conversations: OpenAI's conversations, which responses go on with."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from vllmx_server.answers.conversations import ConversationObject, DeletedConversation
from vllmx_server.answers.responses import ItemList
from vllmx_server.body import body_bytes, checked, read_json
from vllmx_server.responses.as_chat import check_items
from vllmx_server.responses.items import named, shown
from vllmx_server.routes.pages import answer, check_query, newest_first, number, page
from vllmx_server.schema.conversations import (
    ADD,
    CREATE,
    UPDATE,
    AddItems,
    CreateConversation,
)
from vllmx_server.schema.responses import InputItem
from vllmx_server.state import client_of, owner_of, state_of
from vllmx_server.store.conversations import Conversations
from vllmx_server.store.ids import new_id, now

_INCLUDE = ("include", "include[]")


def _place(request: Request) -> tuple[Conversations, str, str]:
    """The stored conversations, and the owner and id of the request's."""
    conversations = state_of(request).storage.conversations
    return conversations, owner_of(request), request.path_params["id"]


async def create(request: Request) -> Response:
    """Creates a conversation, with items if some are given."""
    state = state_of(request)

    def parse(data: bytes) -> CreateConversation:
        body = checked(data, state, CREATE)
        check_items(body.items or (), "items")
        return body

    state.check_admission()
    body = await read_json(request, state, parse)
    made = ConversationObject(id=new_id("conv_"), created_at=now(), metadata=body.metadata or {})
    items = named(body.items or ())
    await state.storage.conversations.create(owner_of(request), made, items)
    return answer(made)


async def retrieve(request: Request) -> Response:
    """Answers with a conversation."""
    conversations, owner, name = _place(request)
    return answer(await conversations.get(owner, name))


async def update(request: Request) -> Response:
    """Replaces the metadata of a conversation."""
    state = state_of(request)
    body = await read_json(request, state, partial(checked, state=state, decoder=UPDATE))
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
    state = state_of(request)

    def parse(data: bytes) -> AddItems:
        body = checked(data, state, ADD)
        check_items(body.items, "items")
        return body

    state.check_admission()
    body = await read_json(request, state, parse)
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
        owner, name, after, limit, newest_first(request), state_of(request).config.max_body_bytes
    )
    return await _listed(request, found, has_more, num_bytes)


async def _listed(
    request: Request, items: list[InputItem], has_more: bool, num_bytes: int
) -> Response:
    """A list of items, encoded on a thread because it may be long."""
    return await state_of(request).llm.text.run(
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
