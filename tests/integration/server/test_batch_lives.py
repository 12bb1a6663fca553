"""Batches through the official client, and over the end of everything by SIGKILL."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import openai

from tests.waiting import wait_until

from .conftest import MakeFake, RunningServer


def client_of(running: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0)


def line(custom_id: str, model: str, **body: Any) -> bytes:
    asked = {"model": model, "prompt": f"say {custom_id}", "max_tokens": 6, **body}
    record = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": asked}
    return json.dumps(record).encode() + b"\n"


def begin(client: openai.OpenAI, lines: Iterable[bytes]) -> Any:
    file = client.files.create(file=("in.jsonl", b"".join(lines)), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )


def ended(client: openai.OpenAI, batch: Any) -> Any:
    def has_ended() -> bool:
        nonlocal batch
        batch = client.batches.retrieve(batch.id)
        return batch.status in ("completed", "failed", "cancelled", "expired")

    wait_until(has_ended)
    return batch


def test_the_openai_client_runs_a_batch(server: RunningServer) -> None:
    with client_of(server) as client:
        lines = [line(f"c{i}", "demo", temperature=0) for i in range(10)]
        batch = ended(client, begin(client, [*lines, line("bad", "demo", temperature=-1)]))
        assert batch.status == "completed"
        assert batch.request_counts.failed == 1
        records = [json.loads(x) for x in client.files.content(batch.output_file_id).iter_lines()]
        assert [record["custom_id"] for record in records] == [f"c{i}" for i in range(10)]
        direct = client.completions.create(
            model="demo", prompt="say c3", max_tokens=6, temperature=0
        )
        text = records[3]["response"]["body"]["choices"][0]["text"]
        assert text == direct.choices[0].text
        assert batch.id in [each.id for each in client.batches.list(limit=5)]
        for file_id in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
            assert client.files.delete(file_id).deleted


def test_a_batch_goes_on_after_everything_was_killed(fake_server: MakeFake, tmp_path: Path) -> None:
    flags = ("--data-dir", str(tmp_path / "data"), "--max-num-seqs", "4")
    names = [f"c{i}" for i in range(60)]
    with fake_server(*flags) as running, client_of(running) as client:
        batch = begin(client, [line(name, "fake") for name in names])
        wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 8)
        core = running.core_pid()
        for pid in (running.process.pid, core):
            os.kill(pid, signal.SIGKILL)
        running.process.wait()
    with fake_server(*flags) as running, client_of(running) as client:
        going = client.batches.retrieve(batch.id)
        assert going.request_counts.completed >= 8, "what was answered is not asked again"
        done = ended(client, going)
        assert (done.status, done.request_counts.completed) == ("completed", 60)
        lines = list(client.files.content(done.output_file_id).iter_lines())
        assert [json.loads(each)["custom_id"] for each in lines] == names
    mode = (tmp_path / "data" / "vllmx.sqlite3").stat().st_mode & 0o777
    assert mode == 0o600


def test_a_batch_outlives_the_engine_core(fake_server: MakeFake) -> None:
    """What was in the engine is asked again when it is back."""
    with fake_server("--max-num-seqs", "4") as running, client_of(running) as client:
        names = [f"c{i}" for i in range(30)]
        batch = begin(client, [line(name, "fake") for name in names])
        wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 4)
        os.kill(running.core_pid(), signal.SIGKILL)
        done = ended(client, batch)
        assert (done.status, done.request_counts.completed) == ("completed", 30)
        assert done.error_file_id is None
