"""Which models have a core, and which one makes room for another."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllmx_core.config import EngineConfig
from vllmx_core.errors import (
    BackendUnavailableError,
    CapacityError,
    InvalidRequestError,
    ModelNotFoundError,
)
from vllmx_core.plugins.registry import Registry
from vllmx_core.plugins.specs import BackendSpec
from vllmx_engine.core.found_model import FoundModel
from vllmx_engine.wire.messages import CoreStats
from vllmx_server.errors import OverloadedError
from vllmx_server.host.models import device_memory
from vllmx_server.host.models import host as host_module
from vllmx_server.host.models.config import ModelConfig
from vllmx_server.host.models.device_memory import HOST, DeviceMemory, FreeMemory
from vllmx_server.host.models.host import CoreHost

from tests.waiting import PATIENCE_S


class Machine:
    """Memory for two models of size 10, and cores that take it."""

    def __init__(self) -> None:
        self.free, self.cores, self.busy = 20, dict[str, Core](), set[str]()
        self.knows_free = True
        self.gpu = 10
        """Memory of another device."""

    async def start(self, plan: Any, door: Any) -> Core:
        await asyncio.sleep(0)
        name = plan.config.name
        if name == "broken":
            raise ModelNotFoundError("it is broken")
        on_gpu = plan.config.backend == "gpu"
        if (self.gpu if on_gpu else self.free) < 10:
            raise CapacityError("it does not fit")
        self.take(10, on_gpu=on_gpu)
        self.cores[name] = Core(self, name, on_gpu=on_gpu)
        return self.cores[name]

    def take(self, size: int, *, on_gpu: bool) -> None:
        if on_gpu:
            self.gpu -= size
        else:
            self.free -= size

    async def device(self, _: Any, backend: str) -> str:
        return "gpu" if backend == "gpu" else HOST

    async def free_memory(self, _: Any, backend: str) -> FreeMemory:
        if backend == "gpu":
            return FreeMemory("gpu", self.gpu)
        return FreeMemory(HOST, self.free if self.knows_free else math.inf)

    async def leave(self, name: str) -> bool:
        return name not in self.busy


class Core:
    """A ProcessFrontend, as much of it as a host sees."""

    info: Any = SimpleNamespace(
        weight_bytes=7,
        kv_cache_bytes=3,
        max_model_len=64,
        takes_images=False,
        takes_audio=False,
        takes_videos=False,
        audio_rows=0,
        free_bytes=30,
        backend="cpu",
    )
    start_message: Any = None
    status = "ready"
    listener: Any = None

    def __init__(self, machine: Machine, name: str, *, on_gpu: bool) -> None:
        self._machine, self._name, self._on_gpu = machine, name, on_gpu
        if on_gpu:
            self.info = SimpleNamespace(**{**vars(Core.info), "backend": "gpu", "free_bytes": 10})

    async def close(self) -> None:
        self._machine.take(-10, on_gpu=self._on_gpu)
        del self._machine.cores[self._name]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(
        host_module,
        "find_model",
        lambda config, _: FoundModel(config, Path("/x"), Registry(), False),
    )
    monkeypatch.setattr(host_module, "_weight_bytes", lambda path: 10)
    for name, ask in (("free", machine.free_memory), ("device", machine.device)):
        monkeypatch.setattr(DeviceMemory, name, staticmethod(ask))
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


async def test_models_of_one_device_make_room_for_each_other(machine: Machine) -> None:
    """And leave those of another alone, however little memory that one has."""
    on_gpu = ("b", "c")
    models = [
        ModelConfig(engine=EngineConfig(model=name, backend="gpu" if name in on_gpu else "cpu"))
        for name in ("a", "b", "c", "d")
    ]
    host = CoreHost(models, 0.0, machine.leave)
    await host.load("a")
    machine.free = 0
    await host.load("b")
    await host.load("c")
    assert set(machine.cores) == {"a", "c"}
    await host.load("d")
    assert set(machine.cores) == {"c", "d"}
    machine.busy = {"c"}
    with pytest.raises(OverloadedError, match="in use"):
        await host.load("b")
    assert set(machine.cores) == {"c", "d"}
    await host.close()


async def test_a_server_that_ends_while_a_device_is_asked_leaves_no_core(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A core that has come up, and of whose device nothing is known yet, has an owner."""
    asked = asyncio.Event()

    async def hangs(_: Any, backend: str) -> str:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(DeviceMemory, "device", staticmethod(hangs))
    host = CoreHost([ModelConfig(engine=EngineConfig(model="a"))], 0.0, machine.leave)
    loading = asyncio.ensure_future(host.load("a"))
    await asyncio.wait_for(asked.wait(), PATIENCE_S)
    assert machine.cores
    await host.close()
    assert not machine.cores
    with pytest.raises(asyncio.CancelledError):
        await loading


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
    first = {"weight_bytes": 0, "kv_cache_bytes": 0, "free_bytes": 30, "backend": "cpu"}
    host.first_took(SimpleNamespace(**first))  # type: ignore[arg-type]
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


GPU = """
class Backend:
    def free_bytes(self):
        print("a driver that talks")
        return 123
class Broken:
    def free_bytes(self):
        raise RuntimeError("no device")
class OnHost:
    pass
"""


async def test_a_backend_says_what_is_free_on_its_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is asked in a process of its own each time, one without a device once."""
    (tmp_path / "a_gpu.py").write_text(GPU)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(device_memory, "free_bytes", lambda: 77)
    registry: Any = SimpleNamespace()
    memory = DeviceMemory()

    def choose(name: str) -> tuple[BackendSpec, str]:
        if name == "none":
            raise BackendUnavailableError("nobody can run")
        return BackendSpec(name, f"a_gpu:{name}", probe="", priority=0), "it was named"

    registry.choose_backend = choose
    for name, expected in (
        ("Backend", FreeMemory("Backend", 123)),
        ("OnHost", FreeMemory(HOST, 77)),
        ("Broken", FreeMemory("Broken", math.inf)),
        ("none", FreeMemory(HOST, 77)),
    ):
        assert await memory.free(registry, name) == expected
    assert "backend Broken does not say how much memory is free" in caplog.text
    (tmp_path / "a_gpu.py").unlink()  # nobody is asked again what is known
    assert await memory.free(registry, "OnHost") == FreeMemory(HOST, 77)
    assert await memory.device(registry, "OnHost") == HOST
    assert await memory.device(registry, "Backend") == "Backend"
