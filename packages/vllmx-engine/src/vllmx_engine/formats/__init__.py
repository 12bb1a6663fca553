"""Formats of answers: thoughts and calls of tools, read from text, written, and found for a model.

The descriptions themselves are `vllmx_core.output_format`.
"""
