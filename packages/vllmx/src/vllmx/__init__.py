"""Serving engine for large language models: CLI, LLM, AsyncLLM and Engine."""
