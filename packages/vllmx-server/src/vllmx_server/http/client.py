"""The client of a request, by its key or its address."""

from __future__ import annotations

from typing import cast

from starlette.requests import Request


def owner_of(request: Request) -> str:
    """The owner of the data that a request may see: the API key's name, empty without keys."""
    return cast(str, request.scope["state"].get("client", ""))


def client_of(request: Request) -> str:
    """The client that fair share and budgets count: the API key's name, or without keys the
    address. A batch counts as another client than its sender."""
    owner = owner_of(request)
    if "is_batch" in request.scope["state"]:
        return f"{owner} (batch)"
    address = request.scope.get("client")
    return owner or (str(address[0]) if address else "")
