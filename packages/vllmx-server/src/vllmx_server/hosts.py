"""The Host header of a server that listens on loopback.

Whatever web page its user looks at can have its own name resolve to 127.0.0.1 and then counts as
the same origin (DNS rebinding). Such a request carries the page's name.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send
from vllmx_core.errors import shown

from vllmx_server.config import ServerConfig
from vllmx_server.errors import HostError, error_response
from vllmx_server.middleware import header


def allowed_hosts(config: ServerConfig) -> frozenset[str] | None:
    """Names that a Host header may have; None: any, since a proxy passes its own name on to a
    server that listens elsewhere."""
    given = {name.lower().strip("[]") for name in config.allowed_hosts}
    if "*" in given or config.uds is not None or not (given or _is_loopback(config.host)):
        return None
    return frozenset({"localhost", config.host.lower(), *given})


class HostCheck:
    """Refuses a request in the name of another host. Addresses are let in: only names can be made
    to point elsewhere."""

    def __init__(self, app: ASGIApp, *, allowed: Iterable[str]) -> None:
        self.app = app
        self.allowed = frozenset(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            name = _name_of(header(scope, b"host").decode("latin1"))
            if name not in self.allowed and not _is_address(name):
                error = HostError(
                    f"this server is not for the host {shown(name)}: call it localhost, or start"
                    " it with --allowed-hosts NAME (any: --allowed-hosts '*')"
                )
                await error_response(error, scope)(scope, receive, send)
                return
        await self.app(scope, receive, send)


def _name_of(host: str) -> str:
    """The name of a host without its port and brackets."""
    name = host.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0].removesuffix(".")


def _is_address(name: str) -> bool:
    """Whether a name is an address. No name at all counts as one: no browser leaves it out."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return not name
    return True


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
