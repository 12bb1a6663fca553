"""AltUp (arXiv:2301.13310) and LAuReL (arXiv:2411.07501) in place of the residual stream, as Gemma
3n has them.

N streams of E features. A layer predicts all of them, computes the first one, and corrects the
others by what came out of it.
"""

from __future__ import annotations

from collections.abc import Mapping

from vllmx_core.model import Array, Ops, Weight
from vllmx_core.records import Record
from vllmx_core.weights.spec import PartSpec, RowRuns, WeightSpec

from vllmx_models.blocks.attention import AttentionMixer
from vllmx_models.blocks.dense import DenseMLP
from vllmx_models.blocks.layer import LayerNames, LayerScope, linear, part, vector
from vllmx_models.blocks.norms import Norm, ResidualStream


class AltUp(Record):
    """The streams of a model, and the names of their weights."""

    streams: int  # N
    scales: bool = True
    """True if the block after the feed-forward reads the first stream times a vector."""

    def layer_weights(self, ours: str, theirs: str, hidden_size: int) -> tuple[WeightSpec, ...]:
        """A row of coefficients for each pair of streams, and one to correct each."""
        theirs, count = f"{theirs}.altup", self.streams
        router = (part(f"{theirs}.modality_router", count, False),)
        found = [
            vector(f"{ours}.router_norm", f"{theirs}.router_norm.weight", hidden_size),
            WeightSpec(f"{ours}.router", "linear", router, hidden_size, role="router"),
        ]
        for module, rows in (("prediction", count * count), ("correction", count)):
            source = f"{theirs}.{module}_coefs.weight"
            for row in range(rows):
                one = (PartSpec(source, 1, runs=RowRuns(row, 1, 1)),)
                name = f"{ours}.{module}.{row}"
                found.append(WeightSpec(name, "linear", one, count, role="router"))
        if self.scales:
            source = f"{theirs}.correct_output_scale"
            found.append(vector(f"{ours}.corrected_scale", source, hidden_size))
        return tuple(found)

    def last_weights(self, hidden_size: int) -> tuple[WeightSpec, ...]:
        """A matrix to and from each stream but the first; GGUF files have those of all as one."""
        found = []
        for name, module in (("first", "altup_projections"), ("last", "altup_unembed_projections")):
            for index in range(self.streams - 1):
                stacked = PartSpec(f"model.{module}", hidden_size, entry=index)
                source = f"model.{module}.{index}.weight"
                one = PartSpec(source, hidden_size, alternatives=(stacked,))
                found.append(WeightSpec(f"altup.{name}.{index}", "linear", (one,), hidden_size))
        return tuple(found)

    def stream(self, ops: Ops, w: Mapping[str, Weight], norm: Norm, x: Array) -> AltUpStream:
        """The streams before the first layer, which all come of the embeddings x (T, E)."""
        return AltUpStream(ops, w, norm, x, self)


