"""Responses and conversations of a server, and the servers of tools."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllmx_server.apis.responses.conversation_store import Conversations
from vllmx_server.apis.responses.store import Responses
from vllmx_server.config import ServerConfig
from vllmx_server.store.database import Database

if TYPE_CHECKING:
    from vllmx_server.mcp.servers import ToolServers


class KeptResponses:
    """Responses and conversations in one database.

    Attributes:
        tool_servers: MCP servers of the operator; None: there are none.
    """

    def __init__(self, config: ServerConfig, database: Database) -> None:
        most, lifetime_s = config.max_stored_bytes, config.lifetime_s
        self.responses = Responses(database, most, lifetime_s)
        self.conversations = Conversations(database, most, lifetime_s)
        self.tool_servers: ToolServers | None = None

    async def clean(self) -> None:
        """Deletes what is too old."""
        await self.responses.clean()
        await self.conversations.clean()
