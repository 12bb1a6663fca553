"""Clients that are broken or mean no good, for `bench/soak.py`.

    python bench/hostile.py URL GUEST_KEY SECONDS [KIND,...]

Each kind runs by itself until the time is up; what the server answered is printed as JSON: for each
kind how often each status came ("closed": the connection ended without one).
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

_ANSWER_S = 20.0
_CHAT = {"messages": [{"role": "user", "content": "Tell me a story about a fox."}]}
_DEEP = b'{"messages":' + b"[" * 100_000
_BROKEN = (
    b"", b"{", b'{"messages": [', b"\xff\xfe\x00{}", _DEEP, b"[]", b'"x"', b"null", b"1e999",
    b'{"messages": [{"role": "user", "content": "\\ud800"}], "max_tokens": 1e400}',
)  # fmt: skip
_SCHEMAS = (
    {"type": "string", "pattern": "(a+)+(b+)+$" * 40},
    {"type": "string", "pattern": "(" * 2000 + ")" * 2000},
    {"$ref": "#"},
    {"anyOf": [{"const": f"value {n}"} for n in range(5000)]},
    {"type": "array", "minItems": 1_000_000, "items": {"type": "integer"}},
    {"type": "string", "minLength": 100_000_000},
    {"type": "object", "properties": {f"p{n}": {"$ref": "#"} for n in range(300)}},
    {"type": "no such type"},
)


@dataclass
class Target:
    """The server, and what it said to each kind of client."""

    host: str
    port: int
    key: str
    end_s: float
    answers: dict[str, Counter[str]] = field(default_factory=dict)

    async def post(self, kind: str, path: str, body: object, key: str | None = None) -> None:
        """A request, read to its end; `body`: bytes as they are, or JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        await self.raw(kind, self.head(path, len(data), key) + data)

    def head(self, path: str, length: int, key: str | None = None) -> bytes:
        return (
            f"POST {path} HTTP/1.1\r\nHost: {self.host}\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {key or self.key}\r\nContent-Length: {length}\r\n"
            "Connection: close\r\n\r\n"
        ).encode()

    async def raw(self, kind: str, data: bytes, most: int | None = None) -> None:
        """Bytes, and what comes back up to the end or `most` bytes of it."""
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(self.host, self.port)
            try:
                writer.write(data)
                status = await asyncio.wait_for(reader.readline(), _ANSWER_S)
                self.came(kind, status)
                left = most if most is not None else 1 << 24
                while left > 0 and (piece := await asyncio.wait_for(reader.read(65536), _ANSWER_S)):
                    left -= len(piece)
                return
            except TimeoutError:
                self.came(kind, b"HTTP late")
                return
            finally:
                writer.close()
        self.came(kind, b"")

    def came(self, kind: str, status: bytes) -> None:
        words = status.split()
        name = words[1].decode("latin-1") if len(words) > 1 else "closed"
        self.answers.setdefault(kind, Counter())[name] += 1


async def slow_heads(target: Target) -> None:
    """Connections whose request comes a byte at a time."""
    reader, writer = await asyncio.open_connection(target.host, target.port)
    try:
        for byte in target.head("/v1/chat/completions", 10):
            writer.write(bytes([byte]))
            with suppress(TimeoutError):
                target.came("slow heads", await asyncio.wait_for(reader.readline(), 1.0))
                return
    finally:
        writer.close()


async def large_bodies(target: Target) -> None:
    declared = target.head("/v1/chat/completions", 1 << 30)
    await target.raw("large bodies", declared + b" " * (1 << 20), most=4096)
    chunked = declared.replace(b"Content-Length: 1073741824", b"Transfer-Encoding: chunked")
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    await target.raw("large bodies", chunked + chunk * 160, most=4096)


async def broken_json(target: Target) -> None:
    await target.post("broken JSON", "/v1/chat/completions", random.choice(_BROKEN))


