"""An MCP server by the official package: `python real_server.py stdio`, or `http PORT`."""

from __future__ import annotations

import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("real")


@server.tool()
def get_weather(city: str) -> dict[str, str | int]:
    """The weather of a city."""
    return {"temperature": 21, "sky": "sunny"} if city == "Paris" else {}


@server.tool()
def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        server.run("stdio")
    else:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
