"""What loading a model on the CPU backend decides, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from vllmx_core.backend import LoadOptions
from vllmx_core.cache.capacity import CachePlan
from vllmx_core.errors import CapacityError, ConfigError, InvalidRequestError, WeightFormatError
from vllmx_core.reference.backend import ReferenceBackend
from vllmx_core.system.memory import format_bytes
from vllmx_cpu.backend import CpuBackend
from vllmx_cpu.kv_cache import plan_kv
from vllmx_cpu.loaded import CpuLoadedModel
from vllmx_cpu.memory import allocate
from vllmx_cpu.structs import VxJob
from vllmx_testing.attention_checks import attention_model
from vllmx_testing.harness import (
    PAGE,
    VOCAB,
    all_logprobs,
    load_options,
    log_softmax,
    mixed_steps,
)
from vllmx_testing.plans import Row, make_plan, sampling_rows
from vllmx_testing.step_checks import decoder
from vllmx_testing.synthetic import ArraySource, Builder, SyntheticModel, tiny_decoder

LIMITS: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 64}


def load(model: SyntheticModel, source: ArraySource, **options: Any) -> CpuLoadedModel:
    return CpuBackend().load(model, source, LoadOptions(**(LIMITS | options)))


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_the_cache_is_of_the_type_of_the_checkpoint(dtype: str) -> None:
    model, source = decoder()
    loaded = load(replace(model, shape=replace(model.shape, dtype=dtype)), source)
    assert loaded.info.kv_cache_dtype == dtype
    loaded.close()


def test_keys_and_values_in_f16_are_nearer_than_in_bf16() -> None:
    """The model's weights are ones that f16 holds exactly, and float64 is the judge."""
    builder = Builder(VOCAB)
    model = tiny_decoder(builder)
    source = ArraySource(builder.arrays, "f16")
    model = replace(model, shape=replace(model.shape, dtype="f16"))
    oracle = ReferenceBackend().load(model, source, load_options("f64", {}))
    errors = {}
    for kv in ("auto", "bf16"):
        loaded = load(model, source, kv_cache_dtype=kv, num_kv_blocks=64, block_size=PAGE)
        errors[kv] = max(
            np.abs(
                all_logprobs(loaded, make_plan(rows, PAGE), VOCAB)
                - log_softmax(oracle.logits(make_plan(rows, PAGE)))
            ).max()
            for rows in mixed_steps()
        )
        loaded.close()
    assert errors["auto"] < errors["bf16"] / 2, errors


