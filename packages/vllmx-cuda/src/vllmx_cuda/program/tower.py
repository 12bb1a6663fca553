"""The tower of a loaded model on its device: passes over images, in parts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from vllmx_core.plan import StepPlan

from vllmx_cuda.device.device import Event
from vllmx_cuda.kernel_specs import Variant
from vllmx_cuda.loading.tuning import Tunable
from vllmx_cuda.program.lower import lower
from vllmx_cuda.program.lowering import Enqueue, Lowering
from vllmx_cuda.program.staging import SLOTS, Layout, Staging, StepMemory
from vllmx_cuda.program.step_arrays import StepSizes
from vllmx_cuda.program.tower_sizes import TowerSizes
from vllmx_cuda.program.work import StepWork, plan_all_items, plan_tiles


@dataclass(slots=True)
class _Group:
    """Images that go through the tower together."""

    plan: StepPlan
    placed: tuple[StepSizes, StepMemory] | None = None
    """The sizes and memory of the pass, once its first launches were enqueued."""


@dataclass(slots=True)
class _Pass:
    """Launches of all groups, one behind the other."""

    groups: Sequence[_Group]
    ends: Sequence[float]
    """The end of each launch, as a share of the pass."""

    def place(self, share: float) -> int:
        """How many launches are over when so much of the pass is."""
        if share >= 1.0:
            return len(self.ends)
        return int(np.searchsorted(self.ends, share, side="right"))


@dataclass
class Tower:
    """The launches of a tower over buffers of its own, which are made anew for an image larger than
    those before.

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
        self.make_room(self.recorded.num_patches)

    @property
    def variants(self) -> Sequence[Variant]:
        """All kernels that the tower launches."""
        assert self._lowering is not None, "there is room for a pass"
        return self._lowering.variants

    def take_tunables(self) -> list[Tunable]:
        """See `Lowering.take_tunables`."""
        assert self._lowering is not None, "there is room for a pass"
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

    def make_room(self, num_patches: int) -> None:
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
        self.make_room(max(group.num_tokens for group in groups))
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
