"""Streams outlive a replica whose connection breaks inside a frame, or that sends nonsense."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from vllmx_core.plugins.registry import Registry
from vllmx_core.sampling import SamplingParams
from vllmx_engine.async_llm import AsyncLLM
from vllmx_engine.replicas.frontend import ReplicaFrontend

from tests.waiting import until

from .test_remote_core import client, find, hosting, key_file

__all__ = ["key_file"]
PARAMS = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)


class Between:
    """Passes what a core and its clients send, until `fault` says what to do to the next part."""

    def __init__(self, address: str) -> None:
        self._place = address.rpartition(":")
        self.fault = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._place[0], int(self._place[2]))
        ways = [self._pass(reader, back, is_back=False), self._pass(there, writer, is_back=True)]
        tasks = [asyncio.ensure_future(way) for way in ways]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            for end in (writer, back):
                end.close()

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_back: bool
    ) -> None:
        while data := await reader.read(1 << 16):
            fault, self.fault = (self.fault, "") if is_back else ("", self.fault)
            writer.write({"": data, "cut": data[:-1], "nonsense": b"\xff" * 8}[fault])
            await writer.drain()
            if fault == "cut":
                return


@asynccontextmanager
async def between(address: str) -> AsyncIterator[tuple[str, Between]]:
    """The address at which a core is reached through `Between`."""
    found = Between(address)
    server = await asyncio.start_server(found.serve, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", found


async def ids_of(llm: AsyncLLM) -> list[list[int]]:
    async def one() -> list[int]:
        return list((await (await llm.submit("hi", PARAMS)).last()).outputs[0].token_ids)

    return await asyncio.gather(*(one() for _ in range(4)))


@pytest.mark.parametrize("fault", ["cut", "nonsense"])
async def test_streams_outlive_it(
    fault: str, slow_folder: str, registry: Registry, key_file: str
) -> None:
    found = find(slow_folder, registry)
    async with (
        hosting(found) as first,
        hosting(found) as second,
        between(first) as (one, to_first),
        between(second) as (other, to_second),
        client(found, f"{one},{other}", key_file) as llm,
    ):
        assert isinstance(llm._frontend, ReplicaFrontend)
        seats = llm._frontend._seats
        wanted = await ids_of(llm)
        running = asyncio.ensure_future(ids_of(llm))
        await until(lambda: any(seat.flights for seat in seats.values()))
        seat = max(seats.values(), key=lambda seat: len(seat.flights))
        (to_first, to_second)[seat.number].fault = fault
        await until(lambda: not seat.serves)
        assert await running == wanted
        await until(lambda: seat.serves)
        assert await ids_of(llm) == wanted
