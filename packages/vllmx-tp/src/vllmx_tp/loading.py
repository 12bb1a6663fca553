"""Loads a rank's part of the model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from vllmx_core.backend import LoadedModel, LoadOptions
from vllmx_core.config import EngineConfig
from vllmx_core.errors import ConfigError
from vllmx_core.model import Model
from vllmx_core.sharding.model import sharded
from vllmx_core.sharding.stages import staged
from vllmx_core.system.processors import available_processors, divided_processors
from vllmx_core.weights.files import FileRange
from vllmx_core.weights.part import SourceOver, WeightPart, WeightSource
from vllmx_core.weights.tensor import RawTensor
from vllmx_engine.core.load import OpenedModel

from vllmx_tp.communicator import SharedMemoryCommunicator
from vllmx_tp.region import Region

Cores = tuple[int, ...]
BY_BYTES = "bytes"
"""The word for `EngineConfig.pipeline_layers`."""


def divide_cores(ranks: int, config: EngineConfig, backend: str) -> list[Cores]:
    """The cores of each rank, neighbours together; empty where the system does not tell. Under a
    quota they say how many there are, not which (`on_cores`). Raises ConfigError for more ranks
    than cores, unless `num_threads` asks for so many threads."""
    count = available_processors()
    if ranks > count and config.num_threads is None and backend != "numpy":
        hosts = config.num_ranks // ranks
        one_way = 1 in (config.tensor_parallel_size, config.pipeline_parallel_size)
        is_flag = one_way and hosts == 1
        what = f"{_flag(config)} {ranks} is" if is_flag else f"{ranks} ranks on a host are"
        most = f"choose at most {count}" if is_flag else f"choose at most {count * hosts} in all"
        raise ConfigError(
            f"{what} more than the {count} cores that there are: {most},"
            f" or set --num-threads {ranks} to share cores",
            param=_param(config),
        )
    return divided_processors(ranks)


def share_of_host(config: EngineConfig, hosts: int) -> int:
    """Ranks of each host. Raises ConfigError where they cannot be shared out evenly."""
    stages = config.pipeline_parallel_size
    if config.num_ranks % hosts or (stages > 1 and stages % hosts):
        what = f"{config.num_ranks} ranks" if stages == 1 else f"{stages} stages"
        raise ConfigError(
            f"{what} cannot be shared out among {hosts} hosts (this one and those"
            f" of --rank-hosts): choose {_flag(config)} {hosts} or a multiple",
            param=_param(config),
        )
    return config.num_ranks // hosts


def _param(config: EngineConfig) -> str:
    in_stages = config.pipeline_parallel_size > 1
    return "pipeline_parallel_size" if in_stages else "tensor_parallel_size"


def _flag(config: EngineConfig) -> str:
    return "--" + _param(config).replace("_", "-")


@contextmanager
def on_cores(cores: Sequence[int]) -> Iterator[None]:
    """This thread, and those that it starts meanwhile, which stay there. Under a quota of less than
    all cores they run on any: each container would choose the same ones of a machine."""
    if not cores or available_processors() < len(os.sched_getaffinity(0)):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def load_rank(
    opened: OpenedModel,
    region: Region,
    rank: int,
    cores: Sequence[int],
    *,
    share: int,
    config: EngineConfig,
) -> LoadedModel:
    """One rank's part on its backend, of a host that has `share` of the ranks. Raises what
    `sharded`, `staged` and the backend raise."""
    options, own_devices = opened.options, opened.backend.has_own_devices()
    source = opened.checkpoint.weights
    model, part = _part(opened, region, rank, config)
    mine = replace(
        rank_options(options, part, len(cores), share, own_devices=own_devices),
        communicator=SharedMemoryCommunicator(region, rank),
        progress=options.progress and rank == 0,
    )
    with on_cores(cores):
        loaded: LoadedModel = opened.backend.load()().load(model, source, mine)
    return loaded


def _part(
    opened: OpenedModel, region: Region, rank: int, config: EngineConfig
) -> tuple[Model, float]:
    """A rank's part, and how much it keeps of what all ranks keep of a token."""
    source, options = opened.checkpoint.weights, opened.options
    ranks, stages = region.ranks_of_stage, region.num_stages
    number = rank % ranks
    model = part_of_rank(opened, config, number)
    if stages == 1:
        return model, 1 / ranks
    first = part_of_rank(opened, config, 0) if number else None
    layers = layers_of(config)
    stage = staged(model, source, options, rank // ranks, stages, as_rank_0=first, layers=layers)
    return stage, stage.share_of_cache / ranks


def part_of_rank(opened: OpenedModel, config: EngineConfig, number: int) -> Model:
    """The part of all layers that the rank of that number in each stage has. Raises what `sharded`
    does."""
    ranks = config.tensor_parallel_size
    if ranks == 1 and not config.deterministic:
        return opened.model
    how = {"deterministic": config.deterministic, "whole_experts": config.expert_parallel}
    source, length = opened.checkpoint.weights, opened.options.max_model_len
    return sharded(opened.model, source, length, number, ranks, **how)


def layers_of(config: EngineConfig) -> tuple[int, ...] | None:
    """The layers of each stage; None: such that bytes of weights are balanced."""
    text = config.pipeline_layers
    return None if text in (None, BY_BYTES) else tuple(map(int, str(text).split(",")))


def rank_options(
    options: LoadOptions, part: float, num_cores: int, share: int, *, own_devices: bool = False
) -> LoadOptions:
    """A rank's part of its host, on which `share` of the ranks are: of threads and, but for ranks
    that have devices of their own, of memory. It keeps `part` of what all of them keep of a token.
    """
    threads, given = options.num_threads, options.kv_cache_memory_bytes
    own = 1.0 if own_devices else part
    return replace(
        options,
        memory_fraction=options.memory_fraction / (1 if own_devices else share),
        kv_cache_memory_bytes=None if given is None else int(given * own),
        num_threads=(num_cores or 1) if threads is None else max(1, threads // share),
    )


class WatchedSource(SourceOver):
    """The `WeightSource` of rank 0: each read calls `check` first, which raises if another rank
    cannot load its part. Backends may take all parts first and read their bytes later."""

    def __init__(self, source: WeightSource, check: Callable[[], None]) -> None:
        self._source, self._check = source, check

    def part(self, name: str) -> WeightPart:
        self._check()
        return self._source.part(name).with_buffers(self._watched)

    def _watched(self, raw: RawTensor) -> RawTensor:
        if not isinstance(raw.stored, FileRange):
            return raw
        return replace(raw, stored=replace(raw.stored, before_read=self._check))
