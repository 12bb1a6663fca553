"""Loads a checkpoint into tensors of one dtype on the device. A layout that torch has no dtype for
is dequantised on the way, one part after the other, so that no second copy of the model exists."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from vllmx_core.plan import AnyArray
from vllmx_core.system.memory import format_bytes
from vllmx_core.system.progress import show_progress
from vllmx_core.weights.map import TieKey, bias_of, has_bias, parts_of, tie_key
from vllmx_core.weights.part import DENSE, WeightPart, WeightSource
from vllmx_core.weights.spec import WeightSpec

logger = logging.getLogger("vllmx.torch")

DTYPES: Mapping[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
}
_COPY_BYTES = 64 << 20
"""A dense tensor goes over in pieces of this size."""


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """A matrix of `linear` or of the head with its bias, or a stack of X such matrices."""

    matrix: Tensor  # (out, in), of a stack (X, out, in)
    bias: Tensor | None  # (out,), of a stack (X, out)


TorchWeight = LinearWeight | Tensor
"""Matrices and biases are of the model's dtype; vectors and constants are float32."""


def weight_bytes(
    specs: Iterable[WeightSpec],
    constants: Mapping[str, AnyArray],
    dtype: torch.dtype,
    shared: Collection[TieKey] = (),
) -> int:
    """Memory that `WeightLoader` will take for a map, but for matrices that are shared."""
    matrices: dict[TieKey, int] = {}
    rest = sum(table.size * 4 for table in constants.values())
    for spec in specs:
        if spec.kind == "vector":
            rest += spec.rows * 4
            continue
        rows = spec.rows * spec.count
        rest += rows * dtype.itemsize * has_bias(spec)
        matrices[tie_key(spec)] = rows * spec.cols * dtype.itemsize
    return sum(size for key, size in matrices.items() if key not in shared) + rest


@dataclass
class WeightLoader:
    """Loads a weight map. `load` raises WeightFormatError that names the tensor when one is missing
    or has another shape than the map says."""

    source: WeightSource
    dtype: torch.dtype
    device: torch.device
    matrices: dict[TieKey, Tensor] = field(default_factory=dict)
    """Loaded ones; at first those of another model, which are shared."""
    _dequantised: Counter[str] = field(default_factory=Counter)

    def load(
        self, specs: Sequence[WeightSpec], constants: Mapping[str, AnyArray], *, progress: bool
    ) -> dict[str, TorchWeight]:
        weights: dict[str, TorchWeight] = {}
        for index, spec in enumerate(specs):
            weights[spec.name] = self._weight(spec)
            if progress:
                show_progress("loading weights", index + 1, len(specs))
        for name, table in constants.items():
            weights[name] = torch.from_numpy(np.array(table, np.float32)).to(self.device)
        for kind, elements in self._dequantised.items():
            size = format_bytes(elements * self.dtype.itemsize)
            logger.info("%s weights are dequantised at load and take %s", kind, size)
        return weights

    def _weight(self, spec: WeightSpec) -> TorchWeight:
        if spec.kind == "vector":
            vector = torch.empty(spec.rows, dtype=torch.float32, device=self.device)
            self._fill(vector, spec)
            return vector
        key = tie_key(spec)
        if key not in self.matrices:  # a head that is tied to the embedding is held once
            shape = (spec.rows * spec.count, spec.cols)
            self.matrices[key] = torch.empty(shape, dtype=self.dtype, device=self.device)
            self._fill(self.matrices[key], spec)
        if spec.kind == "embedding":
            return self.matrices[key]
        matrix, bias = self.matrices[key], self._bias(spec)
        if spec.kind == "stack":
            matrix = matrix.view(spec.count, spec.rows, spec.cols)
            bias = None if bias is None else bias.view(spec.count, spec.rows)
        return LinearWeight(matrix, bias)

    def _bias(self, spec: WeightSpec) -> Tensor | None:
        bias = bias_of(spec, self.source)
        return None if bias is None else torch.from_numpy(bias).to(self.device, self.dtype)

    def _fill(self, out: Tensor, spec: WeightSpec) -> None:
        first = 0
        for part in parts_of(spec, self.source):
            rows = part.shape[0]
            self._copy(out[first : first + rows], part, spec.offset)
            first += rows

    def _copy(self, out: Tensor, part: WeightPart, offset: float) -> None:
        """Copies a part into `out`, rounded to its dtype."""
        if part.layout == DENSE and not offset:
            step = max(1, _COPY_BYTES // max(1, 4 * out[:1].numel()))
            for begin in range(0, part.shape[0], step):
                raw = part.rows(begin, min(begin + step, part.shape[0])).buffers["weight"]
                held = raw.dtype in DTYPES
                rows = tensor_of(raw.view(), raw.dtype) if held else torch.from_numpy(raw.to_f32())
                out[begin : begin + step].copy_(rows)
            return
        if part.layout != DENSE:
            self._dequantised[part.layout.kind] += out.numel()
        out.copy_(torch.from_numpy(part.dequantize() + np.float32(offset)))


def tensor_of(rows: AnyArray, dtype: str) -> Tensor:
    """A copy: what a part holds may be read-only, which torch has no notion of."""
    copied = np.array(rows)
    if dtype == "bf16":
        return torch.from_numpy(copied.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(copied)
