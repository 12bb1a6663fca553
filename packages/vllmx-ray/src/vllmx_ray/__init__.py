"""Replicas of a model on a Ray cluster."""

__version__ = "0.1.0"
