"""Tensor parallelism: what one rank of several computes of a model, as a model of its own."""