@pytest.mark.parametrize(
    ("name", "dtype"), [("bfloat16", "bf16"), ("half", "f16"), ("float", "f32")]
)
def test_dtype_names_of_the_command_line(name: str, dtype: str) -> None:
    loaded = load(*decoder(), dtype=name, kv_cache_dtype=name)
    assert (loaded.info.dtype, loaded.info.kv_cache_dtype) == (dtype, dtype)
    loaded.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 24}, "block_size 24.*16"),
        ({"num_threads": 1000}, "num_threads"),
    ],
)
def test_options_that_cannot_be_honoured(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(*decoder(), **options)


def test_tied_embeddings_are_held_once() -> None:
    sizes = []
    for tied in (False, True):
        builder = Builder(4096)
        builder.embedding("embed", 64)
        if tied:
            builder.tied("head", "embed", 64)
        else:
            builder.linear("head", 4096, 64)
        model = builder.build(
            64,
            lambda ops, w, step: ops.logits(
                ops.embedding(step.tokens, w["embed"]), step.logit_rows, w["head"]
            ),
        )
        loaded = load(model, ArraySource(builder.arrays), dtype="bf16")
        sizes.append(loaded.info.weight_bytes)
        loaded.close()
    assert sizes == [2 * 4096 * 64 * 2, 4096 * 64 * 2]


def test_logprobs_beyond_the_limit_are_refused() -> None:
    loaded = load(*decoder())
    plan = make_plan([Row([1], 0, [0])], PAGE)
    with pytest.raises(InvalidRequestError, match=r"at most 64.*got 65"):
        loaded.step(plan, sampling_rows(1, num_logprobs=65))
    loaded.close()


def test_a_whole_step_is_one_native_job_and_halves_are_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded = load(*decoder())
    jobs: list[int] = []
    submit = loaded._team.submit

    def counted(job: VxJob) -> None:
        jobs.append(job.num_records)
        submit(job)

    monkeypatch.setattr(loaded._team, "submit", counted)
    plan = make_plan([Row([1], 0, [0])], PAGE)
    loaded.step(plan, sampling_rows(1)).result()
    loaded.forward(plan).sample(sampling_rows(1)).result()
    assert jobs == [jobs[0], jobs[0] - 1, 1]
    loaded.close()


def test_a_half_step_that_cannot_be_sampled_gives_its_place_back() -> None:
    loaded = load(*decoder())
    plan = make_plan([Row([1], 0, [0])], PAGE)
    wanted = loaded.step(plan, sampling_rows(1)).result().ids
    for _ in range(3):
        with pytest.raises(InvalidRequestError, match="at most 64"):
            loaded.forward(plan).sample(sampling_rows(1, num_logprobs=65))
    assert (loaded.step(plan, sampling_rows(1)).result().ids == wanted).all()
    loaded.close()


def test_a_tensor_of_another_shape_is_named_with_both_shapes() -> None:
    model, source = decoder()
    arrays = {name: source.part(name).dequantize() for name in source.names()}
    name = "1.down.0.weight"
    rows, cols = arrays[name].shape
    wrong = arrays | {name: np.zeros((rows + 1, cols), np.float32)}
    with pytest.raises(WeightFormatError, match=rf"{name}.*{rows + 1}, {cols}.*{rows}, {cols}"):
        load(model, ArraySource(wrong))


class TestCacheSize:
    GIB = 1 << 30

    def plan(self, free: int, used: int = 0, **options: Any) -> CachePlan:
        model = tiny_decoder(Builder(VOCAB))
        chosen = LoadOptions(**({"max_model_len": 4096, "max_num_seqs": 8} | options))
        return plan_kv(model.shape, chosen, "f32", free, used)

    def test_no_more_than_all_sequences_at_full_length(self) -> None:
        assert self.plan(64 * self.GIB).num_blocks == 8 * 4096 // 16

    def test_no_more_than_the_fraction_of_free_memory(self) -> None:
        everything = self.plan(64 * self.GIB)
        half = everything.num_bytes
        plan = self.plan(half, memory_fraction=0.5)
        assert plan.num_bytes <= half // 2 < plan.num_bytes + plan.num_bytes // plan.num_blocks

    def test_blocks_and_bytes_are_taken_at_their_word(self) -> None:
        assert self.plan(self.GIB, num_kv_blocks=700).num_blocks == 700
        per_block = self.plan(self.GIB, num_kv_blocks=700).num_bytes // 700
        assert self.plan(self.GIB, kv_cache_memory_bytes=300 * per_block + 1).num_blocks == 300

    @pytest.mark.parametrize(
        ("kv", "vectors"),
        [("int8", 2 * (128 + 4)), ("fp8", 2 * (128 + 4)), ("q4", 2 * 68), ("q8,q4", 132 + 68)],
    )
    def test_codes_take_a_half_or_a_quarter_of_bf16(self, kv: str, vectors: int) -> None:
        """A byte or a half for a number and four for a vector, in what is reported and in every
        message."""
        model, source = attention_model(head_size=128, num_heads=2, num_kv_heads=1)
        memory = {"dtype": "f32", "kv_cache_memory_bytes": 1 << 18}
        infos = [load(model, source, kv_cache_dtype=name, **memory).info for name in ("bf16", kv)]
        per_block = [info.kv_cache_bytes / info.num_kv_blocks for info in infos]
        needed = 16 * 2 * vectors  # of a block; a sequence needs eight
        assert per_block == [16 * 2 * 2 * 128 * 2, needed]
        assert [info.num_kv_blocks for info in infos] == [(1 << 18) // int(b) for b in per_block]
        message = f"{7 * needed} bytes.*7 blocks.*--kv-cache-memory-bytes to {8 * needed}"
        with pytest.raises(CapacityError, match=message):
            load(model, source, kv_cache_dtype=kv, kv_cache_memory_bytes=8 * needed - 1)

    @pytest.mark.parametrize(
        ("free", "options", "message"),
        [
            (
                1 << 30,
                {"num_kv_blocks": 10},
                r"4096.*256 blocks.*10 blocks.*--num-kv-blocks to 256",
            ),
            (
                1 << 30,
                {"kv_cache_memory_bytes": 1000},
                r"4096.*raise --kv-cache-memory-bytes to \d+",
            ),
            (1 << 20, {}, "4096.*use a machine with more memory"),
            (3 << 20, {"memory_fraction": 0.1}, "--max-model-len to .*raise --memory-fraction"),
            (1 << 20, {"num_kv_blocks": 10**6}, "num_kv_blocks asks for .*lower --num-kv-blocks"),
        ],
    )
    def test_refusals_name_numbers_and_the_flag(
        self, free: int, options: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(CapacityError, match=message):
            self.plan(free, **options)


def test_weights_that_do_not_fit_are_refused_before_they_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vllmx_cpu.planning.free_bytes", lambda: 1000)
    model, _ = decoder()
    with pytest.raises(CapacityError, match=r"weights take .* 1000 bytes"):
        load(model, ArraySource({}))


def test_small_sizes_are_written_in_bytes() -> None:
    assert format_bytes(1000) == "1000 bytes"
    assert format_bytes(3 << 19) == "1.5 MiB"
    assert format_bytes(5 << 29) == "2.50 GiB"


def test_buffers_are_zero_and_aligned() -> None:
    buffer = allocate(100_000)
    assert buffer.nbytes == 100_000
    assert buffer.ctypes.data % 64 == 0
    assert not buffer.any()
    assert allocate(0).nbytes == 0
