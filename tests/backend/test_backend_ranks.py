"""The conformance suite on ranks: of the CPU backend, of metal and of torch. They share memory, as
processes of one host do.

`VLLMX_TEST_RANKS=all` runs all of it, which takes minutes; else what ranks have most to do with.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from vllmx_core.backend import Backend, LoadedModel
from vllmx_core.communicator import Communicator
from vllmx_core.errors import ConfigError
from vllmx_core.model import Model
from vllmx_core.testing.attention_checks import FEATURES, attention_model
from vllmx_core.testing.backend_suite import BackendSuite
from vllmx_core.testing.harness import Harness, mixed_steps
from vllmx_core.testing.late_checks import LateChecks
from vllmx_core.testing.op_checks import CASES, STEPS, case_model
from vllmx_core.testing.ranked_backend import Meeting, RankedBackend
from vllmx_core.testing.ranks import ThreadCommunicator
from vllmx_core.testing.step_checks import StepChecks
from vllmx_core.testing.weight_checks import WeightChecks
from vllmx_core.weights import WeightSource
from vllmx_tp.communicator import SharedMemoryCommunicator
from vllmx_tp.region import Region

from .test_backends import backend_spec

EVERYTHING = os.environ.get("VLLMX_TEST_RANKS") == "all"
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

    def _abort(self) -> None:
        for region in self.regions:
            region.aborted[0] = 1

    def make_backend(self) -> Backend:
        backend: Backend = backend_spec(self.backend).load()()
        return RankedBackend(backend, self.ranks, partial(shared_by, regions=self.regions))

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


class _Cpu(_Ranks):
    block_sizes = (16, 32, 64, 128)
    kv_share = 0.75  # as in TestCpu


class _Metal(_Ranks):
    backend = "metal"
    exact_batches = False  # as in TestMetal


class _Torch(_Ranks):
    backend = "torch"
    exact_batches = False  # as in TestTorch


class TestTwoRanksOfCpu(_Cpu, StepChecks, LateChecks, WeightChecks):
    @pytest.mark.parametrize("name", ["grouped 3", "multi-query", "head size 20", "everything"])
    def test_heads_are_divided(self, name: str) -> None:
        self.compare(*attention_model(**FEATURES[name]), mixed_steps())

    @pytest.mark.parametrize(
        "name", ["experts: 24 by 20, 2 of 4, silu, clamp 7.0, biased", "gated_act: silu, width 33"]
    )
    def test_ops_between_divided_tables(self, name: str) -> None:
        self.compare(*case_model(CASES[name]), STEPS)


class TestFourRanksOfCpu(_Cpu, StepChecks):
    ranks = 4


class TestTwoRanksOfMetal(_Metal, StepChecks):
    pass


class TestTwoRanksOfTorch(_Torch, StepChecks):
    pass


class TestAllOfTwoRanksOfCpu(_Cpu, BackendSuite):
    __test__ = EVERYTHING


class TestAllOfFourRanksOfCpu(_Cpu, BackendSuite):
    __test__ = EVERYTHING
    ranks = 4


class TestAllOfTwoRanksOfMetal(_Metal, BackendSuite):
    __test__ = EVERYTHING


class TestAllOfTwoRanksOfTorch(_Torch, BackendSuite):
    __test__ = EVERYTHING
