"""The conformance suite on ranks of the CPU backend, and what depends on their number or on the
backend on others. They share memory, as processes of one host do.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import pytest
from vllmx_core.backend import Backend, LoadedModel
from vllmx_core.communicator import Communicator
from vllmx_core.errors import ConfigError
from vllmx_core.model import Model
from vllmx_core.weights.part import WeightSource
from vllmx_testing.attention_checks import AttentionChecks
from vllmx_testing.backend_suite import BackendSuite
from vllmx_testing.harness import Harness
from vllmx_testing.latent_checks import LatentChecks
from vllmx_testing.ranked_backend import Meeting, RankedBackend
from vllmx_testing.ranks import ThreadCommunicator
from vllmx_testing.sparse_checks import SparseChecks
from vllmx_testing.state_checks import StateChecks
from vllmx_testing.step_checks import StepChecks
from vllmx_tp.communicator import SharedMemoryCommunicator
from vllmx_tp.region import Region

from tests.usable_backends import backend_spec

PATIENCE_S = 300.0
"""After which a test whose ranks wait for each other for ever fails."""


def shared_by(num_ranks: int, regions: list[Region] | None = None) -> Meeting:
    """The memory that ranks of one load share; it joins `regions`."""
    region = Region.create(num_ranks)
    if regions is not None:
        regions.append(region)

    def meet(end: ThreadCommunicator) -> Communicator:
        return SharedMemoryCommunicator(region, end.rank)

    return meet


class _Ranks(Harness):
    backend = "cpu"
    ranks = 2
    regions: list[Region]

    @pytest.fixture(autouse=True)
    def patience(self) -> Iterator[None]:
        self.regions = []
        timer = threading.Timer(PATIENCE_S, self._abort)
        timer.start()
        yield
        timer.cancel()
        self.regions.clear()  # pytest keeps this object, and each region a descriptor

    def _abort(self) -> None:
        for region in self.regions:
            region.aborted[0] = 1

    def make_backend(self) -> Backend:
        backend: Backend = backend_spec(self.backend).load()()
        return RankedBackend(backend, self.ranks, partial(shared_by, regions=self.regions))

    def with_adapters(self) -> AbstractContextManager[LoadedModel]:
        pytest.skip("ranks take no adapters")

    @contextmanager
    def loaded(self, model: Model, source: WeightSource, **options: Any) -> Iterator[LoadedModel]:
        try:
            with super().loaded(model, source, **options) as loaded:
                yield loaded
        except ConfigError as error:
            if error.param != "tensor_parallel_size":
                raise
            pytest.skip(error.message)  # one feature or fewer kv heads than ranks
        finally:
            for region in self.regions:
                region.close()


class _Parts(AttentionChecks, LatentChecks, SparseChecks, StateChecks, StepChecks):
    """What is cut by ranks. Ops are cut before a backend sees them; codes of the KV cache, the
    sampler and what moves blocks are the same code on each rank as without ranks."""


class _Cpu(_Ranks):
    block_sizes = (16, 32, 64, 128)
    kv_share = 0.75  # as in TestCpu


class _Metal(_Ranks):
    backend = "metal"
    exact_batches = False  # as in TestMetal


class _Torch(_Ranks):
    backend = "torch"
    exact_batches = False  # as in TestTorch


class TestTwoRanksOfCpu(_Cpu, BackendSuite):
    pass


class TestFourRanksOfCpu(_Cpu, _Parts):
    ranks = 4


class TestTwoRanksOfMetal(_Metal, _Parts):
    pass


class TestTwoRanksOfTorch(_Torch, _Parts):
    pass
