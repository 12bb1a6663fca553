"""FakeBackend: right schedules give the expected ids, wrong ones do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllmx_core.backend import LoadOptions
from vllmx_core.errors import CapacityError
from vllmx_core.plan import LogitEdits, TokenCounts
from vllmx_core.plugins.checkpoint import build_model, open_checkpoint, resolve_path
from vllmx_core.plugins.registry import Registry
from vllmx_core.plugins.specs import BackendSpec
from vllmx_core.sampling import SamplingParams
from vllmx_testing.fake import (
    FakeBackend,
    FakeError,
    FakeLoadedModel,
    FakeRules,
    expected_rank,
    expected_tokens,
)
from vllmx_testing.fake_checkpoint import FakePlugin, make_fake_checkpoint
from vllmx_testing.plans import Driver, Row, make_plan, sampling_rows

RULES = FakeRules(vocab_size=97)
PROMPTS = [[5], list(range(1, 40)), [7] * 16, [3, 1, 4, 1, 5, 9, 2, 6]]


def fake(**options: Any) -> FakeLoadedModel:
    return FakeLoadedModel(options.pop("rules", RULES), num_blocks=64, block_size=8, **options)


def step_ids(model: FakeLoadedModel, rows: list[Row], **columns: Any) -> list[int]:
    plan = make_plan(rows, 8)
    result = model.step(plan, sampling_rows(plan.num_logit_rows, **columns)).result()
    return [int(token) for token in result.ids]


@pytest.mark.parametrize("verify_pages", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_driver_output_is_expected(
    verify_pages: bool, overlap: bool, chunk: int, temperature: float
) -> None:
    driver = Driver(fake(verify_pages=verify_pages), chunk=chunk, overlap=overlap)
    outputs = driver.generate(PROMPTS, 12, temperature=temperature, seeds=[9, 9, 2**64 - 1, 0])
    params = SamplingParams(temperature=temperature)
    for prompt, seed, output in zip(PROMPTS, [9, 9, 2**64 - 1, 0], outputs, strict=True):
        expected = expected_tokens(prompt, 12, rules=RULES, params=params, seed=seed)
        assert output == expected


def test_seed_position_and_history_change_a_draw() -> None:
    params = SamplingParams(temperature=1.0)
    drawn = [expected_tokens([1, 2], 8, rules=RULES, params=params, seed=seed) for seed in (1, 2)]
    assert drawn[0] != drawn[1]
    assert expected_tokens([2, 1], 8, rules=RULES) != expected_tokens([1, 2], 8, rules=RULES)


def test_an_overwritten_or_swapped_page_changes_the_output() -> None:
    prompt = list(range(24))
    right = expected_tokens([*prompt, 50], 1, rules=RULES)
    for blocks, victim in (([0, 1, 2, 3], None), ([0, 1, 2, 3], 1), ([1, 0, 2, 3], None)):
        model = fake(rules=RULES)
        step_ids(model, [Row(prompt, 0, [0, 1, 2, 3])])
        if victim is not None:
            step_ids(model, [Row([60] * 8, 0, [victim])])
        ids = step_ids(model, [Row([50], 24, blocks)])
        assert (ids == right) == (blocks[0] == 0 and victim is None)


def test_logit_rows_inside_a_chunk_see_their_own_history() -> None:
    prompt = [4, 8, 15, 16, 23, 42, 4, 8, 15, 16]
    for verify_pages in (True, False):
        ids = step_ids(fake(verify_pages=verify_pages), [Row(prompt, 0, [3, 1], "all")])
        assert ids == [
            expected_tokens(prompt[: i + 1], 1, rules=RULES)[0] for i in range(len(prompt))
        ]


def test_target_is_scored_and_logprobs_are_consistent() -> None:
    plan = make_plan([Row([1, 2, 3], 0, [0], "all")], 8)
    rows = sampling_rows(3, target=[2, 3, -1], num_logprobs=[0, 2, -1])
    result = fake().step(plan, rows).result()
    assert result.ids[:2].tolist() == [2, 3]
    assert result.logprobs is not None
    ranks = [expected_rank([1], 2, RULES), expected_rank([1, 2], 3, RULES), 0]
    assert result.logprobs.rank.tolist() == ranks
    assert result.logprobs.top_ids[1, 0] == expected_tokens([1, 2], 1, rules=RULES)[0]
    assert result.logprobs.top_ids[0].tolist() == [-1, -1]
    assert result.logprobs.chosen[0] == pytest.approx(-ranks[0] / 4)


def test_end_of_sequence_comes_where_it_was_ordered() -> None:
    rules = FakeRules(97, eos_id=96, eos_every=10)
    outputs = Driver(fake(rules=rules)).generate([[1, 2, 3, 4]], 10)
    assert outputs[0].index(96) == 6  # position 10
    assert expected_tokens([1, 2, 3, 4], 20, rules=rules, stop_ids=(96,)) == outputs[0][:7]
    often = FakeRules(1000, eos_id=999, eos_rate=5)
    count = expected_tokens([1], 200, rules=often).count(999)
    assert 20 < count < 65
    assert Driver(fake(rules=often)).generate([[1]], 40)[0] == expected_tokens([1], 40, rules=often)


def test_bans_masks_and_biases() -> None:
    natural = expected_tokens([1, 2], 1, rules=RULES)[0]
    plan = make_plan([Row([1, 2], 0, [0])], 8)

    def ids(**columns: Any) -> list[int]:
        result = fake().step(plan, sampling_rows(1, **columns)).result()
        return [int(token) for token in result.ids]

    def edits(*pairs: tuple[int, float]) -> LogitEdits:
        return LogitEdits(
            np.array([0, len(pairs)], np.int32),
            np.array([pair[0] for pair in pairs], np.int32),
            np.array([pair[1] for pair in pairs], np.float32),
        )

    assert ids(edits=edits((natural, -np.inf))) == [(natural + 1) % 97]
    assert ids(edits=edits((11, 100.0))) == [11]
    assert ids(edits=edits((11, 1.0))) == [natural]
    mask = np.zeros((1, 4), np.uint32)
    mask[0, 40 >> 5] |= 1 << (40 & 31)
    on = np.zeros(1, np.int32)
    assert ids(masks=mask, mask_index=on) == [40]
    assert ids(masks=mask, mask_index=on - 1) == [natural]
    assert ids(masks=mask, mask_index=on, edits=edits((40, -np.inf))) == [-1]
    params = SamplingParams(temperature=0.0, allowed_token_ids=(40, 41), logit_bias={41: 80.0})
    assert expected_tokens([1, 2], 2, rules=RULES, params=params) == [41, 41]


def test_penalties_see_counts_and_the_pending_token() -> None:
    params = SamplingParams(temperature=0.0, repetition_penalty=1.2, frequency_penalty=0.5)
    first, second, third = expected_tokens([1, 2, 1], 3, rules=RULES, params=params)
    history = [1, 2, 1, first, second]

    def third_id(ids: list[int], counts: list[int], pending: bool) -> int:
        columns = TokenCounts(
            np.array([0, len(ids)], np.int32),
            np.array(ids, np.int32),
            np.array(counts, np.int32),
            np.array([pending]),
        )
        plan = make_plan([Row(history, 0, [0])], 8)
        rows = sampling_rows(1, repetition_penalty=1.2, frequency_penalty=0.5, counts=columns)
        return int(fake().step(plan, rows).result().ids[0])

    assert len({1, 2, first, second}) == 4
    assert third_id([1, 2, first, second], [0, 0, 1, 1], pending=False) == third
    assert third_id([1, 2, first], [0, 0, 1], pending=True) == third
    assert third_id([1, 2, first], [0, 0, 1], pending=False) != third
    assert third_id([1, 2, first, second], [0, 1, 1, 1], pending=False) != third


def test_broken_row_and_failing_step() -> None:
    model = fake(rules=FakeRules(97, nan_token=13), fail_steps=[1])
    ids = step_ids(model, [Row([1, 13], 0, [0]), Row([1, 12], 0, [1])])
    assert ids == [-1, expected_tokens([1, 12], 1, rules=RULES)[0]]
    assert expected_tokens([1, 13], 5, rules=FakeRules(97, nan_token=13)) == []
    with pytest.raises(FakeError, match="step 1"):
        step_ids(model, [Row([5], 2, [1])])
    assert step_ids(model, [Row([5], 0, [1])]) == expected_tokens([5], 1, rules=RULES)


def test_two_steps_in_flight_and_no_more() -> None:
    model = fake()
    plan, rows = make_plan([Row([1], 0, [0])], 8), sampling_rows(1)
    first, second = model.step(plan, rows), model.step(plan, rows)
    with pytest.raises(AssertionError, match="third step"):
        model.step(plan, rows)
    with pytest.raises(AssertionError, match="order"):
        second.result()
    first.result()
    second.result()
    with pytest.raises(AssertionError, match="twice"):
        second.result()
    model.close()
    model.close()
    with pytest.raises(AssertionError, match="close"):
        model.step(plan, rows)


class Clock:
    """In the place of the module `time`: nothing but sleeping takes any."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_simulated_time_overlaps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("vllmx_testing.fake.time", clock)
    model = fake(step_s=0.02, token_s=0.001)
    plan, rows = make_plan([Row([1], 0, [0])], 8), sampling_rows(1)
    handles = [model.step(plan, rows), model.step(plan, rows)]
    assert clock.now_s == 100.0
    assert [handle.result().elapsed_s for handle in handles] == pytest.approx([0.021, 0.021])
    assert clock.now_s == pytest.approx(100.042)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": ([8, 1, 2],)}, "slots and block_tables"),
        ({"positions": [1, 2, 3]}, "positions"),
        ({"context_len": [4]}, "positions"),
        ({"tokens": [97, 0, 0]}, "vocabulary"),
        ({"tokens": [-1, 0, 0]}, "step before"),
        ({"query_start": [0, 2]}, "query_start"),
        ({"block_tables": ([[64]],)}, "does not exist"),
        ({"logit_rows": [3]}, "logit row"),
    ],
)
def test_a_plan_that_breaks_its_contract_is_refused(change: dict[str, Any], message: str) -> None:
    plan = make_plan([Row([1, 2, 3], 0, [0])], 8)
    for name, value in change.items():
        grouped = isinstance(value, tuple)
        made = tuple(np.array(part, np.int32) for part in (value if grouped else (value,)))
        setattr(plan, name, made if grouped else made[0])
    with pytest.raises(AssertionError, match=message):
        fake().step(plan, sampling_rows(1))


