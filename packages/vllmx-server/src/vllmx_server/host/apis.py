"""The APIs of a server, which plugins bring and its configuration switches on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

from vllmx_core.errors import ConfigError, PluginError, listing
from vllmx_core.plugins.registry import Registry, load_registry
from vllmx_core.plugins.specs import ApiSpec

from vllmx_server.config import ServerConfig
from vllmx_server.generating.api import Api
from vllmx_server.http.route import Route


def load_apis(config: ServerConfig, registry: Registry | None = None) -> list[Api]:
    """Imports and makes the APIs of a server with this configuration. `registry`: None: that of the
    installed plugins. An API that `--apis` names takes routes over from those that it does not.
    Raises PluginError, and ConfigError for a name that is unknown or settings that an API cannot
    use."""
    specs = (_installed() if registry is None else registry).all(ApiSpec)
    known = {spec.name: spec for spec in specs if spec.by_name}
    if unknown := [name for name in config.apis if name not in known]:
        raise ConfigError(
            f"--apis names {listing(unknown)}, and the APIs to choose from are {listing(known)}",
            param="apis",
        )
    named: list[Api] = [known[name].load()(config) for name in config.apis]
    taken = {(route.method, route.path) for api in named for route in api.routes}
    others = [spec.load()(config) for spec in specs if not spec.by_name and _is_on(spec, config)]
    for api in others if taken else ():
        api.routes = [each for each in api.routes if (each.method, each.path) not in taken]
    return [*named, *others]


def all_routes(*, by_name: bool = False) -> list[Route]:
    """The routes of all APIs that are installed, switched on or not: of those that `--apis` may
    name, or of all others."""
    specs = (spec for spec in _installed().all(ApiSpec) if spec.by_name == by_name)
    return [route for spec in specs for route in spec.load().routes]


def check_routes(apis: Sequence[Api]) -> None:
    """Raises PluginError if two APIs have the same route."""
    owners: dict[tuple[str, str], Api] = {}
    for api in apis:
        for route in api.routes:
            other = owners.setdefault((route.method, route.path), api)
            if other is not api:
                names = (f"{type(each).__module__}.{type(each).__name__}" for each in (other, api))
                raise PluginError(
                    f"{' and '.join(names)} both answer {route.method} {route.path}: leave one"
                    " out of --apis, or uninstall the plugin of one"
                )


def spans_of(routes: Sequence[Route]) -> Mapping[str, str]:
    """`gen_ai.operation.name` by path."""
    return {route.path: route.span for route in routes if route.span is not None}


@cache
def _installed() -> Registry:
    return load_registry()


def _is_on(spec: ApiSpec, config: ServerConfig) -> bool:
    try:
        return not spec.switch or bool(getattr(config, spec.switch))
    except AttributeError:
        raise PluginError(
            f"API {spec.name!r} is switched by the setting {spec.switch!r}, which servers do not"
            " have"
        ) from None
