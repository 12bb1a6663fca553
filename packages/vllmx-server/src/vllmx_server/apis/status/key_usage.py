"""What keys have used."""

from __future__ import annotations

from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import Response

from vllmx_server.apis.status.answers import KeyUsed, KeyUsedList
from vllmx_server.generating.served import served_of
from vllmx_server.http.client import owner_of
from vllmx_server.http.pages import answer, check_query
from vllmx_server.limits.usage import KeyUsage


async def usage(request: Request) -> Response:
    """Answers the usage of the key that asks; of all keys for one with `admin`, and on the socket
    of operators."""
    check_query(request)
    served, client = served_of(request), owner_of(request)
    holder = served.keys.holder(client)
    found = await served.usage.all()
    is_admin = holder.record is not None and holder.record.admin
    is_admin = is_admin or "is_operator" in request.scope["state"]
    clients = sorted({*found, client}) if is_admin else [client]
    rows = [
        KeyUsed(key=served.keys.holder(each).name, **asdict(found.get(each, KeyUsage())))
        for each in clients
    ]
    return answer(KeyUsedList(data=rows))
