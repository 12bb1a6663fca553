"""Whisper's encoder (arXiv 2212.04356): two convolutions over log-mel frames, then a transformer. A
row holds the four frames that its two convolutions read directly, one before its own two and one
behind them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import numpy as np
from vllmx_core.errors import InvalidRequestError
from vllmx_core.model import Activation, Array, ImagePlaces, Ops, StepInputs, Weight
from vllmx_core.ops.segment_attention import SegmentSpec
from vllmx_core.plan import AnyArray
from vllmx_core.records import Record
from vllmx_core.weights.spec import PartSpec, WeightSpec

from vllmx_models.blocks.layer import part
from vllmx_models.blocks.tower import linear, norm, normed, prefixed

EPS = 1e-5
_FRAMES = 4


class WhisperTower(Record):
    """The layers. Subclasses of this `vllmx_core.model.Encoder` make features of them."""

    mels: int
    depth: int
    hidden_size: int
    num_heads: int
    mlp_size: int
    activation: Activation
    positions: int
    """Rows of the longest audio."""
    module: str
    """The encoder's module in the checkpoint."""
    last_norm: ClassVar[str] = "layer_norm"
    k_bias: ClassVar[bool] = False

    @property
    def colours_last(self) -> bool:
        """See `vllmx_core.model.Encoder`: frames have no colours."""
        return False

    @property
    def patch_width(self) -> int:
        """See `vllmx_core.model.Encoder`."""
        return _FRAMES * self.mels

    @property
    def patches_per_token(self) -> int:
        """See `vllmx_core.model.Encoder`."""
        return 1

    def constants(self, max_model_len: int) -> Mapping[str, AnyArray]:
        """Positions are weights."""
        return {}

    def weights(self) -> tuple[WeightSpec, ...]:
        """See `vllmx_core.model.Encoder`."""
        return (*self._stem_weights(), *self._layer_weights())

    def _stem_weights(self) -> Iterator[WeightSpec]:
        size, module = self.hidden_size, self.module
        for name, channels in (("conv1", self.mels), ("conv2", size)):
            conv = (part(f"{module}.{name}", size, bias=True),)
            shape = (size, channels, 3)
            yield WeightSpec(f"audio.{name}", "linear", conv, 3 * channels, shape=shape)
        table = (PartSpec(f"{module}.embed_positions.weight", self.positions),)
        yield WeightSpec("audio.positions", "embedding", table, size)

    def _layer_weights(self) -> Iterator[WeightSpec]:
        size, module = self.hidden_size, self.module
        for index in range(self.depth):
            ours, theirs = f"audio.{index}", f"{module}.layers.{index}"
            yield from norm(f"{ours}.norm1", f"{theirs}.self_attn_layer_norm", size)
            biases = {"q": True, "k": self.k_bias, "v": True}
            heads = tuple(
                part(f"{theirs}.self_attn.{one}_proj", size, bias) for one, bias in biases.items()
            )
            yield WeightSpec(f"{ours}.qkv", "linear", heads, size)
            yield linear(f"{ours}.o", f"{theirs}.self_attn.out_proj", size, size)
            yield from norm(f"{ours}.norm2", f"{theirs}.final_layer_norm", size)
            yield linear(f"{ours}.up", f"{theirs}.fc1", self.mlp_size, size)
            yield linear(f"{ours}.down", f"{theirs}.fc2", size, self.mlp_size)
        yield from norm("audio.norm", f"{module}.{self.last_norm}", size)

    def _stem(self, ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> Array:
        """(T, E) before the layers."""
        frames = ops.patches(step, self.patch_width)
        even, odd = (
            ops.activation(
                ops.linear(ops.unfold(frames, self.mels, first, step), w["audio.conv1"]), "gelu"
            )
            for first in (0, 1)
        )
        near = ops.unfold(even, self.hidden_size, -1, step, odd)
        x = ops.activation(ops.linear(near, w["audio.conv2"]), "gelu")
        return ops.add(x, ops.mix(step, w["audio.positions"]))

    def encoded(self, ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> Array:
        """(T, E) before the last norm."""
        x = self._stem(ops, w, step)
        head = self.hidden_size // self.num_heads
        spec = SegmentSpec(self.num_heads, self.num_heads, head, head**-0.5)
        for index in range(self.depth):
            ours = f"audio.{index}"
            qkv = ops.linear(normed(ops, x, w, f"{ours}.norm1", EPS), w[f"{ours}.qkv"])
            x = ops.add(x, ops.linear(ops.segment_attention(qkv, spec, step), w[f"{ours}.o"]))
            up = ops.linear(normed(ops, x, w, f"{ours}.norm2", EPS), w[f"{ours}.up"])
            x = ops.add(x, ops.linear(ops.activation(up, self.activation), w[f"{ours}.down"]))
        return x

    def places(self, grid: tuple[int, int, int]) -> ImagePlaces:
        """See `vllmx_core.model.Encoder`: positions of audio tokens continue those of text."""
        count = grid[2]
        whole = grid[:2] == (1, 1) and count % self.patches_per_token == 0
        if not whole or not 0 < count <= self.positions:
            raise InvalidRequestError(f"the model cannot hear an audio of {grid} rows")
        places = np.arange(count, dtype=np.int32)
        ones = np.ones((count, 1), np.float32)
        return ImagePlaces(
            places[None], places[:, None], ones, None, count // self.patches_per_token
        )


class CrossTower(WhisperTower):
    """The encoder of an encoder-decoder. Its features are the keys and values of the decoder's
    layers, so that each is computed once for an audio: part 2 * i holds the keys of layer i, part
    2 * i + 1 its values."""

    num_decoder_layers: int = 0
    decoder: str = "model.decoder"

    def weights(self) -> tuple[WeightSpec, ...]:
        """See `vllmx_core.model.Encoder`."""
        return (*super().weights(), *self._cross_weights())

    def _cross_weights(self) -> Iterator[WeightSpec]:
        size = self.hidden_size
        for index in range(self.num_decoder_layers):
            theirs = f"{self.decoder}.layers.{index}.encoder_attn"
            yield linear(f"audio.keys.{index}", f"{theirs}.k_proj", size, size, bias=False)
            yield linear(f"audio.values.{index}", f"{theirs}.v_proj", size, size)

    def forward(self, ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> tuple[Array, ...]:
        """See `vllmx_core.model.Encoder`."""
        x = ops.merge(normed(ops, self.encoded(ops, w, step), w, "audio.norm", EPS), 1)
        return tuple(
            ops.linear(x, w[f"audio.{kind}.{index}"])
            for index in range(self.num_decoder_layers)
            for kind in ("keys", "values")
        )


_PREFIXES = ("model.", "thinker.")


class ChatTower(WhisperTower):
    """The encoder in front of a decoder whose audio tokens are some merged rows, projected."""

    out_size: int
    merge: int
    """Rows that make a token."""
    projector: tuple[str, ...]
    """The matrices of the projector in the checkpoint."""
    inner_size: int = 0
    """Numbers between two matrices; 0: as many as behind them."""
    projector_bias: bool = False
    projector_activation: Activation = "gelu"
    """The activation between two matrices."""
    joins: bool = False
    """Rows are joined behind the last norm; otherwise the norm reads their mean."""

    @property
    def patches_per_token(self) -> int:
        """See `vllmx_core.model.Encoder`."""
        return self.merge

    def weights(self) -> tuple[WeightSpec, ...]:
        """See `vllmx_core.model.Encoder`; transformers saves them inside `model`, and models that
        also speak inside `thinker`."""
        found = (*super().weights(), *self._projector())
        return tuple(prefixed(spec, "", _PREFIXES) for spec in found)

    def _projector(self) -> Iterator[WeightSpec]:
        width = self.hidden_size * (self.merge if self.joins else 1)
        for index, theirs in enumerate(self.projector):
            size = self.out_size if index else self.inner_size or self.out_size
            yield linear(f"audio.out.{index}", theirs, size, width, bias=self.projector_bias)
            width = size

    def forward(self, ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> tuple[Array, ...]:
        """See `vllmx_core.model.Encoder`."""
        x = self.encoded(ops, w, step)
        if self.joins:
            x = ops.merge(normed(ops, x, w, "audio.norm", EPS), self.merge)
        else:
            x = normed(ops, ops.merge(x, self.merge, "mean"), w, "audio.norm", EPS)
        for index in range(len(self.projector)):
            x = x if index == 0 else ops.activation(x, self.projector_activation)
            x = ops.linear(x, w[f"audio.out.{index}"])
        return (x,)
