"""A loaded model: steps go to the native team and come back as results."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
from vllmx_core.backend import LoadedInfo
from vllmx_core.backend_kit.in_flight import InFlight
from vllmx_core.ops.op import Op, OpList
from vllmx_core.ops.values import Value
from vllmx_core.plan import F32, I32, SamplingRows, StepPlan, StepResult

from vllmx_cpu.lower import Lowering
from vllmx_cpu.memory import Bytes
from vllmx_cpu.native import Team
from vllmx_cpu.sampling import SamplerCall
from vllmx_cpu.structs import VxJob, VxRecord, VxSampler, VxStep
from vllmx_cpu.tape import Call, Tape, make_tape


@dataclass(frozen=True, slots=True)
class RecordedStep:
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
    ) -> None:
        self._info = info
        self._team = team
        self._lowering = lowering
        self._vocab_size = vocab_size
        self._sampler_workspace = sampler_workspace
        self._recorded = recorded
        self._steps = steps
        self._sample = lowering.isa.op("sample", VxSampler)
        self._in_flight: InFlight[CpuStep] = InFlight(info)
        self._last: CpuStep | None = None

    @property
    def info(self) -> LoadedInfo:
        return self._info

    def step(self, plan: StepPlan, rows: SamplingRows) -> CpuStep:
        """See `vllmx_core.backend.LoadedModel.step`. With enforce_eager the step has run when this
        returns."""
        self._in_flight.check_room(plan)
        step = CpuStep(self, plan, rows, self._last)
        if self._recorded is not None:
            self._submit(step, self._recorded)
        else:
            self._run_eagerly(step)
        self._in_flight.add(step)
        self._last = step
        return step

    def _submit(self, step: CpuStep, recorded: RecordedStep) -> None:
        forward = recorded.tape.records
        logits = recorded.arena.ctypes.data + recorded.logits_offset
        step.sampler.bind(logits, self._vocab_size, self._sampler_workspace)
        sampler = VxRecord(self._sample, step.sampler.address)
        step.records = (VxRecord * (len(forward) + 1))()
        ctypes.memmove(step.records, forward, ctypes.sizeof(forward))
        step.records[len(forward)] = sampler
        step.job.records = step.records
        step.job.num_records = len(step.records)
        self._team.submit(step.job)

    def _run_eagerly(self, step: CpuStep) -> None:
        run = EagerRun(self._lowering, self._team, step)
        for op in self._steps.ops:
            run.op(op)
        logits = run.address(self._steps.logits)
        step.sampler.bind(logits, self._vocab_size, self._sampler_workspace)
        run.call(Call("sample", self._sample, step.sampler.struct))

    def finish(self, step: CpuStep) -> None:
        """Waits for the oldest step in flight."""
        self._in_flight.check_oldest(step)
        if self._recorded is not None:
            self._team.wait(step.job)
        self._in_flight.remove_oldest()

    def close(self) -> None:
        self._team.close()  # runs what is queued, then joins the threads
        self._in_flight.close()
        self._last = None
        self._recorded = None


class CpuStep:
    """A step in flight: copies of everything that the engine may overwrite, and the native job."""

    def __init__(
        self, owner: CpuLoadedModel, plan: StepPlan, rows: SamplingRows, previous: CpuStep | None
    ) -> None:
        self._owner = owner
        self._arrays: dict[str, I32] = {
            name: np.array(getattr(plan, name), np.int32, order="C")
            for name in ("tokens", "positions", "query_start", "context_len", "logit_rows")
        }
        # One group after the other; a copy even where there is only one.
        self._arrays["slots"] = np.concatenate(plan.slots)  # (G * T,)
        self._arrays["block_table"] = np.concatenate(plan.block_tables)  # (G * R, B)
        width = self._arrays["block_table"].shape[1]
        pointers = {name: array.ctypes.data for name, array in self._arrays.items()}
        shape = {"T": plan.num_tokens, "R": plan.num_rows, "L": plan.num_logit_rows}
        self.records: ctypes.Array[VxRecord] | None = None
        self.sampler = SamplerCall(rows)
        self.job = VxJob(
            step=VxStep(**shape, B=width, block_stride=width, **pointers),
            tokens=pointers["tokens"],
        )
        if previous is not None:
            self._previous_ids = previous.sampler.ids
            self.job.previous_ids = self._previous_ids.ctypes.data
            self.job.num_previous_ids = len(self._previous_ids)

    @property
    def num_tokens(self) -> int:
        return int(self.job.step.T)

    @property
    def num_logit_rows(self) -> int:
        return int(self.job.step.L)

    def result(self) -> StepResult:
        """See `vllmx_core.backend.StepHandle.result`."""
        self._owner.finish(self)
        return self.sampler.result(self.job.seconds)


class EagerRun:
    """Runs each op as a native call of its own, in fresh buffers of the step's size."""

    def __init__(self, lowering: Lowering, team: Team, step: CpuStep) -> None:
        self._lowering, self._team, self._step = lowering, team, step
        self._buffers: dict[Value, F32] = {}
        self._seconds = 0.0

    def address(self, value: Value) -> int:
        """Where a value lies."""
        return int(self._buffers[value].ctypes.data)

    def op(self, op: Op) -> None:
        """All calls of one op."""
        for value in op.writes:
            rows = self._step.num_tokens if value.rows == "T" else self._step.num_logit_rows
            self._buffers[value] = np.empty((rows, value.width), np.float32)
        for call in self._lowering.lower(op, self.address):
            self.call(call)

    def call(self, call: Call) -> None:
        """One native call; the step's time adds up."""
        job = self._step.job
        job.records = make_tape([call]).records
        job.num_records = 1
        self._team.run(job)
        self._seconds += job.seconds
        job.seconds = self._seconds
