"""Finds plugins through entry points and answers "who provides X?".

pluggy's own loader drops the second of two plugins with one name and stops at the first import that
fails, so this module walks the entry points itself: each plugin is keyed "distribution:name", a
failure is recorded and shown instead of raised, and of two providers of one name
`vllmx_core.plugins.providers` says who serves it.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any, TypeVar

import pluggy

from vllmx_core.config_values import nearest
from vllmx_core.errors import (
    BackendUnavailableError,
    ConfigError,
    PluginClashError,
    PluginError,
    UnsupportedModelError,
    listing,
    shown,
)
from vllmx_core.plugins.backend_choice import (
    PACKAGED_BACKENDS,
    best_backend,
    check_available,
    describe,
)
from vllmx_core.plugins.hooks import GROUP, HOOKS, HookSpecs
from vllmx_core.plugins.providers import Provided, choose, claims, kind_name, matches, passed_over
from vllmx_core.plugins.specs import API_VERSION, BackendSpec, ModelSpec, Spec

logger = logging.getLogger("vllmx.registry")

S = TypeVar("S", bound=Spec)


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
    """`architectures` of config.json; empty unless that is a list of names."""
    listed = config.get("architectures")
    return [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []


_LISTED = 10
"""More architectures than so many are not named in a message."""
PLUGIN_CAN = "A plugin can add it (docs/plugins.md)"
_STREAMS = "hc_count"
"""Qwen's config key for the number of residual streams."""


def nearest_architecture(wanted: str, known: Iterable[str]) -> str | None:
    """The known architecture whose name is nearest, endings such as ForCausalLM apart."""
    stems = {_stem(name): name for name in sorted(known)}
    near = difflib.get_close_matches(_stem(wanted), stems, 1, 0.5)
    return stems[near[0]] if near else None


def _beyond_ops(config: dict[str, Any]) -> str:
    """Names a feature of the config that no op supports, if there is one."""
    inner = config.get("text_config")
    if _STREAMS not in {*config, *(inner if isinstance(inner, dict) else ())}:
        return ""
    return "; it joins its layers by gated residuals, for which there are no ops"


def _stem(architecture: str) -> str:
    name = architecture.partition("For")[0].removesuffix("LMHeadModel").removesuffix("Model")
    return name.lower().replace("_", "")


