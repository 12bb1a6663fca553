"""What the workspace tests share: where the packages lie."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def projects() -> dict[str, dict[str, Any]]:
    """Parsed pyproject.toml by distribution name."""
    return {
        path.parent.name: tomllib.loads(path.read_text())
        for path in sorted((ROOT / "packages").glob("*/pyproject.toml"))
    }
