"""Figures of bench scripts are not lost for want of a folder."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench_scripts import BENCH, bench_modules

WRITES = sorted(
    path for path in BENCH.glob("*.py") if re.search(r'"--json", type=', path.read_text())
)


def test_every_script_that_writes_figures_makes_the_folder_first() -> None:
    assert len(WRITES) == 6
    for path in WRITES:
        assert re.search(r'"--json", type=output_file\b', path.read_text()), path.name


def test_the_folder_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with bench_modules(monkeypatch) as load:
        output_file = load("output_file").output_file
    path = tmp_path / "a" / "b" / "figures.json"
    assert output_file(str(path)) == path
    assert path.parent.is_dir()
    assert not path.exists()
    (tmp_path / "file").touch()
    for wrong in (tmp_path / "file" / "x.json", tmp_path / "a"):
        with pytest.raises(argparse.ArgumentTypeError, match="cannot be written"):
            output_file(str(wrong))


def test_a_script_writes_there(tmp_path: Path) -> None:
    schemas, out = tmp_path / "schemas", tmp_path / "new" / "verdicts.json"
    schemas.mkdir()
    command = [sys.executable, str(BENCH / "schemas.py"), str(schemas), "--json", str(out)]
    subprocess.run(command, capture_output=True, check=False)
    assert out.parent.is_dir()
    assert not out.exists() or json.loads(out.read_text()) is not None
