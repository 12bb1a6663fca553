"""CPU backend of vllmx: numpy arrays and native C++ kernels, no torch."""

__version__ = "0.1.0"
