"""Launches against a driver in C that only writes down what it is told, compiled with cuda.h, whose
types hold the calls to what the real one takes."""

from __future__ import annotations

import ctypes
import struct
import subprocess
from typing import Any

import pytest
from vllmx_cuda.device.launcher import LaunchAttribute, Launcher
from vllmx_cuda.device.memory import Memory
from vllmx_cuda.kernel_specs.types import Launch, kernel

from .test_cuda_headers import include_folders

DRIVER = """
#include <cuda.h>
#include <string.h>
CUlaunchConfig seen; unsigned char values[64]; int calls;
static const int sizes[] = {8, 4, 8, 4, 8, 4};
CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction f, void** parameters,
                          void** extra) {
  unsigned char* to = values;
  if ((long)f != 0x77 || extra) return CUDA_ERROR_INVALID_VALUE;
  seen = *config, calls++;
  for (int i = 0; i < 6; to += sizes[i++]) memcpy(to, parameters[i], sizes[i]);
  return CUDA_SUCCESS;
}
int tell(int what) {
  int told[] = {calls, seen.gridDimX, seen.gridDimY, seen.gridDimZ, seen.blockDimX, seen.blockDimY,
                seen.blockDimZ, seen.sharedMemBytes, (int)(long)seen.hStream, seen.numAttrs,
                seen.numAttrs && sizeof *seen.attrs == SIZE &&
                    seen.attrs->id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION &&
                    seen.attrs->value.programmaticStreamSerializationAllowed == 1};
  return told[what];
}
"""
SIGNATURE = "add(in f32* x, i32 some, in f32* bias?, u32 n, out f32* y, f32 factor)"


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("driver")
    having = [path for path in include_folders() if (path / "cuda.h").is_file()]
    if not having:
        pytest.skip("cuda.h is not installed")
    (folder / "driver.c").write_text(DRIVER)
    built = folder / "libdriver.so"
    command = [
        "cc",
        "-shared",
        "-fPIC",
        "-O1",
        f"-I{having[0]}",
        f"-DSIZE={ctypes.sizeof(LaunchAttribute)}",
        "driver.c",
        "-o",
        str(built),
    ]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(built))


def launcher(driver: Any, prepared: list[Launch], *, early: bool = False) -> Launcher:
    def rule(sizes: Any, options: Any) -> Launch:
        return Launch((sizes["n"], 3, 2), 64, 1000 * sizes["n"])

    variant = kernel("add.cu", SIGNATURE, "n", rule).variant()
    return Launcher(driver.cuLaunchKernelEx, variant, 0x77, 0x55, prepared.append, early=early)


def told(driver: Any) -> list[int]:
    return [driver.tell(i) for i in range(10)]


def values(driver: Any) -> tuple[Any, ...]:
    return struct.unpack("<QiQIQf", (ctypes.c_ubyte * 36).in_dll(driver, "values"))


def test_every_argument_and_size_arrives(driver: Any) -> None:
    prepared: list[Launch] = []
    add = launcher(driver, prepared)
    x, y = Memory(0x1234567890AB, 4, None), Memory(0xFFFFFFFFFFFFFFF0, 4, None)
    before = driver.tell(0)
    assert add({"n": 5}, (x, -7, None, 0xFFFFFFFF, y, 0.5)) == 0
    assert told(driver) == [before + 1, 5, 3, 2, 64, 1, 1, 5000, 0x55, 0]
    assert values(driver) == (x.address, -7, 0, 0xFFFFFFFF, y.address, 0.5)
    assert add({"n": 4}, (y, 1, x, 2, x, 0)) == 0
    assert told(driver)[:3] == [before + 2, 4, 3]
    assert values(driver) == (y.address, 1, x.address, 2, x.address, 0)
    add({"n": 5}, (y, 1, x, 2, x, 0))
    assert told(driver)[1] == 5
    assert [shape.shared_bytes for shape in prepared] == [5000, 4000]


def test_a_launch_may_begin_early(driver: Any) -> None:
    assert launcher(driver, [], early=True)({"n": 5}, (0, 0, 0, 0, 0, 0)) == 0
    assert driver.tell(9) == 1
    assert driver.tell(10), "the attribute as cuda.h has it"


def test_nothing_is_launched_for_a_size_of_none(driver: Any) -> None:
    before = driver.tell(0)
    assert launcher(driver, [])({"n": 0}, ()) == 0
    assert driver.tell(0) == before


@pytest.mark.parametrize(
    "arguments",
    [(1, 2, 3), (0, 1 << 31, 0, 0, 0, 0.0), (0, 0, 0, -1, 0, 0.0), (0, 0.5, 0, 0, 0, 0)],
)
def test_what_a_parameter_cannot_hold_is_refused(driver: Any, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(struct.error):
        launcher(driver, [])({"n": 1}, arguments)


def test_what_the_driver_answers_is_told(driver: Any) -> None:
    add = launcher(driver, [])
    add._function = ctypes.c_void_p(1)
    assert add({"n": 1}, (0, 0, 0, 0, 0, 0)) == 1
