"""The lowered step on its device: enqueues any size, replays the sizes that repeat."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from vllmx_core.plan import I32, SamplingRows, StepPlan
from vllmx_core.system.progress import show_progress

from vllmx_cuda.device.buckets import bucket_of
from vllmx_cuda.device.device import Device, Graph
from vllmx_cuda.device.memory import Memory
from vllmx_cuda.device.ranks import DeviceRanks
from vllmx_cuda.kernel_specs import Variant
from vllmx_cuda.program.layout import max_items
from vllmx_cuda.program.lowering import Enqueue
from vllmx_cuda.program.planning import LoadSizes
from vllmx_cuda.program.sampler import DRAWS, DeviceSampler, Draw, Sampled, draw_of
from vllmx_cuda.program.staging import Layout, Staging, StepMemory, is_plain
from vllmx_cuda.program.step_arrays import StepSizes
from vllmx_cuda.program.vectors import DeviceVectors, Vectors
from vllmx_cuda.program.work import StepWork, item_tokens, plan_all_items, plan_tiles

logger = logging.getLogger("vllmx.cuda")
FEW_LOGITS = 8
"""Logit rows of a captured step with few prompts that end."""


class Graphs:
    """Captured graphs by key.

    Args:
        enabled: False: nothing is captured, for debugging.
    """

    def __init__(self, device: Device, *, enabled: bool) -> None:
        self._device, self._enabled = device, enabled
        self._graphs: dict[Hashable, Graph] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, key: Hashable, enqueue: Callable[[], None]) -> None:
        """Runs launches that are always the same for their key. The first time they run uncaptured,
        so that algorithms are chosen, and are then captured."""
        graph = self._graphs.get(key)
        if graph is not None:
            graph.launch()
            return
        if not self._enabled:
            enqueue()
            return
        with self._device.tuning():
            enqueue()
        self._graphs[key] = self._device.capture(enqueue)


@dataclass(frozen=True, slots=True)
class PlacedStep:
    """The memory of a step's arrays; all steps of one bucket share one."""

    layout: Layout
    memory: StepMemory
    captured: bool
    """True for a bucket, whose launches are always the same."""


