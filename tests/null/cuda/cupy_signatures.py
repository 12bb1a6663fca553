"""Holds a stand-in for CuPy against CuPy itself, which can be imported without a driver.

Each name that is looked up must exist there, and each call must fit the signature that Cython
writes into the docstring, in number, names and types. So a fake cannot keep the signature of an
older CuPy.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable
from functools import cache
from typing import Any

_INTEGERS = {"int", "size_t", "intptr_t", "unsigned int", "MemoryKind"}
_SET_IN_INIT = {("Event", "ptr"), ("Stream", "ptr")}
"""Attributes of instances, which the class does not show."""
_MADE_BY = {
    "Device": "Device",
    "MemoryPool": "MemoryPool",
    "Stream": "Stream",
    "Event": "Event",
    "Module": "function.Module",
    "end_capture": "Graph",
    "get_function": "function.Function",
}
"""Calls whose results are held too, and the class that `cupy.cuda` has for them."""


def held(fake: Any, real: Any, cuda: Any = None) -> Any:
    """`fake`, whose every use is held against `real`; `cuda`: `cupy.cuda`."""
    return _Held(fake, real, real.cuda if cuda is None else cuda)


class _Held:
    def __init__(self, fake: Any, real: Any, cuda: Any) -> None:
        vars(self).update(_fake=fake, _real=real, _cuda=cuda)

    def __getattr__(self, name: str) -> Any:
        fake = getattr(self._fake, name)
        where = getattr(self._real, "__name__", "cupy")
        if (where, name) in _SET_IN_INIT:
            return fake
        assert hasattr(self._real, name), f"{where} has no {name}"
        real = getattr(self._real, name)
        if isinstance(fake, type) and issubclass(fake, Exception):
            bases = {base for base in real.__mro__ if base.__module__ == "builtins"}
            assert bases <= set(fake.__mro__), f"{name} is a {bases}"
            return fake
        if inspect.isclass(real) or callable(fake):
            return self._call(name, fake, real)
        return _Held(fake, real, self._cuda) if hasattr(fake, "__dict__") else fake

    def _call(self, name: str, fake: Callable[..., Any], real: Any) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            check_call(real, arguments, named, bound=inspect.isclass(self._real))
            result = fake(*(_bare(one) for one in arguments), **named)
            if name in _MADE_BY:
                return _Held(result, operator.attrgetter(_MADE_BY[name])(self._cuda), self._cuda)
            return result

        return call

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._fake, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._fake, name)

    def __enter__(self) -> Any:
        return self._fake.__enter__()

    def __exit__(self, *error: object) -> Any:
        return self._fake.__exit__(*error)


def _bare(value: Any) -> Any:
    return value._fake if isinstance(value, _Held) else value


def check_call(
    real: Any, arguments: tuple[Any, ...], named: dict[str, Any], *, bound: bool
) -> None:
    """Asserts that CuPy's function takes these arguments; `bound`: it is a method, called without
    its object."""
    signature, types = _signature(real)
    own = (None,) if bound and "self" in signature.parameters else ()
    fitting = signature.bind(*own, *arguments, **named)  # TypeError: CuPy would raise one too
    for name, value in fitting.arguments.items():
        kind = types.get(name)
        if kind in _INTEGERS:
            operator.index(value)
        elif kind == "bytes":
            assert isinstance(value, bytes), f"{real}: {name} is {value!r}"


@cache
def _signature(real: Any) -> tuple[inspect.Signature, dict[str, str]]:
    """The signature, and the C types of parameters that have one."""
    try:
        return inspect.signature(real), {}
    except ValueError:
        pass
    match = re.match(r"[\w.]+\((.*?)\)( -> .*)?$", real.__doc__.split("\n")[0])
    assert match is not None, f"{real} says nothing of its parameters"
    parameters, types = [], {}
    for part in filter(None, match[1].split(", ")):
        text, _, default = part.partition("=")
        kind, _, name = text.rpartition(" ")
        types[name] = kind
        parameters.append(
            inspect.Parameter(
                name,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=default if default else inspect.Parameter.empty,
            )
        )
    return inspect.Signature(parameters), types
