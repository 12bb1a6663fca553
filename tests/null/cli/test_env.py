"""`vllmx env` beside backends that cannot run, or break when they are asked."""

from __future__ import annotations

import pytest
from vllmx.cli import env
from vllmx_core.hooks import hookimpl
from vllmx_core.registry import Registry
from vllmx_core.specs import BackendSpec


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
    assert found["backend breaks"] == {"error": "ImportError: no module named abacus"}
