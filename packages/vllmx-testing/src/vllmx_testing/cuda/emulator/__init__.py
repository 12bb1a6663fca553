"""Runs CUDA C++ kernels on the CPU, so that they are tested where there is no GPU.

The same `.cu` file goes to NVRTC and to g++. Needs g++ on x86-64 Linux and NVIDIA's headers (the
wheels nvidia-cuda-runtime, nvidia-cuda-crt and nvidia-cuda-cccl, or a CUDA toolkit), nothing else.

    emulator = Emulator(check=True)
    emulator.launch(RMS_NORM.variant(VX_DTYPE=2, VX_VEC=8), {"rows": 3, "width": 64}, arguments)
"""

from __future__ import annotations

from vllmx_testing.cuda.emulator.build import check_available, find_cuda_headers
from vllmx_testing.cuda.emulator.launch import ORDERS, Emulator, KernelFault, empty

__all__ = ["ORDERS", "Emulator", "KernelFault", "check_available", "empty", "find_cuda_headers"]
