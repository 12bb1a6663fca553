"""Rank 0: a loaded model whose steps the other ranks run too, and the limits that all agree on."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

from vllmx_core.backend import ForwardStep, LoadedInfo, LoadedModel, SeeingModel, StepHandle
from vllmx_core.errors import RankLostError, VllmxError
from vllmx_core.plan import SamplingRows, StepPlan, StepResult
from vllmx_core.records import Record
from vllmx_core.system.greeter import addresses
from vllmx_core.system.handshake import read_key
from vllmx_engine.core.found_model import FoundModel
from vllmx_engine.core.load import OpenedModel

from vllmx_tp.frames import Frame, PartFrame
from vllmx_tp.group import Group
from vllmx_tp.hosts import COMMAND, RemoteHost
from vllmx_tp.loading import WatchedSource, divide_cores, load_rank, share_of_host
from vllmx_tp.messages import Call, RankReady
from vllmx_tp.pipeline import Handle, PipelinedModel
from vllmx_tp.region import Region
from vllmx_tp.sampled_ids import SampledIds, compares, sampled_frame
from vllmx_tp.stage_times import with_layers

logger = logging.getLogger("vllmx.tp")


def load(found: FoundModel, opened: OpenedModel) -> RankedModel | PipelinedModel:
    """The executor: starts the other ranks, which open the model themselves, and loads this one's
    part meanwhile. Raises the error of any rank."""
    config, places = found.config, addresses(found.config.rank_hosts, "rank_hosts", COMMAND)
    ranks = config.num_ranks
    share = share_of_host(config, 1 + len(places))
    key = read_key(config.rank_key_file) if places else b""
    cores = divide_cores(share, config, opened.backend.name)
    config = with_layers(opened, config, cores[0], share)
    found = replace(found, config=config)
    region = Region.create(ranks, config.pipeline_parallel_size)
    if opened.backend.has_own_devices():
        # NCCL listens on the first external interface, without authentication.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")

    def hosts(group: Group) -> Iterator[RemoteHost]:
        for address, first in zip(places, range(share, ranks, share), strict=True):
            mine = range(first, first + share)
            yield RemoteHost(address, mine, found, region, key, group.check)

    try:
        group = Group(
            found, region, range(1, share), cores[1:], share, hosts, free_bytes=opened.free_bytes
        )
    except BaseException:
        region.close()
        raise
    model: LoadedModel | None = None
    weights = WatchedSource(opened.checkpoint.weights, group.check)
    opened = replace(opened, checkpoint=replace(opened.checkpoint, weights=weights))
    try:
        try:
            model = load_rank(opened, region, 0, cores[0], share=share, config=config)
        except RankLostError:  # it may not contain the cause
            raise group.verdict() from None
        others = group.loaded()
        if config.pipeline_parallel_size > 1:
            info = agreed_stages(model.info, others, config.pipeline_parallel_size)
            info = replace(info, details=info.details | {"layers": config.pipeline_layers})
            return PipelinedModel(model, group, info)
        return RankedModel(model, group, agreed_ranks(model.info, others))
    except BaseException:
        group.kill()
        if model is not None:
            model.close()
        region.close()
        raise


class RankedModel:
    """A `vllmx_core.backend.LoadedModel` over this process's part and a group. All ranks sample the
    same ids from the same logits, because the noise depends only on the row; so ids are not sent.
    """

    def __init__(self, model: LoadedModel, group: Group, info: LoadedInfo) -> None:
        self._model, self._group, self._info = model, group, info
        self._sampled = SampledIds(group.region, 0) if compares() else None
        self._has_hosts = len(group.ranks) < group.region.num_ranks - 1
        self._num_begun = self._num_read = 0
        self._is_closed = False

    @property
    def info(self) -> LoadedInfo:
        return self._info

    @property
    def failure(self) -> RankLostError | None:
        """The reason why the group has ended, if it has; steps raise it too."""
        return self._group.failure

    def step(self, plan: StepPlan, rows: SamplingRows) -> StepHandle:
        call = Call.STEP if self._num_begun > self._num_read else Call.NEXT
        self._num_begun += 1
        self._group.send(call, Frame(plan, rows))
        with self._group.guarded():
            return self._handle(self._model.step(plan, rows))

    def forward(self, plan: StepPlan) -> RankedForward:
        self._num_begun += 1
        self._group.send(Call.FORWARD, Frame(plan, None))
        with self._group.guarded():
            return RankedForward(partial(self.sample, self._model.forward(plan)))

    def sample(self, step: ForwardStep, rows: SamplingRows) -> StepHandle:
        """The second half of a step."""
        self._group.send(Call.SAMPLE, Frame(None, rows))
        with self._group.guarded():
            return self._handle(step.sample(rows))

    def encode(self, plan: StepPlan, begin: float = 0.0, end: float = 1.0) -> None:
        """See `vllmx_core.backend.SeeingModel.encode`. Each rank has the whole tower and computes
        all features itself."""
        if begin == 0.0:
            self._group.send(Call.PASS, Frame(plan, None))
        self._group.send(Call.ENCODE, PartFrame(begin, end))
        with self._group.guarded():
            encode_part(self._model, plan, begin, end)

    def _handle(self, step: StepHandle) -> StepHandle:
        return Handle(partial(self.read, step))

    def read(self, step: StepHandle) -> StepResult:
        """Waits for a step."""
        with self._group.guarded():
            result = step.result()
        if self._group.region.aborted[0]:  # native code then stops waiting without an error
            raise self._group.verdict()
        self._num_read += 1
        if self._sampled is not None:
            self._sampled.tell(result.ids)
            if self._has_hosts:
                self._group.send(Call.SAMPLED, sampled_frame(self._num_read, result.ids))
            difference = self._sampled.difference(self._group.ranks, self._group.check)
            if difference is not None:
                raise self._group.lost(difference)
        return result

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._group.close(self._model.close)
            self._group.region.close()


def encode_part(model: LoadedModel, plan: StepPlan, begin: float, end: float) -> None:
    """Runs a part of a tower's pass; only called on models that see images."""
    seeing = cast(SeeingModel, model)
    if (begin, end) == (0.0, 1.0):
        seeing.encode(plan)
    else:
        seeing.encode(plan, begin, end)


