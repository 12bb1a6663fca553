"""Fixtures of tests of hosts."""

from .hosted import address, found, ranks, region

__all__ = ["address", "found", "ranks", "region"]
