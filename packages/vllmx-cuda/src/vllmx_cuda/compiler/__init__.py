"""Compiles CUDA source text to cubins, and keeps them."""
