"""A checkpoint with a LoRA adapter merged into its matrices."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
from vllmx_core.adapters import Adapter, LowRank, module_key
from vllmx_core.errors import AdapterError, listing
from vllmx_core.plan import F32
from vllmx_core.plugins.checkpoint import Checkpoint, open_adapter
from vllmx_core.plugins.registry import Registry
from vllmx_core.weights.part import SourceOver, WeightPart, WeightSource, dense_part

_OF_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj")


def merged(registry: Registry, checkpoint: Checkpoint, path: Path) -> Checkpoint:
    """The checkpoint with the adapter at `path` in its weights. Raises what `open_adapter` raises,
    and AdapterError for an adapter that does not fit it."""
    adapter = open_adapter(registry, path, checkpoint.config)
    return replace(checkpoint, weights=MergedSource(checkpoint.weights, adapter))


class MergedSource(SourceOver):
    """A `WeightSource` whose matrices have an adapter's changes added, in float32. The
    changes of all experts of a layer may be one pair, as PEFT writes them."""

    def __init__(self, source: WeightSource, adapter: Adapter) -> None:
        self._source, self._changes = source, adapter.modules
        found = {key for name in source.names() for key in self._keys(name)}
        strange = sorted(self._changes.keys() - found)
        if strange:
            raise AdapterError(
                f"the adapter changes {listing(strange, 3)}, which the checkpoint does not have"
            )

    def part(self, name: str) -> WeightPart:
        """Raises WeightFormatError for a missing tensor, AdapterError for a change that does not
        fit."""
        part = self._source.part(name)
        keys = [key for key in self._keys(name) if key in self._changes]
        if not keys:
            return part
        deltas = [
            delta for key in keys if (delta := self._delta(name, key, part.shape)) is not None
        ]
        if not deltas:
            raise AdapterError(f"the adapter's change of {keys[0]!r} is not of {list(part.shape)}")
        return dense_part(name, part.dequantize() + deltas[0])

    @staticmethod
    def _keys(name: str) -> list[str]:
        """The changes that a tensor may be in: its own, or that of all experts."""
        key = module_key(name.removesuffix(".weight"))
        found = _OF_EXPERT.fullmatch(key)
        if found is None:
            return [key]
        return [key, f"{found[1]}.{'down' if found[3] == 'down' else 'gate_up'}_proj"]

    def _delta(self, name: str, key: str, shape: tuple[int, ...]) -> F32 | None:
        """The change of a tensor of this shape; None: the change is of another one."""
        change, module = self._changes[key], module_key(name.removesuffix(".weight"))
        if len(shape) == 3:
            every = _of_experts(change, shape[0])
            turned = None if every is None else every.swapaxes(1, 2)
            return next(
                (one for one in (every, turned) if one is not None and one.shape == shape), None
            )
        if key == module:
            delta = change.b @ change.a
            return next((one for one in (delta, delta.T) if one.shape == shape), None)
        one = _OF_EXPERT.fullmatch(module)
        assert one is not None, "a change of all experts is of a tensor of one"
        every = _of_experts(change, self._num_experts(one[1]))
        if every is None or every.shape[1] not in (shape[0], 2 * shape[0]):
            return None
        half = slice(shape[0], None) if one[3] == "up" else slice(shape[0])
        return every[int(one[2]), half]

    def _num_experts(self, module: str) -> int:
        keys = (module_key(name.removesuffix(".weight")) for name in self.names())
        found = (_OF_EXPERT.fullmatch(key) for key in keys)
        return len({one[2] for one in found if one is not None and one[1] == module})


def _of_experts(change: LowRank, count: int) -> F32 | None:
    """(X, N, K) changes of X experts out of PEFT's pair (r X, K) and (N, r X)."""
    if len(change.a) % count:
        return None
    a = change.a.reshape(count, -1, change.a.shape[1])  # (X, r, K)
    b = change.b.reshape(len(change.b), -1, count)  # (N, r, X)
    found: F32 = np.einsum("orx,xri->xoi", b, a)
    return found
