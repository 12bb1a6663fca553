"""Servers one after the other over one folder of KV blocks."""

from __future__ import annotations

import os
import signal
import stat
from functools import partial
from pathlib import Path
from typing import Any

from tests.waiting import wait_until

from .conftest import RunningServer, running_server

PROMPT = "In a quiet harbour town the lighthouse keeper counted ships. " * 6
BODY = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "logprobs": 2, "ignore_eos": True}


def serve(folder: Path, *flags: str) -> Any:
    return running_server(
        "--backend", "cpu", "--kv-disk", str(folder), "--num-kv-blocks", "128", *flags
    )


def ask(server: RunningServer, **fields: Any) -> tuple[int, Any]:
    """The cached tokens of the prompt, and the choice with its log-probabilities."""
    answer = server.post("/v1/completions", BODY | fields).json()
    details = answer["usage"].get("prompt_tokens_details") or {}
    return details.get("cached_tokens", 0), answer["choices"][0]


def ended(server: RunningServer) -> None:
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(20) == 0


def test_a_restarted_server_finds_its_blocks(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with serve(folder) as server:
        cached, first = ask(server)
        assert cached == 0
        ended(server)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert set(modes.values()) == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    with serve(folder) as server:
        cached, second = ask(server)
        assert cached > 50
        assert second == first
        assert server.metric("kv_tier_tokens_total") == cached
        with serve(folder) as other:  # without the folder, which is in use
            cached, third = ask(other)
            assert (cached, third) == (0, first)
            wait_until(lambda: any("in use by another process" in line for line in other.lines))
        stored = server.metric("kv_store_blocks")
        other_prompt = PROMPT[::-1]
        fifth = ask(server, prompt=other_prompt)[1]
        wait_until(lambda: server.metric("kv_store_blocks") > stored)  # while nothing runs
        killed = server.core_pid()
        os.kill(killed, signal.SIGKILL)
        cores = partial(server.child_pids, "vllmx_engine.link.process")
        wait_until(lambda: killed not in cores() and len(cores()) == 1)
        wait_until(lambda: server.get("/health").status_code == 200)
        cached, fourth = ask(server)
        assert cached > 50
        assert fourth == first
        cached, sixth = ask(server, prompt=other_prompt)
        assert cached > 50
        assert sixth == fifth
        ended(server)
