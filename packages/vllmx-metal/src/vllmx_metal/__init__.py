"""Backend of vllmx on MLX: Apple GPUs, and the CPU of Linux for tests."""

__version__ = "0.1.0"
