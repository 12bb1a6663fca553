"""The sampler, wholly on the device.

Order of launches: where a row has edits, penalties or a mask, mask_logits into a second buffer and
edit_logits there. Then, if all rows are greedy, sample_max and sample_pick; if every other row
takes few ids (top_k of 1 to 64), sample_candidates and sample_among; else sample_max, sample_count,
sample_collect, sample_threshold, sample_draw and sample_pick. Where somebody asked, logprob_chunks
and logprob_rows on the logits as computed.
"""

from __future__ import annotations

from vllmx_cuda.kernel_specs.types import (
    Launch,
    Options,
    Sizes,
    at_least,
    at_most,
    ceil_div,
    kernel,
)

CHUNK = 8192
"""Ids that one block looks at; results of chunks are (L, num_chunks(V)) arrays."""
CANDIDATES = 256
"""Ids of a chunk that are listed at most; lists are (L, num_chunks(V), CANDIDATES)."""
BINS = 2048
"""Counts and masses by which thresholds are found, (L, BINS), zero before and after."""
FEW = 64
"""The greatest top_k of sample_candidates."""
_MOST_IDS = (1 << 19) - 1
_CHUNK_THREADS = 256


def num_chunks(vocab: int) -> int:
    return ceil_div(vocab, CHUNK)


def _chunks(sizes: Sizes, options: Options) -> Launch:
    at_least("rows", sizes["rows"], 1)
    at_most("vocab", sizes["vocab"], _MOST_IDS, "sums of masses have words of 32 bits")
    return Launch((sizes["rows"], num_chunks(sizes["vocab"]), 1), _CHUNK_THREADS)


def _one_block(sizes: Sizes, options: Options) -> Launch:
    return Launch((sizes["rows"], 1, 1), _CHUNK_THREADS)


def _row_block(sizes: Sizes, options: Options) -> Launch:
    return Launch((sizes["rows"], 1, 1), 512)


def _pick(sizes: Sizes, options: Options) -> Launch:
    return Launch((sizes["rows"], 1, 1), 32)


KERNELS = (
    kernel(
        "sample_edit.cu",
        "mask_logits(in f32* logits, in i32* mask_index?, in u32* masks?, in i32* target,"
        " out f32* out, i32 vocab, i32 words)",
        "rows vocab",
        _chunks,
    ),
    kernel(
        "sample_edit.cu",
        "edit_logits(inout f32* logits, in i32* edit_start?, in i32* edit_ids?,"
        " in f32* edit_values?, in i32* count_start?, in i32* count_ids?, in i32* counts?,"
        " in u8* pending?, in i32* tokens, in i32* logit_rows, in f32* repetition,"
        " in f32* frequency, in f32* presence, in i32* target, i32 vocab)",
        "rows",
        _one_block,
    ),
    kernel(
        "sample.cu",
        "sample_max(in f32* logits, out f32* chunk_max, out i32* chunk_argmax, i32 vocab)",
        "rows vocab",
        _chunks,
    ),
    kernel(
        "sample_threshold.cu",
        "sample_count(in f32* logits, in f32* chunk_max, in i32* chunk_argmax, in f32* temperature,"
        " in f32* min_x, in i32* top_k, in f32* top_p, in i32* target, inout u32* bin_counts,"
        " inout u64* bin_masses, i32 vocab)",
        "rows vocab",
        _chunks,
    ),
    kernel(
        "sample_threshold.cu",
        "sample_collect(in f32* logits, in f32* chunk_max, in i32* chunk_argmax,"
        " in f32* temperature, in f32* min_x, in i32* top_k, in f32* top_p, in i32* target,"
        " in u32* bin_counts, in u64* bin_masses, out i32* listed, out f32* lists, i32 vocab)",
        "rows vocab",
        _chunks,
    ),
    kernel(
        "sample_threshold.cu",
        "sample_threshold(in f32* logits, in f32* chunk_max, in i32* chunk_argmax,"
        " in f32* temperature, in f32* min_x, in i32* top_k, in f32* top_p, in i32* target,"
        " inout u32* bin_counts, inout u64* bin_masses, in i32* listed, in f32* lists,"
        " out f32* threshold, i32 vocab, i32 chunks)",
        "rows",
        _row_block,
    ),
    kernel(
        "sample_few.cu",
        "sample_candidates(in f32* logits, in f32* temperature, in i32* top_k, in i32* target,"
        " out f32* chunk_max, out i32* chunk_argmax, out f32* chunk_least, out i32* listed,"
        " out f32* lists, out i32* list_ids, i32 vocab)",
        "rows vocab",
        _chunks,
    ),
    kernel(
        "sample_few.cu",
        "sample_among(in f32* logits, in f32* chunk_max, in i32* chunk_argmax, in f32* chunk_least,"
        " in i32* listed, in f32* lists, in i32* list_ids, in f32* temperature, in f32* min_x,"
        " in i32* top_k, in f32* top_p, in u64* seed, in i32* position, in i32* target,"
        " out i32* ids, i32 vocab, i32 chunks)",
        "rows",
        _row_block,
    ),
    kernel(
        "sample.cu",
        "sample_draw(in f32* logits, in f32* chunk_max, in i32* chunk_argmax, in f32* temperature,"
        " in f32* threshold, in u64* seed, in i32* position, in i32* target, out f32* chunk_score,"
        " out i32* chunk_id, i32 vocab)",
        "rows vocab",
        _chunks,
    ),
    kernel(
        "sample.cu",
        "sample_pick(in f32* chunk_max, in i32* chunk_argmax, in f32* chunk_score,"
        " in i32* chunk_id, in f32* temperature, in i32* target, out i32* ids, i32 chunks)",
        "rows",
        _pick,
    ),
    kernel(
        "logprobs.cu",
        "logprob_chunks(in f32* logits, in i32* num_logprobs, out f32* chunk_max,"
        " out f32* chunk_sum, out f32* chunk_top?, out i32* chunk_top_ids?, i32 vocab, i32 width)",
        "rows vocab",
        _chunks,
    ),
    kernel(
        "logprobs.cu",
        "logprob_rows(in f32* logits, in i32* num_logprobs, in i32* ids, in f32* chunk_max,"
        " in f32* chunk_sum, in f32* chunk_top?, in i32* chunk_top_ids?, out f32* chosen,"
        " out i32* rank, out i32* top_ids?, out f32* top?, i32 vocab, i32 chunks, i32 width)",
        "rows",
        _one_block,
    ),
)
