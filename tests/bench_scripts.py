"""Modules of bench/, which is a folder of scripts and no installed package."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).resolve().parents[1] / "bench"


@contextmanager
def bench_modules(patch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports modules by their names in bench/, and forgets them at the end."""
    patch.syspath_prepend(str(BENCH))
    known = set(sys.modules)
    yield import_module
    for name in set(sys.modules) - known:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(BENCH):
            del sys.modules[name]
