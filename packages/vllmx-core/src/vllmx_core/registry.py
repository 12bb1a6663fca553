"""Finds plugins through entry points and answers "who provides X?".

pluggy's own loader drops the second of two plugins with one name and stops at the first import that
fails, so this module walks the entry points itself: each plugin is keyed "distribution:name", a
failure is recorded and shown instead of raised, and two providers of one name are an error that
names both.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

import pluggy

from vllmx_core.errors import BackendUnavailableError, PluginError, UnsupportedModelError
from vllmx_core.hooks import GROUP, Hooks
from vllmx_core.specs import (
    API_VERSION,
    BackendSpec,
    CommandSpec,
    ExecutorSpec,
    ModelSourceSpec,
    ModelSpec,
    ParserSpec,
    QuantizationSpec,
    Spec,
    WeightFormatSpec,
)

logger = logging.getLogger("vllmx.registry")

S = TypeVar("S", bound=Spec)

_HOOKS: dict[str, type[Spec]] = {
    "vllmx_backends": BackendSpec,
    "vllmx_models": ModelSpec,
    "vllmx_weight_formats": WeightFormatSpec,
    "vllmx_quantizations": QuantizationSpec,
    "vllmx_parsers": ParserSpec,
    "vllmx_executors": ExecutorSpec,
    "vllmx_commands": CommandSpec,
    "vllmx_model_sources": ModelSourceSpec,
}


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """One entry point, loaded or not."""

    key: str
    """distribution:name"""
    version: str
    module: str
    error: str | None
    provides: tuple[str, ...]
    """"backend cpu", "model llama", ..."""


class Registry:
    """All specs of all plugins. Build it with `load_registry()`, or from `plugins` in tests."""

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager(GROUP)
        self._manager.add_hookspecs(Hooks)
        self._specs: dict[type[Any], dict[str, tuple[Any, str]]] = {
            kind: {} for kind in _HOOKS.values()
        }
        self._plugins: list[PluginInfo] = []

    @property
    def plugins(self) -> Sequence[PluginInfo]:
        """What was found, the failures included, in order of their keys."""
        return self._plugins

    def add(self, plugin: object, key: str, *, version: str = "", module: str = "") -> None:
        """Registers a plugin module or object. Raises PluginError for a misspelt hook, a wrong
        return value, an API version from the future or a name that is taken."""
        self._manager.register(plugin, name=key)
        try:
            self._manager.check_pending()
            found = self._collect(plugin, key)
        except pluggy.PluginValidationError as error:
            self._manager.unregister(plugin)
            raise PluginError(f"plugin {key}: {error}") from error
        except PluginError:
            self._manager.unregister(plugin)
            raise
        for spec in found:
            self._specs[type(spec)][spec.name] = (spec, key)
        provides = tuple(f"{_kind(spec)} {spec.name}" for spec in found)
        self._plugins.append(PluginInfo(key, version, module, None, provides))

    def _collect(self, plugin: object, key: str) -> list[Spec]:
        found: list[Spec] = []
        for hook, kind in _HOOKS.items():
            function = getattr(plugin, hook, None)
            if function is None:
                continue
            for spec in function():
                self._check(spec, kind, key, hook, found)
                found.append(spec)
        return found

    def _check(
        self, spec: Any, kind: type[Spec], key: str, hook: str, found: Iterable[Spec]
    ) -> None:
        if type(spec) is not kind:
            raise PluginError(
                f"plugin {key}: {hook} returned {type(spec).__name__}, expected {kind.__name__}"
            )
        if spec.api > API_VERSION:
            raise PluginError(
                f"plugin {key}: {spec.name!r} needs vllmx plugin API {spec.api}, this vllmx has"
                f" {API_VERSION}: upgrade vllmx"
            )
        taken = self._specs[kind].get(spec.name)
        owner = taken[1] if taken else key if any(_same(spec, other) for other in found) else None
        if owner is not None:
            raise PluginError(
                f"{_kind(spec)} {spec.name!r} is provided by both {owner} and {key}: uninstall one"
            )

    def record_failure(self, info: PluginInfo) -> None:
        """Remembers a plugin that could not be loaded, for `vllmx plugins`."""
        self._plugins.append(info)

    def all(self, kind: type[S]) -> list[S]:
        """Every spec of a kind, by name."""
        return [spec for _, (spec, _) in sorted(self._specs[kind].items())]

    def get(self, kind: type[S], name: str) -> S:
        """Raises PluginError that lists the known names."""
        try:
            spec: S = self._specs[kind][name][0]
        except KeyError:
            known = ", ".join(sorted(self._specs[kind])) or "none is installed"
            raise PluginError(
                f"no {kind.__name__.removesuffix('Spec').lower()} named {name!r}; known: {known}"
            ) from None
        return spec

    def provider(self, spec: Spec) -> str:
        """Key of the plugin that brought a spec."""
        key: str = self._specs[type(spec)][spec.name][1]
        return key

    def model_for(self, config: dict[str, Any]) -> ModelSpec:
        """The architecture of a parsed config.json. Raises UnsupportedModelError."""
        names = [name for name in config.get("architectures") or [] if isinstance(name, str)]
        model_type = config.get("model_type")
        specs = self.all(ModelSpec)
        for name in names:
            for spec in specs:
                if name in spec.architectures:
                    return spec
        if not names:
            for spec in specs:
                if model_type in spec.model_types:
                    return spec
        known = ", ".join(sorted(name for spec in specs for name in spec.architectures))
        wanted = ", ".join(names) or f"model_type {model_type!r}"
        raise UnsupportedModelError(
            f"no installed plugin serves the architecture {wanted}; known: {known or 'none'}."
            " A plugin can add it (docs/plugins.md)"
        )

    def choose_backend(self, wanted: str = "auto") -> tuple[BackendSpec, str]:
        """A backend and the reason for it. A name is taken at its word; `auto` is the one of
        greatest priority that can run here. Raises BackendUnavailableError with every reason."""
        if wanted != "auto":
            spec = self.get(BackendSpec, wanted)
            reason = spec.unavailable_reason()
            if reason is not None:
                raise BackendUnavailableError(f"backend {wanted!r} cannot run here: {reason}")
            return spec, "asked for by name"
        reasons: list[str] = []
        for spec in sorted(self.all(BackendSpec), key=lambda spec: -spec.priority):
            if spec.priority < 0:
                continue  # only by name
            reason = spec.unavailable_reason()
            if reason is None:
                skipped = "; ".join(reasons)
                return spec, f"first that can run here{' (' + skipped + ')' if skipped else ''}"
            reasons.append(f"{spec.name}: {reason}")
        raise BackendUnavailableError(
            "no backend can run here: "
            + ("; ".join(reasons) or "none is installed, try: pip install 'vllmx[cpu]'")
        )


def load_registry(points: Iterable[EntryPoint] | None = None) -> Registry:
    """Loads every installed plugin. Failures are recorded in `Registry.plugins` and logged once;
    a name that two plugins claim is raised, because guessing between them would be wrong."""
    registry = Registry()
    found = list(entry_points(group=GROUP) if points is None else points)
    seen: set[str] = set()
    for point in sorted(found, key=_key):
        key = _key(point)
        if key in seen:
            continue  # an editable install may list its distribution twice
        seen.add(key)
        version = point.dist.version if point.dist else ""
        try:
            plugin = point.load()
        except Exception as error:  # a third party's module may raise anything
            logger.warning("plugin %s cannot be imported: %s", key, error)
            registry.record_failure(
                PluginInfo(key, version, point.value, f"{type(error).__name__}: {error}", ())
            )
            continue
        registry.add(plugin, key, version=version, module=point.value)
    return registry


def _key(point: EntryPoint) -> str:
    return f"{point.dist.name if point.dist else 'unknown'}:{point.name}"


def _kind(spec: Spec) -> str:
    words = {"WeightFormat": "weight format", "ModelSource": "model source"}
    name = type(spec).__name__.removesuffix("Spec")
    return words.get(name, name.lower())


def _same(spec: Spec, other: Spec) -> bool:
    return type(spec) is type(other) and spec.name == other.name
