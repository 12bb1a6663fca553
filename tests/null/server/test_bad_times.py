"""A full disk and a clock that jumps: one sentence, and nobody else notices."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllmx_core.errors import ConfigError
from vllmx_server.apis.batches import files as files_module
from vllmx_server.apis.batches.runner import KeptFiles
from vllmx_server.config import ServerConfig
from vllmx_server.generating.api import Api
from vllmx_server.host import server as server_module
from vllmx_server.store import database as database_module
from vllmx_server.store.database import Storage

from tests.waiting import PATIENCE_S

from .conftest import MakeServer, Served
from .test_files import upload


async def test_uploads_on_a_full_disk_are_503_and_the_rest_goes_on(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("has no /dev/full, which is a disk without room")

    class FullDisk:
        """What is opened on it can be written, until it is to be kept."""

        def open(self, mode: str) -> Any:
            return full.open("wb", buffering=0)

        def unlink(self, missing_ok: bool = False) -> None:
            return None

    with monkeypatch.context() as patched:
        patched.setattr(served.state.store(KeptFiles).files, "new_path", FullDisk)
        for _ in range(2):
            refused = await upload(served, b"{}\n" * 9)
            assert refused.status_code == 503, refused.text
            assert refused.json()["error"]["code"] == "storage_unavailable"
        assert (await served.complete(max_tokens=1))["choices"]
    assert (await upload(served)).status_code == 200
    assert len((await served.client.get("/v1/files")).json()["data"]) == 1


async def test_a_database_on_a_full_disk_is_503_until_there_is_room(
    make_server: MakeServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with make_server({"data_dir": str(tmp_path / "data")}) as served:
        first = (await upload(served)).json()["id"]
        store = served.state.storage.database

        def limit(pages: int) -> Any:
            return store.run(lambda c: c.execute(f"PRAGMA max_page_count = {pages}").fetchone())

        await limit(1)  # SQLite takes the size that it has, and says "database or disk is full"
        statuses = []
        for _ in range(200):
            statuses.append((await upload(served, name="x" * 200)).status_code)
            if statuses[-1] != 200:
                break
        assert statuses[-1] == 503
        assert "the store failed: SQLITE_FULL: look whether there is room" in caplog.text
        assert "Error" not in caplog.text, "a full disk is no bug: it has no traceback"
        assert (await served.client.get(f"/v1/files/{first}")).status_code == 200
        assert (await served.complete(max_tokens=1))["choices"]
        await limit(1 << 20)
        assert (await upload(served)).status_code == 200


@pytest.mark.parametrize("way", ["deleted", "expired"])
async def test_a_full_disk_gets_room_by_what_is_deleted(
    served: Served, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """A disk without one free byte has no room for the note that a file is gone either."""
    file_id = (await upload(served, b"x" * 5000)).json()["id"]
    files = served.state.store(KeptFiles).files
    content, note = files.path(file_id), files_module._delete

    def full(connection: sqlite3.Connection, ids: list[str]) -> None:
        if content.exists():
            raise sqlite3.OperationalError("database or disk is full")
        note(connection, ids)

    monkeypatch.setattr(files_module, "_delete", full)
    if way == "deleted":
        assert (await served.client.delete(f"/v1/files/{file_id}")).status_code == 200
    else:
        monkeypatch.setattr(files_module, "now", lambda: int(time.time()) + 40 * 86400)
        await files.clean()
    assert not content.exists()
    assert (await served.client.get("/v1/files")).json()["data"] == []


async def test_a_data_folder_without_room_is_told_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: str) -> sqlite3.Connection:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(database_module, "_open", full)
    storage = Storage(str(tmp_path))
    with pytest.raises(ConfigError, match="free some space there, or name another folder"):
        await storage.check()
    storage.close()


async def test_what_is_no_database_is_told_in_one_sentence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage = Storage(str(tmp_path))
    Path(storage.folder.database).write_bytes(b"no database" * 400)
    with pytest.raises(ConfigError, match=r"SQLITE_NOTADB\): free some space"):
        await storage.check()
    storage.close()
    assert len(caplog.text.splitlines()) == 1


@pytest.mark.parametrize("jump_s", [-1e9, 1e9])
async def test_a_clock_that_jumps_ends_nothing(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    """Deadlines and measures go by a clock that never jumps."""
    settings = {"request_timeout_s": 600.0, "queue_timeout_s": 600.0}
    async with make_server(settings) as served:
        kept = (await upload(served)).json()["id"]
        right = time.time
        with monkeypatch.context() as patched:
            patched.setattr(time, "time", lambda: right() + jump_s)
            answer = await served.complete(max_tokens=3)
            assert answer["usage"]["completion_tokens"] == 3
            assert answer["created"] > 0
            assert (await upload(served)).status_code == 200
            metrics = await served.metrics()
            assert 0 <= metrics["vllmx:e2e_request_latency_seconds_sum"] < 600
        assert (await served.client.get(f"/v1/files/{kept}")).status_code == 200


async def test_what_is_kept_survives_a_clock_that_jumps_and_comes_back(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What seems too old is forgotten when the clock has said so twice."""
    cleaned: list[float] = []
    walls, shown = [0.0, 0.0, 1e9, 600.0, 1e9, 1e9, 1e9], [0.0]
    ended = asyncio.Event()

    def wall() -> float:
        shown.append(walls.pop(0) if walls else shown[-1])
        if not walls:
            ended.set()
        return shown[-1]

    async with make_server() as served:
        server = served.server
        await server.stop()
        await upload(served)

        async def clean() -> None:
            cleaned.append(shown[-1])

        clock = SimpleNamespace(time=wall, monotonic=lambda: 0.0)
        monkeypatch.setattr(server_module, "time", clock)
        monkeypatch.setattr(server_module, "_CLEAN_EVERY_S", 0.0)
        api = Api(ServerConfig())
        monkeypatch.setattr(api, "clean", clean)
        monkeypatch.setattr(server, "apis", [api])
        await server.start()
        await asyncio.wait_for(ended.wait(), PATIENCE_S)
        await server.stop()
    assert cleaned[:3] == [0.0, 600.0, 1e9]
