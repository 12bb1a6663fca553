"""`vllmx env` beside backends that cannot run, or break when they are asked."""

from __future__ import annotations

import pytest
from vllmx.cli import env
from vllmx_core.ops.op import Op
from vllmx_core.plugins.hooks import hookimpl
from vllmx_core.plugins.registry import Registry
from vllmx_core.plugins.specs import BackendSpec, ExecutorSpec
from vllmx_core.system.processors import available_processors


class Broken:
    def __init__(self) -> None:
        raise ImportError("no module named abacus")


class Explaining:
    def environment(self) -> dict[str, str]:
        return {"driver": "missing", "library": "1.2"}


def cannot_run() -> str:
    return "there is no driver"


def can_run() -> None:
    return None


class Plugin:
    @staticmethod
    @hookimpl
    def vllmx_backends() -> tuple[BackendSpec, ...]:
        here = __name__
        return (
            BackendSpec("explains", f"{here}:Explaining", probe=f"{here}:cannot_run", priority=3),
            BackendSpec("absent", f"{here}:Broken", probe=f"{here}:cannot_run", priority=2),
            BackendSpec("breaks", f"{here}:Broken", probe=f"{here}:can_run", priority=1),
        )


def test_what_cannot_run_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry()
    registry.add(Plugin, "test:backends")
    monkeypatch.setattr(env, "load_registry", lambda: registry)
    found = env.collect()
    assert found["backends"]["explains"] == "there is no driver"
    assert found["backend explains"] == {"driver": "missing", "library": "1.2"}
    assert found["backend absent"] == {}
    assert found["ranks"] == {"--tensor-parallel-size": "needs vllmx-tp: pip install 'vllmx[tp]'"}
    assert found["backend breaks"] == {"error": "ImportError: no module named abacus"}


class Adding(Explaining):
    def supports(self, op: Op) -> bool:
        return op.name == "all_reduce"


class Together:
    @staticmethod
    @hookimpl
    def vllmx_backends() -> tuple[BackendSpec, ...]:
        here = __name__
        return (
            BackendSpec("adds", f"{here}:Adding", probe=f"{here}:can_run", priority=1),
            BackendSpec("absent", f"{here}:Adding", probe=f"{here}:cannot_run", priority=1),
            BackendSpec("breaks", f"{here}:Broken", probe=f"{here}:can_run", priority=1),
        )

    @staticmethod
    @hookimpl
    def vllmx_executors() -> tuple[ExecutorSpec, ...]:
        return (ExecutorSpec("tensor-parallel", f"{__name__}:can_run"),)


def test_who_can_compute_together(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry()
    registry.add(Together, "test:together")
    monkeypatch.setattr(env, "load_registry", lambda: registry)
    ranks = env.collect()["ranks"]
    assert ranks["backends"] == "adds"
    assert ranks["on this host"].startswith(f"up to {available_processors()}, one a core")
    assert "--rank-hosts" in ranks["on other hosts"]
