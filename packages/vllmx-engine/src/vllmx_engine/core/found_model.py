"""The model to load, found: all that the process of the API needs of loading. It imports neither
ops nor engine core, so that a server is ready sooner."""

from __future__ import annotations

import itertools
import logging
import secrets
import sys
from pathlib import Path

from vllmx_core.config import EngineConfig
from vllmx_core.errors import ModelNotFoundError
from vllmx_core.plugins.checkpoint import quantizer, resolve_path
from vllmx_core.plugins.registry import Registry, load_registry
from vllmx_core.records import Record

logger = logging.getLogger("vllmx.load")


class FoundModel(Record):
    """A model that was found, but is not yet opened, with what to load it by."""

    config: EngineConfig
    path: Path
    registry: Registry
    progress: bool
    """Show progress bars on standard error."""
    mmproj: Path | None = None
    """The file of a tower that was asked for."""
    digest_key: bytes = b""
    host_key: bytes = b""
    """See `vllmx_engine.wire.ipc.Start` for both."""


def find_model(config: EngineConfig, registry: Registry | None = None) -> FoundModel:
    """Finds the model, downloading it if need be. Raises ModelNotFoundError, and ConfigError for an
    unknown --isq or --prefer."""
    registry = registry or load_registry()
    if config.prefer:
        registry.prefer(config.prefer)
    for line in itertools.chain(*registry.conflicts()):
        logger.warning("%s", line)
    if config.isq is not None:
        quantizer(registry, config.isq)  # a misspelt one is refused before anything is downloaded
    progress = sys.stderr.isatty()
    path = resolve_path(registry, config.model, revision=config.revision, progress=progress)
    tower = _tower_file(config, registry, progress)
    return FoundModel(config, path, registry, progress, tower, _digest_key(config))


def _digest_key(config: EngineConfig) -> bytes:
    """The key of all replicas, which their folders keep."""
    if config.replicas == 1:
        return b""
    if config.kv_disk is None:
        return secrets.token_bytes(32)
    from vllmx_engine.core.disk_store import folder_key  # few starts need it

    return folder_key(config.kv_disk)


def _tower_file(config: EngineConfig, registry: Registry, progress: bool) -> Path | None:
    """The file that --mmproj names, if the server takes images."""
    if config.mmproj is None or config.limit_images == 0:
        return None
    try:
        return resolve_path(registry, config.mmproj, progress=progress)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(
            f"--mmproj {config.mmproj!r} was not found: give the path of a tower's GGUF file, or"
            " org/repo:mmproj-F16.gguf",
            param="mmproj",
        ) from error
