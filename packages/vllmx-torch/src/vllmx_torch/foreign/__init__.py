"""Architectures that vllmx has no file for, run by transformers' own module code."""
