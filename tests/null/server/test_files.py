"""/v1/files: kept, shown, limited, and nobody else's."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import httpx
import pytest
from vllmx_core.errors import ConfigError
from vllmx_server.apis.batches.files import Files
from vllmx_server.apis.batches.runner import KeptFiles
from vllmx_server.store.folder import Folder, temporary_folder

from tests.waiting import PATIENCE_S

from .conftest import MakeServer, Served
from .loop_meter import shortest_hold


async def upload(
    served: Served, data: bytes = b"{}\n", name: str = "in.jsonl", **options: Any
) -> httpx.Response:
    fields = {"purpose": "batch", **options.pop("fields", {})}
    return await served.client.post(
        "/v1/files", data=fields, files={"file": (name, data)}, **options
    )


async def test_a_file_comes_back_as_it_went(served: Served) -> None:
    data = bytes(range(256)) * 5000
    made = (await upload(served, data, "ä.jsonl")).json()
    assert made["object"] == "file"
    assert (made["bytes"], made["filename"], made["purpose"]) == (len(data), "ä.jsonl", "batch")
    path = f"/v1/files/{made['id']}"
    assert (await served.client.get(path)).json() == made
    content = await served.client.get(path + "/content")
    assert content.content == data
    assert content.headers["content-type"] == "application/octet-stream"
    assert "attachment" in content.headers["content-disposition"]
    done = (await served.client.delete(path)).json()
    assert done == {"id": made["id"], "object": "file", "deleted": True}
    for method, where in (("GET", path), ("GET", path + "/content"), ("DELETE", path)):
        gone = await served.client.request(method, where)
        assert gone.status_code == 404
        assert gone.json()["error"]["code"] == "file_not_found"
    assert list(served.state.storage.folder.files().iterdir()) == []


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://127.0.0.1:1"}, 403),
        ({"origin": "https://mine.example"}, 200),
        ({"origin": "http://evil.example", "x-api-key": "any"}, 200),
        ({}, 200),
    ],
)
async def test_a_web_page_of_others_stores_nothing(
    make_server: MakeServer, sent: dict[str, str], status: int
) -> None:
    """A form is sent by a browser without asking first, unless it has a header of its own."""
    async with make_server({"allowed_origins": ("https://mine.example",)}) as served:
        answer = await upload(served, headers=sent)
        assert answer.status_code == status, answer.text
        if status == 403:
            assert answer.json()["error"]["code"] == "origin_not_allowed"
            assert "--allowed-origins" in answer.json()["error"]["message"]
        own = await upload(served, headers={"origin": served.url})
        assert own.status_code == 200
    async with make_server({"allowed_origins": ("*",)}) as served:
        assert (await upload(served, headers={"origin": "http://a.example"})).status_code == 200


async def test_pages(served: Served) -> None:
    ids = [(await upload(served)).json()["id"] for _ in range(5)]
    other = await upload(served, fields={"purpose": "user_data"})
    ids.append(other.json()["id"])

    async def page(**query: Any) -> tuple[list[str], bool]:
        found = (await served.client.get("/v1/files", params=query)).json()
        assert found["object"] == "list"
        return [each["id"] for each in found["data"]], found["has_more"]

    assert await page() == (ids[::-1], False)
    assert await page(order="asc", limit=2) == (ids[:2], True)
    assert await page(order="asc", limit=4, after=ids[1]) == (ids[2:], False)
    assert await page(limit=2, after=ids[2]) == (ids[1::-1], False)
    assert await page(purpose="user_data") == (ids[5:], False)
    assert await page(after="file-none") == ([], False)
    for query in ("limit=0", "limit=x", "order=up", "nonsense=1"):
        response = await served.client.get(f"/v1/files?{query}")
        assert response.status_code == 400
        assert response.json()["error"]["param"] == query.partition("=")[0]


async def test_metrics_name_the_route_and_no_id(served: Served) -> None:
    file_id = (await upload(served)).json()["id"]
    for path in ("", "/content", "/content/more"):
        await served.client.get(f"/v1/files/{file_id}{path}")
    wanted = {"/v1/files/{id}", "/v1/files/{id}/content", "other"}
    text = ""
    async with asyncio.timeout(PATIENCE_S):  # a request is counted after its answer was sent
        while not all(f'handler="{name}",method="GET"' in text for name in wanted):
            text = (await served.client.get("/metrics")).text
    assert file_id not in text


async def test_names_lead_nowhere(served: Served) -> None:
    made = (await upload(served, name="../../../../tmp/evil")).json()
    assert made["filename"] == "evil"
    for name in (
        "..%2f..%2fvllmx.sqlite3",
        "%2e%2e",
        "..",
        "a/b",
        "%00",
        "%ed%a0%80",
        "%ff",
        "'; DROP TABLE files",
    ):
        response = await served.client.get(f"/v1/files/{name}/content")
        assert response.status_code == 404, name


async def test_other_keys_see_nothing(make_server: MakeServer) -> None:
    async with make_server({"api_key": ("one", "two")}) as served:
        one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
        file_id = (await upload(served, headers=one)).json()["id"]
        path = f"/v1/files/{file_id}"
        for method, where in (("GET", path), ("GET", path + "/content"), ("DELETE", path)):
            response = await served.client.request(method, where, headers=two)
            assert response.status_code == 404
        assert (await served.client.get("/v1/files", headers=two)).json()["data"] == []
        body = {"input_file_id": file_id, "endpoint": "/v1/completions"}
        response = await served.client.post("/v1/batches", json=body, headers=two)
        assert response.status_code == 404
        assert (await served.client.get(path, headers=one)).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"purpose": "other"}, "purpose"),
        ({"nonsense": "1"}, "nonsense"),
        ({"expires_after[anchor]": "now"}, "expires_after[anchor]"),
        ({"expires_after[seconds]": "-1"}, "expires_after[seconds]"),
        ({"expires_after[seconds]": "9" * 400}, "expires_after[seconds]"),
        ({"purpose": "x" * 5000}, "purpose"),
    ],
)
async def test_wrong_fields_are_named(served: Served, fields: dict[str, str], param: str) -> None:
    response = await upload(served, fields=fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert list(served.state.storage.folder.files().iterdir()) == []


async def test_what_is_no_upload_is_refused(served: Served) -> None:
    for content, headers in (
        (b"{}", {"content-type": "application/json"}),
        (b"--x\r\n", {"content-type": "multipart/form-data; boundary=x"}),
        (b"", {"content-type": "multipart/form-data; boundary=x"}),
    ):
        response = await served.client.post("/v1/files", content=content, headers=headers)
        assert response.status_code == 400, response.text
    twice = [("file", ("a", b"x")), ("file", ("b", b"y"))]
    data = {"purpose": "batch"}
    for files in (twice, [("other", ("a", b"x"))]):
        response = await served.client.post("/v1/files", data=data, files=files)
        assert response.status_code == 400
    response = await served.client.post("/v1/files", data=data, files=[("purpose", (None, b"z"))])
    assert response.status_code == 400
    assert list(served.state.storage.folder.files().iterdir()) == []


async def test_sizes_are_limited(make_server: MakeServer) -> None:
    limits = {"max_file_bytes": 100_000, "max_stored_bytes": 310_000}
    async with make_server(limits) as served:
        response = await upload(served, b"x" * 100_001)
        assert response.status_code == 413
        assert "--max-file-bytes" in response.json()["error"]["message"]
        response = await upload(served, b"x" * 1_000_000)
        assert response.status_code == 413
        first = (await upload(served, b"x" * 100_000)).json()["id"]
        assert (await upload(served, b"x" * 100_000)).status_code == 200
        full = await upload(served, b"x" * 100_000)
        assert (full.status_code, full.json()["error"]["code"]) == (413, "storage_full")
        await served.client.delete(f"/v1/files/{first}")
        assert (await upload(served, b"x" * 90_000)).status_code == 200
        assert len(list(served.state.storage.folder.files().iterdir())) == 2


async def test_empty_files_count_too(make_server: MakeServer) -> None:
    async with make_server({"max_stored_bytes": 10_000}) as served:
        sent = [await upload(served, b"") for _ in range(2)]
        assert [each.status_code for each in sent] == [200, 200]
        full = await upload(served, b"")
        assert (full.status_code, full.json()["error"]["code"]) == (413, "storage_full")
        assert "--max-stored-bytes" in full.json()["error"]["message"]


async def test_the_number_of_files_is_limited(make_server: MakeServer) -> None:
    async with make_server({"max_stored_files": 3}) as served:
        sent = await asyncio.gather(*(upload(served, b"") for _ in range(8)))
        assert sorted(each.status_code for each in sent) == [200] * 3 + [413] * 5
        message = (await upload(served, b"")).json()["error"]["message"]
        assert "3 files are kept" in message
        assert "--max-stored-files" in message
        kept = next(each.json()["id"] for each in sent if each.status_code == 200)
        await served.client.delete(f"/v1/files/{kept}")
        assert (await upload(served, b"")).status_code == 200


async def test_files_expire(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    file_id = (await upload(served, fields={"expires_after[seconds]": "60"})).json()["id"]
    kept = (await upload(served)).json()["id"]
    from vllmx_server.apis.batches import files
    from vllmx_server.store import database as ids

    later = ids.now() + 61
    monkeypatch.setattr(files, "now", lambda: later)
    assert (await served.client.get(f"/v1/files/{file_id}")).status_code == 404
    await served.state.store(KeptFiles).files.clean()
    assert [p.name for p in served.state.storage.folder.files().iterdir()] == [kept]


async def test_a_large_upload_holds_nobody(served: Served) -> None:
    data = b"\r\n--" * 5_000_000
    meter, response = await shortest_hold(lambda: upload(served, data), 60)
    assert response.json()["bytes"] == len(data)
    assert meter.longest_ms < 60, meter.what  # the client of the test works in the same loop


def test_a_folder_is_one_servers(tmp_path: Path) -> None:
    first = Folder(str(tmp_path / "d"))
    with pytest.raises(ConfigError, match="is used by another server"):
        Folder(str(tmp_path / "d"))
    first.close()
    Folder(str(tmp_path / "d")).close()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be used"):
        Folder(str(tmp_path / "file"))


def test_files_of_a_killed_server_go_with_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    running = Folder(None)
    (running.files() / "kept").touch()
    killed, begun = temporary_folder(), temporary_folder()
    Folder(str(killed)).close()  # as the system does
    (killed / "files").mkdir()
    following = Folder(None)
    assert following.files() != running.files()
    assert not killed.exists(), "what a killed server left"
    assert begun.exists(), "one that has no lock yet"
    assert (running.files() / "kept").exists()
    running.close()
    following.close()
    assert list(tmp_path.iterdir()) == [begun]


async def test_a_file_opened_for_nobody_is_closed(tmp_path: Path) -> None:
    """Whoever waited for it was cancelled meanwhile."""
    files = Files.__new__(Files)
    files._threads = ThreadPoolExecutor(1)
    begun, go_on, opened = threading.Event(), threading.Event(), list[BinaryIO]()

    def work() -> BinaryIO:
        begun.set()
        go_on.wait(PATIENCE_S)
        opened.append((tmp_path / "file").open("wb"))
        return opened[0]

    waiting = asyncio.create_task(files.on_thread(work, lambda file: file.close()))
    await asyncio.to_thread(begun.wait, PATIENCE_S)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    go_on.set()
    await asyncio.to_thread(files._threads.shutdown)
    await asyncio.sleep(0)
    assert opened[0].closed
