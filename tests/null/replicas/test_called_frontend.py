"""Cores that another program starts and ends, as a file of the server says (`@FILE`)."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
from vllmx_core.config import EngineConfig
from vllmx_core.errors import ConfigError
from vllmx_core.plugins.registry import Registry
from vllmx_engine.core.found_model import FoundModel
from vllmx_engine.link import remote_core
from vllmx_engine.replicas import remote
from vllmx_engine.replicas.frontend import ReplicaFrontend
from vllmx_engine.replicas.remote import WANTED, attach_remote
from vllmx_engine.wire.ipc import Ready, encode_frame
from vllmx_engine.wire.messages import CoreInfo

from tests.waiting import until


class PlayedPlace:
    """Runs the cores that the file of the server wants."""

    again_s = 0.001
    address = "host:1"
    connections: list[socket.socket]

    def __init__(self, file: Path, row: int) -> None:
        self._file, self._row = file, row
        self.connections = []

    def wanted(self) -> str:
        file = Path(f"{self._file}{WANTED}")
        return file.read_text() if file.exists() else "100"

    async def connected(self) -> socket.socket:
        if self.wanted()[self._row] == "0":
            raise OSError("it does not run")
        here, there = socket.socketpair()
        here.setblocking(False)
        info = CoreInfo(
            model="m", path="", architecture="", max_model_len=9, vocab_size=9, backend="",
            device="", dtype="", kv_cache_dtype="", block_size=16, num_kv_blocks=1, max_num_seqs=1,
            max_num_batched_tokens=1, weight_bytes=0, kv_cache_bytes=0, load_seconds=0.0,
        )  # fmt: skip
        there.sendall(encode_frame(Ready(info)))
        self.connections.append(there)
        return here

    def local(self, info: CoreInfo) -> CoreInfo:
        return info


def states(frontend: ReplicaFrontend) -> list[str]:
    return [one.state for one in frontend.replicas()]


async def test_a_spare_core_is_wanted_and_unwanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "hosts"
    places = [PlayedPlace(file, row) for row in range(3)]
    monkeypatch.setenv("VLLMX_RANK_KEY", "k" * 32)
    monkeypatch.setattr(remote, "remote_cores", lambda found, key: places)
    config = EngineConfig(replica_hosts=f"@{file}", min_replicas=1)
    frontend = await attach_remote(FoundModel(config, tmp_path, Registry(), False))
    assert states(frontend) == ["ready", "spare", "spare"]
    await frontend.bring_back(2)
    await until(lambda: states(frontend) == ["ready", "spare", "ready"])
    assert places[0].wanted() == "101"
    await frontend.drain(2, 0.0)
    assert (states(frontend), places[0].wanted()) == (["ready", "spare", "drained"], "100")
    await asyncio.sleep(0.05)
    assert len(places[2].connections) == 1, "it is not looked for"
    await frontend.bring_back(2)
    await until(lambda: states(frontend) == ["ready", "spare", "ready"])
    assert len(places[2].connections) == 2
    places[2].connections[1].close()  # one that is lost is looked for
    await until(lambda: len(places[2].connections) == 3)
    await frontend.close()
    for connection in (one for place in places for one in place.connections):
        connection.close()


async def test_more_than_there_are_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "hosts"
    file.write_text("host:1\n\n")
    monkeypatch.setenv("VLLMX_RANK_KEY", "k" * 32)
    monkeypatch.setattr(remote_core, "model_mark", lambda found: bytes(16))
    config = EngineConfig(replica_hosts=f"@{file}", min_replicas=3)
    with pytest.raises(ConfigError, match="3 is more than the 2 lines of --replica-hosts @"):
        await attach_remote(FoundModel(config, tmp_path, Registry(), False))
