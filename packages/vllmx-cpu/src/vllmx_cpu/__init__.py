"""CPU backend of vllmx: numpy arrays and native C++ kernels, no torch."""
