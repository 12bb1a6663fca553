"""Requests that wait for a model which loads."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from vllmx_core.config import EngineConfig
from vllmx_core.errors import CapacityError
from vllmx_server.errors import OverloadedError, error_response
from vllmx_server.host.models.config import ModelConfig
from vllmx_server.host.models.registry import Models

from tests.waiting import PATIENCE_S


class SlowHost:
    """A host whose model never fits, which it finds out when it is told to."""

    def __init__(self) -> None:
        self.loads = 0
        self.finds_out = asyncio.Event()

    async def load(self, name: str) -> Any:
        self.loads += 1
        await self.finds_out.wait()
        raise CapacityError("it does not fit")


async def test_a_request_waits_no_longer_than_it_may() -> None:
    """And loading goes on for those who come later."""
    configs = [ModelConfig(engine=EngineConfig(model=name)) for name in ("one", "two")]
    default: Any = SimpleNamespace()
    models, host = Models(default, configs, wait_s=0.05), SlowHost()
    models.host = host  # type: ignore[assignment]
    assert await models.served("one") is default
    with pytest.raises(OverloadedError, match=r"takes longer than 0\.05 s: try again") as raised:
        await models.served("two")
    answer = error_response(raised.value)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert not models.is_open("two")
    patient = Models(default, configs, wait_s=PATIENCE_S)
    patient.host = models.host
    models._wait_s = PATIENCE_S
    for each in (models, patient):
        waits = [asyncio.ensure_future(each.served("two")) for _ in range(2)]
        await asyncio.sleep(0)
        host.finds_out.set()
        found = await asyncio.gather(*waits, return_exceptions=True)
        assert [type(error) for error in found] == [CapacityError, CapacityError]
    assert host.loads == 2  # one for all who wait
    assert await models.served("one") is default
    await models.close()
