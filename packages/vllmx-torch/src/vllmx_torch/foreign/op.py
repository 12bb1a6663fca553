"""The one op of a model that is a module of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol, runtime_checkable

from torch import Tensor
from vllmx_core.ops.op import Op
from vllmx_core.ops.values import Value

from vllmx_torch.attention import Scratch
from vllmx_torch.kv_cache import LayerPages
from vllmx_torch.step import TorchStep

FOREIGN_MODULE = "transformers module"
"""The module's name among the weights."""


@runtime_checkable
class ForeignModule(Protocol):
    """Runs a whole step."""

    def logits(self, step: TorchStep, pages: Sequence[LayerPages], scratch: Scratch) -> Tensor:
        """(L, V) float32."""
        ...


class RunModule(Op):
    """Computes (L, V) logits from the step's tokens by code that is not a list of ops. It has
    no formula, so every backend but torch refuses it."""

    name: ClassVar[str] = "transformers"
    architecture: str
    out: Value

    def check(self) -> None:
        """It has no operands."""
