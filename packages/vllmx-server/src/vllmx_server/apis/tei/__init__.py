"""The rest of the API of text-embeddings-inference (TEI); /embed and /rerank are always on."""
