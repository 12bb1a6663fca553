"""A core that clients on other hosts reach, over the loopback."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from vllmx_core.config import EngineConfig
from vllmx_core.errors import ConfigError, EngineDeadError
from vllmx_core.plugins.registry import Registry
from vllmx_core.sampling import SamplingParams
from vllmx_core.system.greeter import MOST_GREETED, listen
from vllmx_core.system.handshake import LET_IN, call
from vllmx_engine.async_llm import AsyncLLM
from vllmx_engine.core.found_model import FoundModel, find_model
from vllmx_engine.core_start import CoreStart
from vllmx_engine.link import remote_core
from vllmx_engine.link.core_host import serve_core
from vllmx_engine.link.frontend import Frontend
from vllmx_engine.link.process_frontend import ProcessFrontend
from vllmx_engine.link.remote_core import CORES, model_mark
from vllmx_engine.replicas.remote import attach_remote
from vllmx_engine.wire.ipc import Ping, encode_frame

from tests.waiting import PATIENCE_S, until

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    return write_key(tmp_path / "key", KEY)


def write_key(file: Path, key: bytes) -> str:
    file.touch(0o600)
    file.write_bytes(key)
    return str(file)


@asynccontextmanager
async def hosting(found: FoundModel) -> AsyncIterator[str]:
    """A host of the model's core, whose address it yields."""
    listener = listen(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    serving = asyncio.ensure_future(serve_core(found, listener, KEY))
    try:
        yield address
    finally:
        serving.cancel()
        await asyncio.wait([serving])
        assert serving.cancelled()


@asynccontextmanager
async def client(found: FoundModel, hosts: str, key_file: str) -> AsyncIterator[AsyncLLM]:
    config = replace(found.config, replica_hosts=hosts, rank_key_file=key_file)
    mine = replace(found, config=config)
    starting: asyncio.Future[Frontend] = asyncio.ensure_future(attach_remote(mine))
    async with CoreStart(mine, starting) as start, await AsyncLLM.over(start) as llm:
        yield llm


async def ids_of(llm: AsyncLLM) -> list[int]:
    return list((await (await llm.submit("hi", GREEDY, kind="final")).last()).outputs[0].token_ids)


def find(folder: str, registry: Registry) -> FoundModel:
    return find_model(EngineConfig(model=folder, backend="fake"), registry)


async def test_clients_of_other_hosts_share_a_core_and_find_it_again(
    slow_folder: str, registry: Registry, key_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owners: list[ProcessFrontend] = []
    start = ProcessFrontend.start

    async def noted(*arguments: object) -> ProcessFrontend:
        owners.append(await start(*arguments))  # type: ignore[arg-type]
        return owners[0]

    monkeypatch.setattr(ProcessFrontend, "start", noted)
    found = find(slow_folder, registry)
    async with (
        hosting(found) as address,
        client(found, address, key_file) as one,
        client(found, address, key_file) as two,
    ):
        assert one.info.path == slow_folder
        first = await ids_of(one)
        assert await ids_of(two) == first
        assert len(first) == 20
        stream = await one.submit("hi", LONG)
        await anext(stream)
        os.kill(owners[0].pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="being restarted"):
            await stream.last()
        for llm in (one, two):
            await until(lambda llm=llm: llm.is_ready)  # type: ignore[misc]
            assert await ids_of(llm) == first


async def test_strangers_are_refused_and_disturb_nobody(
    make_folder: Callable[..., str], registry: Registry, key_file: str, tmp_path: Path
) -> None:
    found = find(make_folder(), registry)
    other = find(make_folder("other", vocab_size=300), registry)
    wrong_key = write_key(tmp_path / "wrong", OTHER_KEY)
    async with hosting(found) as address, client(found, address, key_file) as llm:
        place = ("127.0.0.1", int(address.rpartition(":")[2]))
        with pytest.raises(ConfigError, match=f"^--replica-hosts {address}: .* another key"):
            async with client(found, address, wrong_key):
                pass
        with pytest.raises(ConfigError, match=f"{address}: it serves a model with other files"):
            async with client(other, address, key_file):
                pass
        frame = bytes(encode_frame(Ping()))
        with ExitStack() as stack:
            for _ in range(2 * MOST_GREETED):  # who say nothing
                stack.enter_context(socket.create_connection(place))
            for ending in (b"\x02\0\0\0\xc1\xc1", b"\xff" * 8, frame[:-1]):
                with socket.create_connection(place) as known:
                    verdict = await asyncio.to_thread(call, known, KEY, model_mark(found), 0, CORES)
                    assert verdict == LET_IN
                    known.sendall(ending)
                    known.shutdown(socket.SHUT_WR)
                    known.settimeout(PATIENCE_S)
                    while await asyncio.to_thread(known.recv, 1 << 16):
                        pass  # until the core has closed it
            with socket.create_connection(place) as garbage:
                garbage.sendall(b"GET / HTTP/1.1\r\n\r\n")
                assert len(await ids_of(llm)) == 20


async def test_a_core_that_moves_is_found_by_the_file(
    folder: str, registry: Registry, key_file: str, tmp_path: Path
) -> None:
    """As an orchestrator starts it on another host."""
    found, hosts = find(folder, registry), tmp_path / "hosts"
    async with hosting(found) as address:
        hosts.write_text(f"{address}\n")
        stack = client(found, f"@{hosts}", key_file)
        llm = await stack.__aenter__()
        first = await ids_of(llm)
    try:
        await until(lambda: not llm.is_ready)
        async with hosting(found) as address:
            hosts.write_text(f"{address}\n")
            await until(lambda: llm.is_ready)
            assert await ids_of(llm) == first
    finally:
        await stack.__aexit__(None, None, None)


async def test_a_host_that_nobody_runs(
    folder: str, registry: Registry, key_file: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(remote_core, "PATIENCE_S", 0.0)
    found = find(folder, registry)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"{address}: no core there .*: start `vllmx core`"):
            async with client(found, address, key_file):
                pass
    for hosts, text in (
        ("worker", "is not a host:port"),
        ("a:0", "nobody listens at port 0"),
        (f"@{tmp_path}/none", "name a file with a host:port in each line"),
    ):
        with pytest.raises(ConfigError, match=text):
            await attach_remote(
                replace(
                    found, config=replace(found.config, replica_hosts=hosts, rank_key_file=key_file)
                )
            )
