"""Scheduler, paged KV cache, text processing and frontends of vllmx."""
