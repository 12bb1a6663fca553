"""The least that an event stream costs on hypercorn and starlette, for `bench/serve.py`.

    python bench/bare_sse.py [--step-ms 20]

Prints its URL and serves POST requests: `max_tokens` ready-made events of a chunk's size to
each, all streams woken together every step, as an engine wakes them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
from collections.abc import AsyncIterator

from hypercorn.asyncio import serve
from hypercorn.config import Config
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

EVENT = b'data: {"id":"%s","choices":[{"text":"x"}]}\n\n' % (b"0" * 186)  # 231 bytes


class Clock:
    """Wakes everybody who waits, once a step."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._waiters: list[asyncio.Future[None]] = []

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._step_s)
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    async def tick(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter


def build(clock: Clock) -> Starlette:
    async def stream(request: Request) -> StreamingResponse:
        count = json.loads(await request.body())["max_tokens"]

        async def events() -> AsyncIterator[bytes]:
            for _ in range(count):
                await clock.tick()
                yield EVENT
            yield b'data: {"usage":{"completion_tokens":%d}}\n\n' % count

        return StreamingResponse(events(), media_type="text/event-stream")

    return Starlette(routes=[Route("/v1/completions", stream, methods=["POST"])])


async def main(step_s: float) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    config = Config()
    config.bind = [f"fd://{listener.detach()}"]
    config.accesslog = config.errorlog = None
    clock = Clock(step_s)
    ticking = asyncio.ensure_future(clock.run())
    await serve(build(clock), config)  # type: ignore[arg-type]
    ticking.cancel()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-ms", type=float, default=20.0)
    asyncio.run(main(parser.parse_args().step_ms / 1e3))
