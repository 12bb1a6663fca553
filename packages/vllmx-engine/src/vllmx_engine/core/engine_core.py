"""The step loop."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, cast

from vllmx_core.backend import LoadedInfo, LoadedModel, StepHandle
from vllmx_core.config import EngineConfig
from vllmx_core.errors import EngineDeadError, InvalidRequestError
from vllmx_core.kv_connector import KVConnector
from vllmx_core.model import Encoder, ModelShape
from vllmx_core.plan import SamplingRows, StepPlan
from vllmx_core.records import MutableRecord

from vllmx_engine.core.adapters import AdapterPool, no_room
from vllmx_engine.core.batch import BatchBuilder, Step
from vllmx_engine.core.commit import Committer, error_output
from vllmx_engine.core.core_info import scheduler_counts
from vllmx_engine.core.grammars import Grammars
from vllmx_engine.core.images import Images
from vllmx_engine.core.limits import most_in_flight, step_cost, step_limits
from vllmx_engine.core.prefix_cache import CacheIdentity, image_content
from vllmx_engine.core.scheduler import Scheduler
from vllmx_engine.core.sequence import Sequence, check_request
from vllmx_engine.core.sessions import sessions_of
from vllmx_engine.core.speculation import Drafting, drafting_of
from vllmx_engine.core.step_work import Batch, CoreActivity
from vllmx_engine.core.waiting_queue import Clock, QueueDeadlines, timed_out
from vllmx_engine.wire.grammars import Vocabulary
from vllmx_engine.wire.images import ImageRoom
from vllmx_engine.wire.messages import STEP_TOKENS, CoreOutput, CoreRequest, CoreStats

if TYPE_CHECKING:
    from vllmx_engine.core.draft_model import DraftModel
    from vllmx_engine.core.hidden_drafter import HiddenDrafter
    from vllmx_engine.core.load_drafter import LoadedDrafter

logger = logging.getLogger("vllmx.core")

_MAX_FAILURES = 3
"""Steps that fail one after the other until the backend counts as dead."""
CLOSE_S = 4.0
"""Seconds in which KV blocks are written to their store at the end; a process is killed later."""
_GRAMMAR_WAIT_S = 0.002
"""The seconds that a step waits for a grammar with nothing else to do, as do requests that come
meanwhile."""


class _Launched(MutableRecord):
    step: Step
    handle: StepHandle


class EngineCore:
    """Continues token sequences on a loaded model. One thread owns it.

    Args:
        model: closed by `close`.
        config: its scheduling fields; what the model's `LoadedInfo` says of sizes takes precedence.
        max_model_len: longest sequence, prompt and output together.
        vocab_size: ids below it may occur.
        shape: of a model that gives vectors or scores.
        encoder: the tower of a model that sees images.
        drafter: the model that drafts, if one does; closed by `close`.
        adapters: those that requests may name, if the model takes any.
        clock: of deadlines.
        fingerprint: of the model's files and options, for blocks that outlive or leave the process.
        connect: makes the connector to a shared store for them.
    """

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig,
        *,
        max_model_len: int,
        vocab_size: int,
        shape: ModelShape | None = None,
        encoder: Encoder | None = None,
        drafter: LoadedDrafter | None = None,
        adapters: AdapterPool | None = None,
        clock: Clock = time.monotonic,
        fingerprint: str = "",
        connect: Callable[[str], KVConnector] | None = None,
    ) -> None:
        self._model = model
        self.activity = CoreActivity()
        self.step_timeout_s = (
            model.info.step_timeout_s if config.step_timeout_s is None else config.step_timeout_s
        )
        self.limits = step_limits(model, config, max_model_len, vocab_size, shape)
        self._cost = step_cost(config, self.limits)
        self._images = Images(model, encoder, self.limits, shape.features if shape else None)
        sees = None if encoder is None else self._images
        self._scheduler = scheduler = Scheduler(
            self.limits,
            self._cost,
            fcfs=config.scheduling_policy == "fcfs",
            prefix_caching=config.enable_prefix_caching and not self.limits.whole_prompts,
            chunked_prefill=config.enable_chunked_prefill,
            identity=CacheIdentity.of(fingerprint or config.model, model.info),
            images=sees,
            drafting=drafting_of(config),
        )
        scheduler.sessions = sessions_of(config, scheduler.pool, scheduler.cache, clock)
        if config.has_kv_tiers:
            from vllmx_engine.core.load_tiers import open_tiers  # few starts need it

            scheduler.tiers = open_tiers(scheduler, model, config, connect)
        scheduler.table.adapters = self._adapters = adapters
        self._draft_model: DraftModel | None = None
        self._hidden: HiddenDrafter | None = None
        if drafter is not None:
            self._draft_model = drafter.driver(scheduler.table, self.limits)
            if drafter.num_own_rows:
                self._hidden = cast("HiddenDrafter", self._draft_model)
            self.draft_with(Drafting(self._draft_model, drafting_of(config).num_tokens))
        self._builder = BatchBuilder(
            scheduler.table, self.limits, self._cost, scheduler.states, sees
        )
        self._committer = Committer(self._scheduler)
        self._deadlines = QueueDeadlines(scheduler.live, clock)
        self._grammars = Grammars(vocab_size)
        self._in_flight: deque[_Launched] = deque()
        self._most_in_flight = most_in_flight(model.info, config)
        self._idle = False  # the last call of `step` found nothing to compute
        self._outputs: list[CoreOutput] = []
        self._num_added = self._num_steps = self._num_failures = 0
        self._step_s = 0.0
        self._step_sizes = [0] * (len(STEP_TOKENS) + 1)
        self._dead: EngineDeadError | None = None
        self.is_paused = False  # see `pause`

    # --- the loop -----------------------------------------------------------------------------
    def step(self) -> list[CoreOutput]:
        """Launches the next step, then collects the one before it: while the device computes step
        n + 1, the host takes in the ids of step n, sends them, and in the next call schedules and
        prepares step n + 2. Decode rows of step n + 1 are fed ids that the host has not seen; the
        device fills them in (`StepPlan.tokens`). What the host learns late costs little: a row
        that turns out to have ended with step n is computed once more for nothing. Where what a row
        may sample depends on its last token (bad words of several tokens), step n + 1 is launched
        in halves: its forward pass, then step n is collected, then its sampler.

        The plain twin (async_scheduling off) collects what it has just launched; outputs are equal.
        A model in stages has as many steps in flight as stages, with rows of their own, and the
        oldest is collected when there are so many, or when no row can go on before.
        Returns what is new, an empty list when nothing came. Raises EngineDeadError, and does so
        ever after, when the backend is beyond use.
        """
        if self._dead is not None:
            raise self._dead
        self.activity.calls += 1
        try:
            wait_s, tiers = _GRAMMAR_WAIT_S if self._idle else 0.0, self._scheduler.tiers
            self._take_grammars(wait_s)
            for sequence in tiers.finished(wait_s) if tiers is not None else ():
                self._scheduler.release(sequence)
            if self._deadlines:
                self._end_overdue()
            while self._in_flight and self._waits_for_tokens():
                self._collect(self._in_flight.popleft())
            launched = None if self.is_paused else self._launch()
            self._idle = launched is None and not self._in_flight
            if launched is not None:
                self._in_flight.append(launched)
            if len(self._in_flight) >= (self._most_in_flight if launched is not None else 1):
                self._collect(self._in_flight.popleft())
        finally:
            self.activity.calls += 1
        outputs, self._outputs = self._outputs, []
        return outputs

    def _waits_for_tokens(self) -> bool:
        """True if the next step is scheduled behind the results of those in flight: their drafts
        decide how far rows come, or the next drafts begin with their tokens. Stages have rows of
        their own in each step."""
        speculator = self._scheduler.speculator
        if speculator is None or not speculator.is_on or self.limits.num_stages > 1:
            return False
        return speculator.wants_tokens or self._in_flight[-1].step.batch.drafts is not None

    def _launch(self) -> _Launched | None:
        self.activity.doing, self.activity.batch = "scheduling a step", None
        batch = self._scheduler.schedule()
        self._fail_broken(self._scheduler.failed)
        if batch is None:
            return None
        self.activity.doing, self.activity.batch = "launching a step", batch
        try:
            self._images.encode(batch.images)
            plan, rows, step = self._builder.build(batch, self._num_steps)
            if self._hidden is not None:
                self._hidden.keep(plan, step)
            if step.waits_for_ids:
                handle = self._launch_in_halves(plan, rows, step)
            else:
                handle = self._model.step(plan, rows)
            launched = _Launched(step, handle)
        except Exception as error:  # whatever a backend raises
            self._step_failed(self.sequences_of(batch), error)
            return None
        self._num_steps += 1
        self._fail_broken(step.owners.broken)
        self._outputs += [self._committer.end(one) for one in step.owners.ended if not one.finished]
        step.owners.ended.clear()
        for sequence in step.late:
            self._grammars.prepare(sequence)
        return launched

    def _launch_in_halves(self, plan: StepPlan, rows: SamplingRows, step: Step) -> StepHandle:
        """The device computes the step's logits while the host takes in the step before, whose ids
        decide what this one may sample."""
        forward = self._model.forward(plan)
        if self._in_flight:
            self._collect(self._in_flight.popleft())
        self.activity.doing, self.activity.batch = "launching a step", step.batch
        try:
            self._builder.edit(step, rows)
        except Exception:
            forward.sample(rows).result()  # it cannot be taken back, and none follows it unsampled
            raise
        return forward.sample(rows)

    def _collect(self, launched: _Launched) -> None:
        step = launched.step
        self._scheduler.table.last_collected = step.number
        self.activity.doing, self.activity.batch = "waiting for a step", step.batch
        try:
            result = launched.handle.result()
        except Exception as error:  # whatever a backend raises
            chunks = [chunk.sequence for chunk in step.batch.chunks]
            self._step_failed([*step.owners.sequences, *chunks], error)
            return
        self._num_failures = 0
        if self._hidden is not None:
            self._hidden.collected(step.number, result.ids)
        self._step_s += result.elapsed_s
        self._cost.observe(step.batch.load, result.elapsed_s)
        before = self._committer.num_tokens
        self._outputs[:0] = self._committer.commit(step, result)
        tokens = self._committer.num_tokens - before
        if tokens:
            self._step_sizes[bisect_left(STEP_TOKENS, tokens)] += 1
        for sequence in self._committer.paused:
            self._grammars.prepare(sequence)
        self._committer.paused.clear()

    def _take_grammars(self, wait_s: float) -> None:
        """Sequences whose grammar was compiled go to the queue, those whose mask was made go on."""
        for sequence, error in self._grammars.finished(wait_s):
            if sequence.finished:
                continue
            if error is None:
                self._scheduler.release(sequence)
            else:
                self._outputs.append(self._committer.fail(sequence, error))

    def _end_overdue(self) -> None:
        """Ends the sequences that have waited too long for a row."""
        overdue = self._deadlines.expired()
        if overdue:
            self._scheduler.finish_all(overdue)
            self._outputs += [self._committer.fail(one, timed_out(one)) for one in overdue]

    # --- failures -----------------------------------------------------------------------------
    def _fail_broken(self, broken: list[tuple[Sequence, Exception]]) -> None:
        """Ends sequences whose own bookkeeping raised."""
        for sequence, error in broken:
            if not sequence.finished:
                self._outputs.append(self._committer.fail(sequence, error))
        broken.clear()

    def _step_failed(self, sequences: Iterable[Sequence], error: Exception) -> None:
        """Fails a step and its requests; other requests go on. Rows of a later step that wait for
        this step's ids are among them, so that step's results are dropped. Gives up the backend
        when it says so or fails several times in a row."""
        self._num_failures += 1
        logger.error("a step failed (%d in a row)", self._num_failures, exc_info=error)
        self._images.forget()
        if self._images.crossed:  # every running sequence goes on reading what was forgotten
            sequences = [*self._scheduler.running]
        self._fail_broken([(sequence, error) for sequence in sequences])
        if isinstance(error, EngineDeadError):
            self._dead = error
        elif self._num_failures >= _MAX_FAILURES:
            self._dead = EngineDeadError(
                f"the backend failed {self._num_failures} steps in a row: restart the engine; the"
                " log has the details"
            )
        if self._dead is not None:
            raise self._dead from error

    def sequences_of(self, batch: Batch) -> list[Sequence]:
        """The sequences that a step computes."""
        owners = [self._scheduler.table.owner[row] for row in batch.decodes.tolist()]
        chunks = [chunk.sequence for chunk in batch.chunks]
        return [sequence for sequence in owners if sequence is not None] + chunks

    # --- requests -----------------------------------------------------------------------------
    def add(self, request: CoreRequest) -> None:
        """Takes a request in. Never raises for a bad one: it ends with an error output."""
        try:
            if request.request_id in self._scheduler.live:
                raise InvalidRequestError(
                    f"request id {request.request_id!r} is in use: choose another",
                    param="request_id",
                )
            leader = self._scheduler.live.get(request.leader or "")
            if leader is not None and not leader.request.shares_all_with(request):
                leader = None
            if leader is None:
                check_request(request, self.limits)
            images = self._images.take(request) if leader is None else leader.images
            sequence = Sequence(request, self._num_added, self.limits, leader)
            if self._adapters is not None or request.adapter:
                sequence.adapter = self.adapters.find(request.adapter)
            if images is not None:
                sequence.images = images
                sequence.content = image_content(images.inputs, self.limits.block_size)
            self._num_added += 1
            has_all = request.grammar is None or self._grammars.start(sequence)
            self._scheduler.add(sequence, hold=not has_all)
            self._deadlines.add(sequence)
        except Exception as error:  # one request's fault must not stop the others
            self._outputs.append(error_output(request.request_id, error, request.shown))

    def pause(self, is_paused: bool) -> None:
        """Stops steps and deadlines, or lets them go on; steps in flight are collected."""
        self.is_paused = is_paused
        self._deadlines.stop(is_paused)

    def draft_with(self, drafting: Drafting) -> None:
        """Replaces how later requests draft, if the model can verify drafts."""
        if self._scheduler.speculator is not None:
            self._scheduler.speculator.use(drafting)

    @property
    def adapters(self) -> AdapterPool:
        """The adapters. Raises ConfigError if the model takes none."""
        if self._adapters is None:
            raise no_room()
        return self._adapters

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Sets the vocabulary, which must come before the first request with a grammar."""
        self._grammars.set_vocabulary(vocabulary)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests at once and without an output; their blocks are free for the next step.
        Ids that are unknown or ended are ignored."""
        ids = dict.fromkeys(request_ids)  # not a set: in order they lie side by side in memory
        live = self._scheduler.live
        self._scheduler.finish_all([live[name] for name in ids if name in live])
        if self._outputs:
            self._outputs = [output for output in self._outputs if output.request_id not in ids]

    @property
    def request_ids(self) -> list[str]:
        """The ids of all requests that run or wait."""
        return list(self._scheduler.live)

    @property
    def has_work(self) -> bool:
        """True if `step` has something to do."""
        has_rows = bool(self._scheduler.live) and not self.is_paused
        return bool(has_rows or self._outputs or self._in_flight)

    @property
    def failure(self) -> EngineDeadError | None:
        """Why the model cannot go on, known before a step fails, such as a rank that died."""
        found: EngineDeadError | None = getattr(self._model, "failure", None)
        return found

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler, for those that only read it."""
        return self._scheduler

    @property
    def has_draft_model(self) -> bool:
        """True if a model drafts, which is loaded with its target."""
        return self._draft_model is not None

    @property
    def image_room(self) -> ImageRoom:
        """Bounds on a request's images."""
        return self._images.room

    # --- the rest -----------------------------------------------------------------------------
    def stats(self) -> CoreStats:
        """Counters and gauges."""
        return CoreStats(
            num_steps=self._num_steps,
            prompt_tokens=self._committer.prompt_tokens,
            generation_tokens=self._committer.generation_tokens,
            step_seconds=self._step_s,
            step_sizes=tuple(self._step_sizes),
            adapters=None if self._adapters is None else self._adapters.infos,
            **scheduler_counts(self._scheduler),
        )

    def write_idle(self) -> bool:
        """Does some of the work that is left for times without any; False: there is none."""
        tiers = self._scheduler.tiers
        return tiers is not None and tiers.write_idle(self._num_steps)

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; False, and nothing done, while requests run."""
        return self._scheduler.reset_prefix_cache()

    @property
    def model_info(self) -> LoadedInfo:
        """The loaded model's sizes."""
        return self._model.info

    def replace_model(self, load: Callable[[], LoadedModel]) -> None:
        """Closes the model and takes the one that `load` returns, which has the same sizes. Where
        `load` raises, the core has a closed model."""
        self._model.close()
        self._images.forget()
        self._model = self._images.model = load()

    def end_session(self, client: str, session_id: str) -> bool:
        """A session pins its blocks no more; False: the client has no such session."""
        sessions = self._scheduler.sessions
        return sessions is not None and sessions.end(client, session_id)

    def close(self) -> None:
        """Drops all requests and closes the model."""
        self.activity.calls += 1
        self.activity.doing, self.activity.batch = "closing the model", None
        try:
            self.abort(self.request_ids)
            self._in_flight.clear()
            if self._scheduler.tiers is not None and self._dead is None:
                self._scheduler.tiers.close(CLOSE_S)
            self._builder.close()
            self._grammars.close()
            if self._draft_model is not None:
                self._draft_model.close()
        finally:
            self._model.close()
            self.activity.calls += 1
