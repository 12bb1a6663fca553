"""The tower of Qwen3-VL: a transformer over patches whose positions are interpolated from a square
table and rotated by row and column, and mergers that make a token of 2 x 2 patches: one at its end,
others behind layers in between (DeepStack, arXiv 2406.04334)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from vllmx_core.errors import InvalidRequestError
from vllmx_core.model import Activation, Array, ImagePlaces, Ops, StepInputs, Weight
from vllmx_core.ops.segment_attention import SegmentSpec
from vllmx_core.plan import F32, I32, AnyArray
from vllmx_core.records import Record
from vllmx_core.weights.spec import PartSpec, WeightSpec

from vllmx_models.blocks.layer import part
from vllmx_models.blocks.rope import Rope
from vllmx_models.blocks.tower import linear, merge_order, norm, normed

_EPS = 1e-6
_LONGEST_SIDE = 1 << 14


class QwenTower(Record):
    """A `vllmx_core.model.Encoder`."""

    depth: int
    hidden_size: int
    num_heads: int
    mlp_size: int
    activation: Activation
    patch: int
    frames: int
    merge: int
    table_side: int
    """Side of the square position table."""
    out_size: int
    theta: float
    deepstack: tuple[int, ...]
    """Layers whose output is merged into features for the decoder's first layers."""
    module: str = "model.visual"
    colours_last: bool = False

    @property
    def patch_width(self) -> int:
        """See `vllmx_core.model.Encoder`."""
        return 3 * self.frames * self.patch**2

    @property
    def patches_per_token(self) -> int:
        """See `vllmx_core.model.Encoder`."""
        return self.merge**2

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    # --- weights ----------------------------------------------------------------------------------
    def weights(self) -> tuple[WeightSpec, ...]:
        """See `vllmx_core.model.Encoder`."""
        return tuple(self._weights())

    def _weights(self) -> Iterator[WeightSpec]:
        module, size = self.module, self.hidden_size
        shape = (size, 3, self.frames, self.patch, self.patch)
        patch = part(f"{module}.patch_embed.proj", size, bias=True)
        yield WeightSpec("visual.patch", "linear", (patch,), self.patch_width, shape=shape)
        table = PartSpec(f"{module}.pos_embed.weight", self.table_side**2)
        yield WeightSpec("visual.positions", "embedding", (table,), size)
        for index in range(self.depth):
            ours, theirs = f"visual.{index}", f"{module}.blocks.{index}"
            yield from norm(f"{ours}.norm1", f"{theirs}.norm1", size)
            yield linear(f"{ours}.qkv", f"{theirs}.attn.qkv", 3 * size, size)
            yield linear(f"{ours}.o", f"{theirs}.attn.proj", size, size)
            yield from norm(f"{ours}.norm2", f"{theirs}.norm2", size)
            yield linear(f"{ours}.up", f"{theirs}.mlp.linear_fc1", self.mlp_size, size)
            yield linear(f"{ours}.down", f"{theirs}.mlp.linear_fc2", size, self.mlp_size)
        joined = size * self.patches_per_token
        mergers = [("visual.merger", f"{module}.merger", size)]
        for number in range(len(self.deepstack)):
            theirs = f"{module}.deepstack_merger_list.{number}"
            mergers.append((f"visual.deepstack.{number}", theirs, joined))
        for ours, theirs, width in mergers:
            yield from norm(f"{ours}.norm", f"{theirs}.norm", width)
            yield linear(f"{ours}.up", f"{theirs}.linear_fc1", joined, joined)
            yield linear(f"{ours}.down", f"{theirs}.linear_fc2", self.out_size, joined)

    def constants(self, max_model_len: int) -> Mapping[str, AnyArray]:
        """Frequencies of the row, then those of the column; an image of n tokens has at most so
        many rows and columns of merged patches."""
        longest = min(max_model_len * self.merge, _LONGEST_SIDE)
        half = Rope("default", self.theta, self.head_size // 2, longest).table(longest)
        cos, sin = np.split(half, 2, axis=1)
        return {"visual.rope": np.concatenate([cos, cos, sin, sin], axis=1)}

    # --- the pass ---------------------------------------------------------------------------------
    def forward(self, ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> tuple[Array, ...]:
        """See `vllmx_core.model.Encoder`: first what replaces tokens, then what is added."""
        x = ops.linear(ops.patches(step, self.patch_width), w["visual.patch"])  # (T, E)
        x = ops.add(x, ops.mix(step, w["visual.positions"]))
        quarter = self.head_size // 4
        spec = SegmentSpec(
            self.num_heads,
            self.num_heads,
            self.head_size,
            self.head_size**-0.5,
            self.head_size,
            rope_axes=(0,) * quarter + (1,) * quarter,
        )
        added = []
        for index in range(self.depth):
            ours = f"visual.{index}"
            qkv = ops.linear(normed(ops, x, w, f"{ours}.norm1", _EPS), w[f"{ours}.qkv"])
            seen = ops.segment_attention(qkv, spec, step, rope=w["visual.rope"])
            x = ops.add(x, ops.linear(seen, w[f"{ours}.o"]))
            up = ops.linear(normed(ops, x, w, f"{ours}.norm2", _EPS), w[f"{ours}.up"])
            x = ops.add(x, ops.linear(ops.activation(up, self.activation), w[f"{ours}.down"]))
            if index in self.deepstack:
                ours = f"visual.deepstack.{self.deepstack.index(index)}"
                joined = normed(ops, ops.merge(x, self.patches_per_token), w, f"{ours}.norm", _EPS)
                added.append(self._merged(ops, joined, w, ours))
        joined = ops.merge(normed(ops, x, w, "visual.merger.norm", _EPS), self.patches_per_token)
        return (self._merged(ops, joined, w, "visual.merger"), *added)

    def _merged(self, ops: Ops, x: Array, w: Mapping[str, Weight], ours: str) -> Array:
        up = ops.activation(ops.linear(x, w[f"{ours}.up"]), "gelu")
        return ops.linear(up, w[f"{ours}.down"])

    # --- places -----------------------------------------------------------------------------------
    def places(self, grid: tuple[int, int, int]) -> ImagePlaces:
        """See `vllmx_core.model.Encoder`: time is constant within an image, rows and columns
        count from its first token, and text continues after the maximum."""
        frames, tall, wide = grid
        merge, most = self.merge, _LONGEST_SIDE
        whole = frames == 1 and tall % merge == 0 and wide % merge == 0
        if not whole or not (merge <= tall <= most and merge <= wide <= most):
            raise InvalidRequestError(f"the model cannot see an image of {grid} patches")
        row, column = merge_order(tall, wide, merge)
        rows, row_weights = _taps(row, tall, self.table_side)
        columns, column_weights = _taps(column, wide, self.table_side)
        table_rows = rows[:, :, None] * self.table_side + columns[:, None, :]  # (N, 2, 2)
        weights = row_weights[:, :, None] * column_weights[:, None, :]
        token_row, token_column = merge_order(tall // merge, wide // merge, 1)
        positions = np.stack([np.zeros_like(token_row), token_row, token_column])
        return ImagePlaces(
            np.stack([row, column]),
            table_rows.reshape(-1, 4),
            weights.reshape(-1, 4),
            positions,
            max(tall, wide) // merge,
        )


def _taps(index: I32, size: int, side: int) -> tuple[I32, F32]:
    """(N, 2) neighbours in a line of `side` values stretched over `size` places, end to end, and
    their weights."""
    at = index.astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
    below = np.floor(at)
    taps = np.clip(below.astype(np.int32)[:, None] + np.arange(2, dtype=np.int32), 0, side - 1)
    above = (at - below)[:, None]
    return taps, np.concatenate([1 - above, above], axis=1)
