"""An MCP server by hand, that answers well or badly: `python -S scripted_server.py MODE [FILE]`."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

MODE, FILE = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
ANY = {"type": "object"}
WELL = (
    "echo",
    "fail",
    "env",
    "image",
    "long",
    "large",
    "die",
    "hang",
    "noise",
    "structured",
    "slow",
)


def tools() -> list[dict[str, Any]]:
    if MODE == "thousands":
        return [{"name": f"t{i}", "inputSchema": ANY} for i in range(5000)]
    if MODE == "weather":
        city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
        return [{"name": "get_weather", "inputSchema": city}]
    if MODE == "deep":
        deep: dict[str, Any] = {}
        for _ in range(300):
            deep = {"properties": {"a": deep}}
        return [{"name": "deep", "inputSchema": deep}]
    if MODE == "strange":
        return [
            {"name": "good", "inputSchema": ANY},
            {"name": "good", "inputSchema": ANY},
            {"name": "an odd/näme", "inputSchema": ANY},
            {"name": "text", "inputSchema": {"type": "string"}},
            {"name": "list", "inputSchema": {"properties": []}},
            {"name": 5, "inputSchema": ANY},
            {"name": "wide", "description": "x" * 20000, "inputSchema": ANY},
            {"name": "n" * 500, "inputSchema": ANY},
        ]
    return [{"name": name, "description": name, "inputSchema": ANY} for name in WELL]


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps(arguments)
    if name == "fail":
        return {"content": [{"type": "text", "text": "no such city"}], "isError": True}
    if name == "env":
        text = " ".join(sorted(os.environ))
    elif name == "image":
        image = {"type": "image", "data": "A" * 1000, "mimeType": "image/png"}
        return {"content": [{"type": "text", "text": "look"}, image]}
    elif name == "structured":
        return {"content": [], "structuredContent": {"a": 1}}
    elif name == "long":
        text = "ab" * 100_000
    elif name == "large":
        text = "x" * (100 << 20)
    elif name == "die":
        sys.exit(3)
    elif name == "get_weather":
        text = '{"temperature": 21, "sky": "sunny"}'
    elif name == "slow":
        time.sleep(0.5)
        text = "at last"
    elif name == "hang":
        time.sleep(1000)
    elif name == "noise":
        print("this is no message\n{ nor this\n[]", flush=True)
    return {"content": [{"type": "text", "text": text}]}


def answer(message: dict[str, Any]) -> dict[str, Any]:
    method, params = message["method"], message.get("params", {})
    if method == "initialize":
        return {"result": {
            "protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}},
            "serverInfo": {"name": "scripted", "version": "1"},
        }}  # fmt: skip
    if method == "tools/list":
        if MODE == "no-list":
            return {"result": {"tools": "none"}}
        return {"result": {"tools": tools()}}
    if method == "tools/call":
        return {"result": call(params["name"], params.get("arguments") or {})}
    if method == "ping":
        return {"result": {}}
    return {"error": {"code": -32601, "message": f"{method} is not known"}}


def main() -> None:
    if MODE == "dies":
        sys.exit("cannot open the data")
    if MODE == "babbles":
        while True:
            print("x" * 1000)
    if MODE == "one-line":
        while True:
            sys.stdout.write("{" * 100_000)
    if MODE == "hangs":
        time.sleep(1000)
    if MODE == "stubborn":  # neither it nor what it started heeds the end of its input
        other = os.fork()
        if other:
            with open(FILE + ".new", "w") as file:
                file.write(f"{os.getpid()} {other}")
            os.rename(FILE + ".new", FILE)
        time.sleep(1000)
    for line in sys.stdin:
        message = json.loads(line)
        if "id" in message:
            print(json.dumps({"jsonrpc": "2.0", "id": message["id"], **answer(message)}))
            sys.stdout.flush()


main()
