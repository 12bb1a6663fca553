"""Requests for weights and pages ahead of their use are in the machine code of the native library.

GCC takes a lambda that does nothing but ask for memory for one without effect, and leaves its calls
out, unless the lambda is inlined first. Weights in units of 256 columns came at two thirds of the
memory's rate so.
"""

from __future__ import annotations

import re

import pytest
from vllmx_cpu.build import NATIVE

LAMBDA = re.compile(r"\[[&=]\]\s*\([^)]*\)(?P<attributes>[^{};]*)\{(?P<body>[^{}]*)\}")
OBJECT = re.compile(r"\n(?P<attributes>[^\n]*)\boperator\(\)\([^)]*\)[^{};]*\{(?P<body>[^{}]*)\}")
FETCHES = re.compile(r"prefetch|before_unit")


def calls_that_fetch() -> list[tuple[str, str]]:
    """The file of each lambda and function object, and what is said of its call."""
    return [
        (path.name, found["attributes"])
        for path in sorted([*NATIVE.glob("*.h"), *NATIVE.glob("*.cpp")])
        for kind in (LAMBDA, OBJECT)
        for found in kind.finditer(path.read_text(encoding="utf-8"))
        if FETCHES.search(found["body"])
    ]


def test_there_are_some() -> None:
    assert {"weight_fetch.h", "tile_attention.h"} <= {name for name, _ in calls_that_fetch()}


@pytest.mark.parametrize(("name", "attributes"), calls_that_fetch())
def test_calls_that_fetch_are_inlined_first(name: str, attributes: str) -> None:
    assert "always_inline" in attributes, name
