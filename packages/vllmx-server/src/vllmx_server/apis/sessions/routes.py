"""DELETE /v1/sessions/{id}: unpins the KV blocks of a session."""

from __future__ import annotations

from typing import Literal

from starlette.requests import Request
from starlette.responses import Response
from vllmx_core.errors import VllmxError, shown

from vllmx_server.generating.api import Api, keyed
from vllmx_server.generating.served import served_of
from vllmx_server.http.client import client_of
from vllmx_server.http.operation import STATUS
from vllmx_server.http.pages import answer
from vllmx_server.schema.record import Record


class SessionNotKnownError(VllmxError):
    """The client has no session of this id."""

    http_status = 404
    code = "session_not_found"


class EndedSession(Record, kw_only=True):
    id: str
    object: Literal["session"] = "session"
    deleted: Literal[True] = True


async def end(request: Request) -> Response:
    """Ends a session in each model that the client used with it."""
    name, served = request.path_params["id"], served_of(request)
    states = [served] if served.models is None else await served.models.loaded()
    client = client_of(request)
    if not any([await each.llm.end_session(client, name) for each in states]):
        raise SessionNotKnownError(
            f"there is no session {shown(name)} of this client: it ended, or its requests named"
            " another session_id",
            param="id",
        )
    return answer(EndedSession(id=name))


class SessionsApi(Api):
    routes = (
        keyed(
            "DELETE",
            "/v1/sessions/{id}",
            end,
            STATUS,
            EndedSession,
            text="The blocks of the session's requests become like those of any other prompt.",
            statuses=(404,),
        ),
    )
