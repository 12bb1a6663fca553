"""The probe of the CUDA backend, against a libcuda that a test makes up."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllmx_core.errors import BackendUnavailableError, ConfigError
from vllmx_cuda import environment, plugin
from vllmx_cuda.device import driver
from vllmx_cuda.device.arch import ARCHITECTURES, architecture


@dataclass
class FakeCuda:
    """libcuda with GPUs of the given names and capabilities."""

    gpus: tuple[tuple[str, int, int], ...] = ()
    status: int = 0
    version: int = 13010

    def cuInit(self, flags: int) -> int:
        return self.status

    def cuDriverGetVersion(self, out: Any) -> int:
        out._obj.value = self.version
        return 0

    def cuDeviceGetCount(self, out: Any) -> int:
        out._obj.value = len(self.gpus)
        return 0

    def cuDeviceGet(self, out: Any, ordinal: int) -> int:
        out._obj.value = ordinal
        return 0

    def cuDeviceGetName(self, out: Any, size: int, handle: ctypes.c_int) -> int:
        out.value = self.gpus[handle.value][0].encode()
        return 0

    def cuDeviceTotalMem_v2(self, out: Any, handle: ctypes.c_int) -> int:
        out._obj.value = 80 << 30
        return 0

    def cuDeviceGetAttribute(self, out: Any, attribute: int, handle: ctypes.c_int) -> int:
        out._obj.value = self.gpus[handle.value][{75: 1, 76: 2}[attribute]]
        return 0


def test_facts_are_those_of_the_driver() -> None:
    facts = driver.query(lambda: FakeCuda((("NVIDIA H200", 9, 0), ("NVIDIA T4", 7, 5))))
    assert facts.cuda_version == (13, 1)
    assert [(d.ordinal, d.name, d.capability) for d in facts.devices] == [
        (0, "NVIDIA H200", (9, 0)),
        (1, "NVIDIA T4", (7, 5)),
    ]
    assert facts.devices[0].memory_bytes == 80 << 30


@pytest.mark.parametrize(
    ("fake", "reason"),
    [
        (FakeCuda(), "no GPU is visible.*CUDA_VISIBLE_DEVICES"),
        (FakeCuda(status=100), "error 100.*no GPU is visible"),
        (FakeCuda(status=803), "error 803.*reboot"),
        (FakeCuda(status=12345), "error 12345"),
        (FakeCuda((("GTX 1080", 6, 1),)), r"7\.5 \(Turing\).*GTX 1080 \(6\.1\).*--backend cpu"),
    ],
)
def test_a_reason_names_the_remedy(fake: FakeCuda, reason: str) -> None:
    found = driver.unavailable_reason(lambda: fake)
    assert found is not None
    assert re.search(reason, found), found


def test_an_old_gpu_beside_a_new_one_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda((("GTX 1080", 6, 1), ("RTX 4090", 8, 9)))
    assert driver.choose_device(driver.query(lambda: fake)).ordinal == 1
    monkeypatch.setenv(driver.DEVICE_VARIABLE, "0")
    assert "GTX 1080" in str(driver.unavailable_reason(lambda: fake))
    monkeypatch.setenv(driver.DEVICE_VARIABLE, "2")
    with pytest.raises(ConfigError, match=r"VLLMX_CUDA_DEVICE=2.*choose 0, 1"):
        driver.choose_device(driver.query(lambda: fake))


def test_no_driver_at_all() -> None:
    def refuse() -> Any:
        raise driver.DriverError("NVIDIA's driver is not installed")

    assert driver.unavailable_reason(refuse) == "NVIDIA's driver is not installed"


def test_the_probe_wants_cupy_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "unavailable_reason", lambda: None)
    monkeypatch.setattr(plugin, "find_spec", lambda name: None)
    assert "vllmx[cuda13]" in str(plugin.probe())
    monkeypatch.setattr(plugin, "find_spec", lambda name: object())
    assert plugin.probe() is None


def test_architectures() -> None:
    assert architecture((9, 0)) == "sm_90a"
    assert architecture((12, 0)) == "sm_120a"
    assert architecture((8, 0)) == "sm_80"
    assert architecture((8, 7)) == "sm_87"
    assert len(
        {
            architecture((int(a[3:].rstrip("a")) // 10, int(a[3:].rstrip("a")) % 10))
            for a in ARCHITECTURES
        }
    ) == len(ARCHITECTURES)
    with pytest.raises(BackendUnavailableError, match=r"7\.0.*7\.5"):
        architecture((7, 0))


def test_the_environment_explains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every line is a fact or a remedy, whatever is missing."""
    monkeypatch.setattr(driver, "open_libcuda", lambda: FakeCuda((("NVIDIA T4", 7, 5),)))
    monkeypatch.setattr(driver.query, "__defaults__", (driver.open_libcuda,))
    found = environment.facts()
    assert found["device"].startswith("0: NVIDIA T4, sm_75, 80.00 GiB")
    assert found["driver"] == "up to CUDA 13.1"
    assert found["dtype of bf16 models"] == "f16"
    old = FakeCuda((("NVIDIA T4", 7, 5),), version=11080)
    monkeypatch.setattr(driver.query, "__defaults__", (lambda: old,))
    monkeypatch.setattr(
        environment.Nvrtc,
        "open",
        lambda newest: SimpleNamespace(version=(13, 0), path="libnvrtc.so"),
    )
    assert "up to CUDA 11.8: update NVIDIA's driver" in environment.facts()["nvrtc"]
    monkeypatch.setattr(driver.query, "__defaults__", (lambda: FakeCuda(status=100),))
    found = environment.facts()
    assert all("no GPU is visible" in found[name] for name in ("driver", "device"))
    assert found["nvrtc"] == "13.0 (libnvrtc.so)"


def test_the_environment_says_why_the_cache_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VLLMX_CACHE_DIR", str(tmp_path))
    (tmp_path / "cuda").mkdir()
    assert "0 files" in environment.facts()["compiled kernels"]
    (tmp_path / "cuda").chmod(0o777)
    assert "not used: others may write" in environment.facts()["compiled kernels"]
