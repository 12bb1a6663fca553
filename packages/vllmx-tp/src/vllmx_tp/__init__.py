"""Ranks of vllmx: several processes that compute one model together."""

__version__ = "0.1.0"
