"""Vectors and scores: OpenAI's, Jina's, Cohere's, vLLM's and TEI's routes."""
