"""A small HTTP/1.1 client for load tests: one streamed request a connection, times of each event.

Client libraries use more CPU for an event than the server does; this one only splits lines.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from vllmx_core.errors import excerpt
from vllmx_core.records import MutableRecord, field


class Streamed(MutableRecord):
    """Times and counts of one streamed request."""

    sent_s: float
    event_s: list[float] = field(default_factory=list)
    """The times at which events that carry text arrived."""
    completion_tokens: int = 0
    error: str | None = None

    @property
    def first_token_s(self) -> float:
        return self.event_s[0] - self.sent_s

    @property
    def whole_s(self) -> float:
        return self.event_s[-1] - self.sent_s

    @property
    def token_s(self) -> float:
        """The average seconds of each token after the first."""
        return (self.whole_s - self.first_token_s) / max(1, self.completion_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.event_s, self.event_s[1:], strict=False)]


async def stream_completion(
    url: str, path: str, body: Mapping[str, Any], api_key: str | None = None
) -> Streamed:
    """Posts a request with stream = true and records the times of its events. A refusal or a broken
    connection is an `error` in the result."""
    parts = urlsplit(url)
    payload = json.dumps(
        {**body, "stream": True, "stream_options": {"include_usage": True}}
    ).encode()
    key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n{key}"
        f"Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
    )
    result = Streamed(time.perf_counter())
    try:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
    except OSError as error:
        result.error = f"cannot connect: {error}"
        return result
    try:
        writer.write(head.encode() + payload)
        status = await reader.readline()
        if b" 200" not in status:
            result.error = (await reader.read(4096)).decode("utf-8", "replace")[-500:]
            return result
        async for line in reader:
            _take(line, result)
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        result.error = f"connection broke: {error}"
    finally:
        writer.close()
    return result


def _take(line: bytes, result: Streamed) -> None:
    if not line.startswith(b"data: {"):
        return
    if b'"usage":{' in line:
        usage = json.loads(line[6:])["usage"]
        result.completion_tokens = usage["completion_tokens"]
        if result.completion_tokens and not result.event_s:  # tokens of which none had a text
            result.event_s.append(time.perf_counter())
    elif b'"error"' in line[:20]:
        result.error = excerpt(line.decode("utf-8", "replace"), 500)
    elif b'"role"' not in line and b'"text":""' not in line:
        result.event_s.append(time.perf_counter())
