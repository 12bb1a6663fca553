"""Numbers that ctypes needs, held against NVIDIA's headers by a C compiler: whichever headers are
installed (cuda.h comes with the development requirements, cublasLt.h and nccl.h do not)."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from vllmx_cuda.device import cublaslt, cupy_device, driver, launcher, nccl
from vllmx_cuda.device.cublaslt import DATA_TYPES

DRIVER = {
    "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES": cupy_device._MAX_DYNAMIC_SHARED,
    "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR": driver._MAJOR,
    "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR": driver._MINOR,
    "sizeof(CUdevice)": ctypes.sizeof(ctypes.c_int),
    "sizeof(CUipcMemHandle)": 64,
    "sizeof(CUlaunchConfig)": ctypes.sizeof(launcher.LaunchConfig),
    "offsetof(CUlaunchConfig, gridDimX)": launcher.LaunchConfig.grid.offset,
    "offsetof(CUlaunchConfig, blockDimX)": launcher.LaunchConfig.block.offset,
    "offsetof(CUlaunchConfig, sharedMemBytes)": launcher.LaunchConfig.shared_bytes.offset,
    "offsetof(CUlaunchConfig, hStream)": launcher.LaunchConfig.stream.offset,
    "offsetof(CUlaunchConfig, attrs)": launcher.LaunchConfig.attributes.offset,
    "offsetof(CUlaunchConfig, numAttrs)": launcher.LaunchConfig.num_attributes.offset,
    "CUDA_ERROR_NOT_INITIALIZED": 3,
    "CUDA_ERROR_STUB_LIBRARY": 34,
    "CUDA_ERROR_NO_DEVICE": 100,
    "CUDA_ERROR_INVALID_DEVICE": 101,
    "CUDA_ERROR_SYSTEM_NOT_READY": 802,
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": 803,
    "CUDA_ERROR_UNKNOWN": 999,
}
CUBLASLT = {
    "CUDA_R_32F": DATA_TYPES["f32"],
    "CUDA_R_16F": DATA_TYPES["f16"],
    "CUDA_R_16BF": DATA_TYPES["bf16"],
    "CUDA_R_8F_E4M3": DATA_TYPES["f8e4m3"],
    "CUDA_R_8I": DATA_TYPES["i8"],
    "CUDA_R_32I": DATA_TYPES["i32"],
    "CUBLAS_COMPUTE_32F": cublaslt._COMPUTE_32F,
    "CUBLAS_COMPUTE_32I": cublaslt._COMPUTE_32I,
    "CUBLAS_OP_N": cublaslt._OP_N,
    "CUBLAS_OP_T": cublaslt._OP_T,
    "CUBLASLT_EPILOGUE_BIAS": cublaslt._EPILOGUE_BIAS,
    "CUBLASLT_MATMUL_DESC_TRANSA": cublaslt._DESC_TRANSA,
    "CUBLASLT_MATMUL_DESC_TRANSB": cublaslt._DESC_TRANSB,
    "CUBLASLT_MATMUL_DESC_EPILOGUE": cublaslt._DESC_EPILOGUE,
    "CUBLASLT_MATMUL_DESC_BIAS_POINTER": cublaslt._DESC_BIAS_POINTER,
    "CUBLASLT_MATMUL_DESC_A_SCALE_POINTER": cublaslt._DESC_A_SCALE_POINTER,
    "CUBLASLT_MATMUL_DESC_B_SCALE_POINTER": cublaslt._DESC_B_SCALE_POINTER,
    "CUBLASLT_MATMUL_DESC_FAST_ACCUM": cublaslt._DESC_FAST_ACCUM,
    "CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE": cublaslt._DESC_BIAS_TYPE,
    "CUBLASLT_MATMUL_DESC_A_SCALE_MODE": cublaslt._DESC_A_SCALE_MODE,
    "CUBLASLT_MATMUL_DESC_B_SCALE_MODE": cublaslt._DESC_B_SCALE_MODE,
    "CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F": cublaslt._SCALE_128X128,
    "CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F": cublaslt._SCALE_1X128,
    "CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES": cublaslt._PREFERENCE_MAX_WORKSPACE,
    "CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES": cublaslt._PREFERENCE_ALIGNMENTS[0],
    "CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES": cublaslt._PREFERENCE_ALIGNMENTS[3],
    "CUBLAS_STATUS_ALLOC_FAILED": cublaslt.ALLOC_FAILED,
    "CUBLAS_STATUS_NOT_SUPPORTED": cublaslt._NOT_SUPPORTED,
    "sizeof(cublasLtMatmulAlgo_t)": cublaslt.ALGORITHM_BYTES,
    "sizeof(cublasLtMatmulHeuristicResult_t)": ctypes.sizeof(cublaslt._Proposal),
}
NCCL = {
    "ncclFloat16": nccl._TYPES["f16"],
    "ncclFloat32": nccl._TYPES["f32"],
    "ncclBfloat16": nccl._TYPES["bf16"],
    "ncclSum": nccl._SUM,
    "NCCL_UNIQUE_ID_BYTES": nccl._ID_BYTES,
}
HEADERS = {
    "cuda.h": DRIVER,
    "driver_types.h": {"cudaErrorNotReady": cupy_device._NOT_READY},
    "cublasLt.h": CUBLASLT,
    "nccl.h": NCCL,
}


def include_folders() -> list[Path]:
    spec = find_spec("nvidia")
    roots = [Path(root) for root in (spec and spec.submodule_search_locations) or ()]
    found = sorted(path for root in roots for path in root.glob("*/include"))
    return [*found, Path("/usr/local/cuda/include")]


@pytest.mark.parametrize("header", HEADERS)
def test_numbers_of_a_header(header: str, tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    folders = include_folders()
    having = [folder for folder in folders if (folder / header).is_file()]
    if not having:
        pytest.skip(f"{header} is not installed")
    source, program = tmp_path / "numbers.c", tmp_path / "numbers"
    prints = "".join(f'  printf("%lld\\n", (long long)({name}));\n' for name in HEADERS[header])
    source.write_text(
        "#include <stddef.h>\n#include <stdio.h>\n"
        f"#include <{header}>\nint main(void) {{\n{prints}}}\n"
    )
    for first in having:  # one for each major version that is installed
        includes = [f"-I{folder}" for folder in (first, *folders)]
        subprocess.run([compiler, *includes, str(source), "-o", str(program)], check=True)
        ran = subprocess.run([str(program)], check=True, capture_output=True, text=True)
        assert (
            dict(zip(HEADERS[header], map(int, ran.stdout.split()), strict=True)) == HEADERS[header]
        )
