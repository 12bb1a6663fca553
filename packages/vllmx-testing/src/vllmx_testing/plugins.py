"""`check_plugin`: whether a plugin keeps the rules, before its users find out."""

from __future__ import annotations

import difflib
import importlib
import json
import subprocess
import sys
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from vllmx_core.errors import PluginError
from vllmx_core.output_format import OutputFormat
from vllmx_core.plugins.hooks import GROUP, HOOKS
from vllmx_core.plugins.registry import Registry
from vllmx_core.plugins.specs import (
    BackendSpec,
    ModelImplSpec,
    ModelSpec,
    ParserSpec,
    QuantizerSpec,
    Spec,
)

HEAVY = (
    "numpy",
    "torch",
    "cupy",
    "mlx",
    "jax",
    "scipy",
    "pandas",
    "transformers",
    "tokenizers",
    "safetensors",
    "gguf",
    "huggingface_hub",
    "PIL",
    "asyncio",
)
"""Modules that neither a plugin's module nor a probe may import."""

_SCRIPT = """
import importlib, json, sys
module, _, attribute = sys.argv[1].partition(":")
plugin = importlib.import_module(module)
plugin = getattr(plugin, attribute) if attribute else plugin
found = {"import": [name for name in sys.argv[2].split(",") if name in sys.modules]}
from vllmx_core.plugins.registry import Registry
from vllmx_core.plugins.specs import BackendSpec, ModelImplSpec
registry = Registry()
registry.add(plugin, "checked")
for spec in registry.all(BackendSpec) + registry.all(ModelImplSpec):
    try:
        spec.unavailable_reason()
    except Exception:
        pass
found["probe"] = [name for name in sys.argv[2].split(",") if name in sys.modules]
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class PluginReport:
    """A plugin that passed."""

    plugin: str
    provides: tuple[str, ...]
    """Names as in `PluginInfo.provides`."""
    specs: tuple[Spec, ...]


def check_plugin(plugin: str) -> PluginReport:
    """Checks the plugin that an entry point's value names, "package.plugin" or
    "package.module:object".

    Hooks must be spelt right, marked and return tuples of their spec; names must be unique and the
    API version known; implementations and probes must be importable, callable, and not imported
    early: a fresh interpreter that imports the plugin and asks its probes may load nothing of
    `HEAVY`. Raises PluginError with every problem found.
    """
    registry = Registry()
    loaded = _load(plugin)
    registry.add(loaded, plugin)
    specs = tuple(spec for kind in _kinds() for spec in registry.all(kind))
    problems = [] if specs else ["it provides nothing: no hook returned a spec"]
    problems += _near_hooks(loaded)
    for spec in specs:
        problems += _problems(spec)
    problems += _heavy_imports(plugin)
    if problems:
        raise PluginError(f"plugin {plugin}: " + "; ".join(problems))
    return PluginReport(plugin, registry.plugins[0].provides, specs)


def _near_hooks(plugin: object) -> list[str]:
    """Functions that look like a hook and are called by nobody."""
    hooks = sorted(HOOKS)
    problems = []
    for name in dir(plugin):
        value = getattr(plugin, name)
        if name.startswith("_") or name in hooks or not isinstance(value, FunctionType):
            continue
        near = difflib.get_close_matches(name, hooks, 1, 0.85)
        if near or hasattr(value, f"{GROUP}_impl"):
            hint = f", did you mean {near[0]}?" if near else ": the hooks are in docs/plugins.md"
            problems.append(f"nothing calls {name!r}{hint}")
    return problems


def _kinds() -> list[Any]:
    return list(Spec.__args__)


def _load(plugin: str) -> object:
    module, _, attribute = plugin.partition(":")
    try:
        loaded: object = importlib.import_module(module)
        return getattr(loaded, attribute) if attribute else loaded
    except (ImportError, AttributeError) as error:
        raise PluginError(f"plugin {plugin} cannot be imported: {error}") from error


def _problems(spec: Spec) -> list[str]:
    what = f"{type(spec).__name__} {spec.name!r}"
    problems = [] if spec.name.strip() else [f"{what} has no name"]
    strings = {"implementation": spec.implementation}
    if isinstance(spec, BackendSpec | ModelImplSpec):
        strings["probe"] = spec.probe
    for role, text in strings.items():
        if text.count(":") != 1 or not all(text.split(":")):
            problems.append(f"{what}: {role} {text!r} is not 'package.module:attribute'")
            continue
        try:
            problems += _kind_problems(spec, _load(text), f"{what}: {role} {text!r}")
        except PluginError as error:
            problems.append(f"{what}: {role}: {error.message}")
    if isinstance(spec, BackendSpec | ModelImplSpec) and not problems:
        problems += _probe_problems(spec, what)
    if isinstance(spec, BackendSpec) and not problems:
        problems += _backend_problems(spec, what)
    if isinstance(spec, ModelSpec):
        problems += _gguf_problems(spec, what)
    return problems + _unread(spec, what)


def _kind_problems(spec: Spec, loaded: object, what: str) -> list[str]:
    if isinstance(spec, ParserSpec):
        return [] if isinstance(loaded, OutputFormat) else [f"{what} is not an OutputFormat"]
    return [] if callable(loaded) else [f"{what} is not callable"]


def _unread(spec: Spec, what: str) -> list[str]:
    """Why nothing of vllmx would ever use a spec."""
    if isinstance(spec, ModelSpec) and not (
        spec.architectures or spec.model_types or spec.gguf_names
    ):
        return [f"{what}: it names no architecture, model type or GGUF name that leads to it"]
    if isinstance(spec, QuantizerSpec) and spec.name != spec.name.lower():
        return [f"{what}: --isq looks names up in small letters"]
    return []


def _gguf_problems(spec: ModelSpec, what: str) -> list[str]:
    if bool(spec.gguf) != bool(spec.gguf_names):
        return [f"{what}: gguf and gguf_names go together, it has only one of them"]
    if not spec.gguf:
        return []
    try:
        spec.load_gguf()
    except PluginError as error:
        return [error.message]
    return []


def _probe_problems(spec: BackendSpec | ModelImplSpec, what: str) -> list[str]:
    try:
        reason: object = spec.unavailable_reason()
    except Exception as error:  # whatever a third party's probe raises
        return [f"{what}: its probe raised {type(error).__name__}: {error}"]
    if reason is not None and not (isinstance(reason, str) and reason.strip()):
        return [f"{what}: its probe returned {reason!r}, not None or a sentence"]
    return []


def _backend_problems(spec: BackendSpec, what: str) -> list[str]:
    missing = [name for name in ("name", "load", "environment") if not hasattr(spec.load(), name)]
    return [f"{what}: its implementation has no {', '.join(missing)}"] if missing else []


def _heavy_imports(plugin: str) -> list[str]:
    done = subprocess.run(  # noqa: S603 - our own interpreter and script
        [sys.executable, "-c", _SCRIPT, plugin, ",".join(HEAVY)],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:]
        return [f"a fresh interpreter cannot load it: {' '.join(last)}"]
    found = json.loads(done.stdout.splitlines()[-1])
    problems = []
    if found["import"]:
        problems.append(f"importing it imports {', '.join(found['import'])}")
    late = [name for name in found["probe"] if name not in found["import"]]
    if late:
        problems.append(f"its hooks or probes import {', '.join(late)}")
    return problems
