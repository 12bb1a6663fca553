"""Manifold-constrained hyper-connections (arXiv:2512.24880) in place of the residual stream.

N streams of E features; each block reads a mix of them and writes to all.
"""

from __future__ import annotations

from collections.abc import Mapping

from vllmx_core.model import Array, HyperSpec, Ops, Weight
from vllmx_core.records import Record
from vllmx_core.weights.spec import PartSpec, WeightSpec

from vllmx_models.blocks.norms import Norm, ResidualStream


class HyperConnections(Record):
    """The streams of a model, and the names of their weights."""

    spec: HyperSpec

    def layer_weights(self, ours: str, theirs: str, hidden_size: int) -> tuple[WeightSpec, ...]:
        """The weights of a layer's two blocks, with those of the norms behind `ours`."""
        found: list[WeightSpec] = []
        for norm, block in (("attn_norm", "attn"), ("mlp_norm", "ffn")):
            names = [f"{theirs}.hc_{block}_{kind}" for kind in ("fn", "scale", "base")]
            parts = map(PartSpec, names, (self.spec.num_mixes, 3, self.spec.num_mixes))
            found += self._weights(f"{ours}.{norm}", tuple(parts), hidden_size)
        return tuple(found)

    def last_weights(self, hidden_size: int) -> tuple[WeightSpec, ...]:
        """The weights of what the model's last norm reads; transformers puts them in a module."""
        sizes = {"fn": self.spec.streams, "scale": 1, "base": self.spec.streams}
        parts = tuple(
            PartSpec(f"hc_head_{kind}", size, alternatives=(f"model.hc_head.hc_{kind}",))
            for kind, size in sizes.items()
        )
        return self._weights("norm", parts, hidden_size)

    def stream(self, ops: Ops, w: Mapping[str, Weight], norm: Norm, x: Array) -> HyperStream:
        """The streams before the first layer, each the embeddings x (T, E)."""
        return HyperStream(ops, w, norm, x, self.spec)

    def _weights(
        self, norm: str, parts: tuple[PartSpec, ...], hidden_size: int
    ) -> tuple[WeightSpec, ...]:
        mixes, scale, bias = parts
        width = self.spec.streams * hidden_size
        return (
            WeightSpec(f"{norm}.mixes", "linear", (mixes,), width, role="router"),
            WeightSpec(f"{norm}.scale", "vector", (scale,)),
            WeightSpec(f"{norm}.bias", "vector", (bias,)),
        )


class HyperStream(ResidualStream):
    """(T, N * E) the streams. A drafter finds the output of the last norm alone."""

    def __init__(
        self, ops: Ops, w: Mapping[str, Weight], norm: Norm, x: Array, spec: HyperSpec
    ) -> None:
        super().__init__(ops, w, norm, ops.hyper_streams(x, spec.streams))
        self._spec = spec
        self._mixes: Array | None = None
        self._named = ""

    def tap(self, point: int) -> None:
        """Keeps nothing: the streams are not what a drafter was trained on."""

    def normed(self, name: str) -> Array:
        """The norm of what the next block reads."""
        ops, w, self._named = self._ops, self._w, name
        self._mixes = ops.linear(self._last, w[f"{name}.mixes"])
        scale, bias = w[f"{name}.scale"], w[f"{name}.bias"]
        x = ops.hyper_read(self._last, self._mixes, self._spec, scale=scale, bias=bias)
        return self._norm.record(ops, x, w, name)

    def add(self, x: Array) -> None:
        """Writes a block's output to the streams."""
        assert self._mixes is not None, "a block reads before it writes"
        scale, bias = self._w[f"{self._named}.scale"], self._w[f"{self._named}.bias"]
        self._last = self._ops.hyper_write(
            self._last, x, self._mixes, self._spec, scale=scale, bias=bias
        )
