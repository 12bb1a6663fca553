"""`vllmx list`, `vllmx show` and `vllmx rm`: models in the cache of the Hugging Face hub."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from vllmx_core.errors import ConfigError, ModelNotFoundError, VllmxError
from vllmx_core.system.memory import format_bytes

from vllmx.cli.tables import age, print_table

if TYPE_CHECKING:
    from vllmx_models.hub_cache import CachedModel

    from vllmx.cli.presets import Preset

_JSON = click.option("--json", "as_json", is_flag=True, help="Write JSON, for scripts.")


def model_of(name: str) -> tuple[str, Preset | None]:
    """The model of a short name, and its preset; other names stay as they are."""
    from vllmx.cli.presets import find_preset

    preset = find_preset(name)
    return (name, None) if preset is None else (preset.model, preset)


@click.command("list")
@click.option("--presets", "shows_presets", is_flag=True, help="List short names instead.")
@_JSON
def list_models(shows_presets: bool, as_json: bool) -> None:
    """List the models in the cache of the Hugging Face hub, or the short names of models."""
    if shows_presets:
        _list_presets(as_json)
        return
    from vllmx_models.hub_cache import cache_folder, cached_models

    found = cached_models()
    if as_json:
        click.echo(json.dumps([_as_json(model) for model in found], indent=1))
        return
    if not found:
        click.echo(f"no models in {cache_folder()}: `vllmx pull NAME` downloads one")
        return
    rows = [("MODEL", "REVISION", "SIZE", "CHANGED", "STATE")]
    for model in found:
        state = model.fault or ("" if model.is_current else "older")
        size, changed = format_bytes(model.num_bytes), age(model.modified_s)
        rows.append((model.name, model.commit[:8], size, changed, state))
    print_table(rows)


def _list_presets(as_json: bool) -> None:
    from vllmx.cli.presets import presets

    found = presets()
    if as_json:
        click.echo(json.dumps([_preset_json(each) for each in found.values()], indent=1))
        return
    rows = [("NAME", "MODEL", "FROM")]
    print_table([*rows, *((each.name, each.model, each.origin) for each in found.values())])


def settings_of(preset: Preset) -> dict[str, Any]:
    """The settings of a preset by the names of flags."""
    found = dict(preset.settings)
    for flags in preset.flags:
        found |= flags
    return found


def _preset_json(preset: Preset) -> dict[str, Any]:
    return {
        "name": preset.name,
        "model": preset.model,
        "settings": settings_of(preset),
        "from": preset.origin,
    }


def _as_json(model: CachedModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "revision": model.commit,
        "path": str(model.path),
        "bytes": model.num_bytes,
        "modified": round(model.modified_s, 3),
        "fault": model.fault or None,
        "current": model.is_current,
    }


@click.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
def rm(names: tuple[str, ...], yes: bool) -> None:
    """Delete models from the cache: a repository with all its revisions, or one GGUF file."""
    from vllmx_models.hub_cache import find_cached, remove

    found = {model.name: model for model in (find_cached(model_of(name)[0]) for name in names)}
    for model in found.values():
        size = format_bytes(model.num_bytes)
        if not yes:
            click.confirm(f"Delete {model.name} ({size})?", abort=True)
        try:
            freed = remove(model)
        except OSError as error:
            raise ConfigError(
                f"cannot delete {error.filename} ({error.strerror}): check who owns it"
            ) from None
        click.echo(f"deleted {model.name}, {format_bytes(freed)} freed")


@click.command()
@click.argument("name")
@_JSON
def show(name: str, as_json: bool) -> None:
    """Show a model of the cache, or a local folder or file: architecture, size, settings."""
    model, preset = model_of(name)
    about: dict[str, Any] = {"model": model}
    if preset is not None:
        about["settings"] = settings_of(preset)
    try:
        about |= facts_of_model(model)
    except ModelNotFoundError:
        if preset is None:
            raise
        about["state"] = "not downloaded"  # the preset is known, though
    if as_json:
        click.echo(json.dumps(about, indent=1))
        return
    rows = [(key.replace("_", " "), _shown(key, value)) for key, value in about.items()]
    print_table([row for row in rows if row[1]])


def _shown(key: str, value: Any) -> str:
    if key == "bytes":
        return format_bytes(value)
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value or "")


def facts_of_model(model: str) -> dict[str, Any]:
    """Facts of a model at hand; `fault` says why it cannot be loaded. Raises ModelNotFoundError."""
    from vllmx_core.config import DEMO_MODEL
    from vllmx_models.hub_cache import find_cached

    path = Path(model).expanduser()
    if model == DEMO_MODEL or os.path.exists(path):  # which too long a name does not
        return {"path": str(path)} | _header(model)
    cached = find_cached(model)
    about = {key: value for key, value in _as_json(cached).items() if value is not None}
    del about["name"], about["modified"]
    return about if cached.fault else about | _header(str(cached.path))


def _header(model: str) -> dict[str, Any]:
    """The facts that a model's header has; for an architecture that is not served, the reason."""
    from vllmx_core.plugins.registry import load_registry
    from vllmx_engine.core.generation_config import SAMPLING
    from vllmx_models.formats.header_only import opened_header

    from vllmx.sizing.facts import facts_of

    registry = load_registry()
    try:
        with opened_header(registry, model) as header:
            facts = facts_of(header, registry)
            generation = header.checkpoint.generation_config
    except ModelNotFoundError:
        raise
    except VllmxError as error:
        return {"fault": error.message}
    stored = facts.forms[0]
    return {
        "architecture": facts.architecture,
        "parameters": stored.num_values,
        "parameters_used_by_a_token": round(stored.values_used),
        "layers": facts.num_layers,
        "max_model_len": facts.shape.max_model_len,
        "weights": ", ".join(sorted({each.kind for each in stored.matrices})),
        "bits_per_weight": round(stored.bits, 2),
        "sampling": {key: value for key, value in generation.items() if key in SAMPLING},
    }