class AltUpStream(ResidualStream):
    """(T, E) the streams. A drafter finds the output of the last norm alone."""

    def __init__(
        self, ops: Ops, w: Mapping[str, Weight], norm: Norm, x: Array, spec: AltUp
    ) -> None:
        super().__init__(ops, w, norm, x)
        self._spec, self._layer, self._written = spec, "", 0
        self._streams = [x, *self._projected("first", [x] * (spec.streams - 1), x)]

    def tap(self, point: int) -> None:
        """Keeps nothing: the streams are not what a drafter was trained on."""

    def normed(self, name: str) -> Array:
        """The norm of what the next block reads. The first norm of a layer predicts its streams,
        and the model's last one reads their mean."""
        layer, _, place = name.rpartition(".")
        if not layer:
            self._last = self._mean()
        elif place == "attn_norm":
            self._layer = layer
            self._predict()
        return self._norm.record(self._ops, self._last, self._w, name)

    def add(self, x: Array) -> None:
        """Takes the output of a layer's mixer, then of its feed-forward, then of the block behind
        it, which is for all streams but the first."""
        ops, self._written = self._ops, (self._written + 1) % 3
        if self._written == 1:
            self._last = ops.scale(ops.add(self._last, x), 0.5**0.5)
        elif self._written == 2:
            self._correct(ops.add(self._last, x))
        else:
            self._streams[1:] = [ops.add(one, x) for one in self._streams[1:]]

    def _predict(self) -> None:
        """Adds a mix of all streams to each."""
        ops, mixes = self._ops, self._routed(self._streams[0])
        predicted = []
        for row, total in enumerate(self._streams):
            for col, one in enumerate(self._streams):
                share = self._share(mixes, f"prediction.{len(self._streams) * row + col}")
                total = ops.add(total, ops.gate(one, share, "identity"))
            predicted.append(total)
        self._streams, self._last = predicted, predicted[0]

    def _correct(self, activated: Array) -> None:
        """Adds what the layer changed of the first stream to each, times its coefficient and 1."""
        ops, mixes = self._ops, self._routed(activated)
        change = ops.add(activated, ops.scale(self._streams[0], -1.0))
        for row, one in enumerate(self._streams):
            share = self._share(mixes, f"correction.{row}")
            more = ops.add(ops.gate(change, share, "identity"), change)
            self._streams[row] = ops.add(one, more)
        self._last = self._streams[0]
        if self._spec.scales:
            self._last = ops.scale(self._last, self._w[f"{self._layer}.corrected_scale"])

    def _routed(self, x: Array) -> Array:
        """(T, N)."""
        ops, w = self._ops, self._w
        x = ops.rms_norm(x, w[f"{self._layer}.router_norm"], self._norm.eps)
        router = w[f"{self._layer}.router"]
        return ops.activation(ops.linear(ops.scale(x, 1 / router.cols), router), "tanh")

    def _share(self, mixes: Array, name: str) -> Array:
        """(T, 1)."""
        return self._ops.linear(mixes, self._w[f"{self._layer}.{name}"])

    def _projected(self, name: str, streams: list[Array], first: Array) -> list[Array]:
        """Projections of streams, in the magnitude of the first one."""
        ops = self._ops
        found = [ops.linear(x, self._w[f"altup.{name}.{i}"]) for i, x in enumerate(streams)]
        return [ops.match_rms(x, first) for x in found]

    def _mean(self) -> Array:
        first, ops = self._streams[0], self._ops
        total = first
        for x in self._projected("last", self._streams[1:], first):
            total = ops.add(total, x)
        return ops.scale(total, 1 / len(self._streams))


class LaurelMixer(AttentionMixer):
    """norm(attention(x)) + x + norm(right(left(x))): two low-rank matrices next to attention."""

    rank: int = 0
    norm: Norm = Norm(1e-6)

    def weights(self, names: LayerNames) -> tuple[WeightSpec, ...]:
        ours, theirs, size = names.ours, names.theirs, names.hidden_size
        left = (part(f"{theirs}.laurel.linear_left", self.rank, False),)
        right = (part(f"{theirs}.laurel.linear_right", size, False),)
        behind = (
            ("attn_post_norm", "post_attention_layernorm"),
            (
                "laurel_norm",
                "laurel.post_laurel_norm",
            ),
        )
        return (
            *super().weights(names),
            linear(f"{ours}.laurel_left", left, size, "none"),
            linear(f"{ours}.laurel_right", right, self.rank, "none"),
            *(
                spec
                for name, module in behind
                for spec in self.norm.weights(f"{ours}.{name}", f"{theirs}.{module}", size)
            ),
        )

    def record(self, x: Array, scope: LayerScope) -> Array:
        ops, layer = scope.ops, f"layers.{scope.layer}"
        low = ops.linear(ops.linear(x, scope.weight("laurel_left")), scope.weight("laurel_right"))
        low = ops.add(x, self.norm.record(ops, low, scope.weights, f"{layer}.laurel_norm"))
        out = super().record(x, scope)
        out = self.norm.record(ops, out, scope.weights, f"{layer}.attn_post_norm")
        return ops.add(out, low)


class SparseMLP(DenseMLP):
    """A gated MLP whose gates are sparse: those above a cutoff count, see `Ops.sparsify`."""

    deviations: float = 0.0

    def weights(self, names: LayerNames) -> tuple[WeightSpec, ...]:
        gate, up = self._first_parts(names)
        _, down = super().weights(names)
        size = names.hidden_size
        return (
            linear(f"{names.ours}.gate", (gate,), size, "none"),
            linear(f"{names.ours}.up", (up,), size, "none"),
            down,
        )

    def record(self, x: Array, scope: LayerScope) -> Array:
        ops = scope.ops
        gate = ops.sparsify(ops.linear(x, scope.weight("gate")), self.deviations)  # (T, F)
        assert self.activation != "relu2"
        hidden = ops.gate(ops.linear(x, scope.weight("up")), gate, self.activation)
        return ops.linear(hidden, scope.weight("down"))  # (T, E)
