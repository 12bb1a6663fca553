"""/v1/batches: answered, failed, cancelled, expired, behind everybody else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from vllmx_server.apis.batches import input as batch_input
from vllmx_server.apis.batches.lines import LineSlots
from vllmx_server.generating.reading import BATCH_PRIORITY

from tests.waiting import PATIENCE_S, until

from .conftest import MakeServer, Served
from .loop_meter import shortest_hold

URL = "/v1/completions"


def line(custom_id: str = "a", url: str = URL, **body: Any) -> dict[str, Any]:
    body = {"prompt": "ab", "max_tokens": 4, "ignore_eos": True, "temperature": 0, **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def lines_of(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(each) for each in data.splitlines()]


async def upload(served: Served, lines: list[dict[str, Any]] | bytes) -> str:
    if isinstance(lines, list):
        lines = b"".join(json.dumps(each).encode() + b"\n" for each in lines)
    made = await served.client.post(
        "/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", lines)}
    )
    return str(made.json()["id"])


async def begin(
    served: Served, lines: list[dict[str, Any]] | bytes, **options: Any
) -> dict[str, Any]:
    body = {"endpoint": URL, **options, "input_file_id": await upload(served, lines)}
    response = await served.client.post("/v1/batches", json=body)
    assert response.status_code == 200, response.text
    return response.json()  # type: ignore[no-any-return]


async def reaches(
    served: Served, batch: dict[str, Any], holds: Callable[[dict[str, Any]], object]
) -> dict[str, Any]:
    async with asyncio.timeout(PATIENCE_S):
        while not holds(batch):
            await asyncio.sleep(0.01)
            batch = (await served.client.get(f"/v1/batches/{batch['id']}")).json()
    return batch


async def ended(served: Served, batch: dict[str, Any]) -> dict[str, Any]:
    ends = ("completed", "failed", "expired", "cancelled")
    return await reaches(served, batch, lambda b: b["status"] in ends)


async def content(served: Served, file_id: str) -> list[dict[str, Any]]:
    return lines_of((await served.client.get(f"/v1/files/{file_id}/content")).content)


async def test_answers_are_those_of_the_route(served: Served) -> None:
    lines = [line(f"c{i}", prompt=f"prompt {i}", max_tokens=3 + i % 5) for i in range(40)]
    begun = await begin(served, lines, metadata={"a": "b"})
    assert begun["object"] == "batch"
    assert begun["status"] == "validating"
    batch = await ended(served, begun)
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
    assert batch["error_file_id"] is None
    assert batch["metadata"] == {"a": "b"}
    assert batch["created_at"] <= batch["in_progress_at"] <= batch["completed_at"]
    records = await content(served, batch["output_file_id"])
    assert [record["custom_id"] for record in records] == [f"c{i}" for i in range(40)]
    for record, asked in zip(records, lines, strict=True):
        assert record["error"] is None
        assert record["response"]["status_code"] == 200
        direct = await served.complete(**asked["body"])
        assert record["response"]["body"]["choices"] == direct["choices"]
        assert (
            record["response"]["body"]["usage"]["completion_tokens"] == asked["body"]["max_tokens"]
        )
    info = (await served.client.get(f"/v1/files/{batch['output_file_id']}")).json()
    assert info["purpose"] == "batch_output"
    listed = (await served.client.get("/v1/batches?limit=1")).json()
    assert listed["data"] == [batch]
    await served.becomes_idle()


async def test_chats_and_messages_go_to_their_routes(served: Served) -> None:
    talk = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "ignore_eos": True}
    for url, kind in (("/v1/chat/completions", "chat.completion"), ("/v1/messages", "message")):
        asked = {"custom_id": "x", "method": "POST", "url": url, "body": talk}
        batch = await ended(served, await begin(served, [asked], endpoint=url))
        (record,) = await content(served, batch["output_file_id"])
        body = record["response"]["body"]
        assert kind in (body.get("object"), body.get("type"))


async def test_lines_that_fail_stand_in_the_error_file(served: Served) -> None:
    lines = [
        line("good"),
        line("hot", temperature=-1),
        line("unknown", nonsense=1),
        line("streamed", stream=True),
        line("other", model="other"),
        line("long", prompt="x" * 2000),
    ]
    batch = await ended(served, await begin(served, lines))
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 6, "completed": 1, "failed": 5}
    (good,) = await content(served, batch["output_file_id"])
    assert good["custom_id"] == "good"
    errors = {e["custom_id"]: e for e in await content(served, batch["error_file_id"])}
    statuses = {name: e["response"]["status_code"] for name, e in errors.items()}
    assert statuses == {"hot": 400, "unknown": 400, "streamed": 400, "other": 404, "long": 400}
    assert errors["hot"]["response"]["body"]["error"]["param"] == "temperature"
    assert errors["streamed"]["response"]["body"]["error"]["param"] == "stream"


@pytest.mark.parametrize(
    ("data", "code", "where"),
    [
        (b"", "empty_file", None),
        (b"\n\n", "empty_file", None),
        (b"\xff\xfe\x00", "invalid_json_line", 1),
        (b"[1, 2", "invalid_json_line", 1),
        (b"[" * 5000, "invalid_json_line", 1),
        (b'{"custom_id": "a"}', "invalid_json_line", 1),
        (json.dumps({**line(), "extra": 1}).encode(), "invalid_json_line", 1),
        (json.dumps({**line(), "body": "text"}).encode(), "invalid_json_line", 1),
        (json.dumps({**line(), "method": "GET"}).encode(), "invalid_json_line", 1),
        (json.dumps({**line(), "custom_id": "x" * 513}).encode(), "invalid_json_line", 1),
        (json.dumps(line(url="/metrics")).encode(), "mismatched_url", 1),
        (b"\n".join([json.dumps(line()).encode()] * 2), "duplicate_custom_id", 2),
        (json.dumps(line("a")).encode() + b"\n" + b" " * 9_000_000, "line_too_long", 2),
    ],
)
async def test_inputs_that_are_none_fail_the_batch(
    served: Served, data: bytes, code: str, where: int | None
) -> None:
    batch = await ended(served, await begin(served, data))
    assert batch["status"] == "failed"
    (error,) = batch["errors"]["data"]
    assert (error["code"], error["line"]) == (code, where)
    assert batch["output_file_id"] is None


async def test_errors_of_an_input_are_bounded(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = await ended(served, await begin(served, b"x\n" * 1000))
    assert len(batch["errors"]["data"]) == 50
    monkeypatch.setattr(batch_input, "MAX_LINES", 3)
    batch = await ended(served, await begin(served, [line(str(i)) for i in range(4)]))
    assert [e["code"] for e in batch["errors"]["data"]] == ["too_many_lines"]
    batch = await ended(served, await begin(served, b"\n" * 10))
    assert [e["code"] for e in batch["errors"]["data"]] == ["too_many_lines"]


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"endpoint": "/metrics"}, 400, "endpoint"),
        ({"completion_window": "soon"}, 400, "completion_window"),
        ({"completion_window": "31d"}, 400, "completion_window"),
        ({"input_file_id": "file-none"}, 404, None),
        ({"input_file_id": "../x"}, 404, None),
        ({"input_file_id": "x" * 65}, 400, "input_file_id"),
        ({"metadata": {str(i): "x" for i in range(17)}}, 400, "metadata"),
        ({"metadata": {"k": "x" * 513}}, 400, "metadata[...]"),
        (
            {"output_expires_after": {"anchor": "created_at", "seconds": 0}},
            400,
            "output_expires_after.seconds",
        ),
        ({"nonsense": 1}, 400, "nonsense"),
    ],
)
async def test_wrong_batches_are_refused(
    served: Served, body: dict[str, Any], status: int, param: str | None
) -> None:
    plain = {"input_file_id": "file-none", "endpoint": URL}
    response = await served.client.post("/v1/batches", json={**plain, **body})
    assert response.status_code == status, response.text
    assert response.json()["error"]["param"] == param
    for path in ("/v1/batches/none", "/v1/batches/..%2f"):
        assert (await served.client.get(path)).status_code == 404
    assert (await served.client.post("/v1/batches/none/cancel")).status_code == 404


async def test_other_keys_see_nothing(make_server: MakeServer) -> None:
    async with make_server({"api_key": ("one", "two")}) as served:
        served.client.headers["authorization"] = "Bearer one"
        mine = await ended(served, await begin(served, [line(prompt="a", max_tokens=1)]))
        path = f"/v1/batches/{mine['id']}"
        output = f"/v1/files/{mine['output_file_id']}"
        served.client.headers["authorization"] = "Bearer two"
        for method, where in (
            ("GET", path),
            ("POST", path + "/cancel"),
            ("GET", output),
            ("GET", output + "/content"),
        ):
            assert (await served.client.request(method, where)).status_code == 404
        assert (await served.client.get("/v1/batches")).json()["data"] == []
        served.client.headers["authorization"] = "Bearer one"
        assert (await served.client.get(path)).json()["status"] == "completed"


async def test_a_cancelled_batch_keeps_what_it_has(make_server: MakeServer) -> None:
    async with make_server(engine={"max_num_seqs": 2}, step_s=0.005) as served:
        lines = [line("short", max_tokens=1), *(line(str(i), max_tokens=400) for i in range(20))]
        begun = await begin(served, lines)
        await reaches(served, begun, lambda b: b["request_counts"]["completed"])
        used = await served.client.delete(f"/v1/files/{begun['input_file_id']}")
        assert used.status_code == 400
        assert begun["id"] in used.json()["error"]["message"]
        cancelled = await served.client.post(f"/v1/batches/{begun['id']}/cancel")
        assert cancelled.json()["status"] in ("cancelling", "cancelled")
        batch = await ended(served, cancelled.json())
        assert batch["status"] == "cancelled"
        output = await content(served, batch["output_file_id"])
        errors = await content(served, batch["error_file_id"])
        assert output[0]["custom_id"] == "short"
        assert {e["error"]["code"] for e in errors} == {"batch_cancelled"}
        names = [each["custom_id"] for each in output + errors]
        assert sorted(names) == sorted(each["custom_id"] for each in lines)
        again = await served.client.post(f"/v1/batches/{begun['id']}/cancel")
        assert again.status_code == 400
        await served.becomes_idle()


async def test_a_batch_expires(make_server: MakeServer) -> None:
    async with make_server(engine={"max_num_seqs": 2}, step_s=0.02) as served:
        lines = [line(str(i), max_tokens=400) for i in range(20)]
        batch = await ended(served, await begin(served, lines, completion_window="1s"))
        assert batch["status"] == "expired"
        assert batch["expired_at"]
        errors = await content(served, batch["error_file_id"])
        assert [e["error"]["code"] for e in errors] == ["batch_expired"] * 20
        await served.becomes_idle()


async def test_batches_come_behind_everybody_else(make_server: MakeServer) -> None:
    """The batch has taken every row when the other request comes."""
    async with make_server(engine={"max_num_seqs": 2}, step_s=0.005, max_model_len=5000) as served:
        batch = await begin(served, [line(str(i), max_tokens=4500) for i in range(30)])
        await until(lambda: served.llm.num_in_flight >= 3)
        streams = list(served.llm._streams)
        assert {s.request.core[0].priority for s in streams} == {BATCH_PRIORITY}
        assert (await served.complete(max_tokens=5))["usage"]["completion_tokens"] == 5
        now = (await served.client.get(f"/v1/batches/{batch['id']}")).json()
        assert now["request_counts"]["completed"] <= 4
        await served.client.post(f"/v1/batches/{batch['id']}/cancel")
        await ended(served, batch)


async def test_places_are_what_others_leave() -> None:
    others = 0
    slots = LineSlots(lambda: 8, lambda: others)
    for _ in range(13):
        await asyncio.wait_for(slots.take(), PATIENCE_S)
    waiting = [asyncio.ensure_future(slots.take()) for _ in range(6)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    waiting[0].cancel()
    for _ in range(2):
        slots.leave()
        await asyncio.sleep(0)
    assert not any(task.done() for task in waiting[1:]), "they are given several at a time"
    slots.leave()
    await until(lambda: all(task.done() for task in waiting[:4]))
    assert waiting[0].cancelled()
    assert slots.num_taken == 13, "the one that was cancelled took none"
    others = 6
    for _ in range(9):
        slots.leave()
    await asyncio.sleep(0)
    assert (slots.num_taken, waiting[4].done()) == (4, False)
    slots.leave()
    await until(waiting[4].done)
    assert (slots.num_taken, waiting[5].done()) == (4, False)
    others = 100
    for _ in range(3):
        slots.leave()
    await asyncio.sleep(0)
    assert not waiting[5].done()
    slots.leave()
    await until(waiting[5].done)
    assert slots.num_taken == 1, "a batch ends some day"


async def test_batches_that_ended_are_bounded(make_server: MakeServer) -> None:
    async with make_server({"max_stored_files": 3}) as served:
        file_id = await upload(served, b"no request")
        body = {"endpoint": URL, "input_file_id": file_id}
        made = []
        for _ in range(5):
            begun = (await served.client.post("/v1/batches", json=body)).json()
            made.append((await ended(served, begun))["id"])
        listed = (await served.client.get("/v1/batches")).json()["data"]
        assert [each["id"] for each in listed] == made[:1:-1]


async def test_what_is_left_when_the_server_ends_goes_on(
    make_server: MakeServer, tmp_path: Any
) -> None:
    folder = {"data_dir": str(tmp_path / "data")}
    lines = [line(str(i), max_tokens=30) for i in range(40)]
    async with make_server(folder, {"max_num_seqs": 2}, step_s=0.002) as served:
        begun = await begin(served, lines)
        await reaches(served, begun, lambda b: b["request_counts"]["completed"] > 2)
    async with make_server(folder) as served:
        batch = await ended(served, begun)
        assert batch["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
        output = await content(served, batch["output_file_id"])
        assert [each["custom_id"] for each in output] == [str(i) for i in range(40)]
        left = await served.state.storage.database.run(
            lambda c: c.execute("SELECT count(*) FROM lines").fetchone()
        )
        assert left == (0,), "lines are forgotten once they stand in the files"


async def test_a_draining_server_does_not_wait_for_batches(make_server: MakeServer) -> None:
    async with make_server(step_s=0.01) as served:
        batch = await begin(served, [line(str(i), max_tokens=500) for i in range(50)])
        await reaches(served, batch, lambda b: b["status"] == "in_progress")
        assert await asyncio.wait_for(served.server.drain(4 * PATIENCE_S), PATIENCE_S)
        refused = await served.client.post(f"/v1/batches/{batch['id']}/cancel")
        assert refused.status_code == 503
        await served.becomes_idle()


async def test_a_large_input_holds_nobody(served: Served) -> None:
    file_id = await upload(served, [line(str(i), max_tokens=1) for i in range(5000)])
    body = {"input_file_id": file_id, "endpoint": URL}

    async def begin_and_cancel() -> None:
        batch = (await served.client.post("/v1/batches", json=body)).json()
        await reaches(served, batch, lambda b: b["request_counts"]["completed"] > 100)
        await served.client.post(f"/v1/batches/{batch['id']}/cancel")
        await ended(served, batch)

    meter, _ = await shortest_hold(begin_and_cancel, 20)
    assert meter.longest_ms < 20, meter.what
