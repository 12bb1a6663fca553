"""`vllmx env`: what a bug report needs."""

from __future__ import annotations

import json
import os
import platform
import sys
from contextlib import suppress
from importlib import metadata
from typing import TYPE_CHECKING

import click
from vllmx_core.errors import VllmxError
from vllmx_core.plugins.registry import Registry, load_registry
from vllmx_core.plugins.specs import BackendSpec, ExecutorSpec
from vllmx_core.system.processors import available_processors

if TYPE_CHECKING:
    from vllmx_core.ops.op import Op

LIBRARIES = (
    "numpy",
    "tokenizers",
    "jinja2",
    "llguidance",
    "msgspec",
    "pluggy",
    "starlette",
    "hypercorn",
    "huggingface_hub",
    "torch",
    "transformers",
    "mlx",
    "cupy",
)


def collect() -> dict[str, dict[str, str]]:
    """Sections of facts without secrets: environment variables are shown, keys are not."""
    registry = load_registry()
    backends: dict[str, str] = {}
    sections: dict[str, dict[str, str]] = {}
    for spec in sorted(registry.all(BackendSpec), key=lambda spec: -spec.priority):
        reason = spec.unavailable_reason()
        backends[spec.name] = "available" if reason is None else reason
        sections[f"backend {spec.name}"] = _environment(spec, reason)
    try:
        chosen, why = registry.choose_backend()
        backends["auto"] = f"{chosen.name} ({why})"
    except VllmxError as error:
        backends["auto"] = f"none: {error.message}"
    return {
        "versions": {"python": sys.version.split()[0], **_versions()},
        "machine": {"system": platform.platform(), "processor": platform.machine()},
        "backends": backends,
        **sections,
        "ranks": _ranks(registry),
        "environment": {
            name: "set" if "KEY" in name or "TOKEN" in name else value
            for name, value in sorted(os.environ.items())
            if name.startswith(("VLLMX_", "HF_", "OMP_"))
        },
    }


def _ranks(registry: Registry) -> dict[str, str]:
    """The backends that support several ranks, and how their ranks communicate."""
    from vllmx_core.ops.all_reduce import AllReduce
    from vllmx_core.ops.send import Send
    from vllmx_core.ops.values import Value

    if registry.find(ExecutorSpec, "tensor-parallel") is None:
        return {"--tensor-parallel-size": "needs vllmx-tp: pip install 'vllmx[tp]'"}
    together = _backends_with(registry, AllReduce.of(Value(1)))
    stages = _backends_with(registry, Send.of(Value(1)))
    return {
        "backends": ", ".join(together),
        "stages": ", ".join(stages),
        "stages of several": ", ".join(name for name in stages if name in together),
        "on this host": f"up to {available_processors()}, one a core; parts go through shared"
        " memory",
        "on other hosts": "--rank-hosts; parts go by TCP (CUDA devices: one host alone)",
    }


def _backends_with(registry: Registry, op: Op) -> list[str]:
    """Names of backends that run here and have the op."""
    found = []
    for spec in registry.all(BackendSpec):
        with suppress(Exception):  # a plugin's error, or a missing library
            if spec.unavailable_reason() is None and spec.load()().supports(op):
                found.append(spec.name)
    return found


def _environment(spec: BackendSpec, reason: str | None) -> dict[str, str]:
    """A backend's facts about this machine, even if it cannot run here: they help to find what is
    missing. If that fails, only the reason is shown."""
    try:
        found: dict[str, str] = spec.load()().environment()
    except Exception as error:  # a plugin's error must not hide the rest of a bug report
        return {} if reason is not None else {"error": f"{type(error).__name__}: {error}"}
    return found


def _versions() -> dict[str, str]:
    found = {}
    names = {d.metadata["Name"] for d in metadata.distributions()}
    ours = sorted(name for name in names if name and name.startswith("vllmx"))
    for name in (*ours, *LIBRARIES):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Write JSON, for scripts.")
def env(as_json: bool) -> None:
    """Print what a bug report needs: versions, processor features, backends with reasons."""
    sections = collect()
    if as_json:
        click.echo(json.dumps(sections, indent=1))
        return
    for title, facts in sections.items():
        if facts:
            click.echo(title)
            width = max(map(len, facts))
            for name, value in facts.items():
                click.echo(f"  {name:<{width}}  {value}")
