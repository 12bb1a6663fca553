"""A core that another process has, or that this one keeps behind a door, for `AsyncLLM.over`."""

from __future__ import annotations

import asyncio
from pathlib import Path

from vllmx_core.plugins.registry import load_registry
from vllmx_engine.core.found_model import FoundModel
from vllmx_engine.link.attached_frontend import AttachedFrontend
from vllmx_engine.link.core_start import CoreStart
from vllmx_engine.link.frontend import Frontend
from vllmx_engine.wire.ipc import Start


async def attach(core: Start, door: str) -> CoreStart:
    """Begins to reach a core by its door, told what it loads. All plugins are looked for: a core
    knows only of those that load models, but not of formats of answers."""
    registry = await asyncio.to_thread(load_registry)
    if core.config.prefer:
        registry.prefer(core.config.prefer)
    found = FoundModel(core.config, Path(core.path), registry, progress=False)
    return CoreStart(found, asyncio.ensure_future(_attached(door)))


async def _attached(door: str) -> Frontend:
    return await AttachedFrontend.start(Path(door))
