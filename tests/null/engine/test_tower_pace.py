"""Passes of a tower beside running rows, on a simulated machine: their pace, and features that are
there when a step reads them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from vllmx_core.config import EngineConfig
from vllmx_core.model import ImagePlaces
from vllmx_core.plan import StepPlan
from vllmx_core.sampling import SamplingParams
from vllmx_engine.core.cost import StepCost, StepLoad, TowerLoad
from vllmx_engine.core.engine_core import EngineCore
from vllmx_engine.wire.messages import CoreRequest, ImageInput, pack_ids
from vllmx_testing.fake import FakeError, FakeLoadedModel, FakeRules, FakeStep

PER_TOKEN = 4
STEP_S, ROW_S, TOKEN_S, PATCH_S, WORK_S = 30e-3, 1e-3, 0.1e-3, 0.8e-3, 0.2e-6
"""A step of four rows takes 34 ms, a tower of 1,024 patches a second."""
ROWS = 4


class Tower:
    """An `Encoder` of patches that nobody computes."""

    patch_width, patches_per_token, colours_last = 3, PER_TOKEN, False

    def places(self, grid: tuple[int, int, int]) -> ImagePlaces:
        count = grid[1] * grid[2]
        lines, weights = np.zeros((2, count), np.int32), np.zeros((count, 0), np.float32)
        return ImagePlaces(lines, np.zeros((count, 0), np.int32), weights, None, count // PER_TOKEN)


class SeeingModel(FakeLoadedModel):
    """Knows how long steps and passes take, and that no step reads what no pass has written."""

    def __init__(
        self, *, in_parts: bool = True, num_features: int = 2048, spread: float = 0.0
    ) -> None:
        super().__init__(FakeRules(vocab_size=48), num_blocks=4096, max_num_seqs=16)
        self._info = replace(self._info, num_feature_rows=num_features, encodes_in_parts=in_parts)
        self._spread, self._random = spread, np.random.default_rng(0)
        """How far a part may be from what its share says."""
        self.seconds: list[float] = []
        """Of each step, with the passes before it."""
        self.num_images = self.num_tokens = 0
        self.parts: list[tuple[float, float]] = []
        """Of passes, since the last step."""
        self.most_parts = 0
        self.fails = False
        self._made: set[int] = set()
        self._tower_s = self._done = 0.0
        self._open: StepPlan | None = None

    def encode(self, plan: StepPlan, begin: float = 0.0, end: float = 1.0) -> None:
        if self.fails:
            self.fails = False
            raise FakeError("no pass, as the test ordered")
        assert plan.patches is not None
        assert (begin > 0) == (self._open is not None), "one pass after the other"
        assert begin == 0 or (self._open is plan and begin == self._done), "parts in order"
        assert begin < end <= 1
        self._open, self._done = (plan, end) if end < 1 else (None, 0.0)
        counts = np.diff(plan.query_start).astype(float)
        far = 1.0 + self._spread * self._random.uniform(-1, 1)
        self._tower_s += (end - begin) * far * float((PATCH_S * counts + WORK_S * counts**2).sum())
        self._made -= set(plan.patches.keep.tolist())
        if end == 1:
            self._made |= set(plan.patches.keep.tolist())
            self.num_images += plan.num_rows
        self.parts.append((begin, end))

    def _enqueue(self, plan: StepPlan) -> FakeStep:
        if plan.feature_rows is not None:
            read = set(plan.feature_rows[plan.feature_rows >= 0].tolist())
            assert read <= self._made, "features that nobody made"
        step = super()._enqueue(plan)
        tokens_s = ROW_S * plan.num_rows + TOKEN_S * (plan.num_tokens - plan.num_rows)
        self.num_tokens += plan.num_tokens
        self.seconds.append(STEP_S + tokens_s + self._tower_s)
        step._result.elapsed_s = self.seconds[-1]
        self.most_parts = max(self.most_parts, len(self.parts))
        self._tower_s, self.parts = 0.0, []
        return step


def make_core(model: SeeingModel, **options: Any) -> EngineCore:
    config = EngineConfig(model="fake", **{"target_itl": "60", **options})
    return EngineCore(
        model,
        config,
        max_model_len=4096,
        vocab_size=48,
        encoder=Tower(),  # type: ignore[arg-type]
    )


def request(
    name: str,
    images: Sequence[tuple[int, int]] = (),
    answer: int = 4,
    before: Sequence[int] = (1, 2, 3, 4, 5),
    behind: int = 0,
) -> CoreRequest:
    """Five tokens, then each image, of (rows of 32 patches, what it shows), with one behind it, and
    so many more."""
    ids, inputs = [*before], []
    for tall, shown in images:
        count = tall * 32
        digest = hashlib.sha256(bytes([tall, shown])).digest()
        inputs.append(
            ImageInput(
                len(ids), count // PER_TOKEN, digest, (1, tall, 32), bytes(3 * count),
                bytes(4 * 3 * 256),
            )
        )  # fmt: skip
        ids += [6] * (count // PER_TOKEN) + [7]
    ids += [8] * behind
    params = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
    return CoreRequest(
        request_id=name, prompt=pack_ids(ids), images=inputs, params=params, max_tokens=answer,
        seed=0,
    )  # fmt: skip


def run(core: EngineCore, steps: int = 10_000) -> list[Any]:
    found: list[Any] = []
    for _ in range(steps):
        if not core.has_work:
            break
        found += core.step()
    return found


def decoding(core: EngineCore) -> None:
    for row in range(ROWS):
        core.add(request(f"row {row}", answer=4000))
    run(core, 40)


@pytest.mark.parametrize("spread", [0.0, 0.8])
@pytest.mark.parametrize("target_ms", [60.0, 200.0])
def test_running_rows_keep_their_pace_while_images_arrive(spread: float, target_ms: float) -> None:
    """Where parts take up to 1.8 times what was meant, they are made smaller; and a step that ends
    a pass has no more of the image's prompt than there is time for."""
    model = SeeingModel(spread=spread)
    core = make_core(model, target_itl=str(target_ms))
    decoding(core)
    alone = float(np.median(model.seconds[20:]))
    core.add(request("first", [(32, 0)]))
    run(core, 80)  # what a tower costs is known from here on
    before = len(model.seconds)
    for number in range(1, 9):
        core.add(request(f"image {number}", [(32, number)]))
        run(core, 60)
    run(core, 60)
    taken = model.seconds[before:]
    assert model.num_images == 9
    assert np.quantile(taken, 0.99) <= 2.0 * alone
    assert max(taken) <= 2.5 * alone
    core.close()


