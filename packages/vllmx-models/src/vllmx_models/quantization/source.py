"""A `WeightSource` over the dense tensors of a file that joins those of one quantised module."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Protocol

import numpy as np
from vllmx_core.errors import WeightFormatError
from vllmx_core.records import Record
from vllmx_core.weights.part import SourceOver, WeightPart, WeightSource
from vllmx_core.weights.tensor import DType, RawTensor

_FLOATS = ("f32", "f16", "bf16", "f64")
_INTS = ("i32", "i64")
"""Tables of numbers, such as DeepSeek-V4's experts of a token."""


class ModuleTensors(Record):
    """The tensors `stem + suffix` of one quantised module."""

    stem: str
    source: WeightSource
    scheme: str
    """Name of the scheme, for errors."""

    def get(self, suffix: str) -> RawTensor | None:
        """The tensor, None where the checkpoint has none."""
        name = self.stem + suffix
        if name not in self.source.names():
            return None
        return self.source.part(name).stored().buffers["weight"]

    def need(self, suffix: str, dtypes: tuple[DType, ...], rank: int | None = None) -> RawTensor:
        """The tensor. Raises WeightFormatError when it is missing, has another dtype or, where a
        rank is given, has another or is empty."""
        tensor = self.get(suffix)
        if tensor is None:
            raise self.error(suffix, "is missing", "a complete download")
        if tensor.dtype not in dtypes:
            raise self.error(suffix, f"is stored as {tensor.dtype}", " or ".join(dtypes))
        if rank is not None and (len(tensor.shape) != rank or 0 in tensor.shape):
            found = f"has shape {list(tensor.shape)}"
            raise self.error(suffix, found, f"{rank} axes, none of them empty")
        return tensor

    def shaped(self, suffix: str, dtypes: tuple[DType, ...], *shapes: tuple[int, ...]) -> RawTensor:
        """The tensor, which must have one of the shapes."""
        tensor = self.need(suffix, dtypes)
        if tensor.shape not in shapes:
            expected = " or ".join(str(list(shape)) for shape in shapes)
            raise self.error(suffix, f"has shape {list(tensor.shape)}", expected)
        return tensor

    def groups(self, suffix: str, count: int, groups: int) -> RawTensor:
        """(count,) group numbers, each below `groups`."""
        index = self.shaped(suffix, ("i32", "i64"), (count,))
        found = np.asarray(index.view())
        if count and (int(found.min()) < 0 or int(found.max()) >= groups):
            holds = f"holds {found.min()} to {found.max()}"
            raise self.error(suffix, holds, f"group numbers from 0 to {groups - 1}")
        return index

    def error(self, suffix: str, found: str, expected: str) -> WeightFormatError:
        """`tensor NAME FOUND, SCHEME asks for EXPECTED`, to be raised."""
        return WeightFormatError(
            f"tensor {self.stem + suffix!r} {found}, {self.scheme} asks for {expected}: config.json"
            " and weights do not belong together, or the file is damaged"
        )


class Scheme(Protocol):
    """Builds a module's weight from its tensors."""

    @property
    def name(self) -> str:
        """The name for errors: the scheme with what matters of its config."""
        ...

    @property
    def weight_suffix(self) -> str:
        """The suffix that a model's weight map appends to a module's name."""
        ...

    @property
    def markers(self) -> tuple[str, ...]:
        """Suffixes of tensors; a module that has one of them is quantised."""
        ...

    @property
    def companions(self) -> tuple[str, ...]:
        """Suffixes of further tensors that belong to a quantised module."""
        ...

    def excludes(self, module: str) -> bool:
        """True if the config excludes the module from quantisation."""
        ...

    def part(self, name: str, tensors: ModuleTensors) -> WeightPart:
        """The logical weight `name`. Raises WeightFormatError for tensors that do not fit, and
        UnsupportedModelError for an option of this module that is not read here."""
        ...


class QuantizedSource(SourceOver):
    """A `WeightSource` whose quantised weights have the scheme's layout; others are unchanged."""

    def __init__(self, source: WeightSource, scheme: Scheme) -> None:
        self._source = source
        self._scheme = scheme
        self._quantised = frozenset(
            name.removesuffix(marker)
            for name in source.names()
            for marker in scheme.markers
            if name.endswith(marker)
        )
        self._names = frozenset(self._logical_names())

    def names(self) -> Collection[str]:
        """Names for weight maps; a quantised module's tensors count as one weight."""
        return self._names

    def part(self, name: str) -> WeightPart:
        """Raises WeightFormatError when `name` is missing or its tensors do not fit together."""
        scheme, suffix = self._scheme, self._scheme.weight_suffix
        module = name.removesuffix(suffix)
        if not name.endswith(suffix) or module not in self._quantised:
            return self._dense(name)
        if scheme.excludes(module):
            raise WeightFormatError(
                f"module {module!r} has tensors of {scheme.name}, but the quantization_config"
                " says that it is not quantised: config.json and weights do not belong together"
            )
        return scheme.part(name, ModuleTensors(module, self._source, scheme.name))

    def _dense(self, name: str) -> WeightPart:
        part = self._source.part(name)
        tensor = part.stored().buffers["weight"]
        is_table = tensor.dtype in _INTS and not name.endswith(self._scheme.weight_suffix)
        if tensor.dtype not in _FLOATS and not is_table:
            raise WeightFormatError(
                f"tensor {name!r} is stored as {tensor.dtype}, but {self._scheme.name} has none of"
                f" its tensors {', '.join(self._scheme.markers)} here: the checkpoint is"
                " incomplete, download the model again"
            )
        return part

    def _logical_names(self) -> Iterator[str]:
        scheme = self._scheme
        for name in self._source.names():
            for suffix in (*scheme.markers, *scheme.companions):
                stem = name.removesuffix(suffix)
                if stem != name and stem in self._quantised:
                    yield stem + scheme.weight_suffix
                    break
            else:
                yield name
