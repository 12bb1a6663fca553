"""The formulas of the ops in numpy, by name: the oracle of every backend.

Each is in the file of its op in `vllmx_core.ops`. Shapes as in `vllmx_core.plan`; pages are
(blocks, P, K, D).
"""

from __future__ import annotations

from vllmx_core.arrays import NUMPY
from vllmx_core.ops.activation import activation
from vllmx_core.ops.attention import attend, attention, attention_mask, rotate
from vllmx_core.ops.experts import experts
from vllmx_core.ops.formulas import Floats
from vllmx_core.ops.gated_act import gated_act
from vllmx_core.ops.head import logits, softcap
from vllmx_core.ops.linear import linear
from vllmx_core.ops.route import route

rms_norm, layer_norm = NUMPY.rms_norm, NUMPY.layer_norm

__all__ = [
    "Floats",
    "activation",
    "attend",
    "attention",
    "attention_mask",
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
