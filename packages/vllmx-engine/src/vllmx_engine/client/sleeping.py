"""An engine that gives its memory back for a while: what trainers do in the same process."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Literal

from vllmx_core.config import EngineConfig
from vllmx_core.errors import InvalidRequestError, shown
from vllmx_core.plugins.registry import Registry
from vllmx_core.system.held_files import HeldFiles
from vllmx_core.weights.file_names import weight_files

from vllmx_engine.client.inline import HasEngine
from vllmx_engine.core.engine_core import EngineCore

WakeTag = Literal["weights", "kv_cache"]


class CanSleep(HasEngine):
    """The methods of vLLM's `LLM` for it."""

    def __init__(self, config: EngineConfig, registry: Registry | None = None) -> None:
        super().__init__(config, registry)
        self._config, self._registry = config, registry
        self._held: HeldFiles | None = None

    def sleep(self, level: int = 1) -> None:
        """Ends all requests and frees weights and KV cache until `wake_up`; calls raise
        EngineDeadError meanwhile.

        Args:
            level: 1 keeps the files of weights in the host's memory, 2 keeps nothing.
        """
        if level not in (1, 2):
            raise InvalidRequestError(f"level is 1 or 2, got {shown(str(level))}", param="level")
        if self._held is None:
            files = weight_files(Path(self._engine.info.path)) if level == 1 else ()
            super().close()
            self._held = HeldFiles(files)  # now that the memory is free

    def wake_up(self, tags: Collection[WakeTag] | None = None) -> None:
        """Loads the model again, as the constructor does; nothing if it is awake. Weights and KV
        cache wake together, whichever of them `tags` names."""
        if unknown := set(tags or ()) - {"weights", "kv_cache"}:
            text = f"tags are weights and kv_cache, got {shown(', '.join(sorted(unknown)))}"
            raise InvalidRequestError(text, param="tags")
        if self._held is not None:
            super().__init__(self._config, self._registry)
            self._let_go()

    def close(self) -> None:
        """Frees the model, and the memory of one that sleeps. May be called twice."""
        super().close()
        self._let_go()

    def _let_go(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None

    @property
    def is_sleeping(self) -> bool:
        """True from `sleep` to `wake_up`."""
        return self._held is not None

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; False while requests run."""
        return self._engine.on_core(EngineCore.reset_prefix_cache)
