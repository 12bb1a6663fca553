"""Models with images whose towers nobody has or asks for, and images that do not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from vllmx_core.errors import UnsupportedOpError
from vllmx_core.reference.backend import ReferenceBackend
from vllmx_engine.client.inline import InlineEngine

from .test_image_engine import (
    OTHER,
    check,
    config,
    other,
    other_folder,
    prompt,
    request,
    run,
)

__all__ = ["other", "other_folder"]


def test_stages_serve_the_text_and_say_so(
    other: Any, other_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = replace(config(other_folder, backend="cpu"), pipeline_parallel_size=2, num_threads=2)
    with caplog.at_level("WARNING", "vllmx"):
        engine = InlineEngine(options)
    try:
        assert [one for one in caplog.messages if "has no passes of towers" in one]
        assert not engine.info.takes_images
        ids = prompt([])[0]
        (found,) = run(engine, request(engine, ids, [], []))
        check(OTHER, other, ids, [], found.outputs[0].token_ids)
    finally:
        engine.close()


def test_ranks_whose_backend_has_no_towers_serve_the_text(
    other: Any, other_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them: the others are started again without what the first one could not do."""
    load = ReferenceBackend.load

    def lacking(self: Any, model: Any, *rest: Any) -> Any:
        if model.encoder is not None:
            raise UnsupportedOpError("no such op")
        return load(self, model, *rest)

    monkeypatch.setattr(ReferenceBackend, "load", lacking)
    engine = InlineEngine(
        replace(config(other_folder, backend="numpy"), tensor_parallel_size=2, num_threads=2)
    )
    try:
        assert not engine.info.takes_images
        ids = prompt([])[0]
        (found,) = run(engine, request(engine, ids, [], []))
        check(OTHER, other, ids, [], found.outputs[0].token_ids)
    finally:
        engine.close()


@pytest.mark.parametrize("wrong", ["start", "count", "grid", "bytes", "levels", "order"])
def test_images_that_do_not_fit_their_prompt(other_folder: Path, wrong: str) -> None:
    engine = InlineEngine(config(other_folder, backend="numpy"))
    try:
        images = [OTHER.image(2, 2, 0), OTHER.image(2, 2, 1)]
        ids, starts = prompt(images)
        made = request(engine, ids, starts, images)
        first, second = made.core[0].images
        change: dict[str, Any] = {
            "start": {"start": 200},
            "count": {"num_tokens": 2},
            "grid": {"grid": (1, 2, 3)},
            "bytes": {"patches": first.patches[:-4]},
            "levels": {"levels": b""},
            "order": {"start": 50},
        }[wrong]
        broken = [msgspec.structs.replace(first, **change), second]
        core = [msgspec.structs.replace(one, images=broken) for one in made.core]
        state = engine.submit(replace(made, core=core))
        engine.run([state])
        assert "image" in str(state.error)
        assert np.isfinite(len(run(engine, made)))
    finally:
        engine.close()


@pytest.mark.parametrize("asked", [True, False], ids=["asked for", "the backend has no towers"])
def test_text_alone(
    other: Any, other_folder: Path, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = ReferenceBackend.load

    def lacking(self: Any, model: Any, *rest: Any) -> Any:
        if model.encoder is not None:
            raise UnsupportedOpError("no such op")
        return load(self, model, *rest)

    monkeypatch.setattr(ReferenceBackend, "load", lacking)
    options = {"limit_images": 0} if asked else {}
    engine = InlineEngine(config(other_folder, backend="numpy", **options))
    try:
        assert not engine.info.takes_images
        ids = prompt([])[0]
        check(
            OTHER, other, ids, [], run(engine, request(engine, ids, [], []))[0].outputs[0].token_ids
        )
    finally:
        engine.close()
