"""bench/host.py runs, and measures what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S

HOST = Path(__file__).parents[3] / "bench" / "host.py"


@pytest.mark.parametrize(("sampling", "drafts"), [("plain", 0), ("logprobs", 0), ("plain", 3)])
def test_reports_every_part(sampling: str, drafts: int) -> None:
    command = [sys.executable, str(HOST), "--rows", "1,3", "--steps", "8", "--context", "40"]
    command += ["--sampling", sampling, "--drafts", str(drafts), "--json"]
    done = subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE_S)
    report = json.loads(done.stdout)
    assert report["unit"] == "us"
    assert [result["rows"] for result in report["results"]] == [1, 3]
    for result in report["results"]:
        for part in ("schedule", "prepare", "commit", "total"):
            assert 0 < result[part]["p10"] <= result[part]["median"] <= result[part]["p90"]
        assert result["step"]["median"] >= result["total"]["median"]
