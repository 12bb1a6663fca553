"""Kernels compiled side by side by real worker processes, with the real NVRTC."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from vllmx_core.errors import BackendUnavailableError
from vllmx_cuda.compiler import compiling
from vllmx_cuda.compiler.compiling import compiled
from vllmx_cuda.compiler.cubins import CubinCache, Keys, Target, Unit, missing
from vllmx_cuda.compiler.nvrtc import CompileError, Nvrtc

SOURCE = """
extern "C" __global__ void k(float *x) { x[threadIdx.x] *= FACTOR; }
"""


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    try:
        return Nvrtc.open()
    except BackendUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture
def target(nvrtc: Nvrtc) -> Target:
    return Target("sm_90a", nvrtc.version, ())


@pytest.fixture
def units(tmp_path: Path) -> list[Unit]:
    source = tmp_path / "k.cu"
    source.write_text(SOURCE)
    return [Unit(source, (f"FACTOR={i}",)) for i in range(7)]


@pytest.fixture
def cache(tmp_path: Path) -> CubinCache:
    return CubinCache(tmp_path / "cache")


class CountingPopen(subprocess.Popen[str]):
    started = 0

    def __init__(self, *args: object, **more: object) -> None:
        type(self).started += 1
        super().__init__(*args, **more)  # type: ignore[call-overload]


@pytest.mark.parametrize(("cores", "workers"), [(1, 0), (2, 2), (64, 2)])
def test_every_unit_is_compiled_and_the_second_start_only_loads(
    units: list[Unit],
    target: Target,
    nvrtc: Nvrtc,
    cache: CubinCache,
    cores: int,
    workers: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(compiling, "available_processors", lambda: cores)
    monkeypatch.setattr(subprocess, "Popen", CountingPopen)
    CountingPopen.started = 0
    first = compiled([*units, units[0]], target, nvrtc, cache, progress=True)
    assert CountingPopen.started == workers
    assert list(first) == units
    assert len(set(first.values())) == len(units)
    assert all(cubin.startswith(b"\x7fELF") for cubin in first.values())
    bar = capsys.readouterr().err
    assert bar.startswith("\rcompiling kernels")
    assert bar.count("\r") == len(units)
    assert bar.endswith("100%\n")

    monkeypatch.setattr(Nvrtc, "compile", lambda *_: pytest.fail("it is there already"))
    assert compiled(units, target, nvrtc, cache, progress=True) == first
    assert CountingPopen.started == workers
    assert capsys.readouterr().err == ""


def test_what_does_not_compile_is_reported_and_the_rest_is_kept(
    units: list[Unit],
    target: Target,
    nvrtc: Nvrtc,
    cache: CubinCache,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiling, "available_processors", lambda: 2)
    bad = Unit(units[0].source, ("FACTOR=nonsense",))
    with pytest.raises(CompileError, match="nonsense"):
        compiled([bad, *units], target, nvrtc, cache)
    keys = {unit: Keys(target).key(unit) for unit in units}
    assert missing(cache, keys) == []


def test_workers_that_die_only_cost_time(
    units: list[Unit],
    target: Target,
    nvrtc: Nvrtc,
    cache: CubinCache,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiling, "available_processors", lambda: 2)
    monkeypatch.setattr(compiling.sys, "executable", "/bin/false")
    assert list(compiled(units, target, nvrtc, cache)) == units
