"""OpenAI's Responses and conversations."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vllmx_server.apis.responses import conversation_routes, mcp_routes, routes
from vllmx_server.apis.responses.response import BackgroundResponses, lost
from vllmx_server.apis.responses.store import KeptResponses
from vllmx_server.config import ServerConfig
from vllmx_server.generating.api import Api
from vllmx_server.generating.served import Served

if TYPE_CHECKING:
    from vllmx_server.mcp.servers import ToolServers


class ResponsesApi(Api):
    routes = (*routes.ROUTES, *conversation_routes.ROUTES, *mcp_routes.ROUTES)

    def __init__(self, config: ServerConfig) -> None:
        super().__init__(config)
        self._tool_servers = _tool_servers(config)
        self._kept: KeptResponses
        self._outlives = False

    def start(self, served: Served) -> None:
        self._kept = KeptResponses(self.config, served.storage.database)
        self._outlives = served.storage.folder.outlives
        served.stores[KeptResponses] = self._kept
        served.stores[BackgroundResponses] = BackgroundResponses()
        if self._tool_servers is not None:
            self._kept.tool_servers = self._tool_servers
            served.metrics.tools = self._tool_servers.counts

    async def lead(self, *, takes_over: bool) -> None:
        if self._outlives or takes_over:
            await self._kept.responses.end_open_ones(lost)

    async def clean(self) -> None:
        await self._kept.clean()

    def close(self) -> None:
        if self._tool_servers is not None:
            self._tool_servers.close()


def _tool_servers(config: ServerConfig) -> ToolServers | None:
    """MCP servers, which start while the model loads. Raises ConfigError."""
    if config.mcp_config is None:
        return None
    from vllmx_server.mcp.settings import read_servers

    settings = read_servers(config.mcp_config, "--mcp-config")
    servers: Any = import_module("vllmx_server.mcp.servers")
    import_module("vllmx_server.apis.responses.mcp_rounds")
    started: ToolServers = servers.ToolServers(settings)
    return started
