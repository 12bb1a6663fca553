"""`Record`: the base of frozen values with named fields, which a class statement makes in C.

A frozen dataclass compiles six functions on import, 0.6 to 1.1 ms per class; for 190 classes that
was a quarter of the time to a first token. A `Record` takes 0.02 ms, and instances are made six
times as fast. Otherwise it behaves like a dataclass: fields in order with defaults, keyword or
positional arguments, `__post_init__`, equality, hash and repr by fields (`eq=False` in the class
statement: by identity). `dataclasses.replace`, `fields` and `asdict` take records too.

`specs`, which plugins import before anything is loaded, uses dataclasses to avoid msgspec, and so
does `vllmx_cpu.build`, which runs before anything is installed.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any, ClassVar, dataclass_transform

from msgspec import Struct, field

__all__ = ["MutableRecord", "Record", "field"]

Fields = dict[str, "dataclasses.Field[Any]"]


class _DataclassFields:
    """Makes the fields that the functions of `dataclasses` need, on first use."""

    def __get__(self, record: object, kind: type[Struct]) -> Fields:
        return _fields(kind)


class _NoDecorator:
    """Raises in `@dataclass` on a subclass of a record: only that reads this attribute."""

    def __get__(self, record: object, kind: type[Struct]) -> object:
        raise TypeError(
            f"{kind.__name__} is the base of a class that needs no @dataclass: leave it"
        )


@cache
def _fields(kind: type[Struct]) -> Fields:
    """Fields as a dataclass keeps them; the functions of `dataclasses` only read their names."""
    # A class without a docstring would be given one from its signature, which costs 1 ms.
    made = dataclasses.make_dataclass(
        kind.__name__,
        kind.__struct_fields__,
        namespace={"__doc__": kind.__name__},
        init=False,
        repr=False,
        eq=False,
    )
    return dict(vars(made)["__dataclass_fields__"])


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Record(Struct, frozen=True):
    """A frozen value. A subclass lists its fields and takes no decorator:
    `class Extent(Record): begin: int; end: int = 0`."""

    __dataclass_fields__: ClassVar[Fields] = _DataclassFields()  # type: ignore[assignment]
    __dataclass_params__: ClassVar[object] = _NoDecorator()


@dataclass_transform(field_specifiers=(field,))
class MutableRecord(Struct):
    """A `Record` whose fields can be set."""

    __dataclass_fields__: ClassVar[Fields] = _DataclassFields()  # type: ignore[assignment]
    __dataclass_params__: ClassVar[object] = _NoDecorator()
