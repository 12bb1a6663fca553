"""Records are like dataclasses, but for the time that they take to define."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict, dataclass, fields, replace
from typing import ClassVar

import pytest
from vllmx_core.ops.op import Op
from vllmx_core.records import MutableRecord, Record, field

COUNT = """
import sys
import vllmx_cpu.loaded, vllmx_cpu.lowering.table, vllmx_engine.engine, vllmx_models.families.llama
modules = [vars(module) for name, module in sys.modules.items() if name.startswith("vllmx")]
made = {v for module in modules for v in module.values() if isinstance(v, type)}
print(*sorted(kind.__name__ for kind in made if "__dataclass_params__" in vars(kind)))
"""


class Extent(Record):
    begin: int
    end: int = 0
    marks: list[int] = field(default_factory=list)


class Cursor(MutableRecord):
    at: int = 0


class Twice(Op):
    name: ClassVar[str] = "twice"
    factor: int


def test_fields_and_defaults() -> None:
    extent = Extent(1, end=2)
    assert (extent.begin, extent.end, extent.marks) == (1, 2, [])
    assert extent == Extent(1, 2, [])
    assert repr(extent) == "Extent(begin=1, end=2, marks=[])"
    with pytest.raises(AttributeError):
        extent.end = 3  # type: ignore[misc]


def test_the_functions_of_dataclasses_take_them() -> None:
    assert replace(Extent(1), end=7) == Extent(1, 7)
    assert asdict(Extent(1, 2)) == {"begin": 1, "end": 2, "marks": []}
    assert [found.name for found in fields(Cursor)] == ["at"]
    cursor = Cursor()
    cursor.at = 4
    assert replace(cursor) == cursor


def test_ops_are_told_apart_by_identity() -> None:
    assert Twice(2) != Twice(2)
    assert len({Twice(2), Twice(2)}) == 2
    assert Twice(2).options == {"factor": 2}


def test_a_decorator_is_refused_in_words() -> None:
    with pytest.raises(TypeError, match="needs no @dataclass"):
        dataclass(frozen=True)(type("Thrice", (Twice,), {}))


def test_what_a_first_token_needs_compiles_few_dataclasses() -> None:
    """Each takes up to a millisecond of every start."""
    command = [sys.executable, "-c", COUNT]
    made = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert len(made) <= 32, made
