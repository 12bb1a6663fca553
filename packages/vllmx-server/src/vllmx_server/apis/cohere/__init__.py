"""Embeddings and rankings in the shapes of Cohere's API."""
