"""Norms of the residual stream: their kind and their places in a layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from vllmx_core.model import Array, Ops, Weight
from vllmx_core.records import Record
from vllmx_core.weights.spec import WeightSpec

from vllmx_models.blocks.layer import vector


class Norm(Record):
    """The kind and options of a model's norms."""

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    bias: bool = False
    """True if a layer norm has a bias."""
    offset: float = 0.0
    """Added to the checkpoint's weights: 1 for Gemma, which stores weights minus one."""

    def weights(self, name: str, source: str, size: int) -> tuple[WeightSpec, ...]:
        """The norm's lines of the weight map; `source` is the module in the checkpoint."""
        scale = vector(name, f"{source}.weight", size, self.offset)
        return (scale, vector(f"{name}.bias", f"{source}.bias", size)) if self.bias else (scale,)

    def record(self, ops: Ops, x: Array, w: Mapping[str, Weight], name: str) -> Array:
        """The norm of x over its last axis."""
        if self.kind == "rms":
            return ops.rms_norm(x, w[name], self.eps)
        return ops.layer_norm(x, w[name], w[f"{name}.bias"] if self.bias else None, self.eps)


class LayerNorms(Record):
    """The norms of a layer by their modules in the checkpoint; None: no norm at that place."""

    before_mixer: str | None = "input_layernorm"
    after_mixer: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    parallel: bool = False
    """True if the feed-forward reads the layer's input in parallel to the mixer. Without its own
    norm it shares the mixer's."""

    @property
    def named(self) -> dict[str, str]:
        """The layer's norms by their logical names."""
        places = {
            "attn_norm": self.before_mixer,
            "attn_post_norm": self.after_mixer,
            "mlp_norm": self.before_mlp,
            "mlp_post_norm": self.after_mlp,
        }
        return {name: module for name, module in places.items() if module is not None}


PRE = LayerNorms()
POST = LayerNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
SANDWICH = LayerNorms(
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
PARALLEL = LayerNorms(before_mlp=None, parallel=True)


class ResidualStream:
    """(T, E) the residual stream. It adds the last block's output at the next read, so that the sum
    and the following norm fuse into one op."""

    def __init__(self, ops: Ops, w: Mapping[str, Weight], norm: Norm, x: Array) -> None:
        self._ops, self._w, self._norm = ops, w, norm
        self._sum: Array | None = None
        self._last = x
        self._taps: list[int] = []

    def tap(self, point: int) -> None:
        """Keeps what the next read finds for a drafter, see `Ops.tap`."""
        self._taps.append(point)

    def _tapped(self) -> None:
        while self._taps:
            self._ops.tap(self._last, self._taps.pop())

    def add(self, x: Array) -> None:
        """Adds a block's output."""
        self._sum, self._last = self.read(), x

    def read(self) -> Array:
        """The stream itself."""
        if self._sum is not None:
            self._last, self._sum = self._ops.add(self._last, self._sum), None
        self._tapped()
        return self._last

    def replace(self, x: Array) -> None:
        """Replaces the stream by x."""
        self._last, self._sum = x, None

    def scale(self, name: str) -> None:
        """Scales the whole row by the weight `name`."""
        self._last, self._sum = self._ops.scale(self.read(), self._w[name]), None

    def normed(self, name: str) -> Array:
        """The stream's norm by the weight `name`."""
        if self._sum is None or self._norm.kind != "rms":
            return self._norm.record(self._ops, self.read(), self._w, name)
        x, self._last = self._ops.add_rms_norm(self._last, self._sum, self._w[name], self._norm.eps)
        self._sum = None
        self._tapped()
        return x
