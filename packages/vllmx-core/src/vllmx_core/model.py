"""The face of a model architecture and the ops that it is written in.

An architecture is one class that reads a Hugging Face `config.json`, lists its weights, and writes
its forward pass once against `Ops`. It knows no device, no file format, no quantisation and no
sharding. `forward` runs when a step is *recorded*, not when it is replayed: it must not look at
values, only pass arrays on, so that a backend can tape, capture or compile it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from vllmx_core.plan import AnyArray
from vllmx_core.weights import WeightSpec

Array = Any
"""Opaque to a model: a numpy array, a tape slot, a device array ..."""
Weight = Any
"""Opaque to a model: what the backend made of a `WeightSpec` or of a constant."""
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What one attention layer keeps for each token."""

    num_kv_heads: int
    head_size: int
    window: int | None = None
    """Tokens that stay visible, the newest included; None: all of them."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the engine and the backends must know of a model before it is loaded."""

    vocab_size: int
    hidden_size: int
    max_model_len: int
    """Context length that the checkpoint claims."""
    kv: tuple[KVSpec, ...]
    """One entry for each attention layer."""
    dtype: str = "bf16"
    """Checkpoint dtype by its config: bf16, f16 or f32."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Everything about one attention layer that is not data. D = head_size.

    The op splits `qkv` (T, (H + 2K) * D) into q | k | v, applies the optional per-head RMS norm to
    q and k, rotates the first `rotary_dim` of D, writes k and v to the layer's pages and attends.
    Query head h reads kv head h // (H / K).
    """

    layer: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    rope: Weight | None = None
    """Constant (positions, rotary_dim) float32: cos of the rotary_dim / 2 frequencies, then sin."""
    rotary_dim: int = 0
    interleaved: bool = False
    """False: pairs (i, i + rotary_dim / 2), as Hugging Face; True: pairs (2i, 2i + 1)."""
    q_norm: Weight | None = None  # (D,)
    k_norm: Weight | None = None  # (D,)
    norm_eps: float = 1e-6
    window: int | None = None
    softcap: float | None = None
    sinks: Weight | None = None  # (H,) extra logit in each head's softmax
    causal: bool = True
    """False: a row sees its whole context, and a window reaches as far forward as back."""


class StepInputs(Protocol):
    """The arrays of the step that is being recorded, in the backend's own kind."""

    @property
    def tokens(self) -> Array:
        """(T,) token ids."""
        ...

    @property
    def logit_rows(self) -> Array:
        """(L,) indices into the T tokens."""
        ...


class Ops(Protocol):
    """Fused operations; E, F, V as in the module `vllmx_core.plan`. x is (T, features)."""

    def embedding(self, ids: Array, w: Weight) -> Array:
        """(T,) -> (T, E): rows of the table."""
        ...

    def rms_norm(self, x: Array, w: Weight, eps: float) -> Array:
        """x / sqrt(mean(x^2) + eps) * w over the last axis."""
        ...

    def add_rms_norm(
        self, x: Array, residual: Array | None, w: Weight, eps: float
    ) -> tuple[Array, Array]:
        """s = x + residual (x alone when None); returns (rms_norm(s), s)."""
        ...

    def layer_norm(self, x: Array, w: Weight, bias: Weight | None, eps: float) -> Array:
        """(x - mean) / sqrt(var + eps) * w + bias."""
        ...

    def linear(self, x: Array, w: Weight) -> Array:
        """x @ w.T + bias; a row-sharded weight reduces over ranks inside."""
        ...

    def attention(self, qkv: Array, spec: AttentionSpec, step: StepInputs) -> Array:
        """(T, (H + 2K) * D) -> (T, H * D); see `AttentionSpec`."""
        ...

    def gated_act(self, gate_up: Array, kind: Activation) -> Array:
        """(T, 2F) -> (T, F): act(gate) * up."""
        ...

    def activation(self, x: Array, kind: Activation) -> Array:
        """act(x)."""
        ...

    def add(self, x: Array, y: Array) -> Array:
        """x + y."""
        ...

    def scale(self, x: Array, factor: float) -> Array:
        """x * factor."""
        ...

    def logits(self, x: Array, rows: Array, w: Weight, softcap: float | None = None) -> Array:
        """Gathers `rows` of x, multiplies by the LM head: (L, V) float32; with a softcap c, each
        logit becomes c * tanh(logit / c)."""
        ...


class Model(Protocol):
    """An architecture with its config read. Constructed as `Implementation(config)`, `config` being
    the parsed config.json; raises UnsupportedModelError for a config that it cannot honour."""

    @property
    def shape(self) -> ModelShape: ...

    def weights(self) -> tuple[WeightSpec, ...]:
        """The weight map, in the order of use."""
        ...

    def constants(self, max_model_len: int) -> Mapping[str, AnyArray]:
        """Float32 tables such as RoPE's, for positions below `max_model_len`; the backend puts them
        beside the weights under the same names."""
        ...

    def forward(self, ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> Array:
        """Writes the pass from token ids to (L, V) logits."""
        ...
