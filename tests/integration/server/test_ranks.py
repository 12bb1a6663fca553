"""A server whose model runs on two ranks: their end is told, and a new group takes their place."""

from __future__ import annotations

import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import psutil

from tests.waiting import PATIENCE_S, wait_until

from .conftest import RunningServer, running_server

FLAGS = (
    "--backend",
    "cpu",
    "--tensor-parallel-size",
    "2",
    "--num-threads",
    "2",
    "--max-num-seqs",
    "2",
    "--num-kv-blocks",
    "32",
)
PATH = "/v1/completions"
REQUEST = {"prompt": "A cat", "max_tokens": 8, "temperature": 0}


def ranks(server: RunningServer) -> tuple[psutil.Process, psutil.Process]:
    """The engine core, which is rank 0, and rank 1."""
    core = psutil.Process(server.core_pid())
    (other,) = [one for one in core.children() if "vllmx_tp.rank_process" in one.cmdline()]
    return core, other


def lost_and_replaced(
    server: RunningServer, end: Callable[[psutil.Process, psutil.Process], object], *causes: str
) -> None:
    """Ends a group with a request in flight, which it cannot answer as rank 1 is stopped. One of
    the causes is told to that request and by /health."""
    group = ranks(server)
    group[1].suspend()
    with ThreadPoolExecutor(1) as pool:
        request = pool.submit(server.post, PATH, REQUEST)
        wait_until(lambda: server.metric("num_requests_running") == 1)
        end(*group)
        wait_until(lambda: told(causes, server.get("/health").text))
        answer = request.result()
    assert answer.status_code == 503
    assert told(causes, answer.json()["error"]["message"])
    replaced(server, group)


def told(causes: tuple[str, ...], text: str) -> bool:
    return any(cause in text for cause in causes)


def kill(core: psutil.Process, rank: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        core.kill()


def replaced(server: RunningServer, group: tuple[psutil.Process, psutil.Process]) -> None:
    """No process is left, and a new group answers."""
    psutil.wait_procs(group, PATIENCE_S)
    assert not any(one.is_running() for one in group)
    wait_until(lambda: server.get("/health").status_code == 200)
    again = server.post(PATH, REQUEST).json()
    assert again["usage"]["completion_tokens"] == 8


def test_a_group_that_ends_is_started_again() -> None:
    with running_server(*FLAGS) as server:
        first = ranks(server)[1].pid
        cause = f"rank 1 (process {first}) hangs or was stopped"
        lost_and_replaced(server, lambda core, rank: None, cause)
        wait_until(lambda: any(f"{cause}: all ranks are ended" in line for line in server.lines))
        # A busy machine may let the stopped rank be missed before the other one is killed.
        lost_and_replaced(server, kill, "was killed by SIGKILL", "hangs or was stopped")
        group = ranks(server)
        group[0].suspend()
        cause = f"rank 0 (process {group[0].pid}) hangs or was stopped"
        wait_until(lambda: cause in server.get("/health").text)
        replaced(server, group)
        last = ranks(server)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE_S) == 0
    assert not any(one.is_running() for one in last)
