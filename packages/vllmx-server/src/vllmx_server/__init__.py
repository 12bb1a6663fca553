"""OpenAI-compatible HTTP server of vllmx."""
