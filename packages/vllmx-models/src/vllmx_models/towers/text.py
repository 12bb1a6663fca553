"""The encoder of an encoder-decoder of text, such as T5. Its patches are token ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
from vllmx_core.errors import InvalidRequestError
from vllmx_core.model import Array, ImagePlaces, Ops, StepInputs, Weight
from vllmx_core.plan import AnyArray
from vllmx_core.records import Record
from vllmx_core.weights.spec import PartSpec, WeightSpec

from vllmx_models.blocks.attention import AttentionMixer
from vllmx_models.blocks.dense import DenseMLP
from vllmx_models.blocks.layer import Block, LayerNames, LayerScope
from vllmx_models.blocks.norms import Norm
from vllmx_models.blocks.tower import linear


class TextTower(Record):
    """A `vllmx_core.model.Encoder`. Its features are the keys and values of the decoder's layers:
    part 2 * i holds the keys of layer i, part 2 * i + 1 its values. Its layers are numbered behind
    those of the decoder."""

    table: PartSpec
    """The embedding."""
    hidden_size: int
    depth: int
    mixer: AttentionMixer
    mlp: DenseMLP
    norm: Norm
    norms: tuple[str, str]
    """The norms before the mixer and before the MLP, within a layer."""
    positions: int
    """Tokens of the longest text."""
    num_decoder_layers: int
    cross: str
    """The modules of cross-attention, with {} for the decoder's layer."""
    module: str = "encoder"

    @property
    def colours_last(self) -> bool:
        """See `vllmx_core.model.Encoder`: ids have no colours."""
        return False

    @property
    def patch_width(self) -> int:
        """See `vllmx_core.model.Encoder`."""
        return 1

    @property
    def patches_per_token(self) -> int:
        """See `vllmx_core.model.Encoder`."""
        return 1

    def constants(self, max_model_len: int) -> Mapping[str, AnyArray]:
        """Positions are biases, which are weights."""
        return {}

    def weights(self) -> tuple[WeightSpec, ...]:
        """See `vllmx_core.model.Encoder`."""
        return tuple(replace(one, shard="none") for one in self._weights())

    @property
    def _blocks(self) -> tuple[Block, Block]:
        return self.mixer, self.mlp

    def _weights(self) -> Iterator[WeightSpec]:
        size, width = self.hidden_size, self.mixer.num_heads * self.mixer.head_size
        yield WeightSpec("encoder.embed", "embedding", (self.table,), size, role="vocabulary")
        for index in range(self.depth):
            ours = f"layers.{self.num_decoder_layers + index}"
            names = LayerNames(ours, f"{self.module}.block.{index}", size)
            for name, theirs, block in zip(_NORMS, self.norms, self._blocks, strict=True):
                yield from self.norm.weights(f"{ours}.{name}", names.within(theirs), size)
                yield from block.weights(names)
        yield from self.norm.weights("encoder.norm", f"{self.module}.final_layer_norm", size)
        for layer in range(self.num_decoder_layers):
            for kind in "kv":
                theirs = f"{self.cross.format(layer)}.{kind}"
                yield linear(f"encoder.{kind}.{layer}", theirs, width, size, bias=False)

    def forward(self, ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> tuple[Array, ...]:
        """See `vllmx_core.model.Encoder`."""
        x = ops.mix(step, w["encoder.embed"])  # (T, E)
        for index in range(self.depth):
            number = self.num_decoder_layers + index
            scope = LayerScope(ops, w, step, number, 0, 0, {}, x)
            for name, block in zip(_NORMS, self._blocks, strict=True):
                normed = self.norm.record(ops, x, w, f"layers.{number}.{name}")
                x = ops.add(x, block.record(normed, scope))
        x = ops.merge(self.norm.record(ops, x, w, "encoder.norm"), 1)
        return tuple(
            ops.linear(x, w[f"encoder.{kind}.{layer}"])
            for layer in range(self.num_decoder_layers)
            for kind in "kv"
        )

    def places(self, grid: tuple[int, int, int]) -> ImagePlaces:
        """See `vllmx_core.model.Encoder`; the engine fills in the rows of the table, the ids."""
        count = grid[2]
        if grid[:2] != (1, 1) or not 0 < count <= self.positions:
            raise InvalidRequestError(f"the model cannot read a text of {grid} tokens")
        places = np.arange(count, dtype=np.int32)
        ones = np.ones((count, 1), np.float32)
        return ImagePlaces(places[None], places[:, None], ones, None, count)


_NORMS = ("attn_norm", "mlp_norm")
