"""Which models have a core, and which one makes room for another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllmx_core.config import EngineConfig
from vllmx_core.errors import CapacityError, InvalidRequestError, ModelNotFoundError
from vllmx_engine.wire.messages import CoreStats
from vllmx_server.errors import OverloadedError
from vllmx_server.models import host as host_module
from vllmx_server.models.config import ModelConfig
from vllmx_server.models.host import CoreHost


class Machine:
    """Memory for two models of size 10, and cores that take it."""

    def __init__(self) -> None:
        self.free, self.cores, self.busy = 20, dict[str, Core](), set[str]()
        self.knows_free = True

    async def start(self, plan: Any, door: Any) -> Core:
        await asyncio.sleep(0)
        name = plan.config.name
        if name == "broken":
            raise ModelNotFoundError("it is broken")
        if self.free < 10:
            raise CapacityError("it does not fit")
        self.free -= 10
        self.cores[name] = Core(self, name)
        return self.cores[name]

    async def leave(self, name: str) -> bool:
        return name not in self.busy


class Core:
    """A ProcessFrontend, as much of it as a host sees."""

    info: Any = SimpleNamespace(weight_bytes=7, kv_cache_bytes=3, max_model_len=64, free_bytes=30)
    start_message: Any = None
    status = "ready"
    listener: Any = None

    def __init__(self, machine: Machine, name: str) -> None:
        self._machine, self._name = machine, name

    async def close(self) -> None:
        self._machine.free += 10
        del self._machine.cores[self._name]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(
        host_module, "find_model", lambda config, _: SimpleNamespace(config=config, path=Path("/x"))
    )
    monkeypatch.setattr(host_module, "_weight_bytes", lambda path: 10)
    monkeypatch.setattr(
        host_module, "free_bytes", lambda: machine.free if machine.knows_free else 1 << 40
    )
    monkeypatch.setattr(host_module.ProcessFrontend, "start", machine.start)
    return machine


@pytest.fixture
async def host(machine: Machine) -> AsyncIterator[CoreHost]:
    names = ("a", "b", "c", "broken")
    models = [ModelConfig(engine=EngineConfig(model=name)) for name in names]
    made = CoreHost(models, 0.0, machine.leave)
    yield made
    await made.close()
    assert machine.free == 20


async def states(host: CoreHost) -> dict[str, str]:
    return {card.name: card.state for card in await host.cards()}


@pytest.mark.parametrize("knows_free", [True, False])
async def test_the_one_that_was_asked_for_longest_ago_makes_room(
    host: CoreHost, machine: Machine, knows_free: bool
) -> None:
    """It makes room where memory is known, and where only a core that starts finds out."""
    machine.knows_free = knows_free
    await host.load("a")
    await host.load("b")
    await host.load("a")  # which is there, and used again
    await host.load("c")
    assert set(machine.cores) == {"a", "c"}
    assert await states(host) == {
        "a": "loaded",
        "b": "unloaded",
        "c": "loaded",
        "broken": "unloaded",
    }


async def test_one_that_is_in_use_stays(host: CoreHost, machine: Machine) -> None:
    await host.load("a")
    await host.load("b")
    machine.busy = {"a"}
    machine.cores["b"].listener.stats(CoreStats(num_running=1))
    with pytest.raises(OverloadedError, match="in use"):
        await host.load("c")
    with pytest.raises(InvalidRequestError, match="in use"):
        await host.unload("a")
    assert set(machine.cores) == {"a", "b"}
    machine.cores["b"].listener.stats(CoreStats())
    await host.load("c")
    assert set(machine.cores) == {"a", "c"}


async def test_a_model_is_loaded_once_for_all_who_ask(host: CoreHost, machine: Machine) -> None:
    await asyncio.gather(*(host.load("a") for _ in range(5)))
    assert machine.free == 10
    await host.unload("a")
    await host.unload("a")
    assert machine.free == 20


async def test_one_that_cannot_be_loaded_is_tried_again(host: CoreHost, machine: Machine) -> None:
    for _ in range(2):
        with pytest.raises(ModelNotFoundError, match="broken"):
            await host.load("broken")
    cards = {card.name: card for card in await host.cards()}
    assert (cards["broken"].state, cards["broken"].error) == ("failed", "it is broken")
    with pytest.raises(ModelNotFoundError, match="not one that is loaded"):
        await host.load("unknown")


async def test_what_models_were_promised_is_not_free(machine: Machine) -> None:
    """The system says that it is free, though: pages of a KV cache are taken when they are
    written."""
    machine.free = 1000
    models = [ModelConfig(engine=EngineConfig(model=name)) for name in ("a", "b", "c")]
    host = CoreHost(models, 0.0, machine.leave)
    host.first_took(Core.info)  # 30 were free, the first model has 10 of them
    for name in ("a", "b", "c"):
        await host.load(name)
    assert set(machine.cores) == {"b", "c"}
    await host.close()


async def test_a_core_is_told_its_part(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, EngineConfig] = {}
    start = machine.start

    async def noting(plan: Any, door: Any) -> Core:
        told[plan.config.name] = plan.config
        return await start(plan, door)

    monkeypatch.setattr(host_module.ProcessFrontend, "start", noting)
    parts = {"a": 0.5, "b": None, "c": 0.1}
    models = [
        ModelConfig(engine=EngineConfig(model=name), memory_part=part)
        for name, part in parts.items()
    ]
    host = CoreHost(models, 0.0, machine.leave)
    host.first_took(SimpleNamespace(weight_bytes=0, kv_cache_bytes=0, free_bytes=30))  # type: ignore[arg-type]
    await host.load("a")
    await host.load("b")
    assert [told[name].memory_bytes for name in ("a", "b")] == [15, None]
    machine.free = 9  # too little for "c", though its part of 3 is there: nobody has to make room
    with pytest.raises(CapacityError, match=r"model c may take 0\.10 of it: raise"):
        await host.load("c")
    monkeypatch.setattr(host_module, "_weight_bytes", lambda path: 1)
    with pytest.raises(CapacityError, match=r"does not fit.*model c may take 0\.10 of it: raise"):
        await host.load("c")
    assert set(machine.cores) == {"a", "b"}
    machine.free = 0
    await host.close()
