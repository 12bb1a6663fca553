"""The ASGI application: routes of all APIs, middleware, error handlers."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from starlette import routing
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from vllmx_core.errors import VllmxError
from vllmx_engine.async_llm import AsyncLLM

from vllmx_server import errors
from vllmx_server.config import ServerConfig
from vllmx_server.errors import AuthenticationError, route_path
from vllmx_server.generating.api import Api
from vllmx_server.generating.pooling import pooler_of
from vllmx_server.generating.served import Served, cache_labels, served_of
from vllmx_server.host.apis import check_routes, load_apis, spans_of
from vllmx_server.host.server import Server
from vllmx_server.http.hosts import HostCheck, allowed_hosts
from vllmx_server.http.middleware import Authorization, RequestContext, key_digest
from vllmx_server.http.operation import Endpoint
from vllmx_server.http.route import Right, Route
from vllmx_server.limits.admission import ALONE, BodyBudget
from vllmx_server.limits.keys import ApiKeys
from vllmx_server.limits.rate_limiter import KeyLimiter
from vllmx_server.limits.usage import UsageLedger
from vllmx_server.store.database import Storage
from vllmx_server.watch.collector import open_tracer
from vllmx_server.watch.metrics import MetricCounts, Metrics

if TYPE_CHECKING:
    from vllmx_server.host.workers.peers import Peers

_METHODS = ("GET", "POST", "DELETE", "HEAD", "OPTIONS")


class RoutePaths:
    """Finds the pattern of a path among those of routes."""

    def __init__(self, found: Iterable[str]) -> None:
        paths = dict.fromkeys(found)
        self._fixed = frozenset(path for path in paths if "{" not in path)
        self._patterns = [
            (routing.compile_path(path)[0], path.replace(":path}", "}"))
            for path in paths
            if "{" in path
        ]

    def find(self, path: str) -> str | None:
        """The pattern of a path; None: no route has it."""
        if path in self._fixed:
            return path
        return next((shown for each, shown in self._patterns if each.fullmatch(path)), None)

    def has(self, path: str) -> bool:
        return self.find(path) is not None

    def name(self, scope: Scope) -> tuple[str, str]:
        """The path and the method of a request where they are a route's, else "other"."""
        method = scope["method"]
        found = self.find(route_path(scope)) or "other"
        return found, method if method in _METHODS else "other"


class OneProcess:
    """See `vllmx_server.generating.served.Processes`."""

    leads = True
    sharing = ALONE

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    async def relay(self, request: Request, body: bytes) -> Response:
        raise AssertionError("there is no other process")

    async def metric_counts(self, own: dict[str, MetricCounts]) -> list[dict[str, MetricCounts]]:
        return []

    async def sleep(self, level: int, *, force: bool) -> None:
        await self._llm.sleep(level, force=force)

    async def wake(self) -> None:
        await self._llm.wake()

    async def drain_replica(self, number: int, timeout_s: float) -> None:
        """See `AsyncLLM.drain_replica`."""
        await self._llm.drain_replica(number, timeout_s)

    async def add_replica(self, number: int) -> None:
        """See `AsyncLLM.add_replica`."""
        await self._llm.add_replica(number)

    def shut_down(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


class App(Starlette):
    """The ASGI application. `scope["state"]["send"]` sends the body of a started answer past the
    middleware, which inspects only the start: a layer costs as much as the JSON of a streamed
    token. Drops trailing slashes of paths, which clients add when they join addresses."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["send"] = send
        if scope["type"] == "http" and scope["path"].endswith("/"):
            path = route_path(scope)
            surplus = len(path) - len(path.rstrip("/"))
            if surplus < len(path):  # else it is the root's
                scope["path"] = scope["path"][:-surplus]
        await super().__call__(scope, receive, send)

    def build_middleware_stack(self) -> ASGIApp:
        """The layers without starlette's outermost one, whose work `RequestContext` does."""
        stack = super().build_middleware_stack()
        assert isinstance(stack, ServerErrorMiddleware)
        return stack.app


def known_keys(config: ServerConfig) -> tuple[str, ...]:
    """The keys that open the server; empty: everybody may use it."""
    asked = config.api_key or config.api_keys_file is not None
    return (*config.api_key, *config.admin_key) if asked else ()


def build_app(
    llm: AsyncLLM,
    config: ServerConfig,
    storage: Storage | None = None,
    peers: Peers | None = None,
    *,
    several: bool = False,
    apis: Sequence[Api] | None = None,
) -> Starlette:
    """The application over a started engine; it does not own the engine, nor `storage` if that is
    given. `app.state.server` must be started in one process of the server, and stopped and closed
    in each.

    Args:
        peers: the other processes of the server; None: there are none.
        several: models, which `app.state.served.models` gets before the first request.
        apis: None: those that are installed and switched on.

    Raises PluginError if two APIs have the same route.
    """
    apis = load_apis(config) if apis is None else apis
    check_routes(apis)
    routes = [route for api in apis for route in api.routes]
    public = [each for each in routes if not (config.admin_uds and each.right is Right.OPERATORS)]
    served = _served(llm, config, storage or Storage(config.data_dir), peers)
    tracer = open_tracer(config.otlp_traces_endpoint, spans_of(routes))
    server = Server(served, apis, routes, RoutePaths(route.path for route in routes).name, tracer)
    endpoints = [(each, _endpoint(each, peers is not None, several)) for each in public]
    app = App(
        routes=[
            routing.Route(each.path, endpoint, methods=[each.method])
            for each, endpoint in endpoints
        ],
        middleware=_middleware(server, public),
        exception_handlers={
            VllmxError: errors.on_vllmx_error,
            HTTPException: errors.on_http_error,
        },
    )
    app.router.redirect_slashes = False  # it redirects to whatever host the client named
    served.app, served.routes = app, public
    served.endpoints = {each.path: one for each, one in endpoints if each.method == "POST"}
    served.takes_any_model = any(api.takes_any_model for api in apis)
    app.state.served, app.state.server = served, server
    app.state.error_shapes = [each for api in apis for each in api.error_shapes]
    untyped = (route.path for api in apis if api.takes_untyped for route in api.routes)
    app.state.untyped = frozenset(untyped)
    if peers is not None:
        peers.join(app, served)
    for api in apis:
        api.start(served)
    return app


def _served(llm: AsyncLLM, config: ServerConfig, storage: Storage, peers: Peers | None) -> Served:
    keys = ApiKeys(known_keys(config), config.api_keys_file)
    metrics = Metrics(llm.config.name, lambda: llm.stats, cache_labels(llm))
    llm.grammars.observer = metrics
    processes = OneProcess(llm) if peers is None else peers
    is_shared = peers is not None or storage.folder.outlives
    served = Served(
        llm,
        config,
        metrics,
        BodyBudget(config.max_body_bytes, processes.sharing),
        storage,
        processes,
        keys,
        UsageLedger(storage.database if is_shared else None),
        processes.sharing,
        pooler_of(llm),
    )
    if config.api_keys_file is not None:
        served.limiter = KeyLimiter(keys)
    return served


def _middleware(server: Server, routes: Sequence[Route]) -> list[Middleware]:
    """The outermost first: browsers' origins, the log, hosts, keys."""
    config, middleware = server.served.config, []
    if config.allowed_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(config.allowed_origins),
                allow_methods=list(config.allowed_methods),
                allow_headers=list(config.allowed_headers),
                allow_credentials=config.allow_credentials,
                expose_headers=["X-Request-Id"],
            )
        )
    middleware.append(
        Middleware(
            RequestContext,
            is_logged=logged(server),
            name_route=server.name_route,
            count=server.served.metrics.count_http,
            tracer=server.tracer,
        )
    )
    hosts = allowed_hosts(config)
    if hosts is not None:
        middleware.append(Middleware(HostCheck, allowed=hosts))
    opened = [route for route in routes if route.right is Right.EVERYBODY]
    is_open = RoutePaths(path for route in opened for path in _paths(route)).has
    middleware.append(Middleware(Authorization, keys=server.served.keys, is_open=is_open))
    return middleware


