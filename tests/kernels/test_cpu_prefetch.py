"""Requests for weights and pages ahead of their use are in the machine code of the native library.

GCC takes a lambda that does nothing but ask for memory for one without effect, and leaves its calls
out, unless the lambda is inlined first. Weights in units of 256 columns came at two thirds of the
memory's rate so.
"""

from __future__ import annotations

import re

import pytest
from vllmx_cpu.build import NATIVE

LAMBDA = re.compile(r"\[[&=]\]\s*\([^)]*\)([^{};]*)\{([^{}]*)\}")
FETCHES = re.compile(r"prefetch|beside_unit|before_unit")


def lambdas_that_fetch() -> list[tuple[str, str]]:
    """The file of each, and what stands between its arguments and its body."""
    return [
        (path.name, found[1])
        for path in sorted([*NATIVE.glob("*.h"), *NATIVE.glob("*.cpp")])
        for found in LAMBDA.finditer(path.read_text(encoding="utf-8"))
        if FETCHES.search(found[2])
    ]


def test_there_are_some() -> None:
    assert {"block_kinds.h", "tile_attention.h"} <= {name for name, _ in lambdas_that_fetch()}


@pytest.mark.parametrize(("name", "attributes"), lambdas_that_fetch())
def test_lambdas_that_fetch_are_inlined_first(name: str, attributes: str) -> None:
    assert "always_inline" in attributes, name
