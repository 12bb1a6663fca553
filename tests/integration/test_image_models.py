"""Models that see images against transformers, backend by backend: towers, places, rotations."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllmx_core.backend import LoadOptions
from vllmx_core.errors import UnsupportedOpError
from vllmx_core.image_plan import tower_plan, turns_of
from vllmx_core.model import encoder_of
from vllmx_core.plugins.checkpoint import open_checkpoint
from vllmx_core.plugins.registry import load_registry
from vllmx_core.plugins.specs import BackendSpec, ModelSpec
from vllmx_core.recorded.recording import prepare
from vllmx_testing.plans import Row, make_plan, sampling_rows

from .image_models import BREAK, END, FAMILIES, PAD, START, VARIANTS, Family, colours_last, save

REGISTRY = load_registry()
TEXT = [5, 6, 7]


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest) -> Family:
    return (FAMILIES | VARIANTS)[request.param]


@pytest.fixture(scope="module")
def oracle(family: Family) -> Any:
    return family.make()


@pytest.fixture(scope="module")
def folder(oracle: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(oracle, tmp_path_factory.mktemp("images"))


def load(folder: Path, backend: str, **changes: Any) -> tuple[Any, Any]:
    checkpoint = open_checkpoint(REGISTRY, folder)
    model = REGISTRY.model_for(checkpoint.config).load()(checkpoint.config)
    given = {"dtype": "f32", "kv_cache_dtype": "f32", "max_model_len": 128, "num_kv_blocks": 16}
    options = LoadOptions(**{**given, **changes})
    spec = REGISTRY.find(BackendSpec, backend)
    assert spec is not None
    return model, spec.load()().load(model, checkpoint.weights, options)


def prompt(images: list[Any], merge: int = 2, breaks: bool = False) -> tuple[list[int], list[int]]:
    """Ids, and where the images are."""
    ids, starts = list(TEXT), []
    for _, (_, tall, wide) in images:
        ids.append(START)
        starts.append(len(ids))
        lines = [[PAD] * (wide // merge) + [BREAK] * breaks] * (tall // merge)
        tokens = [token for line in lines for token in line]
        ids += [*tokens[: len(tokens) - breaks], END, 8]
    return ids, starts


def plans(model: Any, ids: list[int], images: list[Any], chunks: list[int]) -> Any:
    """The tower's pass, and steps of so many tokens."""
    encoder = encoder_of(model)
    assert encoder is not None
    size = encoder.patches_per_token
    places = [encoder.places(grid) for _, grid in images]
    breaks = any(one.featured is not None for one in places)
    starts = prompt(images, math.isqrt(size), breaks)[1]
    counts = [
        one.num_tokens(len(image[0]) // size) for one, image in zip(places, images, strict=True)
    ]
    keep = np.arange(3, 3 + sum(counts), dtype=np.int32)[::-1].copy()  # anywhere in the store
    rows = np.full(len(ids), -1, np.int32)
    for start, count, end in zip(starts, counts, np.cumsum(counts), strict=True):
        rows[start : start + count] = keep[end - count : end]
    rows[np.array(ids) == BREAK] = -1
    turns = turns_of(list(zip(starts, places, strict=True)))
    steps, begin = [], 0
    for size in chunks:
        if begin == len(ids):
            break
        end = min(begin + size, len(ids))
        state = 0 if model.shape.states else None
        plan = make_plan([Row(ids[begin:end], begin, range(8), "all", state)], 16)
        turned = None if turns is None else turns.at(begin, end)
        if model.shape.features.feeds is not None:
            plan.tokens[rows[begin:end] >= 0] = model.shape.features.feeds
        seen = None
        if model.shape.features.spans:
            seen = plan.positions.copy()
            for start, count in zip(starts, counts, strict=True):
                seen[max(start - begin, 0) : max(start + count - begin, 0)] = start + count - 1
        arrays = {"feature_rows": rows[begin:end], "rope_positions": turned, "visible_to": seen}
        steps.append(replace(plan, **arrays))
        begin = end
    shown = [colours_last(one) if encoder.colours_last else one for one, _ in images]
    tower = tower_plan(encoder, shown, places, keep, 0) if images else None
    return tower, steps


CASES: dict[str, tuple[list[tuple[int, int, int]], list[int]]] = {
    "two images": ([(4, 6, 0), (8, 2, 1)], [64]),
    "an image cut by chunks": ([(6, 6, 2)], [5, 3, 1, 40]),
    "equal images": ([(2, 4, 3), (2, 4, 3)], [64]),
    "one token for an image": ([(2, 2, 4)], [4, 1, 20]),
    "no image": ([], [2, 9]),
}
WHOLE = {"an image cut by chunks": [3, 12, 40], "one token for an image": [4, 9, 20]}
"""Chunks of models whose images must not be cut."""


RUNS = [
    *(
        (family, backend, False)
        for family in (*FAMILIES, *VARIANTS)
        for backend in ("numpy", "torch", "cpu", "metal")
    ),
    ("qwen3_vl", "cpu", True),
]


def test_the_record_has_these_families() -> None:
    recorded = {spec.name for spec in REGISTRY.all(ModelSpec) if "images" in spec.checked}
    assert recorded == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES, indirect=True)