@dataclass
class Program:
    """All launches of a step. One of decode rows alone, or one with prompts or drafts that is not
    long, is padded to its bucket and is a copy to the device, two graphs (to the logits, and to the
    ids) and a copy back; any other runs as it is."""

    device: Device
    recorded: LoadSizes
    ops: Sequence[Enqueue]
    begin: Variant
    logits: Memory
    last_ids: Memory
    staging: Staging
    ending: DeviceSampler | DeviceVectors
    graphs: Graphs
    ranks: DeviceRanks | None = None
    """The other ranks of a model on several devices."""
    _buckets: dict[tuple[int, int | None], PlacedStep] = field(default_factory=dict)
    """The captured steps by their tokens and, if rows have several, by their logit rows."""

    def run(self, plan: StepPlan, rows: SamplingRows) -> Sampled | Vectors:
        """Enqueues a whole step."""
        return self._sample(self._forward(plan, rows), rows)

    def forward(self, plan: StepPlan) -> PlacedStep:
        """Enqueues a step as far as its logits, which `sample` must take before the next one."""
        return self._forward(plan, None)

    def sample(self, placed: PlacedStep, rows: SamplingRows) -> Sampled | Vectors:
        """Enqueues the rest; the sampler's parameters go in a copy of their own."""
        self.staging.upload_parameters(rows, placed.layout)
        return self._sample(placed, rows)

    def capture_buckets(self, limit_s: float, *, progress: bool = False) -> int:
        """Captures decode steps, the largest bucket first, until all are or the time is over: the
        rest is captured when it is first used. Number of buckets that are ready."""
        begin, total = time.perf_counter(), len(self.recorded.buckets)
        for done, size in enumerate(reversed(self.recorded.buckets)):
            is_over = time.perf_counter() - begin >= limit_s
            if self.ranks is not None:  # a rank that goes on alone would wait for the others
                is_over = not self.ranks.agree(wanted=not is_over)
            if is_over:
                logger.info("captured %d of %d batch sizes, the rest at first use", done, total)
                return done
            bucket = self._bucket(size)
            for draw in DRAWS:  # of stages without a sampler, too: each replay meets the others'
                nothing, work = _nothing(self._groups), self._no_work(bucket.layout.sizes)
                self.staging.upload(nothing, _no_rows(draw), bucket.layout, work)
                self._replay_forward(bucket)
                if isinstance(self.ending, DeviceSampler):
                    self._replay_ids(bucket, draw)
            self.device.synchronize()
            if progress:
                show_progress("capturing graphs", done + 1, total)
        return total

    def _forward(self, plan: StepPlan, rows: SamplingRows | None) -> PlacedStep:
        bucket = self._bucket_of(plan)
        tiles = self._no_tiles
        if plan.num_tokens > plan.num_rows or bucket is None:
            tiles = tuple(plan_tiles(plan, kind) for kind in self.recorded.work.tiles)
        if bucket is not None:
            work = self._work(plan, bucket.layout.sizes, tiles)
            self.staging.upload(plan, rows, bucket.layout, work)
            self._replay_forward(bucket)
            return bucket
        sizes = self._sizes(plan, tiles)
        layout = self.staging.layout(sizes)
        self.staging.upload(plan, rows, layout, self._work(plan, sizes, tiles))
        placed = PlacedStep(layout, self.staging.memory(layout), captured=False)
        self._enqueue(sizes, placed.memory)
        return placed

    def _sample(self, placed: PlacedStep, rows: SamplingRows) -> Sampled | Vectors:
        if isinstance(self.ending, DeviceVectors):
            # a bucket is a stage's, whose plans ask for none
            return self.ending.take(0 if placed.captured else placed.layout.sizes.logit_rows)
        picked = placed.captured and is_plain(rows) and rows.num_rows > 0
        if picked:
            self._replay_ids(placed, draw_of(rows))
        return self.ending.sample(self.logits, placed.memory, rows, picked=picked)

    def _replay_forward(self, bucket: PlacedStep) -> None:
        """The pass to the logits."""
        sizes, memory = bucket.layout.sizes, bucket.memory
        self.graphs.run(sizes, lambda: self._enqueue(sizes, memory))

    def _replay_ids(self, bucket: PlacedStep, draw: Draw) -> None:
        """The ids of every row."""
        sizes, memory, sampler = bucket.layout.sizes, bucket.memory, self.ending
        assert isinstance(sampler, DeviceSampler), "a model without ids has no buckets"
        self.graphs.run(
            (sizes, draw),
            lambda: sampler.enqueue_ids(self.logits, memory, sizes.logit_rows, draw),
        )

    def _enqueue(self, sizes: StepSizes, memory: StepMemory) -> None:
        self.device.launch(
            self.begin,
            {"count": sizes.tokens, "patches": sizes.patches},
            (
                memory.tokens,
                self.last_ids,
                self.staging.tables,
                memory.patches,
                sizes.tokens,
                sizes.patches,
            ),
        )
        for op in self.ops:
            op(sizes, memory)

    def _bucket_of(self, plan: StepPlan) -> PlacedStep | None:
        """The bucket of a step of decode rows, or of one with prompts or drafts. The latter comes
        with a few logit rows, and with as many as tokens."""
        tokens, logits = plan.num_tokens, plan.num_logit_rows
        mixed = tokens > plan.num_rows
        size = bucket_of(tokens, self.recorded.mixed_buckets if mixed else self.recorded.buckets)
        if size is None or not mixed:
            return None if size is None else self._bucket(size)
        most = min(size, self.recorded.max_rows["L"])
        return self._bucket(size, min(FEW_LOGITS, most) if logits <= FEW_LOGITS else most)

    def _bucket(self, size: int, logits: int | None = None) -> PlacedStep:
        """
        Args:
            logits: rows of logits of a step some of whose rows have several tokens.
        """
        found = self._buckets.get((size, logits))
        if found is None:
            mixed = logits is not None
            items = max_items(self.recorded.steps.ops, size, self.device.info.num_processors)
            # Rows of several tokens are at most half as many, each of them a tile and what is full.
            tiles = tuple(
                size // 2 + size // kind.tokens if mixed else 0 for kind in self.recorded.work.tiles
            )
            rows = size - mixed  # some row has several tokens
            sizes = StepSizes(
                size,
                size if logits is None else logits,
                rows,
                items,
                tiles,
                self._groups,
                has_states=self._has_states,
            )
            layout = self.staging.layout(sizes)
            found = self._buckets[size, logits] = PlacedStep(
                layout, self.staging.memory(layout), captured=True
            )
        return found

    def _sizes(self, plan: StepPlan, tiles: tuple[I32, ...]) -> StepSizes:
        by_items = item_tokens(plan, self.recorded.work)
        processors = self.device.info.num_processors
        items = max_items(self.recorded.steps.ops, by_items, processors) if by_items else 0
        num_tiles = tuple(map(len, tiles))
        return StepSizes(
            plan.num_tokens,
            plan.num_logit_rows,
            plan.num_rows,
            items,
            num_tiles,
            self._groups,
            has_states=self._has_states,
        )

    def _work(self, plan: StepPlan, sizes: StepSizes, tiles: tuple[I32, ...]) -> StepWork:
        return StepWork(plan_all_items(plan, self.recorded.work, sizes.tokens, sizes.items), tiles)

    @property
    def _groups(self) -> int:
        return len(self.recorded.kv.layout.groups)

    @property
    def _has_states(self) -> bool:
        return self.recorded.kv.states.slot_bytes > 0

    @property
    def _no_tiles(self) -> tuple[I32, ...]:
        return tuple(np.zeros((0, 4), np.int32) for _ in self.recorded.work.tiles)

    def _no_work(self, sizes: StepSizes) -> StepWork:
        return self._work(_nothing(self._groups), sizes, self._no_tiles)


def _nothing(groups: int) -> StepPlan:
    """Padding alone: nothing is stored, nothing attended to."""
    empty = np.zeros(0, np.int32)
    return StepPlan(
        empty,
        empty,
        (empty,) * groups,
        np.zeros(1, np.int32),
        empty,
        (empty.reshape(0, 0),) * groups,
        empty,
    )


def _no_rows(draw: Draw) -> SamplingRows:
    return replace(SamplingRows.greedy(0), all_greedy=draw == "greedy")
