"""Models that see images against transformers, backend by backend: towers, places, rotations."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllmx_core.backend import LoadOptions
from vllmx_core.checkpoint import open_checkpoint
from vllmx_core.image_plan import tower_plan, turns_of
from vllmx_core.model import encoder_of
from vllmx_core.registry import load_registry
from vllmx_core.specs import BackendSpec
from vllmx_core.testing.plans import Row, make_plan, sampling_rows

from .image_models import END, PAD, START, image, logits, qwen3_vl, save

REGISTRY = load_registry()
TEXT = [5, 6, 7]


@pytest.fixture(scope="module")
def oracle() -> Any:
    return qwen3_vl()


@pytest.fixture(scope="module")
def folder(oracle: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(oracle, tmp_path_factory.mktemp("qwen3_vl"))


def load(folder: Path, backend: str, **changes: Any) -> tuple[Any, Any]:
    checkpoint = open_checkpoint(REGISTRY, folder)
    model = REGISTRY.model_for(checkpoint.config).load()(checkpoint.config)
    given = {"dtype": "f32", "kv_cache_dtype": "f32", "max_model_len": 128, "num_kv_blocks": 16}
    options = LoadOptions(**{**given, **changes})
    spec = REGISTRY.find(BackendSpec, backend)
    assert spec is not None
    return model, spec.load()().load(model, checkpoint.weights, options)


def prompt(images: list[Any]) -> tuple[list[int], list[int]]:
    """Ids, and where the images are."""
    ids, starts = list(TEXT), []
    for patches, _ in images:
        ids.append(START)
        starts.append(len(ids))
        ids += [PAD] * (len(patches) // 4) + [END, 8]
    return ids, starts


def plans(model: Any, ids: list[int], images: list[Any], chunks: list[int]) -> Any:
    """The tower's pass, and steps of so many tokens."""
    encoder = encoder_of(model)
    assert encoder is not None
    starts = prompt(images)[1]
    places = [encoder.places(grid) for _, grid in images]
    counts = [len(patches) // 4 for patches, _ in images]
    keep = np.arange(3, 3 + sum(counts), dtype=np.int32)[::-1].copy()  # anywhere in the store
    rows = np.full(len(ids), -1, np.int32)
    for start, count, end in zip(starts, counts, np.cumsum(counts), strict=True):
        rows[start : start + count] = keep[end - count : end]
    turns = turns_of(list(zip(starts, places, strict=True)))
    steps, begin = [], 0
    for size in chunks:
        end = min(begin + size, len(ids))
        plan = make_plan([Row(ids[begin:end], begin, range(8), "all")], 16)
        turned = None if turns is None else turns.at(begin, end)
        steps.append(replace(plan, feature_rows=rows[begin:end], rope_positions=turned))
        begin = end
    tower = tower_plan(encoder, [one for one, _ in images], places, keep) if images else None
    return tower, steps


CASES = {
    "two images": ([image(4, 6, 0), image(8, 2, 1)], [64]),
    "an image cut by chunks": ([image(6, 6, 2)], [5, 3, 1, 40]),
    "equal images": ([image(2, 4, 3), image(2, 4, 3)], [64]),
    "one token for an image": ([image(2, 2, 4)], [4, 1, 20]),
    "no image": ([], [2, 9]),
}


@pytest.mark.parametrize(
    ("backend", "eager"),
    [("numpy", False), ("torch", False), ("cpu", False), ("cpu", True), ("metal", False)],
)
def test_logits(oracle: Any, folder: Path, backend: str, eager: bool) -> None:
    model, loaded = load(folder, backend, enforce_eager=eager)
    try:
        for name, (images, chunks) in CASES.items():
            ids = [*prompt(images)[0], 11, 12]
            wanted = logits(oracle, ids, images)
            tower, steps = plans(model, ids, images, chunks)
            if tower is not None and loaded.info.encodes_in_parts:
                ends = [0.0, 0.01, 0.4, 0.55, 1.0]
                for begin, end in pairwise(ends if len(steps) > 1 else [0.0, 1.0]):
                    loaded.encode(tower, begin, end)
                    if end < 1.0:  # a step of others between the parts
                        first = replace(steps[0], feature_rows=None)
                        loaded.step(first, sampling_rows(first.num_logit_rows)).result()
            elif tower is not None:
                loaded.encode(tower)
            found = []
            for plan in steps:
                rows = sampling_rows(plan.num_logit_rows)
                rows.whole = np.arange(plan.num_logit_rows, dtype=np.int32)
                rows.num_logprobs[:] = 0
                rows.max_logprobs = 0
                found.append(loaded.step(plan, rows).result().logits)
            error = np.abs(np.concatenate(found) - wanted).max() / np.abs(wanted).max()
            assert error < 2e-5, (name, error)
    finally:
        loaded.close()