class Registry:
    """All specs of all plugins. Build it with `load_registry()`, or from `plugins` in tests."""

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager(GROUP)
        self._manager.add_hookspecs(HookSpecs)
        self._provided: dict[type[Any], list[Provided[Any]]] = {kind: [] for kind in HOOKS.values()}
        self._claims: dict[str, list[Provided[Any]]] = {}
        self._plugins: list[PluginInfo] = []
        self._prefer: tuple[str, ...] = ()

    @property
    def plugins(self) -> Sequence[PluginInfo]:
        """All plugins found, including those that failed, ordered by key."""
        return self._plugins

    def add(self, plugin: object, key: str, *, version: str = "", module: str = "") -> None:
        """Registers a plugin module or object. Otherwise changes nothing and raises PluginError,
        for a misspelt or unmarked hook, one that fails or does not return specs, or a newer API
        version; or PluginClashError for a name given twice."""
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
            entry = Provided(spec, key)
            self._provided[type(spec)].append(entry)
            for claim in claims(spec):
                self._claims.setdefault(claim, []).append(entry)
        provides = tuple(f"{kind_name(type(spec))} {spec.name}" for spec in found)
        self._plugins.append(PluginInfo(key, version, module, None, provides))

    def _check_names(self, plugin: object, key: str) -> None:
        """Refuses hooks without a mark, which pluggy would ignore, and misspelt ones."""
        for name in dir(plugin):
            if not name.startswith(f"{GROUP}_") or isinstance(getattr(plugin, name), ModuleType):
                continue
            if name not in HOOKS:
                near = difflib.get_close_matches(name, HOOKS, 1) or sorted(HOOKS)
                raise PluginError(
                    f"plugin {key}: there is no hook {name!r}, did you mean {', '.join(near)}?"
                )
            if not callable(getattr(plugin, name)):
                raise PluginError(
                    f"plugin {key}: {name} is not a function: define it with @hookimpl above it"
                )
            if self._manager.parse_hookimpl_opts(plugin, name) is None:
                raise PluginError(
                    f"plugin {key}: {name} is not marked as a hook: put"
                    " @vllmx_core.plugins.hooks.hookimpl above it"
                )

    def _forget(self, plugin: object) -> None:
        if self._manager.is_registered(plugin):
            self._manager.unregister(plugin)

    def _collect(self, plugin: object, key: str) -> list[Spec]:
        found: list[Spec] = []
        for hook, kind in HOOKS.items():
            function = getattr(plugin, hook, None)
            if function is None:
                continue
            specs = function()
            if not isinstance(specs, tuple):
                raise PluginError(
                    f"plugin {key}: {hook} returned {type(specs).__name__}, expected a tuple of"
                    f" {kind.__name__}"
                )
            claimed: set[str] = set()
            for spec in specs:
                self._check(spec, kind, key, hook)
                for claim in {*claims(spec)}:
                    if claim in claimed:
                        raise PluginClashError(
                            f"{claim} is provided twice by {key}: give it one name"
                        )
                    claimed.add(claim)
                found.append(spec)
        return found

    def _check(self, spec: Any, kind: type[Spec], key: str, hook: str) -> None:
        if type(spec) is not kind:
            raise PluginError(
                f"plugin {key}: {hook} returned {type(spec).__name__}, expected {kind.__name__}"
            )
        if spec.api > API_VERSION:
            raise PluginError(
                f"plugin {key}: {spec.name!r} needs vllmx plugin API {spec.api}, this vllmx has"
                f" {API_VERSION}: upgrade vllmx"
            )

    def record_failure(self, info: PluginInfo) -> None:
        """Remembers a plugin that could not be loaded, for `vllmx plugins`."""
        self._plugins.append(info)

    def prefer(self, plugins: Sequence[str]) -> None:
        """Prefers these plugins, in order, for names that others provide too. Raises ConfigError
        for one that is not installed."""
        for wanted in plugins:
            if not any(matches(info.key, wanted) for info in self._plugins):
                keys = sorted({part for info in self._plugins for part in info.key.split(":")})
                raise ConfigError(
                    f"--prefer {wanted!r} is not an installed plugin{nearest(wanted, keys)};"
                    f" known: {', '.join(sorted(info.key for info in self._plugins))}",
                    param="prefer",
                )
        self._prefer = tuple(plugins)

    @property
    def preferred(self) -> Sequence[str]:
        """The plugins given to `prefer`."""
        return self._prefer

    def conflicts(self) -> tuple[list[str], list[str]]:
        """Names with several providers: those that need a decision by the user, and notes on those
        that are decided."""
        open_, notes = [], []
        for claim, providers in sorted(self._claims.items()):
            if len(providers) < 2:
                continue
            try:
                notes.append(passed_over(claim, self._serving(claim), providers))
            except PluginClashError as error:
                open_.append(error.message)
        return open_, notes

    def _serving(self, claim: str) -> Provided[Any]:
        return choose(claim, self._claims[claim], self._prefer)

    def provided(self, kind: type[S]) -> list[tuple[str, S]]:
        """(plugin's key, spec) of every spec of a kind, used or not."""
        return [(each.key, each.spec) for each in self._provided[kind]]

    def all(self, kind: type[S]) -> list[S]:
        """Every spec of a kind that serves its name, by name."""
        found = []
        for each in sorted(self._provided[kind], key=lambda each: each.spec.name):
            try:
                if self._serving(f"{kind_name(kind)} {each.spec.name!r}") is each:
                    found.append(each.spec)
            except PluginClashError:
                continue  # asking for it by name raises
        return found

    def find(self, kind: type[S], name: str) -> S | None:
        """The spec of that name, None where there is none. Raises PluginClashError."""
        claim = f"{kind_name(kind)} {name!r}"
        found: S | None = self._serving(claim).spec if claim in self._claims else None
        return found

    def get(self, kind: type[S], name: str) -> S:
        """Raises PluginError that lists the known names, and PluginClashError."""
        spec = self.find(kind, name)
        if spec is None:
            names = [each.spec.name for each in self._provided[kind]]
            known = ", ".join(sorted(names)) or "none is installed"
            raise PluginError(
                f"no {kind_name(kind)} named {name!r}{nearest(name, names)}; known: {known}"
            )
        return spec

    def provider(self, spec: Spec) -> str:
        """Key of the plugin that brought a spec."""
        return next(each.key for each in self._provided[type(spec)] if each.spec is spec)

    def model_for(self, config: dict[str, Any]) -> ModelSpec:
        """The architecture of a parsed config.json. Raises UnsupportedModelError that names the
        nearest known one, and PluginClashError where two plugins serve it."""
        spec = self.find_model_for(config)
        if spec is None:
            raise UnsupportedModelError(f"{self.unserved(config)}. {PLUGIN_CAN}")
        return spec

    def find_model_for(self, config: dict[str, Any]) -> ModelSpec | None:
        """`model_for`, None where nobody serves it."""
        names = architecture_names(config)
        claimed = [f"architecture {name!r}" for name in names]
        claims = claimed or [f"model type {config.get('model_type')!r}"]
        return next((spec for claim in claims if (spec := self._model(claim)) is not None), None)

    def unserved(self, config: dict[str, Any]) -> str:
        """The error text for an architecture that no plugin serves, without a full stop."""
        names, model_type = architecture_names(config), config.get("model_type")
        wanted = listing(names, 5) or f"model_type {shown(model_type)}"
        specs = [spec for _, spec in self.provided(ModelSpec)]
        known = sorted({name for spec in specs for name in spec.architectures})
        near = nearest_architecture(names[0] if names else str(model_type), known)
        inner = config.get("text_config")
        if near is None and isinstance(inner, dict):  # a model around one that may be known
            near = nearest_architecture(" ".join(architecture_names(inner)[:1]), known)
        hint = f", the nearest that is known is {near!r}" if near else ""
        listed = ", ".join(known) if 0 < len(known) <= _LISTED else ""
        listed = f"known: {listed}" if listed else "`vllmx models` lists those that are known"
        beyond = _beyond_ops(config)
        return f"no installed plugin serves the architecture {wanted}{hint} ({listed}){beyond}"

    def find_model(self, architecture: str) -> ModelSpec | None:
        """The architecture's spec: who serves a value of `architectures`. Raises
        PluginClashError."""
        return self._model(f"architecture {architecture!r}")

    def find_text_part(self, model_type: str) -> ModelSpec | None:
        """The model that serves the text part of a multimodal config. Raises PluginClashError."""
        return self._model(f"text part {model_type!r}")

    def gguf_model_for(self, name: str) -> ModelSpec | None:
        """Returns the model that serves the architecture of a GGUF file. Raises
        PluginClashError."""
        return self._model(f"GGUF architecture {name!r}")

    def _model(self, claim: str) -> ModelSpec | None:
        found: ModelSpec | None = self._serving(claim).spec if claim in self._claims else None
        return found

    def choose_backend(self, wanted: str = "auto") -> tuple[BackendSpec, str]:
        """A backend and the reason for it: the named one, or for `auto` the best that can run here
        (see `best_backend`). Raises PluginError or BackendUnavailableError."""
        if wanted == "auto":
            installed = {spec.name for _, spec in self.provided(BackendSpec)}
            return best_backend(self.all(BackendSpec), installed)
        if self.find(BackendSpec, wanted) is None and wanted in PACKAGED_BACKENDS:
            raise BackendUnavailableError(
                f"backend {wanted!r} is not installed: pip install 'vllmx[{wanted}]'"
            )
        spec = self.get(BackendSpec, wanted)
        check_available(spec)
        return spec, "asked for by name"


def load_registry(points: Iterable[EntryPoint] | None = None) -> Registry:
    """Loads every installed plugin. Failures are recorded in `Registry.plugins` and logged once,
    and conflicts are logged, so that a broken plugin disturbs no other."""
    registry = Registry()
    found = list(entry_points(group=GROUP) if points is None else points)
    seen: set[str] = set()
    for point in sorted(found, key=plugin_key):
        key = plugin_key(point)
        if key in seen:
            continue  # an editable install may list its distribution twice
        seen.add(key)
        version = point.dist.version if point.dist else ""
        try:
            registry.add(point.load(), key, version=version, module=point.value)
        except Exception as error:  # a third party's module may raise anything
            logger.warning("plugin %s cannot be loaded: %s", key, error)
            text = error.message if isinstance(error, PluginError) else describe(error)
            registry.record_failure(PluginInfo(key, version, point.value, text, ()))
    return registry


def plugin_key(point: EntryPoint) -> str:
    """DISTRIBUTION:NAME."""
    return f"{point.dist.name if point.dist else 'unknown'}:{point.name}"
