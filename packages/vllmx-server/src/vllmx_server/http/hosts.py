"""The Host header of a server that listens on loopback, and the Origin header of forms.

Any web page can have its own name resolve to 127.0.0.1 and then counts as the same origin (DNS
rebinding). Such a request carries the page's name. Under its real name a page can send forms to
other sites, but JSON only after asking them.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send
from vllmx_core.errors import shown

from vllmx_server.config import ServerConfig
from vllmx_server.errors import HostError, OriginError, error_response
from vllmx_server.http.middleware import header


def allowed_hosts(config: ServerConfig) -> frozenset[str] | None:
    """Allowed names in the Host header; None: any, since proxies pass their own name to servers
    that do not listen on loopback."""
    given = {name.lower().strip("[]") for name in config.allowed_hosts}
    if "*" in given or config.uds is not None or not (given or _is_loopback(config.host)):
        return None
    return frozenset({"localhost", config.host.lower(), *given})


def check_origin(request: Request, allowed: Collection[str]) -> None:
    """Raises OriginError for a form from a web page of another site, unless it has a key or comes
    from an origin of `--allowed-origins`."""
    sent = request.headers
    origin = sent.get("origin")
    if origin is None or "*" in allowed or origin in allowed:
        return
    if "authorization" in sent or "x-api-key" in sent:
        return
    if origin.partition("://")[2].lower() != sent.get("host", "").lower():
        raise OriginError(
            f"a web page of {shown(origin)} may not send forms here: start the server with"
            " --allowed-origins ORIGIN, or send an API key"
        )


class HostCheck:
    """Refuses requests with another host's name. Addresses pass: only names can be made to point
    here."""

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
    """True if a name is an address, or empty: browsers never leave it out."""
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
