"""What answers on the socket of `--admin-uds`: the routes of operators, without keys.

The socket is its owner's alone (0600), and whoever may open it may end the server anyway. Its
connections have limits of their own, so that no crowd at the public port keeps operators out.
"""

from __future__ import annotations

from starlette import routing
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.types import Receive, Scope, Send
from vllmx_core.errors import VllmxError

from vllmx_server import errors
from vllmx_server.host.app import App, logged
from vllmx_server.host.server import Server
from vllmx_server.http.connections.serving import ConnectionLimits
from vllmx_server.http.middleware import RequestContext
from vllmx_server.http.route import Right

LIMITS = ConnectionLimits(64, 64)


class _OperatorsApp(App):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["is_operator"] = True
        await super().__call__(scope, receive, send)


def operators_app(server: Server) -> Starlette:
    """The application over the same model as the public one."""
    context = Middleware(
        RequestContext,
        is_logged=logged(server),
        name_route=server.name_route,
        count=server.served.metrics.count_http,
    )
    app = _OperatorsApp(
        routes=[
            routing.Route(route.path, route.endpoint, methods=[route.method])
            for route in server.routes
            if route.right is Right.OPERATORS or route.for_operators
        ],
        middleware=[context],
        exception_handlers={
            VllmxError: errors.on_vllmx_error,
            HTTPException: errors.on_http_error,
        },
    )
    app.router.redirect_slashes = False
    app.state.served = server.served
    return app
