"""The conformance suite on ranks: of the CPU backend, which share memory, of metal and of torch."""

from __future__ import annotations

from vllmx_core.backend import Backend
from vllmx_core.communicator import Communicator
from vllmx_core.testing.backend_suite import BackendSuite
from vllmx_core.testing.harness import Harness
from vllmx_core.testing.ranked_backend import Meeting, RankedBackend
from vllmx_core.testing.ranks import ThreadCommunicator
from vllmx_core.testing.step_checks import StepChecks
from vllmx_core.testing.weight_checks import WeightChecks
from vllmx_tp.communicator import SharedMemoryCommunicator
from vllmx_tp.region import Region

from .test_backends import backend_spec


def shared_memory(num_ranks: int) -> Meeting:
    """As processes of one host have it."""
    region = Region.create(num_ranks)

    def meet(end: ThreadCommunicator) -> Communicator:
        return SharedMemoryCommunicator(region, end.rank)

    return meet


class _Ranks(Harness):
    backend = "cpu"
    ranks = 2

    def make_backend(self) -> Backend:
        backend: Backend = backend_spec(self.backend).load()()
        return RankedBackend(backend, self.ranks, shared_memory if self.backend == "cpu" else None)


class TestTwoRanksOfCpu(_Ranks, BackendSuite):
    block_sizes = (16, 32, 64, 128)
    kv_share = 0.75


class TestFourRanksOfCpu(_Ranks, StepChecks, WeightChecks):
    ranks = 4


class TestTwoRanksOfMetal(_Ranks, StepChecks, WeightChecks):
    backend = "metal"
    exact_batches = False


class TestTwoRanksOfTorch(_Ranks, StepChecks, WeightChecks):
    backend = "torch"
    exact_batches = False
