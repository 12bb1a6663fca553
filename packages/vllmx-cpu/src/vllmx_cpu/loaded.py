"""A loaded model: steps go to the native team and come back as results."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from vllmx_core.adapters import Adapter
from vllmx_core.backend import LoadedInfo, MovableCache
from vllmx_core.backend_kit.hidden import Hidden
from vllmx_core.backend_kit.host_rows import HostRows
from vllmx_core.backend_kit.in_flight import InFlight
from vllmx_core.ops.adapt import Adapt
from vllmx_core.ops.op import Op, OpList
from vllmx_core.ops.values import Value
from vllmx_core.plan import F32, I32, SamplingRows, StepPlan, StepResult
from vllmx_core.records import Record

from vllmx_cpu.images import VxSee, reads_images, see
from vllmx_cpu.kv_cache import LayerPages
from vllmx_cpu.lowering.images import turns
from vllmx_cpu.lowering.site import Lowering
from vllmx_cpu.lowering.table import lower
from vllmx_cpu.memory import Bytes
from vllmx_cpu.native import Team
from vllmx_cpu.sampling import SamplerCall
from vllmx_cpu.structs import VxElementwise, VxJob, VxRecord, VxSampler, VxStep
from vllmx_cpu.tape import Call, Tape, make_tape
from vllmx_cpu.tower import CpuTower


class RecordedStep(Record):
    """The tape of the whole forward pass, and where it leaves the logits."""

    tape: Tape
    arena: Bytes
    logits_offset: int


class CpuLoadedModel:
    """`vllmx_core.backend.LoadedModel`. At most two steps are in flight."""

    def __init__(
        self,
        info: LoadedInfo,
        team: Team,
        lowering: Lowering,
        vocab_size: int,
        sampler_workspace: Bytes,
        recorded: RecordedStep | None,
        steps: OpList,
        tower: CpuTower | None = None,
        hidden: Hidden | None = None,
    ) -> None:
        self._hidden = hidden
        self._info = info
        self._tower = tower
        self._sees = tower is not None or reads_images(steps.ops)
        self._pass: CpuStep | None = None
        """The last pass of the tower, which may still run."""
        self._passes: list[VxJob] = []
        """The last parts of a pass."""
        self._unbilled: list[VxJob] = []
        """Parts since the last step."""
        self._team = team
        self._lowering = lowering
        self._vocab_size = vocab_size
        self._sampler_workspace = sampler_workspace
        self._recorded = recorded
        self._steps = steps
        samples = steps.samples
        ending = ("sample", VxSampler) if samples else (VectorsCall.function, VxElementwise)
        self._end = lowering.isa.op(*ending)
        self._in_flight: InFlight[CpuStep] = InFlight(info, samples=samples)
        self._last: CpuStep | None = None

    @property
    def pages(self) -> tuple[LayerPages, ...]:
        """See `vllmx_core.backend.HasPages`."""
        return self._lowering.pages

    @property
    def hidden(self) -> Hidden | None:
        """See `vllmx_core.backend.HasHidden`."""
        return self._hidden

    @property
    def movable_cache(self) -> MovableCache:
        """See `vllmx_core.backend.HasMovableCache`."""
        pages = [half for page in self.pages for half in (page.k, page.v)]
        blocks = [half.reshape(self._info.num_kv_blocks, -1) for half in pages]
        states = None
        if self._lowering.states:
            memory = self._lowering.states[0].memory  # of all layers
            states = HostRows([memory.reshape(self._info.num_state_slots, -1)], self._settle)
        return MovableCache(HostRows(blocks, self._settle), states, in_host_memory=True)

    def _settle(self) -> None:
        if self._last is not None:
            self._wait(self._last)  # jobs run in order

    @property
    def info(self) -> LoadedInfo:
        return self._info

    def set_adapter(self, slot: int, adapter: Adapter | None) -> None:
        """See `vllmx_core.backend.HasAdapters`."""
        adapters = self._lowering.adapters
        assert adapters is not None, "the model was loaded without room for adapters"
        if self._last is not None:
            self._wait(self._last)  # steps run in order
        adapters.put(slot, adapter)

    def step(self, plan: StepPlan, rows: SamplingRows) -> CpuStep:
        """See `vllmx_core.backend.LoadedModel.step`: one native job. With enforce_eager the step
        has run when this returns."""
        step = self._begin(plan)
        ending = self._ending(step, rows)
        if self._recorded is None:
            self._run_eagerly(step)
            self._end_eagerly(step, ending)
        else:
            records, opening = self._recorded.tape.records, self._opening(step)
            self._submit(step.job, records, self._bound(ending), first=opening)
        step.ending = ending
        self._in_flight.add(step)
        self._last = step
        return step

    def encode(self, plan: StepPlan, begin: float = 0.0, end: float = 1.0) -> None:
        """See `vllmx_core.backend.SeeingModel.encode`: a native job for each part."""
        tower = self._tower
        assert tower is not None, "the model sees no images"
        if begin == 0.0:
            for job in self._passes:  # before its memory goes
                self._team.wait(job)
            tower.make_room(plan)
            self._pass = CpuStep(self, plan, None)
        step = self._pass
        assert step is not None, "a pass begins with its first part"
        job = VxJob(step=step.job.step, tokens=step.job.tokens)
        if self._recorded is None:
            step.eager = step.eager or EagerRun(tower.lowering, self._team, step)
            job.seconds, job.done = step.eager.run(tower.ops, begin, end), 1
        else:
            if len(self._passes) > 1:
                self._team.wait(self._passes[-2])
            self._submit(job, (), *self._opening(step), *tower.part(begin, end))
        self._passes = [*self._passes[-1:], job] if begin else [job]
        self._unbilled.append(job)

    def forward(self, plan: StepPlan) -> CpuStep:
        """See `vllmx_core.backend.LoadedModel.forward`: a native job for each half."""
        step = self._begin(plan)
        if self._recorded is None:
            self._run_eagerly(step)
        else:
            self._submit(step.job, self._recorded.tape.records, first=self._opening(step))
        self._in_flight.add_unsampled(step, plan)
        return step

    def sample(self, step: CpuStep, rows: SamplingRows) -> None:
        """The second half of a step."""
        with self._in_flight.sampling(step, rows):
            try:
                ending = self._ending(step, rows)
            except BaseException:
                self._wait(step)  # before its memory goes
                raise
            if self._recorded is None:
                self._end_eagerly(step, ending)
            else:
                step.second_job = VxJob(step=step.job.step)  # its tokens are resolved by then
                self._submit(step.second_job, (), self._bound(ending))
            step.ending = ending
        self._last = step

    def _begin(self, plan: StepPlan) -> CpuStep:
        self._in_flight.check_room(plan)
        step = CpuStep(self, plan, self._last)
        step.passes, self._unbilled = self._unbilled, []
        return step

    def _ending(self, step: CpuStep, rows: SamplingRows) -> SamplerCall | VectorsCall:
        """The last call of a step."""
        if self._steps.samples:
            return SamplerCall(rows)
        return VectorsCall(step.num_logit_rows, self._steps.logits.width)

    def _bind(self, ending: SamplerCall | VectorsCall, result: int) -> None:
        if isinstance(ending, SamplerCall):
            ending.bind(result, self._vocab_size, self._sampler_workspace)
        else:
            ending.bind(result)

    def _bound(self, ending: SamplerCall | VectorsCall) -> VxRecord:
        """The ending behind the tape."""
        assert self._recorded is not None, "no tape"
        self._bind(ending, self._recorded.arena.ctypes.data + self._recorded.logits_offset)
        return VxRecord(self._end, ending.address, not self._steps.samples)

    def _opening(self, step: CpuStep) -> list[VxRecord]:
        """The calls before the tape."""
        return [call.record for call in opening(self._lowering, step)]

    def _submit(
        self,
        job: VxJob,
        forward: ctypes.Array[VxRecord] | tuple[()],
        *more: VxRecord,
        first: Sequence[VxRecord] = (),
    ) -> None:
        records = (VxRecord * (len(first) + len(forward) + len(more)))()
        records[: len(first)] = list(first)
        if forward:
            place = ctypes.addressof(records) + len(first) * ctypes.sizeof(VxRecord)
            ctypes.memmove(place, forward, ctypes.sizeof(forward))
        records[len(first) + len(forward) :] = list(more)
        job.records = records  # which keeps them
        job.num_records = len(records)
        self._team.submit(job)

    def _run_eagerly(self, step: CpuStep) -> None:
        step.eager = EagerRun(self._lowering, self._team, step)
        step.eager.run(self._steps)

    def _end_eagerly(self, step: CpuStep, ending: SamplerCall | VectorsCall) -> None:
        assert step.eager is not None, "the forward pass has run"
        self._bind(ending, step.eager.address(self._steps.logits))
        step.eager.call(Call("end", self._end, ending.struct, not self._steps.samples))
        step.eager = None

    def seen(self, plan: StepPlan) -> VxSee | None:
        """The plan's arrays for images, where ops read them."""
        return see(plan, self._lowering.images) if self._sees else None

    def finish(self, step: CpuStep) -> None:
        """Waits for the oldest step in flight."""
        self._in_flight.check_oldest(step)
        self._wait(step)
        self._in_flight.remove_oldest()

    def _wait(self, step: CpuStep) -> None:
        if self._recorded is not None:
            self._team.wait(step.job if step.second_job is None else step.second_job)

    def close(self) -> None:
        self._team.close()  # runs what is queued, then joins the threads
        self._in_flight.close()
        self._last = self._pass = None
        self._recorded = self._tower = None


