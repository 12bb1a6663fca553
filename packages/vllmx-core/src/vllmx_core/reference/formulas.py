"""The formulas of the ops in numpy, by name: the oracle of every backend.

Each stands in the file of its op in `vllmx_core.ops`. Shapes as in `vllmx_core.plan`; pages are
(blocks, P, K, D).
"""

from __future__ import annotations

from vllmx_core.ops.activation import activation
from vllmx_core.ops.add_rms_norm import add_rms_norm
from vllmx_core.ops.attention import attend, attention, attention_mask, rotate
from vllmx_core.ops.embedding import embedding
from vllmx_core.ops.experts import experts
from vllmx_core.ops.formulas import Floats
from vllmx_core.ops.gated_act import gated_act
from vllmx_core.ops.head import logits, softcap
from vllmx_core.ops.layer_norm import layer_norm
from vllmx_core.ops.linear import linear
from vllmx_core.ops.rms_norm import rms_norm
from vllmx_core.ops.route import route

__all__ = [
    "Floats",
    "activation",
    "add_rms_norm",
    "attend",
    "attention",
    "attention_mask",
    "embedding",
    "experts",
    "gated_act",
    "layer_norm",
    "linear",
    "logits",
    "rms_norm",
    "rotate",
    "route",
    "softcap",
]
