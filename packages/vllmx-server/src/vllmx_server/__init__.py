"""OpenAI-compatible HTTP server of vllmx: starlette on hypercorn."""

__version__ = "0.1.0"