_NOTHING: I32 = np.zeros((1, 0), np.int32)
_SHORT = ("tokens", "positions", "query_start", "context_len", "logit_rows")
_AS_I32: dict[str, Any] = {"dtype": np.int32, "casting": "unsafe"}


def opening(lowering: Lowering, step: CpuStep) -> list[Call]:
    """The calls before a tape: the arrays of a step for images, where the model sees."""
    if step.seen is None:
        return []
    return [Call("see", lowering.isa.op("see", VxSee), step.seen)]


class CpuStep:
    """A step in flight: copies of everything that the engine may overwrite, and its native jobs."""

    def __init__(self, owner: CpuLoadedModel, plan: StepPlan, previous: CpuStep | None) -> None:
        self._owner = owner
        self.seen = owner.seen(plan)
        # One copy of what is short: each would cost more than what it copies.
        arrays = {name: getattr(plan, name) for name in _SHORT}
        if plan.token_types is not None:
            arrays["token_types"] = plan.token_types
        if owner.info.num_state_slots and plan.patches is None:
            arrays["state_from"], arrays["state_to"] = plan.state_slots
            if plan.state_after is not None:
                arrays["state_after"] = plan.state_after
        if plan.adapters is not None and (plan.adapters >= 0).any():
            arrays["adapters"] = plan.adapted
        # One group after the other.
        self._short = np.concatenate((*arrays.values(), *plan.slots), **_AS_I32)  # slots: (G * T,)
        self._tables = np.concatenate(plan.block_tables or (_NOTHING,), **_AS_I32)  # (G * R, B)
        pointers, at = {"block_tables": self._tables.ctypes.data}, self._short.ctypes.data
        for name, array in arrays.items():
            pointers[name] = at
            at += 4 * len(array)
        pointers["slots"] = at
        width = self._tables.shape[1]
        shape = {"T": plan.num_tokens, "R": plan.num_rows, "L": plan.num_logit_rows}
        self.ending: SamplerCall | VectorsCall | None = None
        self.eager: EagerRun | None = None
        """The forward pass, until it was sampled."""
        self.job = VxJob(
            step=VxStep(**shape, B=width, block_stride=width, **pointers),
            tokens=pointers["tokens"],
        )
        self.passes: list[VxJob] = []
        """The passes of the tower between the step before and this one."""
        self.second_job: VxJob | None = None
        """The sampler's own, where it came late."""
        if previous is not None:
            assert previous.ending is not None, "the step before was sampled"
            self._previous_ids = previous.ending.ids
            self.job.previous_ids = self._previous_ids.ctypes.data
            self.job.num_previous_ids = len(self._previous_ids)

    @property
    def num_tokens(self) -> int:
        return int(self.job.step.T)

    @property
    def num_logit_rows(self) -> int:
        return int(self.job.step.L)

    def sample(self, rows: SamplingRows) -> CpuStep:
        """See `vllmx_core.backend.ForwardStep.sample`."""
        self._owner.sample(self, rows)
        return self

    def result(self) -> StepResult:
        """See `vllmx_core.backend.StepHandle.result`."""
        self._owner.finish(self)
        assert self.ending is not None, "a step in flight was sampled"
        late_s = 0.0 if self.second_job is None else self.second_job.seconds
        tower_s = sum(job.seconds for job in self.passes)
        return self.ending.result(self.job.seconds + late_s + tower_s)


