"""From CUDA source text to cubins, and where they are kept."""
