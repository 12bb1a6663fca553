"""Finds plugins through entry points and answers "who provides X?".

pluggy's own loader drops the second of two plugins with one name and stops at the first import that
fails, so this module walks the entry points itself: each plugin is keyed "distribution:name", a
failure is recorded and shown instead of raised, and two providers of one name are an error that
names both.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

import pluggy

from vllmx_core.errors import (
    BackendUnavailableError,
    PluginClashError,
    PluginError,
    UnsupportedModelError,
    shown,
)
from vllmx_core.hooks import GROUP, Hooks
from vllmx_core.specs import (
    API_VERSION,
    BackendSpec,
    CommandSpec,
    EncoderSpec,
    ExecutorSpec,
    ModelSourceSpec,
    ModelSpec,
    ParserSpec,
    QuantizationSpec,
    QuantizerSpec,
    Spec,
    WeightFormatSpec,
)

logger = logging.getLogger("vllmx.registry")

PACKAGED_BACKENDS = ("cpu", "cuda", "metal", "torch")
"""Those of our own that are an extra of the distribution `vllmx`, under the same name."""

S = TypeVar("S", bound=Spec)

_HOOKS: dict[str, type[Spec]] = {
    "vllmx_backends": BackendSpec,
    "vllmx_models": ModelSpec,
    "vllmx_weight_formats": WeightFormatSpec,
    "vllmx_quantizations": QuantizationSpec,
    "vllmx_quantizers": QuantizerSpec,
    "vllmx_encoders": EncoderSpec,
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


def architecture_names(config: dict[str, Any]) -> list[str]:
    """What config.json lists under `architectures`; nothing where that is no list of names."""
    listed = config.get("architectures")
    return [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []


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
        """Registers a plugin module or object, or leaves everything as it was and raises
        PluginError: a misspelt or unmarked hook, one that fails or returns something else than
        specs, an API version from the future; PluginClashError for a name that is taken."""
        first = self._manager.get_name(plugin)
        if first is not None:
            raise PluginClashError(
                f"one plugin is registered by both {first} and {key}: uninstall one"
            )
        try:
            self._check_names(plugin, key)
            self._manager.register(plugin, name=key)
            self._manager.check_pending()
            found = self._collect(plugin, key)
        except PluginError:
            self._forget(plugin)
            raise
        except Exception as error:  # pluggy's refusals, and whatever a third party's hook raises
            self._forget(plugin)
            raise PluginError(f"plugin {key}: {type(error).__name__}: {error}") from error
        for spec in found:
            self._specs[type(spec)][spec.name] = (spec, key)
        provides = tuple(f"{_kind(spec)} {spec.name}" for spec in found)
        self._plugins.append(PluginInfo(key, version, module, None, provides))

    def _check_names(self, plugin: object, key: str) -> None:
        """pluggy alone would pass over a hook without its mark, misspelt or not."""
        for name in dir(plugin):
            if not name.startswith(f"{GROUP}_") or not callable(getattr(plugin, name)):
                continue
            if name not in _HOOKS:
                near = difflib.get_close_matches(name, _HOOKS, 1) or sorted(_HOOKS)
                raise PluginError(
                    f"plugin {key}: there is no hook {name!r}, did you mean {', '.join(near)}?"
                )
            if self._manager.parse_hookimpl_opts(plugin, name) is None:
                raise PluginError(
                    f"plugin {key}: {name} is not marked as a hook: put"
                    " @vllmx_core.hooks.hookimpl above it"
                )

    def _forget(self, plugin: object) -> None:
        if self._manager.is_registered(plugin):
            self._manager.unregister(plugin)

    def _collect(self, plugin: object, key: str) -> list[Spec]:
        found: list[Spec] = []
        for hook, kind in _HOOKS.items():
            function = getattr(plugin, hook, None)
            if function is None:
                continue
            specs = function()
            if not isinstance(specs, tuple):
                raise PluginError(
                    f"plugin {key}: {hook} returned {type(specs).__name__}, expected a tuple of"
                    f" {kind.__name__}"
                )
            for spec in specs:
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
        known = [*self._specs[kind].values(), *((other, key) for other in found)]
        for other, owner in known:
            for claim in _claims(spec) & _claims(other) if type(other) is kind else ():
                raise PluginClashError(
                    f"{claim} is provided by both {owner} and {key}: uninstall one"
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
            raise PluginError(f"no {_kind_name(kind)} named {name!r}; known: {known}") from None
        return spec

    def provider(self, spec: Spec) -> str:
        """Key of the plugin that brought a spec."""
        key: str = self._specs[type(spec)][spec.name][1]
        return key

    def model_for(self, config: dict[str, Any]) -> ModelSpec:
        """The architecture of a parsed config.json. Raises UnsupportedModelError."""
        names = architecture_names(config)
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
        wanted = ", ".join(map(shown, names[:5])) or f"model_type {shown(model_type)}"
        raise UnsupportedModelError(
            f"no installed plugin serves the architecture {wanted}; known: {known or 'none'}."
            " A plugin can add it (docs/plugins.md)"
        )

    def choose_backend(self, wanted: str = "auto") -> tuple[BackendSpec, str]:
        """A backend and the reason for it. A name is taken at its word; `auto` is the one of
        greatest priority that can run here. Raises BackendUnavailableError with every reason."""
        if wanted != "auto":
            if wanted in PACKAGED_BACKENDS and wanted not in self._specs[BackendSpec]:
                raise BackendUnavailableError(
                    f"backend {wanted!r} is not installed: pip install 'vllmx[{wanted}]'"
                )
            spec = self.get(BackendSpec, wanted)
            reason = _unavailable_reason(spec)
            if reason is not None:
                raise BackendUnavailableError(f"backend {wanted!r} cannot run here: {reason}")
            return spec, "asked for by name"
        reasons: list[str] = []
        by_name: list[str] = []
        for spec in sorted(self.all(BackendSpec), key=lambda spec: -spec.priority):
            reason = _unavailable_reason(spec)
            if spec.priority < 0:
                by_name += [spec.name] if reason is None else []
            elif reason is None:
                skipped = "; ".join(reasons)
                return spec, f"first that can run here{' (' + skipped + ')' if skipped else ''}"
            else:
                reasons.append(f"{spec.name}: {reason}")
        if "cpu" not in self._specs[BackendSpec]:
            reasons.append("the one that runs anywhere is not installed: pip install 'vllmx[cpu]'")
        if by_name:
            reasons.append(f"or ask for one by its name: --backend {' or '.join(by_name)}")
        raise BackendUnavailableError(f"no backend is chosen by itself here: {'; '.join(reasons)}")


def load_registry(points: Iterable[EntryPoint] | None = None) -> Registry:
    """Loads every installed plugin. Failures are recorded in `Registry.plugins` and logged once,
    so that a broken plugin disturbs no other; PluginClashError alone is raised."""
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
            registry.add(point.load(), key, version=version, module=point.value)
        except PluginClashError:
            raise
        except Exception as error:  # a third party's module may raise anything
            logger.warning("plugin %s cannot be loaded: %s", key, error)
            text = error.message if isinstance(error, PluginError) else _describe(error)
            registry.record_failure(PluginInfo(key, version, point.value, text, ()))
    return registry


def _key(point: EntryPoint) -> str:
    return f"{point.dist.name if point.dist else 'unknown'}:{point.name}"


def _kind(spec: Spec) -> str:
    return _kind_name(type(spec))


def _kind_name(kind: type[Any]) -> str:
    words = {"WeightFormat": "weight format", "ModelSource": "model source"}
    name = kind.__name__.removesuffix("Spec")
    return words.get(name, name.lower())


def _claims(spec: Any) -> set[str]:
    """What no other spec of its kind may provide."""
    claims = {f"{_kind(spec)} {spec.name!r}"}
    if isinstance(spec, ModelSpec):
        claims |= {f"architecture {name!r}" for name in spec.architectures}
        claims |= {f"GGUF architecture {name!r}" for name in spec.gguf_names}
    return claims


def _unavailable_reason(spec: BackendSpec) -> str | None:
    """What the probe says; a probe that fails says no."""
    try:
        return spec.unavailable_reason()
    except Exception as error:  # a third party's probe may raise anything
        return f"its probe failed: {_describe(error)}"


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
