"""Ops and steps on every instruction set of the CPU backend, not only on the best one.

tests/kernels has attention, sampling, products and rows of each. What a backend holds and counts is
the same code on all.
"""

from __future__ import annotations

import pytest
from vllmx_core.backend import Backend
from vllmx_core.errors import BackendUnavailableError, ConfigError
from vllmx_cpu.backend import CpuBackend
from vllmx_cpu.native import ISA_VARIABLE, choose_isa, instruction_sets
from vllmx_testing.compressed_checks import CompressedChecks
from vllmx_testing.latent_checks import LatentChecks
from vllmx_testing.op_checks import OpChecks
from vllmx_testing.sparse_checks import SparseChecks
from vllmx_testing.state_checks import StateChecks
from vllmx_testing.step_checks import StepChecks


def usable() -> list[str]:
    try:
        return [isa.name for isa in instruction_sets() if isa.supported]
    except BackendUnavailableError as error:
        pytest.skip(str(error))


class _Forced(OpChecks, LatentChecks, SparseChecks, StateChecks, CompressedChecks, StepChecks):
    isa = ""
    block_sizes = (32, 128)
    kv_share = 0.75  # codes are multiplied as bf16

    @pytest.fixture(autouse=True)
    def force(self, monkeypatch: pytest.MonkeyPatch) -> None:
        names = usable()
        if self.isa not in names:
            pytest.skip(f"{self.isa} does not run here")
        if self.isa == names[-1]:
            pytest.skip(f"{self.isa} is the default here, tested as backend cpu")
        monkeypatch.setenv(ISA_VARIABLE, self.isa)

    def make_backend(self) -> Backend:
        return CpuBackend()


class TestPortable(_Forced):
    isa = "portable"


class TestAvx2(_Forced):
    isa = "avx2"


class TestAvx512Bf16(_Forced):
    isa = "avx512bf16"


class TestAvx512(_Forced):
    isa = "avx512"


class TestNeon(_Forced):
    isa = "neon"


def test_the_default_is_the_most_capable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ISA_VARIABLE, raising=False)
    assert choose_isa().name == usable()[-1]


def test_an_unknown_instruction_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA_VARIABLE, "avx9")
    with pytest.raises(ConfigError, match=rf"VLLMX_CPU_ISA=avx9 .*{usable()[0]}"):
        choose_isa()


def test_the_environment_names_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA_VARIABLE, usable()[0])
    facts = CpuBackend().environment()
    assert facts["instruction set"] == usable()[0]
    assert all(facts.values())
