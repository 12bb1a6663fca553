"""The image encoder of a loaded model: plans its passes and runs them in parts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from vllmx_core.backend import LoadOptions
from vllmx_core.model import Model, encoder_of
from vllmx_core.ops.linear import Linear
from vllmx_core.ops.op import Op, OpList
from vllmx_core.ops.segment_attention import SegmentAttention
from vllmx_core.ops.values import Rows
from vllmx_core.plan import F32, I32, PatchRows, StepPlan
from vllmx_core.recorded.recording import Recording

from vllmx_cuda.device.device import Device, Event
from vllmx_cuda.kernel_specs import Variant
from vllmx_cuda.kernel_specs.attention import KV_ELEM
from vllmx_cuda.loading.tuning import Tunable
from vllmx_cuda.matrices.form import ScratchBytes
from vllmx_cuda.matrices.plan import WeightPlan
from vllmx_cuda.program.layout import StepLayout, lay_out, max_items, work_kinds
from vllmx_cuda.program.lower import lower
from vllmx_cuda.program.lowering import Enqueue, Lowering
from vllmx_cuda.program.staging import SLOTS, Layout, Staging, StepMemory
from vllmx_cuda.program.step_arrays import StepSizes
from vllmx_cuda.program.work import StepWork, WorkKinds, item_tokens, plan_all_items, plan_tiles

PASS_PATCHES = 8192
"""Patches of several images that go through the tower together: enough to fill any GPU. Buffers
grow when a larger single image arrives."""
_FEATURE_ROWS = 4
"""Some products need a multiple of four rows; the rest is padding."""
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
    """Returns the scratch of products with a number of rows."""
    num_patches: int
    """Patches that the buffers hold once the model is loaded."""

    def layout(self, num_patches: int) -> StepLayout:
        """The layout for so many patches, a multiple of four features."""
        max_rows: dict[Rows, int] = {"T": num_patches, "L": num_patches // self.patches_per_token}
        products = self.products(num_patches)
        return lay_out(self.ops, max_rows, self.dtype, self.num_processors, products)

    def rounded(self, num_patches: int) -> int:
        """The number of patches, rounded up for `layout`."""
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
        """Bytes of the buffers made at load, with the arrays of a pass."""
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
        """Splits a pass into groups of at most `PASS_PATCHES` patches, or one larger image."""
        ends, groups, first = plan.query_start[1:], [], 0
        while first < plan.num_rows:
            begin = int(plan.query_start[first])
            end = int(np.searchsorted(ends, begin + self.num_patches, side="right"))
            end = max(end, first + 1)
            groups.append(self._images(plan, first, end))
            first = end
        return groups

    def _images(self, plan: StepPlan, first: int, end: int) -> StepPlan:
        """Returns the images `first` to `end` of a pass."""
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
    """Reading or writing a number takes as long as hundreds of products on tensor cores."""
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
    """Returns None for a model without an image encoder."""
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


@dataclass(slots=True)
class _Group:
    """Images that go through the tower together."""

    plan: StepPlan
    placed: tuple[StepSizes, StepMemory] | None = None
    """The sizes and memory of the pass, once its first launches were enqueued."""


@dataclass(slots=True)
class _Pass:
    """Launches of all groups, one after the other."""

    groups: Sequence[_Group]
    ends: Sequence[float]
    """The end of each launch, as a share of the pass."""

    def place(self, share: float) -> int:
        """The number of launches in this share of the pass."""
        if share >= 1.0:
            return len(self.ends)
        return int(np.searchsorted(self.ends, share, side="right"))


@dataclass
class Tower:
    """The launches of a tower over its own buffers, which are replaced by larger ones when a larger
    image arrives.

    Args:
        model: what the model's own ops are lowered against; weights and the store of features are
            common to both.
    """

    model: Lowering
    recorded: TowerSizes
    _lowering: Lowering | None = None
    _launches: list[Enqueue] = field(default_factory=list)
    _num_patches: int = 0
    _staging: Staging | None = None
    _uploads: deque[Event] = field(default_factory=deque)
    _pass: _Pass | None = None

    def __post_init__(self) -> None:
        self.reserve(self.recorded.num_patches)

    @property
    def variants(self) -> Sequence[Variant]:
        """All kernels that the tower launches."""
        assert self._lowering is not None, "buffers are reserved"
        return self._lowering.variants

    def take_tunables(self) -> list[Tunable]:
        """See `Lowering.take_tunables`."""
        assert self._lowering is not None, "buffers are reserved"
        features = self._num_patches // self.recorded.patches_per_token
        return self._lowering.take_tunables({"T": self._num_patches, "L": features})

    def encode(self, plan: StepPlan, begin: float, end: float) -> None:
        """Enqueues a part of a pass; see `vllmx_core.backend.SeeingModel.encode`."""
        if begin == 0.0:
            self._pass = self._begin(plan)
        current = self._pass
        assert current is not None, "a pass begins with its first part"
        count = len(self._launches)
        for index in range(current.place(begin), current.place(end)):
            group = current.groups[index // count]
            group.placed = group.placed or self._upload(group.plan)
            self._launches[index % count](*group.placed)
        if end >= 1.0:
            self._pass = None

    def reserve(self, num_patches: int) -> None:
        """Makes the buffers large enough for groups of so many patches. Raises CapacityError."""
        if num_patches <= self._num_patches:
            return
        recorded, device = self.recorded, self.model.device
        if self._launches:  # what they write to must not go while they run
            device.synchronize()
            num_patches = recorded.rounded(1 << (num_patches - 1).bit_length())
        self._launches.clear()
        self._lowering, self._num_patches = None, 0
        layout = recorded.layout(num_patches)
        self._lowering = replace(
            self.model,
            arena=device.empty(layout.arena.num_bytes),
            offsets=layout.arena.offsets,
            in_place=layout.in_place,
            scratch=layout.scratch(device),
            products=layout.product_scratch(device),
            max_tokens=num_patches,
            variants=[],
            fed={},
            shapes={},
            rotations={},
        )
        self._launches = lower(recorded.ops, self._lowering)
        self._num_patches = num_patches

    def _begin(self, plan: StepPlan) -> _Pass:
        groups = self.recorded.groups(plan)
        self.reserve(max(group.num_tokens for group in groups))
        costs = []
        for group in groups:
            found = self.recorded.costs(group)
            costs += [np.ones(len(self._launches) - len(found), np.float32), found]
        ends = np.cumsum(np.concatenate(costs, dtype=np.float64))
        return _Pass([_Group(group) for group in groups], (ends / ends[-1]).tolist())

    def _upload(self, plan: StepPlan) -> tuple[StepSizes, StepMemory]:
        device, kinds = self.model.device, self.recorded.work
        tiles = tuple(plan_tiles(plan, kind) for kind in kinds.tiles)
        sizes = self.recorded.sizes(plan, tiles)
        layout = Layout.of(sizes, kinds)
        staging = self._staging
        if staging is None or layout.num_bytes > staging.num_bytes:
            device.synchronize()  # copies out of the buffers that go
            self._uploads.clear()
            self._staging = staging = None
            staging = self._staging = Staging(device, kinds, layout.num_bytes, 0, 0, 0)
        if len(self._uploads) == SLOTS:
            self._uploads.popleft().wait()  # its pinned buffer is filled again
        items = plan_all_items(plan, kinds, sizes.tokens, sizes.items)
        staging.upload(plan, None, layout, StepWork(items, tiles))
        self._uploads.append(device.event())
        return sizes, staging.memory(layout)