def _paths(route: Route) -> Iterator[str]:
    """The paths of a route that are open to everybody."""
    for name in route.names:
        yield re.sub(r"{\w+}", name, route.path)
    if not route.names:
        yield route.path


def logged(server: Server) -> Callable[[str], bool]:
    """Tells by the path of `name_route` whether the access log has a line for a request."""
    if server.served.config.disable_access_log:
        return lambda path: False
    unlogged = {each.path for each in server.routes if not each.is_logged}
    return lambda path: path not in unlogged


def _endpoint(route: Route, has_peers: bool, several: bool) -> Endpoint:
    """The endpoint behind the checks that a route asks for."""
    endpoint = route.endpoint
    if several and route.of_model:
        from vllmx_server.host.models.routing import of_model

        endpoint = of_model(endpoint, route.model_of, is_sse=route.is_sse)
    elif has_peers and route.led:
        from vllmx_server.host.workers.relay import led

        endpoint = led(endpoint, has_body=route.operation.body is not None)
    return admin(endpoint) if route.right is Right.OPERATORS else endpoint


class AdminError(VllmxError):
    """The route is for operators only."""

    http_status = 403
    code = "admin_only"


def admin(endpoint: Endpoint) -> Endpoint:
    """An endpoint for holders of an admin key. Every key is compared, in constant time."""

    async def checked(request: Request) -> Any:
        state, digest = served_of(request), key_digest(request.scope)
        holder = state.keys.find(digest)
        if holder is not None and holder.record is not None and holder.record.admin:
            return await endpoint(request)
        keys = state.config.admin_key
        if not keys:
            raise AdminError(
                "this route is for operators: start the server with --admin-key KEY, or give the"
                " key `admin` in the file of --api-keys-file"
            )
        known = [hashlib.sha256(key.encode()).digest() for key in keys]
        matches = [hmac.compare_digest(digest, each) for each in known]
        if not any(matches):
            if holder is not None:
                raise AdminError("this route is for operators, and this key is none of theirs")
            raise AuthenticationError(
                "this route is for operators: send a key of --admin-key as 'Authorization: Bearer"
                " KEY'"
            )
        return await endpoint(request)

    checked.__doc__, checked.__name__ = endpoint.__doc__, getattr(endpoint, "__name__", "checked")
    checked.__wrapped__ = endpoint  # type: ignore[attr-defined]
    return checked


class _OperatorsApp(App):
    """An application whose socket is its owner's alone (0600): it needs no keys."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["is_operator"] = True
        await super().__call__(scope, receive, send)


def operators_app(server: Server) -> Starlette:
    """The application on the socket of `--admin-uds`: the routes of operators, over the same model
    as the public one."""
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
