"""Replicas that come and go with the load, by a clock that the test turns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from vllmx_core.errors import ConfigError
from vllmx_engine.link.frontend import Listener
from vllmx_engine.replicas.frontend import ReplicaFrontend
from vllmx_engine.replicas.scaling import GROW_AFTER_S, LONG_WAIT_S, SHRINK_AFTER_S, Scaling
from vllmx_engine.wire.ipc import Announced
from vllmx_engine.wire.messages import ReplicaLoad

from tests.waiting import until

from .test_replica_frontend import PlayedCore, Seen, request

LONG = 2 * LONG_WAIT_S


def test_a_reason_must_hold_for_a_while() -> None:
    scaling = Scaling(1)
    assert scaling.step(LONG, 9, 1, 100.0) == 0
    assert scaling.step(LONG, 9, 1, 99.9 + GROW_AFTER_S) == 0
    assert scaling.step(0.0, 9, 1, 100.0 + GROW_AFTER_S) == 0  # over for a moment
    assert scaling.step(LONG, 9, 1, 100.1 + GROW_AFTER_S) == 0
    assert scaling.step(LONG, 9, 1, 100.1 + 2 * GROW_AFTER_S) == 1
    assert scaling.step(LONG, 9, 2, 100.2 + 2 * GROW_AFTER_S) == 0, "the next one needs as long"


def test_between_both_reasons_nothing_changes() -> None:
    scaling = Scaling(1)
    now_s = 1.0
    for wait_s, num_running in ((LONG_WAIT_S / 2, 1), (0.0, 2), (0.0, 50)):
        for _ in range(9):
            now_s += SHRINK_AFTER_S
            assert scaling.step(wait_s, num_running, 2, now_s) == 0
    assert scaling.step(0.0, 0, 2, now_s) == 0
    assert scaling.step(0.0, 1, 2, now_s + SHRINK_AFTER_S - 1) == 0  # one request came
    assert scaling.step(0.0, 0, 2, now_s + SHRINK_AFTER_S) == 0
    assert scaling.step(0.0, 0, 2, now_s + 2 * SHRINK_AFTER_S) == -1
    for _ in range(3):
        now_s += SHRINK_AFTER_S
        assert scaling.step(0.0, 0, 1, now_s + 9 * SHRINK_AFTER_S) == 0, "one always runs"


class SleepingCore(PlayedCore):
    """Sleeps, and wakes unless it has a fault."""

    fault = False

    async def sleep(self) -> None:
        self.status = "asleep"

    async def wake(self) -> None:
        if self.fault:
            raise ConfigError("no memory")
        self.live()


@pytest.fixture
async def seen() -> AsyncIterator[Seen]:
    cores: list[PlayedCore] = []

    async def start(number: int, told: Listener) -> PlayedCore:
        core = SleepingCore(number, told)
        core.status = "ready" if number == 0 else "asleep"
        cores.append(core)
        return core

    made = await ReplicaFrontend.start(b"k" * 32, 3, start, least=1)
    yield Seen(made, cores)
    await made.close()


def states(seen: Seen) -> list[str]:
    return [one.state for one in seen.frontend.replicas()]


def wait(seen: Seen, seconds: float) -> None:
    for core in seen.cores:
        if core.status == "ready":
            assert core.listener is not None
            load = ReplicaLoad(queued_s=seconds, token_s=1e-3, free_rows=9)
            core.listener.announced(Announced(b"", b"", load))


async def changed(seen: Seen, now_s: float) -> None:
    seen.frontend._scale(now_s)
    task = seen.frontend._changing
    if task is not None:
        await task
    await asyncio.sleep(0)


async def test_replicas_are_added_while_requests_wait(
    seen: Seen, caplog: pytest.LogCaptureFixture
) -> None:
    assert states(seen) == ["ready", "spare", "spare"]
    broken = seen.cores[1]
    assert isinstance(broken, SleepingCore)
    broken.fault = True
    for turn in (1, 2):  # the first one finds no memory
        wait(seen, 1000.0)
        await changed(seen, 100.0 * turn)
        assert states(seen)[1] == "spare"
        await changed(seen, 100.0 * turn + GROW_AFTER_S)
        broken.fault = False
    assert "replica 1 cannot be added: no memory" in caplog.text
    await until(lambda: states(seen) == ["ready", "ready", "spare"])
    seen.frontend.add([request()])
    assert seen.holder() is broken, "it has nothing to do"
    wait(seen, 1000.0)
    await changed(seen, 300.0)
    await changed(seen, 300.0 + GROW_AFTER_S)
    await until(lambda: states(seen) == ["ready"] * 3)
    wait(seen, 1000.0)
    await changed(seen, 400.0)
    await changed(seen, 400.0 + GROW_AFTER_S)
    assert states(seen) == ["ready"] * 3, "there are no more"


async def test_replicas_with_nothing_to_do_are_drained(seen: Seen) -> None:
    await seen.frontend.bring_back(1)
    await until(lambda: states(seen) == ["ready", "ready", "spare"])
    await seen.frontend.bring_back(2)
    await until(lambda: states(seen) == ["ready"] * 3)
    wait(seen, 0.0)
    seen.frontend.add([request()])
    holder = seen.holder()
    await changed(seen, 100.0)
    await changed(seen, 100.0 + SHRINK_AFTER_S)
    assert states(seen).count("spare") == 1
    assert holder.status == "ready", "others had less to do"
    await changed(seen, 1000.0)
    await changed(seen, 1000.0 + SHRINK_AFTER_S)
    assert states(seen).count("spare") == 1, "two are left for one request"
    seen.frontend.abort(["r"])
    await changed(seen, 2000.0)
    await changed(seen, 2000.0 + SHRINK_AFTER_S)
    assert states(seen).count("ready") == 1
    await changed(seen, 3000.0)
    await changed(seen, 3000.0 + SHRINK_AFTER_S)
    assert states(seen).count("ready") == 1


async def test_an_operators_drain_is_not_undone(seen: Seen) -> None:
    await seen.frontend.bring_back(1)
    await until(lambda: states(seen) == ["ready", "ready", "spare"])
    await seen.frontend.drain(1, 0.0)
    assert states(seen) == ["ready", "drained", "spare"]
    wait(seen, 1000.0)
    await changed(seen, 100.0)
    await changed(seen, 100.0 + GROW_AFTER_S)
    await until(lambda: states(seen) == ["ready", "drained", "ready"])
