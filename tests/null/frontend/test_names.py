"""The names of the package `vllmx`."""

from __future__ import annotations

import subprocess
import sys

import pytest
import vllmx


def test_every_name_is_there() -> None:
    for name in vllmx.__all__:
        assert getattr(vllmx, name).__name__ == name
        assert name in dir(vllmx)


def test_other_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="Nothing"):
        _ = vllmx.Nothing


def test_importing_it_imports_nothing_heavy() -> None:
    code = (
        "import sys; before = set(sys.modules); import vllmx; print(*(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"numpy", "msgspec", "vllmx_core", "vllmx_engine"} & set(done.stdout.split())