async def no_http(target: Target) -> None:
    noise = random.randbytes(random.randrange(1, 3000))
    await target.raw("no HTTP", random.choice((noise, b"GET / HTTP/9.9\r\n\r\n", b"\r\n" * 500)))


async def schemas(target: Target) -> None:
    schema = {"name": "s", "schema": random.choice(_SCHEMAS)}
    asked = {"response_format": {"type": "json_schema", "json_schema": schema}, "max_tokens": 8}
    await target.post("schemas", "/v1/chat/completions", _CHAT | asked)


async def resets(target: Target) -> None:
    """Connections that are reset in the middle of a body, or of an answer."""
    reader, writer = await asyncio.open_connection(target.host, target.port)
    data = json.dumps(_CHAT | {"stream": True, "max_tokens": 200}).encode()
    whole = target.head("/v1/chat/completions", len(data)) + data
    writer.write(whole[: random.choice((40, len(whole) - 5, len(whole)))])
    with suppress(TimeoutError):
        target.came("resets", await asyncio.wait_for(reader.readline(), 0.2))
    end: socket.socket = writer.get_extra_info("socket")
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def much_at_once(target: Target) -> None:
    """More than anybody may ask for, and as much as one may."""
    asked = random.choice(
        ({"n": 1 << 31}, {"n": 100_000}, {"n": 64, "max_tokens": 16}, {"max_tokens": 1 << 40})
    )
    await target.post("much at once", "/v1/chat/completions", _CHAT | asked)


async def aborts(target: Target) -> None:
    data = json.dumps(_CHAT | {"stream": True, "max_tokens": 500}).encode()
    await target.raw("aborts", target.head("/v1/chat/completions", len(data)) + data, most=1)


async def wrong_keys(target: Target) -> None:
    await target.post("wrong keys", "/v1/chat/completions", _CHAT, key=f"sk-{random.random()}")


async def tokenise(target: Target) -> None:
    text = "word " * random.choice((10, 1000, 200_000))
    await target.post("tokenise", "/tokenize", {"prompt": text})


async def idle(target: Target) -> None:
    """Connections that say nothing."""
    reader, writer = await asyncio.open_connection(target.host, target.port)
    try:
        with suppress(TimeoutError):
            target.came("idle", await asyncio.wait_for(reader.readline(), 10))
    finally:
        writer.close()


KINDS: dict[Callable[[Target], Awaitable[None]], tuple[int, float]] = {
    slow_heads: (50, 0.1), large_bodies: (1, 1.0), broken_json: (1, 0.2), no_http: (1, 0.2),
    schemas: (1, 0.5), resets: (1, 0.2), much_at_once: (1, 0.5), aborts: (1, 0.3),
    wrong_keys: (1, 0.1), tokenise: (1, 0.3), idle: (200, 0.1),
}  # fmt: skip
"""How many of each at a time, and the seconds that each waits before it comes again."""


async def _repeat(kind: Callable[[Target], Awaitable[None]], target: Target) -> None:
    pause_s = KINDS[kind][1]
    await asyncio.sleep(random.random())
    while time.monotonic() < target.end_s:
        with suppress(OSError):
            await kind(target)
        await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))


async def attack(url: str, key: str, seconds: float, names: str) -> dict[str, Counter[str]]:
    """All kinds at once, or those of these names, for so long."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    target = Target(parts.hostname, parts.port, key, time.monotonic() + seconds)
    tasks = [
        asyncio.ensure_future(_repeat(kind, target))
        for kind, (count, _) in KINDS.items()
        if not names or kind.__name__ in names.split(",")
        for _ in range(count)
    ]
    await asyncio.wait(tasks, timeout=seconds + 5)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return target.answers


if __name__ == "__main__":
    some = sys.argv[4] if len(sys.argv) > 4 else ""
    print(json.dumps(asyncio.run(attack(sys.argv[1], sys.argv[2], float(sys.argv[3]), some))))