class EagerRun:
    """Runs each op as a native call of its own, in fresh buffers of the step's size."""

    def __init__(self, lowering: Lowering, team: Team, step: CpuStep) -> None:
        self._lowering, self._team, self._step = lowering, team, step
        self._buffers: dict[Value, F32] = {}
        self._seconds = 0.0

    def address(self, value: Value) -> int:
        return int(self._buffers[value].ctypes.data)

    def run(self, steps: OpList, begin: float = 0.0, end: float = 1.0) -> float:
        """This part of a pass, and the seconds that it took."""
        before = self._seconds
        for call in (*opening(self._lowering, self._step), *turns(self._lowering)):
            self.call(call)
        for op in steps.ops[int(begin * len(steps.ops)) : int(end * len(steps.ops))]:
            self.op(op)
        return self._seconds - before

    def op(self, op: Op) -> None:
        if isinstance(op, Adapt):  # in place
            self._buffers[op.out] = self._buffers[op.y]
        for value in () if isinstance(op, Adapt) else op.writes:
            rows = self._step.num_tokens if value.rows == "T" else self._step.num_logit_rows
            self._buffers[value] = np.empty((rows, value.width), np.float32)
        for call in lower(self._lowering, op, self.address):
            self.call(call)

    def call(self, call: Call) -> None:
        """One native call; the step's time adds up."""
        job = self._step.job
        job.records = make_tape([call]).records
        job.num_records = 1
        self._team.run(job)
        self._seconds += job.seconds
        job.seconds = self._seconds


class VectorsCall:
    """The op "scale" by one, behind the tape, over the step's L logit `rows`: the next step may
    write into the arena before this one's result is read."""

    function = "scale"

    def __init__(self, rows: int, width: int) -> None:
        self.ids: I32 = np.zeros(0, np.int32)
        self._vectors: F32 = np.empty((rows, width), np.float32)
        self.struct = VxElementwise(y=self._vectors.ctypes.data, width=width, factor=1.0)

    def bind(self, vectors: int) -> None:
        """Sets the address at which the step leaves its (L, width) vectors."""
        self.struct.x = vectors

    @property
    def address(self) -> int:
        """The address of the argument struct."""
        return ctypes.addressof(self.struct)

    def result(self, seconds: float) -> StepResult:
        """The result of the step; call when it has finished."""
        return StepResult(self.ids, elapsed_s=seconds, vectors=self._vectors)