def test_the_record_has_the_backends_with_all_ops(folder: Path) -> None:
    config = open_checkpoint(REGISTRY, folder).config
    spec, found = REGISTRY.model_for(config), set[str]()
    for one in REGISTRY.all(BackendSpec):
        with suppress(UnsupportedOpError):
            prepare(spec.load()(config), 64, one.name, one.load()().supports)
            found.add(one.name)
    assert found == set(spec.backends)


@pytest.fixture(scope="module")
def answered(family: Family, oracle: Any) -> dict[str, tuple[list[Any], list[int], Any]]:
    """Images, ids and the oracle's logits of each case, for all backends."""
    found = {}
    for name, (sizes, _) in CASES.items():
        images = [family.image(*size) for size in sizes]
        if family.form == "pixtral" and name == "one token for an image":
            continue  # transformers itself fails
        ids = [*prompt(images, family.merge, family.breaks)[0], 11, 12]
        found[name] = images, ids, family.logits(oracle, ids, images)
    return found


@pytest.mark.parametrize(("family", "backend", "eager"), RUNS, indirect=["family"])
def test_logits(
    family: Family, answered: dict[str, Any], folder: Path, backend: str, eager: bool
) -> None:
    model, loaded = load(folder, backend, enforce_eager=eager)
    try:
        for name, (images, ids, wanted) in answered.items():
            chunks = WHOLE.get(name, CASES[name][1]) if family.spans else CASES[name][1]
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


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma4"], indirect=True)
def test_features_are_the_same_whatever_other_images_a_pass_has(
    family: Family, folder: Path
) -> None:
    sizes = [(4, 6, 0), (8, 2, 1), (6, 6, 2)]
    images = [family.image(*size) for size in sizes]
    model, loaded = load(folder, "cpu")
    store = loaded._lowering.features[0]
    try:
        together = features(model, loaded, store, images)
        alone = [features(model, loaded, store, [image]) for image in images]
        np.testing.assert_array_equal(together, np.concatenate(alone))
    finally:
        loaded.close()


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"], indirect=True)
def test_a_pass_in_pieces_leaves_the_same_features(
    family: Family, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass in parts stops between 32 rows of a matrix and between heads of attention; to the last
    bit it is the whole one."""
    monkeypatch.setattr("vllmx_cpu.tower._LARGEST", 1)
    images = [family.image(4, 6, 0), family.image(8, 2, 1)]
    model, loaded = load(folder, "cpu")
    store, shares = loaded._lowering.features[0], np.linspace(0, 1, 60)
    try:
        whole = features(model, loaded, store, images)
        store[:] = 0
        np.testing.assert_array_equal(features(model, loaded, store, images, shares), whole)
    finally:
        loaded.close()


def features(model: Any, loaded: Any, store: Any, images: list[Any], ends: Any = (0.0, 1.0)) -> Any:
    """What a pass over images, in parts with these ends, leaves in the store, row after row."""
    ids = prompt(images)[0]
    tower, steps = plans(model, ids, images, [len(ids)])
    for begin, end in pairwise(ends):
        loaded.encode(tower, float(begin), float(end))
    loaded.step(steps[0], sampling_rows(steps[0].num_logit_rows)).result()
    rows = steps[0].feature_rows
    return store[rows[rows >= 0]].copy()
