"""Portable backend of vllmx on torch tensors: CPU, CUDA, XPU and MPS."""

__version__ = "0.1.0"
