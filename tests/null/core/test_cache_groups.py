"""Groups of layers over one pool of pages, and the capacity that follows from them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from vllmx_core.backend import LoadOptions
from vllmx_core.cache.capacity import (
    MAX_BARE_BLOCKS,
    BlockSizes,
    CachePlan,
    check_codes,
    plain_page_bytes,
    plan_cache,
)
from vllmx_core.cache.groups import blocks_of, cache_layout, fitting_step, longest_sequence
from vllmx_core.errors import CapacityError, ConfigError, UnsupportedModelError
from vllmx_core.model import CacheSpec, KVSpec, LatentKV, ModelShape, SharedKV
from vllmx_core.system.memory import FreeBytes

FULL, LOCAL = KVSpec(2, 8), KVSpec(2, 8, window=5)


def shape(*caches: CacheSpec) -> ModelShape:
    return ModelShape(97, 32, 4096, caches)


def layers(*caches: CacheSpec) -> list[tuple[int, ...]]:
    return [group.layers for group in cache_layout(shape(*caches), grouped=True).groups]


@pytest.mark.parametrize("kv", [FULL, LOCAL])
def test_layers_of_one_kind_are_one_group_whose_places_are_the_layers(kv: KVSpec) -> None:
    layout = cache_layout(shape(kv, kv, kv), grouped=True)
    assert layout.windows == (kv.window,)
    assert layout.layers == ((0, 0), (0, 1), (0, 2))
    assert layout.places == (kv, kv, kv)


def test_windows_form_groups_of_equal_size() -> None:
    gemma3 = [FULL if layer % 6 == 5 else LOCAL for layer in range(48)]
    layout = cache_layout(shape(*gemma3), grouped=True)
    assert layout.windows == (5, 5, 5, 5, 5, None)
    assert {len(group.layers) for group in layout.groups} == {8}
    assert len(layout.places) == 8
    assert len(set(layout.layers)) == 48
    for layer, (group, place) in enumerate(layout.layers):
        assert layout.groups[group].layers[place] == layer
        assert layout.groups[group].window == gemma3[layer].window


def test_places_stay_empty_where_counts_do_not_divide() -> None:
    assert layers(LOCAL, FULL, LOCAL, FULL, LOCAL) == [(0, 2), (4,), (1, 3)]
    assert layers(*[LOCAL] * 5, *[FULL] * 2) == [(0, 1), (2, 3), (4,), (5, 6)]
    assert layers(*[LOCAL] * 5, *[FULL] * 6) == [(0, 1, 2, 3, 4), (5, 6, 7, 8, 9, 10)]


def test_one_table_for_all_keeps_everything() -> None:
    layout = cache_layout(shape(LOCAL, FULL, LOCAL), grouped=False)
    assert layout.windows == (None,)
    assert layout.layers == ((0, 0), (0, 1), (0, 2))


def test_pages_of_unequal_size_have_places_of_their_own() -> None:
    large = KVSpec(4, 8)
    assert layers(FULL, large, FULL) == [(0, 1, 2)]
    layout = cache_layout(shape(LOCAL, large, LOCAL), grouped=True)
    assert layout.windows == (5, 5, None)
    assert layout.places == (LOCAL, large)
    assert layout.layers == ((0, 0), (2, 1), (1, 0))
    mixed = cache_layout(shape(LOCAL, FULL, large), grouped=True)
    assert mixed.windows == (None,)
    assert mixed.places == (LOCAL, FULL, large)


def test_gemma_4_groups_where_long_sequences_take_less_memory_so() -> None:
    local, full = KVSpec(8, 256, window=1024), KVSpec(2, 512)
    gemma4 = [full if layer % 6 == 5 else local for layer in range(30)]

    def planned(length: int) -> CachePlan:
        return plan(*gemma4, max_model_len=length, max_num_seqs=1, group_caches=True, free=1 << 40)

    short, long = planned(2048), planned(131072)
    assert short.layout.windows == (None,)
    assert long.layout.windows == (1024,) * 5 + (None,)
    assert len(long.layout.places) == 10
    alone = plan(*gemma4, max_model_len=131072, max_num_seqs=1, free=1 << 40)
    assert long.num_bytes < 0.31 * alone.num_bytes


def test_a_layer_that_shares_has_the_place_of_its_owner() -> None:
    layout = cache_layout(shape(LOCAL, FULL, SharedKV(0), SharedKV(1)), grouped=True)
    assert layout.layers == ((0, 0), (1, 0), (0, 0), (1, 0))
    for wrong in (shape(FULL, SharedKV(2), FULL), shape(FULL, SharedKV(0), SharedKV(1))):
        with pytest.raises(UnsupportedModelError, match=r"layer \d shares the pages of layer \d"):
            cache_layout(wrong, grouped=True)


def test_a_model_without_attention_has_one_group_without_places() -> None:
    layout = cache_layout(shape(), grouped=True)
    assert (layout.windows, layout.places, layout.layers) == ((None,), (), ())


@pytest.mark.parametrize("step_tokens", [1, 3, 64])
def test_blocks_of_is_the_most_that_any_schedule_needs(step_tokens: int) -> None:
    """The judge is a sequence that grows by chunks of every alignment."""
    windows, size = (None, 5, 8), 4
    for tokens in range(1, 60):
        most = 0
        for first_chunk in range(1, min(step_tokens, tokens) + 1):
            start, end = 0, first_chunk
            while True:
                held = 0
                for window in windows:
                    seen = 0 if window is None else max(0, start - window + 1)
                    held += -(-end // size) - seen // size
                most = max(most, held)
                if end == tokens:
                    break
                start, end = end, min(end + step_tokens, tokens)
        assert most <= blocks_of(windows, tokens, size, step_tokens) <= most + 2
    assert blocks_of((None,), 33, 16, step_tokens) == 3


def test_the_longest_sequence_is_the_last_that_fits() -> None:
    windows = (5, None)
    for blocks in range(2, 40):
        found = longest_sequence(windows, blocks, 4, 8, 100)
        assert blocks_of(windows, found, 4, 8) <= blocks
        assert found == 100 or blocks_of(windows, found + 1, 4, 8) > blocks
    assert longest_sequence((None,), 7, 16, 8, 4096) == 7 * 16
    assert longest_sequence((5,), 1 << 10, 4, 8, 4096) == 4096


def test_smaller_steps_need_fewer_pages_of_windows() -> None:
    for blocks in range(2, 60):
        step = fitting_step((5, None), blocks, 4, 64, 100)
        assert step == 0 or blocks_of((5, None), 100, 4, step) <= blocks
        assert step in (0, 32) or blocks_of((5, None), 100, 4, 2 * step) > blocks
    assert fitting_step((None,), 5, 4, 64, 100) == 0


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"num_kv_blocks": 28, "max_num_batched_tokens": 256}, "-tokens to 64 or raise --num-kv-b"),
        ({"kv_cache_memory_bytes": 28 << 11, "max_num_batched_tokens": 256}, "-tokens to 64 or"),
        ({"max_num_batched_tokens": 8}, r"-tokens \(8, for which activations have room\) or use"),
    ],
)
def test_refusals_name_the_size_of_steps(options: dict[str, Any], remedy: str) -> None:
    caches, sizes = (KVSpec(2, 8, window=65), FULL), {"max_model_len": 304, "group_caches": True}
    free = 12 << 11 if len(options) == 1 else 1 << 30
    with pytest.raises(CapacityError, match=f"lower --max-model-len .*--max-num-batched{remedy}"):
        plan(*caches, free=free, **sizes, **options)


@pytest.mark.parametrize(
    ("free", "remedy"),
    [
        (1 << 10, "use a machine with more memory"),
        (FreeBytes(1 << 10, "raise `ulimit -v` (now 1.00 GiB)"), r"or raise `ulimit -v` \(now"),
    ],
)
def test_refusals_name_the_limit_that_bounds_memory(free: int, remedy: str) -> None:
    with pytest.raises(CapacityError, match=remedy):
        plan(FULL, free=free)


def plan(*caches: CacheSpec, free: int = 1 << 30, **options: Any) -> CachePlan:
    chosen = LoadOptions(**({"max_model_len": 4096, "max_num_batched_tokens": 64} | options))
    return plan_cache(shape(*caches), chosen, "f32", BlockSizes("any", multiple=8), free, 0)


def test_a_window_bounds_what_a_sequence_needs() -> None:
    windowed = KVSpec(2, 8, window=65)
    kept = plan(windowed, windowed, max_num_seqs=1)
    bounded = plan(windowed, windowed, max_num_seqs=1, group_caches=True)
    assert kept.num_blocks == 256
    assert bounded.num_blocks == 9
    assert kept.block_bytes == bounded.block_bytes == 2 * 2 * 16 * 2 * 8 * 4
    mixed = plan(windowed, FULL, max_num_seqs=1, group_caches=True)
    assert mixed.num_blocks == 256 + 9
    assert mixed.block_bytes == 2 * 16 * 2 * 8 * 4


def test_refusals_name_the_length_that_fits() -> None:
    caches = (KVSpec(2, 8, window=65), FULL)
    with pytest.raises(CapacityError, match=r"265 blocks\).*109 blocks.*--max-model-len to 1600"):
        plan(*caches, num_kv_blocks=109, group_caches=True)
    assert plan(*caches, num_kv_blocks=2, group_caches=True, shrink_to_fit=True).num_blocks == 2
    with pytest.raises(CapacityError):
        plan(*caches, num_kv_blocks=1, group_caches=True, shrink_to_fit=True)
    with pytest.raises(ConfigError, match=r"block_size 12 .* any backend: choose a multiple of 8"):
        plan(FULL, block_size=12)


def test_pages_of_an_earlier_layer_cost_nothing() -> None:
    assert plan(FULL, SharedKV(0)) == replace(plan(FULL), layout=plan(FULL, SharedKV(0)).layout)


@pytest.mark.parametrize("memory", [None, 1 << 29])
def test_blocks_without_pages_are_bounded_by_what_sequences_use(memory: int | None) -> None:
    """A model without attention would have room for any number of them, but each is an entry in the
    engine core's lists."""
    few = plan(max_num_seqs=2, kv_cache_memory_bytes=memory)
    assert (few.num_blocks, few.num_bytes) == (2 * 256, 0)
    many = plan(max_model_len=1 << 20, max_num_seqs=256, kv_cache_memory_bytes=memory)
    assert many.num_blocks == MAX_BARE_BLOCKS
    one = plan(max_model_len=16 * (MAX_BARE_BLOCKS + 1), kv_cache_memory_bytes=memory)
    assert one.num_blocks == MAX_BARE_BLOCKS + 1


def test_latents_are_rows_without_values() -> None:
    """576 numbers a token and layer, as DeepSeek-V3 has them, instead of 128 heads' keys and
    values."""
    kv = LatentKV(512, 64)
    layout = cache_layout(shape(kv, kv, kv), grouped=True)
    assert (layout.windows, layout.places) == ((None,), (kv, kv, kv))
    assert plain_page_bytes(kv, 16, "bf16") == (16 * 576 * 2, 0)


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_latents_are_not_kept_as_codes(dtype: str) -> None:
    with pytest.raises(ConfigError, match=f"kv_cache_dtype {dtype} is not for .* choose auto"):
        check_codes(shape(LatentKV(512, 64)), dtype)
    check_codes(shape(LatentKV(512, 64)), "bf16")
    check_codes(shape(FULL), dtype)
