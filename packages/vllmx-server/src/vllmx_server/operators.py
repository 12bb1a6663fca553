"""What answers on the socket of `--admin-uds`: the routes of operators, without keys.

The socket is its owner's alone (0600), and whoever may open it may end the server anyway. Its
connections have limits of their own, so that no crowd at the public port keeps operators out.
"""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from vllmx_core.errors import VllmxError

from vllmx_server import errors
from vllmx_server.app import OPERATORS_ROUTES, App, name_route
from vllmx_server.connections.listening import ConnectionLimits
from vllmx_server.middleware import RequestContext
from vllmx_server.routes import key_usage, status
from vllmx_server.state import ServerState

LIMITS = ConnectionLimits(64, 64)
_BESIDE = (
    ("GET", "/v1/models", status.models),
    ("GET", "/v1/models/{name:path}", status.model),
    ("GET", "/v1/usage", key_usage.usage),
    ("GET", "/metrics", status.metrics),
    ("GET", "/health", status.ready),
    ("GET", "/health/live", status.live),
    ("GET", "/health/ready", status.ready),
    ("GET", "/version", status.version),
)


class _OperatorsApp(App):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["is_operator"] = True
        await super().__call__(scope, receive, send)


def operators_app(state: ServerState) -> Starlette:
    """The application over what the public one shares."""
    context = Middleware(
        RequestContext,
        log=not state.config.disable_access_log,
        name_route=name_route,
        count=state.metrics.count_http,
    )
    app = _OperatorsApp(
        routes=[
            Route(path, endpoint, methods=[method])
            for method, path, endpoint in (*OPERATORS_ROUTES, *_BESIDE)
        ],
        middleware=[context],
        exception_handlers={
            VllmxError: errors.on_vllmx_error,
            HTTPException: errors.on_http_error,
        },
    )
    app.router.redirect_slashes = False
    app.state.server = state
    return app
