"""Vision towers, which turn images into embeddings."""
