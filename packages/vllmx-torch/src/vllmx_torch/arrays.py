"""`vllmx_core.arrays.Arrays` of torch: what it names otherwise, and kernels of its own."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional
from vllmx_core.arrays import Arrays
from vllmx_core.plan import AnyArray

from vllmx_torch.transfer import upload

_UPLOADED: Mapping[str, npt.DTypeLike] = {"f": np.float32, "b": np.bool_}


class TorchArrays(Arrays):
    """Activations are float32, which is what formulas compute in."""

    module: ClassVar[Any] = torch

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype)

    def upload(self, x: Tensor, values: AnyArray) -> Tensor:
        return upload(values, _UPLOADED.get(values.dtype.kind, np.int64), x.device)

    def arange_like(self, x: Tensor, count: int) -> Tensor:
        return torch.arange(count, dtype=x.dtype, device=x.device)

    def copy(self, x: Tensor) -> Tensor:
        return x.clone()

    def max(self, x: Tensor, axis: int, keepdims: bool) -> Tensor:
        return x.amax(axis, keepdims)

    def silu(self, x: Tensor) -> Tensor:
        return functional.silu(x)

    def gelu(self, x: Tensor) -> Tensor:
        return functional.gelu(x)

    def gelu_tanh(self, x: Tensor) -> Tensor:
        return functional.gelu(x, approximate="tanh")

    def relu(self, x: Tensor) -> Tensor:
        return functional.relu(x)

    def softplus(self, x: Tensor) -> Tensor:
        return functional.softplus(x)

    def falling(self, x: Tensor) -> Tensor:
        # `topk` promises nothing about ties
        order: Tensor = torch.sort(x, descending=True, stable=True)[1]
        return order

    def descending(self, x: Tensor) -> Tensor:
        return x.sort(-1, descending=True).values

    def greatest(self, x: Tensor, count: int) -> Tensor:
        return x.topk(count, dim=-1).values

    def take_along_axis(self, x: Tensor, indices: Tensor, axis: int) -> Tensor:
        return x.gather(axis, indices)

    def hadamard(self, x: Tensor) -> Tensor:
        return x @ _hadamard_matrix(x.shape[-1], x.device)

    def layer_norm(self, x: Tensor, w: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        if w is None or w.ndim == 1:
            return functional.layer_norm(x, x.shape[-1:], w, bias, eps)
        return functional.layer_norm(x, x.shape[-1:], eps=eps) * w  # no bias comes with these


TORCH = TorchArrays()


@cache
def _hadamard_matrix(size: int, device: torch.device) -> Tensor:
    matrix: Tensor = Arrays.hadamard(TORCH, torch.eye(size, device=device))
    return matrix
