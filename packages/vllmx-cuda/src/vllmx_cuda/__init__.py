"""CUDA backend of vllmx: own kernels on CuPy, cuBLASLt, captured graphs; no torch."""

__version__ = "0.1.0"
