"""Tensor and pipeline parallelism: one rank's part of a model, as a model of its own."""