def test_text_goes_on_at_the_target_and_prompts_with_images_at_the_pace() -> None:
    """Behind its images a prompt is text."""
    model = SeeingModel()
    core = make_core(model, target_itl="200")
    decoding(core)
    alone = float(np.median(model.seconds[20:]))
    for number in range(3):  # chunks grow as far as was seen
        core.add(request(f"text {number}", before=[10 + number] * 2000))
        run(core, 40)
    before = len(model.seconds)
    core.add(request("text", before=[9] * 2000))
    run(core, 20)
    as_text = model.seconds[before:]
    assert 0.18 <= max(as_text) <= 0.21
    core.add(request("first", [(32, 0)]))
    run(core, 80)
    before, computed = len(model.seconds), model.num_tokens
    core.add(request("again", [(32, 0)], before=[8] * 1000, behind=2000))  # its features are there
    run(core, 4)
    assert max(model.seconds[before:]) <= 2 * alone
    assert model.num_tokens - computed > 4 * ROWS + 200
    run(core, 16)
    assert 0.18 <= max(model.seconds[before:]) <= 0.21
    core.close()


def test_a_prompt_whose_image_was_seen_goes_on_beside_the_pass_of_another() -> None:
    model = SeeingModel()
    core = make_core(model)
    decoding(core)
    core.add(request("first", [(32, 0)]))
    run(core, 80)
    core.add(request("large", [(32, 1), (32, 2), (32, 3)]))
    run(core, 3)
    core.add(request("again", [(32, 0)], before=[8] * 20))
    found = run(core, 60)
    assert "again" in {output.request_id for output in found if output.finish_reason is not None}
    assert model.num_images < 4
    core.close()


