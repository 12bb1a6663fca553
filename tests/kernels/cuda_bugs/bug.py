"""A bug that is planted into a copy of the CUDA kernels."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bug:
    """`old` becomes `new` in a source, and a test must fail."""

    source: str
    what: str
    old: str
    new: str
    test: str
    """File and, after a colon, an expression for pytest's -k."""
