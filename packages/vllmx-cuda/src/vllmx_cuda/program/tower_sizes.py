"""What passes of a model's tower will take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from vllmx_core.backend import LoadOptions
from vllmx_core.model import Model, encoder_of
from vllmx_core.ops.linear import Linear
from vllmx_core.ops.op import Op, OpList
from vllmx_core.ops.segment_attention import SegmentAttention
from vllmx_core.ops.values import Rows
from vllmx_core.plan import F32, I32, PatchRows, StepPlan
from vllmx_core.recorded.recording import Recording

from vllmx_cuda.device.device import Device
from vllmx_cuda.kernel_specs.attention import KV_ELEM
from vllmx_cuda.matrices.form import ScratchBytes
from vllmx_cuda.matrices.plan import WeightPlan
from vllmx_cuda.program.layout import StepLayout, lay_out, max_items, work_kinds
from vllmx_cuda.program.staging import Layout
from vllmx_cuda.program.step_arrays import StepSizes
from vllmx_cuda.program.work import WorkKinds, item_tokens

PASS_PATCHES = 8192
"""Patches of several images that go through the tower together: enough for any GPU, and no more
memory than it takes. Room for a single image that is larger is made when it comes."""
_FEATURE_ROWS = 4
"""Some products want whole fours of rows; the rest is padding."""
_TAPS = 4


@dataclass(frozen=True, slots=True)
class TowerSizes:
    """The recorded pass over images."""

    ops: OpList
    patches_per_token: int
    dtype: str
    num_processors: int
    work: WorkKinds
    products: Callable[[int], ScratchBytes]
    """What products with so many rows need."""
    num_patches: int
    """Room that is made while the model is loaded."""

    def layout(self, num_patches: int) -> StepLayout:
        """Room for so many patches, a multiple of four features."""
        max_rows: dict[Rows, int] = {"T": num_patches, "L": num_patches // self.patches_per_token}
        products = self.products(num_patches)
        return lay_out(self.ops, max_rows, self.dtype, self.num_processors, products)

    def rounded(self, num_patches: int) -> int:
        """What `layout` is asked for."""
        return -(-num_patches // (unit := _FEATURE_ROWS * self.patches_per_token)) * unit

    def sizes(self, plan: StepPlan, tiles: Sequence[I32]) -> StepSizes:
        """The sizes that a pass has."""
        assert plan.patches is not None, "a tower is given patches"
        singles, items = item_tokens(plan, self.work), 0
        if singles:
            items = max_items(self.ops.ops, singles, self.num_processors)
        features, taps = plan.num_tokens // self.patches_per_token, plan.patches.table_rows.shape[1]
        counts = tuple(map(len, tiles))
        return StepSizes(
            plan.num_tokens, features, plan.num_rows, items, counts, groups=0, taps=taps
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of the room that is made at load, with the arrays of a pass."""
        patches = self.num_patches
        largest = StepSizes(
            patches,
            patches // self.patches_per_token,
            patches,
            max_items(self.ops.ops, patches, self.num_processors),
            (patches,) * len(self.work.tiles),
            0,
            taps=_TAPS,
        )
        return self.layout(patches).num_bytes + Layout.of(largest, self.work).num_bytes

    def groups(self, plan: StepPlan) -> list[StepPlan]:
        """A pass in parts that `PASS_PATCHES` hold, or one image."""
        ends, groups, first = plan.query_start[1:], [], 0
        while first < plan.num_rows:
            begin = int(plan.query_start[first])
            end = int(np.searchsorted(ends, begin + self.num_patches, side="right"))
            end = max(end, first + 1)
            groups.append(self._images(plan, first, end))
            first = end
        return groups

    def _images(self, plan: StepPlan, first: int, end: int) -> StepPlan:
        """Some of a pass."""
        if end - first == plan.num_rows:
            return plan
        rows = plan.patches
        assert rows is not None, "a tower is given patches"
        begin, stop = int(plan.query_start[first]), int(plan.query_start[end])
        some, size = slice(begin, stop), self.patches_per_token
        windows, turns = rows.windows, plan.rope_positions
        if windows is not None:
            windows = windows[(windows >= begin) & (windows <= stop)] - np.int32(begin)
        patches = PatchRows(
            rows.values[some],
            rows.table_rows[some],
            rows.table_weights[some],
            rows.keep[begin // size : stop // size],
            windows,
        )
        return replace(
            plan,
            tokens=plan.tokens[some],
            positions=plan.positions[some],
            query_start=plan.query_start[first : end + 1] - np.int32(begin),
            context_len=plan.context_len[first:end],
            logit_rows=np.arange(0, stop - begin, size, dtype=np.int32),
            rope_positions=None if turns is None else turns[:, some],
            patches=patches,
        )

    def costs(self, plan: StepPlan) -> F32:
        """The cost of each op: about its multiplications."""
        longest = float(np.average(plan.context_len, weights=plan.context_len))
        return np.array([_cost(op, plan.num_tokens, longest) for op in self.ops.ops], np.float32)


def _cost(op: Op, patches: int, longest: float) -> float:
    """A number that is read or written takes memory as long as tensor cores take hundreds of
    products."""
    if isinstance(op, Linear):
        return float(patches) * op.w.rows * op.w.cols
    if isinstance(op, SegmentAttention):
        return 4.0 * patches * op.spec.num_heads * op.spec.head_size * longest
    width = max((value.width for value in (*op.reads, *op.writes)), default=1)
    return 256.0 * patches * width


def tower_sizes(
    model: Model,
    recording: Recording,
    weights: WeightPlan,
    device: Device,
    dtype: str,
    options: LoadOptions,
    *,
    wgmma: bool,
) -> TowerSizes | None:
    """None for a model that sees no images."""
    ops, encoder = recording.tower, encoder_of(model)
    if ops is None or encoder is None:
        return None
    named = {ref.name for op in ops.ops for ref in op.weights}
    specs = [spec for spec in recording.specs if spec.name in named]
    tokens = min(options.max_num_batched_tokens, options.max_model_len)
    sizes = TowerSizes(
        ops,
        encoder.patches_per_token,
        dtype,
        device.info.num_processors,
        work_kinds(ops.ops, dtype, KV_ELEM, device.info.arch, wgmma=wgmma),
        lambda rows: weights.scratch_of(specs, rows),
        min(tokens * encoder.patches_per_token, PASS_PATCHES),
    )
    return replace(sizes, num_patches=sizes.rounded(sizes.num_patches))