def test_a_pass_ends_however_little_time_there_is() -> None:
    model = SeeingModel()
    core = make_core(model)
    decoding(core)
    core._cost.tower_budget = lambda *decodes: 1e-6  # type: ignore[method-assign]
    core.add(request("image", [(32, 0)]))
    run(core, 300)
    assert model.num_images == 1
    core.close()


def test_without_running_rows_a_pass_is_whole_and_those_of_a_step_are_together() -> None:
    model = SeeingModel()
    core = make_core(model)
    core.add(request("two", [(16, 0), (32, 1), (16, 0)]))
    run(core)
    assert (model.num_images, model.most_parts) == (2, 1)
    core.add(request("again", [(32, 1)]))
    run(core)
    assert model.num_images == 2  # an image that was asked about costs no tower
    core.close()


def test_a_backend_without_parts_does_one_long_pass_a_step() -> None:
    model = SeeingModel(in_parts=False)
    core = make_core(model)
    decoding(core)
    core.add(request("three", [(16, 0), (16, 1), (16, 2)]))
    found = run(core, 60)
    assert (model.num_images, model.most_parts) == (3, 1)
    assert "three" in {output.request_id for output in found if output.finish_reason is not None}
    core.close()


@pytest.mark.parametrize("in_parts", [True, False])
def test_a_store_too_small_for_all_serves_all(in_parts: bool) -> None:
    """Each request fills the store; others wait, and passes that nobody waits for any more end."""
    model = SeeingModel(in_parts=in_parts, num_features=300)
    core = make_core(model)
    decoding(core)
    for number in range(4):
        core.add(request(f"large {number}", [(32, number), (4, 9)]))
    run(core, 10)
    core.abort(["large 0"])
    found = run(core, 600)
    ended = {output.request_id for output in found if output.finish_reason is not None}
    assert ended >= {"large 1", "large 2", "large 3"}
    core.abort([f"row {row}" for row in range(ROWS)])
    core.add(request("last", [(32, 77)]))
    assert "last" in {output.request_id for output in run(core) if output.finish_reason is not None}
    core.close()


def test_a_pass_that_fails_ends_its_request_alone() -> None:
    model = SeeingModel()
    core = make_core(model)
    decoding(core)
    core.add(request("fails", [(32, 0)]))
    model.fails = True
    found = run(core, 5)
    assert any(output.error is not None for output in found)
    core.add(request("again", [(32, 0)]))
    found = run(core, 100)
    assert "again" in {output.request_id for output in found if output.finish_reason is not None}
    core.close()


def test_parts_that_are_nearly_free_do_not_make_a_pass_free() -> None:
    """The ops of a small part may be its norms alone."""
    cost = StepCost(60e-3, 16)
    for _ in range(10):
        cost.observe(StepLoad(ROWS, 400), 34e-3)
    whole = TowerLoad.of(1024)
    for share, added_s in ((1 / 16, 60e-3), (1 / 100, 0.0), (1 / 100, 20e-3), (1 / 256, 0.0)):
        part = whole.part(share)
        cost.observe(StepLoad(ROWS, 400, 0, 0.0, part.patches, part.work), 34e-3 + added_s)
    assert cost.tower_seconds(whole) == pytest.approx(80e-3 / (1 / 16 + 2 / 100 + 1 / 256))
    share = cost.tower_share(cost.tower_budget(ROWS, 400), whole)
    assert share * cost.tower_seconds(whole) == pytest.approx(0.9 * 34e-3)


@pytest.mark.parametrize("fails_late", [False, True])
def test_features_of_a_step_that_failed_are_made_again(fails_late: bool) -> None:
    """Some backends tell of a pass that failed by the result of a step behind it."""
    model = SeeingModel()
    core = make_core(model)
    core.add(request("first", [(8, 1)]))
    run(core)
    assert model.num_images == 1
    model.fails = not fails_late
    model.fail_steps = frozenset({model.num_steps} if fails_late else ())
    core.add(request("fails", [(8, 2)]))
    (last,) = run(core)
    assert last.finish_reason == "error"
    model.num_images = 0
    for name in ("again", "once more"):
        core.add(request(name, [(8, 2)]))
        assert run(core)[-1].finish_reason == "length"
    assert model.num_images == 1
