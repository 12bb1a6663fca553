"""`vllmx pull`: downloads a model into the cache of the Hugging Face hub."""

from __future__ import annotations

import os
import sys

import click
from vllmx_core.config import DEMO_MODEL
from vllmx_core.errors import ConfigError
from vllmx_core.system.logs import configure_logging
from vllmx_core.system.memory import format_bytes

from vllmx.cli.cached import model_of

SOURCE = click.option(
    "--source",
    default="hub",
    show_default=True,
    help="Download from: hub (Hugging Face) or modelscope (needs vllmx[modelscope]).",
)


@click.command()
@click.argument("name")
@click.option("--revision", help="Branch, tag or commit on the hub.")
@SOURCE
def pull(name: str, revision: str | None, source: str) -> None:
    """Download NAME: a short name (qwen3:4b), org/repo, or org/repo:file.gguf.

    A download that broke off goes on where it ended. The largest of several GGUF files that fits
    the free memory is taken; org/repo:Q4_K_M chooses by a part of the file's name.
    """
    configure_logging("warning")
    model, preset = model_of(name)
    if model == DEMO_MODEL or os.path.exists(os.path.expanduser(model)):
        click.echo(f"{model} is on this machine already: `vllmx run {name}` chats with it")
        return
    if preset is not None and revision is None:
        revision = preset.settings.get("revision")
    loads = fetched(with_source(model, source), revision)
    click.echo(f"{loads} is in the cache: `vllmx run {name if preset else loads}` chats with it")


def with_source(model: str, source: str) -> str:
    """The model by its name for a source. Raises ConfigError for unknown sources."""
    from vllmx_models.sources import MODELSCOPE

    from vllmx.cli.presets import SOURCES

    if source not in SOURCES:
        raise ConfigError(
            f"--source must be {' or '.join(SOURCES)}, got {source!r}", param="source"
        )
    if source == "hub" or model.startswith(MODELSCOPE):
        return model
    return MODELSCOPE + model


def fetched(model: str, revision: str | None) -> str:
    """Downloads the files of a model that the cache lacks and returns the name that loads it.
    Raises ModelNotFoundError, CapacityError, and ConfigError if the disk is too small."""
    from vllmx_core.plugins.checkpoint import resolve_path
    from vllmx_core.plugins.registry import load_registry
    from vllmx_core.system.memory import free_bytes
    from vllmx_models.hub_pull import check_disk, plan_pull, pull_files
    from vllmx_models.sources import MODELSCOPE

    if model.startswith(MODELSCOPE):  # its client knows neither sizes nor the cache beforehand
        resolve_path(load_registry(), model, revision=revision, progress=sys.stderr.isatty())
        return model
    found = plan_pull(model, revision, free_bytes())
    check_disk(found)
    if found.missing:
        count = len(found.missing)
        begun = f", {format_bytes(found.present_bytes)} are there" if found.present_bytes else ""
        click.echo(
            f"{found.name}: {count} file{'s' * (count > 1)},"
            f" {format_bytes(found.missing_bytes)} to download{begun}",
            err=True,
        )
    pull_files(found)
    return found.name


def at_hand(model: str) -> str | None:
    """The name that loads a model without a download, if it is local or whole in the cache."""
    if model == DEMO_MODEL or os.path.exists(os.path.expanduser(model)):
        return model
    from vllmx_models.hub_cache import matching

    names = {found.name for found in matching(model) if not found.fault}
    if len(names) == 1:
        return names.pop()
    return model if names and ":" not in model else None
