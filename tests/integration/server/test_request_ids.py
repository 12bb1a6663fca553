"""The ids that clients see stand in what the engine core logs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from vllmx_testing.fake_checkpoint import make_fake_checkpoint

from tests.waiting import wait_until

from .conftest import MakeFake, RunningServer

LONG = {"max_tokens": 500, "ignore_eos": True}
ASKED = {"prompt": [65, 66]} | LONG


@pytest.fixture
def troubled_model(tmp_path: Path) -> Path:
    """Three of its steps fail, and a later one never comes back."""
    settings: dict[str, Any] = {"vocab_size": 259, "eos_id": None, "max_model_len": 4096}
    steps: dict[str, Any] = {"fail_steps": [20, 40, 60], "hang_steps": [80]}
    return make_fake_checkpoint(tmp_path / "model", **settings, **steps)


def core_lines(server: RunningServer, core: int, pattern: str) -> list[str]:
    """The messages of the core in which this is found."""
    records = [json.loads(line) for line in server.lines if line.startswith("{")]
    found = [each["message"] for each in records if each["process"] == core]
    return [message for message in found if re.search(pattern, message, re.DOTALL)]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_ids_of_clients_in_the_log_of_the_core(
    fake_server: MakeFake, troubled_model: Path, workers: str
) -> None:
    flags = ("--log-format", "json", "--step-timeout-s", "0.5", "--api-workers", workers)
    with fake_server("--model", str(troubled_model), *flags) as server:
        core = server.core_pid()

        def ends(words: str, answer: httpx.Response) -> None:
            """A line of the core has these words and the id that the answer has."""
            name = answer.headers["x-request-id"]
            pattern = words + r".*\(" + re.escape(name) + r"\)"
            wait_until(lambda: bool(core_lines(server, core, pattern)))

        for headers in ({"x-request-id": "my-trace:1.a"}, {}):
            failed = server.post("/v1/completions", ASKED, headers=headers)
            assert failed.status_code == 500, failed.text
            ends("request ", failed)
        talk = {"messages": [{"role": "user", "content": "a"}]} | LONG
        failed = server.post("/v1/messages", talk)
        assert failed.status_code == 500, failed.text
        assert failed.headers["request-id"] == failed.headers["x-request-id"]
        ends("request ", failed)
        hung = server.post("/v1/completions", ASKED, headers={"x-request-id": "the-last"})
        assert hung.status_code == 503, hung.text
        ends("requests in it: ", hung)
