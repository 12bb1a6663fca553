"""A device without a GPU, for tests: the same kernels on the CPU."""
