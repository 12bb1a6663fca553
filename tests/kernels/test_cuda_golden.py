"""The emulator beside what a GPU computed, once there is a file of it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllmx_core.errors import BackendUnavailableError
from vllmx_testing.cuda.emulated_device import EmulatedDevice
from vllmx_testing.cuda.emulator import Emulator, check_available

GOLDEN = Path(__file__).parent / "cuda_golden.npz"
SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "gpu" / "golden.py"


@pytest.fixture
def golden(monkeypatch: pytest.MonkeyPatch) -> Any:
    """bench/gpu/golden.py, which made the file."""
    try:
        check_available()
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("golden", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "golden", module)
    spec.loader.exec_module(module)
    return module


def emulated() -> Callable[[], EmulatedDevice]:
    emulator = Emulator()
    return lambda: EmulatedDevice(emulator=emulator)


@pytest.mark.slow
def test_the_emulator_computes_what_a_gpu_did(golden: Any) -> None:
    if not GOLDEN.exists():
        pytest.skip(f"no GPU has made {GOLDEN.name} yet: bench/gpu/run.sh OUT makes golden.npz")
    with np.load(GOLDEN) as stored:
        wrong = golden.differences(stored, golden.outputs(emulated()))
    assert not wrong, "\n".join(wrong)


def test_a_stored_file_is_read_and_compared(golden: Any, tmp_path: Path) -> None:
    found = golden.outputs(emulated(), ["bf16"], ["head size 64"])
    assert len(found) == 4 + 8, "steps of the model, outputs of the wrappers"
    np.savez_compressed(tmp_path / "golden.npz", **found)
    with np.load(tmp_path / "golden.npz") as stored:
        assert golden.differences(stored, found) == []
        changed = {key: value.copy() for key, value in stored.items()}
    changed["bf16 head size 64 2"][1, 3] += 0.2
    changed["bf16 head size 64 1"][0, 0] = np.nan
    changed["bf16 wrapper dots"][7] += 1
    del changed["bf16 head size 64 0"]
    wrapper, first, second, third = golden.differences(changed, found)
    assert "bf16 wrapper dots: off by 1, the limit is 0" in wrapper
    assert "64 0: not in the golden file" in first
    assert "64 1: off by nan" in second
    assert "64 2: off by 0.2, the limit is 0.05" in third
