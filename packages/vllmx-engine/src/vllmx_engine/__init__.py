"""Scheduler, paged KV cache, text processing and frontends of vllmx."""

__version__ = "0.1.0"
