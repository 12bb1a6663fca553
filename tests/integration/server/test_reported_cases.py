"""Small requests that failed once, with the status that each must have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .conftest import RunningServer

DATA = Path(__file__).parents[2] / "data" / "cases" / "http.jsonl"
CASES = [json.loads(line) for line in DATA.read_text("utf-8").splitlines()]


@pytest.mark.parametrize("case", CASES, ids=[f"{n}-{c['path']}" for n, c in enumerate(CASES)])
def test_a_reported_request(server: RunningServer, case: dict[str, Any]) -> None:
    answer = server.post(case["path"], case["body"], headers=case.get("headers"))
    assert answer.status_code == case["status"], (case["why"], answer.text)