class RankedForward(Record):
    """A `ForwardStep`."""

    sample: Callable[[SamplingRows], StepHandle]


_ALIKE_STAGES = ("backend", "dtype", "kv_cache_dtype", "block_size", "cache_windows")
_ALIKE_RANKS = (*_ALIKE_STAGES, "max_num_batched_tokens", "max_logit_rows", "num_feature_rows")


def agreed_ranks(mine: LoadedInfo, others: Sequence[RankReady]) -> LoadedInfo:
    """Combines the limits of all ranks. Raises VllmxError if they do not fit together."""
    ranks = [RankReady.of(mine), *others]
    _compare_bits(ranks)
    return replace(
        _together(mine, ranks, "ranks", _ALIKE_RANKS, {"ranks": len(ranks)}),
        num_state_slots=min(one.num_state_slots for one in ranks),
    )


def agreed_stages(mine: LoadedInfo, others: Sequence[RankReady], num_stages: int) -> LoadedInfo:
    """Combines the limits of all stages, which have equally many ranks. Raises VllmxError if they
    do not fit together."""
    stages = [RankReady.of(mine), *others]
    slots = [one.num_state_slots for one in stages if one.num_state_slots]
    details = {"stages": num_stages, "ranks": len(stages)}
    return replace(
        _together(mine, stages, "stages", _ALIKE_STAGES, details),
        max_num_batched_tokens=min(one.max_num_batched_tokens for one in stages),
        max_logit_rows=stages[-1].max_logit_rows,
        num_state_slots=min(slots, default=0),
        num_stages=num_stages,
    )


def _compare_bits(ranks: Sequence[RankReady]) -> None:
    """Warns if ranks may sample different ids, since each samples by itself."""
    for name, own in ranks[0].computes_with.items():
        values = [one.computes_with.get(name, own) for one in ranks]
        if len(set(values)) > 1:
            logger.warning(
                "ranks differ in %s (%s): they may round differently and draw different ids, and"
                " answers are wrong from there on: use the same on all hosts (instruction sets of"
                " the CPU backend: set VLLMX_CPU_ISA)",
                name,
                ", ".join(values),
            )


def _together(
    mine: LoadedInfo,
    everyone: Sequence[RankReady],
    who: str,
    alike: Sequence[str],
    details: dict[str, Any],
) -> LoadedInfo:
    for name in alike:
        values = [getattr(one, name) for one in everyone]
        if len(set(values)) > 1:
            raise VllmxError(
                f"{who} differ in {name}: {values}; set it by its flag, or report this"
            )
    return replace(
        mine,
        num_kv_blocks=min(one.num_kv_blocks for one in everyone),
        max_num_seqs=min(one.max_num_seqs for one in everyone),
        state_slot_bytes=sum(one.state_slot_bytes for one in everyone),
        weight_bytes=sum(one.weight_bytes for one in everyone),
        kv_cache_bytes=sum(one.kv_cache_bytes for one in everyone),
        details=mine.details | details,
    )
