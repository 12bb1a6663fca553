"""Ollama's API, answered as chats, completions and embeddings."""
