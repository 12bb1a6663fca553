"""The model source of the name "demo"."""

from __future__ import annotations

from pathlib import Path

MODEL_NAME = "demo"
MODEL_FOLDER = Path(__file__).parent / "model"


def demo_model(model: str, revision: str | None, progress: bool) -> Path | None:
    """The folder inside this package for "demo", None for every other name."""
    return MODEL_FOLDER if model == MODEL_NAME else None