def test_writing_a_shared_block_is_refused() -> None:
    plan = make_plan([Row([1], 9, [0, 1]), Row([1], 10, [0, 1])], 8)
    with pytest.raises(AssertionError, match="shared"):
        fake().step(plan, sampling_rows(2))
    plan = make_plan([Row([1], 9, [0, 1]), Row([1], 10, [0, 2])], 8)
    fake().step(plan, sampling_rows(2)).result()


def test_a_checkpoint_takes_the_usual_path(tmp_path: Path) -> None:
    registry = Registry()
    registry.add(FakePlugin, "test:fake")
    folder = make_fake_checkpoint(tmp_path / "model", eos_every=8, step_s=0.0)
    checkpoint = open_checkpoint(registry, resolve_path(registry, str(folder)))
    model = build_model(registry, checkpoint)
    backend = registry.choose_backend("fake")[0].load()()
    assert isinstance(backend, FakeBackend)
    loaded = backend.load(model, checkpoint.weights, LoadOptions(max_model_len=100))
    assert Driver(loaded).generate([[1, 2]], 7)[0][6] == 256
    options = LoadOptions(max_model_len=100, num_kv_blocks=2)
    with pytest.raises(CapacityError, match="--max-model-len to 32"):
        backend.load(model, checkpoint.weights, options)
    assert registry.get(BackendSpec, "fake").priority < 0


def test_the_fake_tokenizer_round_trips(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    path = make_fake_checkpoint(tmp_path) / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    text = "héllo  wörld\n<|end|>"
    ids = tokenizer.encode(text).ids
    assert ids == [*"héllo  wörld\n".encode(), 256]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
