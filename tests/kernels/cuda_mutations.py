"""Plants one bug at a time into a copy of the CUDA kernels and runs the tests that should find it.

`python -m tests.kernels.cuda_mutations [WORD]` (or `nox -s kernels`); exit code 1: one survives.
WORD: only the bugs whose line holds it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from vllmx_cuda.testing.emulator.build import KERNELS

TESTS = Path(__file__).parent
FOLDER_VARIABLE = "VLLMX_TESTED_KERNELS"
"""Where conftest.py's emulators take the sources from."""


@dataclass(frozen=True)
class Bug:
    source: str
    what: str
    old: str
    new: str
    test: str
    """File and, after a colon, an expression for pytest's -k."""


NORMS, ATTENTION, ROWS = "test_cuda_norms.py", "test_cuda_attention.py", "test_cuda_rows.py"
SAMPLER, GGUF, W4 = "test_cuda_sampler.py", "test_cuda_gguf.py", "test_cuda_w4.py"
CODES8, WORDS = "test_cuda_codes8.py", "test_cuda_w4_words.py"
MMA, WRAPPERS = "test_cuda_decode_mma.py", "test_cuda_wrappers.py"
WGMMA = f"{ATTENTION}:wgmma"
DECODE, STORE = f"{ATTENTION}:decode", f"{ATTENTION}:store"
PREFILL = f"{ATTENTION}:prefill and not wgmma"
BUGS = (
    Bug("vx.h", "no barrier before a reduction's buffer is read",
        "  if (lane == 0) part[warp] = v;\n  __syncthreads();", "  if (lane == 0) part[warp] = v;",
        f"{NORMS}:1024"),
    Bug("rms_norm.cu", "a row is read beyond its end", "i < width;", "i <= width;", NORMS),
    Bug("rms_norm.cu", "a misaligned vector", "load(v, row + i);", "load(v, row + i + 1);", NORMS),
    Bug("rms_norm.cu", "the input is written", "store(out + i, v);", "store((elem*)row + i, v);",
        NORMS),
    Bug("rms_norm.cu", "the sum is not rounded before it is normalised",
        "to_float(from_float<elem>(a[j] + b[j]))", "a[j] + b[j] * 1.001f", NORMS),
    Bug("layer_norm.cu", "the variance of values that are not centred",
        "(v[j] - mean) * (v[j] - mean)", "v[j] * v[j]", NORMS),
    Bug("kv_store.cu", "no barrier after the norm", "  __syncwarp();\n", "", STORE),
    Bug("kv_store.cu", "padding is stored", "if (slot < 0) return;", "", STORE),
    Bug("kv_store.cu", "the rotation's sign", "first ? -partner", "first ? partner", STORE),
    Bug("kv_store.cu", "pages of the wrong head", "(head - heads) % kv_heads", "0", STORE),
    Bug("kv_types.h", "a scale of the wrong limit", "127.f : 448.f", "128.f : 448.f", STORE),
    Bug("codes8.h", "no barrier before a reduction's buffer is read",
        "  if (lane == 0) part[warp] = v;\n  __syncthreads();", "  if (lane == 0) part[warp] = v;",
        f"{CODES8}:norms or quantize_rows"),
    Bug("codes8.h", "the sign of the last code of a word", "(i8)(word >> 24)", "(u8)(word >> 24)",
        f"{CODES8}:gemv"),
    Bug("quantize_rows.cu", "what is not finite counts as nothing", "magnitude(v[j])",
        "magnitude(fminf(v[j], 1e30f))", f"{CODES8}:quantize_rows"),
    Bug("codes8.h", "an infinity becomes the greatest code", "v * 0.f + v", "v",
        f"{CODES8}:fixed"),
    Bug("rms_norm_codes.cu", "a fixed scale is not used", "fixed == 0.f ?", "true ?",
        f"{CODES8}:fixed"),
    Bug("rms_norm_codes.cu", "the greatest before the weight", "magnitude(v[j] * w[j])",
        "magnitude(v[j])", f"{CODES8}:norms"),
    Bug("codes8_linear.cu", "blocks begin where the piece does",
        "(first + blockIdx.x) / block_rows", "blockIdx.x / block_rows", f"{CODES8}:dequantize"),
    Bug("codes8_linear.cu", "the scale of the row above", "(row / block_rows)",
        "(row0 / block_rows)", f"{CODES8}:gemv"),
    Bug("codes8_linear.cu", "a column beyond the segment is written", "* pitch + i]", "* n + i]",
        f"{CODES8}:rescale"),
    Bug("paged_decode.cu", "teams end their rounds at different times",
        "base < end; base +=", "base + team < end; base +=", DECODE),
    Bug("paged_decode.cu", "no barrier before teams are joined",
        "  __syncthreads();\n  bool alone", "  bool alone", DECODE),
    Bug("paged_decode.cu", "a block table read off its end", "at >> page_shift]",
        "(at >> page_shift) + 40]", DECODE),
    Bug("paged_decode.cu", "the window is one too wide", "position - window + 1)",
        "position - window)", DECODE),
    Bug("paged_prefill.cu", "a window begins with a key that may be gone",
        "max(0, position0 - window + 1)", "max(0, position0 - window)", PREFILL),
    Bug("paged_prefill_wgmma.cu", "a window begins with a key that may be gone",
        "max(0, position0 - window + 1)", "max(0, position0 - window)", WGMMA),
    Bug("paged_decode_mma.cu", "a window begins with a key that may be gone",
        "max(begin, position - window + 1)", "max(begin, position - window)", MMA),
    Bug("paged_decode.cu", "the join forgets the other maxima", "sums[t][g] * factor",
        "sums[t][g]", DECODE),
    Bug("paged_decode.cu", "items of one token share a row", "(size_t)blockIdx.x * heads + head0",
        "(size_t)token * heads + head0", DECODE),
    Bug("paged_decode_mma.cu", "values of a pair change places", "i % 2 ? 0x7632 : 0x5410",
        "i % 2 ? 0x5410 : 0x7632", MMA),
    Bug("paged_decode_mma.cu", "no barrier before warps are joined",
        "  __syncthreads();\n  bool alone", "  bool alone", MMA),
    Bug("paged_decode_mma.cu", "the sum is not scaled to a new maximum",
        "top[t] = greatest[t], sum[t] *= factor;", "top[t] = greatest[t];", MMA),
    Bug("paged_decode_mma.cu", "a head is scaled to the maximum of its neighbour",
        "8 * quarter + 4);", "8 * quarter);", MMA),
    Bug("paged_decode_mma.cu", "the second tile of heads is scaled as the first",
        "* factor[t][e];", "* factor[0][e];", MMA),
    Bug("paged_decode_mma.cu", "16 dimensions of a key are left over and forgotten",
        "if (VX_HEAD % 32) load_pairs<4>", "if (false) load_pairs<4>", f"{MMA}:head80"),
    Bug("paged_decode_mma.cu", "16 dimensions of a value come from those before them",
        "to + PAIRS - 1, row + VX_HEAD - 16", "to + PAIRS - 1, row + VX_HEAD - 32",
        f"{MMA}:head112"),
    Bug("paged_decode_mma.cu", "queries in shared memory are read too early",
        "    }\n    __syncthreads();\n", "    }\n", f"{MMA}:head256"),
    Bug("paged_decode_mma.cu", "a part of the joined sums overtakes the one before",
        "  __syncthreads();  // the next part", "  // the next part", f"{MMA}:head128"),
    Bug("paged_decode_mma.cu", "columns of a part change places",
        "d % SIDE * 8 + d / SIDE", "d", f"{MMA}:head96"),
    Bug("paged_decode_mma.cu", "a head that the group does not have is written",
        "if (head >= VX_GROUP) continue;", "", f"{MMA}:head80"),
    Bug("code_values.h", "the second half of a word is the first", "upper ? 0x3a24 : 0x1804",
        "0x1804", f"{MMA}:code"),
    Bug("code_values.h", "the sign of a code is lost", "top >> 4 & 0x87f00000",
        "top >> 4 & 0x07f00000", f"{MMA}:code"),
    Bug("code_values.h", "codes are off by 128", "8388736.f", "8388608.f", f"{MMA}:code"),
    Bug("attention.h", "a sink without its weight", "sum * factor + exp2f(sink - greatest)",
        "sum * factor", DECODE),
    Bug("vx_hopper.h", "rows that are not swizzled", "(unit ^ row % 8) * 8", "unit * 8", WGMMA),
    Bug("vx_hopper.h", "groups of eight rows too near each other", "eight_rows = 1024",
        "eight_rows = 512", WGMMA),
    Bug("paged_prefill_wgmma.cu", "products read what is only in the other proxy",
        "  vx_fence_async();\n", "", WGMMA),
    Bug("paged_prefill_wgmma.cu", "no barrier before a stage is read",
        "  vx_fence_async();\n  __syncthreads();", "  vx_fence_async();", WGMMA),
    Bug("paged_prefill_wgmma.cu", "scores are read while they are computed",
        "vx_wgmma_wait<1>()", "vx_wgmma_wait<2>()", WGMMA),
    Bug("paged_prefill_wgmma.cu", "sums are scaled while they are added to",
        "  vx_wgmma_wait<0>();\n#pragma unroll\n  for (int part = 0; part < PARTS; part++) {",
        "#pragma unroll\n  for (int part = 0; part < PARTS; part++) {", WGMMA),
    Bug("paged_prefill_wgmma.cu", "registers without a fence",
        "    stage_arrived();  // these keys, and the values of the step before\n"
        "    vx_wgmma_fence();", "    stage_arrived();", WGMMA),
    Bug("paged_prefill_wgmma.cu", "sums stay on their old scale",
        "o[part][i] *= factor[i / 2 % 2]", "o[part][i] *= 1.f", WGMMA),
    Bug("paged_prefill_wgmma.cu", "pages behind the end are read",
        "min(first + row + line, p.end - 1)", "first + row + line", WGMMA),
    Bug("paged_prefill_wgmma.cu", "values into the stage that is read",
        "load_rows(values + stage * KEYS", "load_rows(values + (stage ^ 1) * KEYS", WGMMA),
    Bug("paged_prefill_wgmma.cu", "the second chunk of values where the first is",
        "vx_matrix_descriptor(values, KEYS * 128)", "vx_matrix_descriptor(values, 0)", WGMMA),
    Bug("paged_prefill_wgmma.cu", "a query sees one key too many", "key >= v.high[r]",
        "key > v.high[r]", WGMMA),
    Bug("paged_prefill_wgmma.cu", "a step that needs a mask goes without",
        "v.all_high = min(end, position0 + 1)", "v.all_high = end", WGMMA),
    Bug("paged_prefill_wgmma.cu", "the second warpgroup takes the first one's queries",
        "threadIdx.x / 128 * 64 * VX_CHUNK", "threadIdx.x / 256", WGMMA),
    Bug("paged_prefill_wgmma.cu", "the soft cap at half its height", "m.softcap - __fdividef(2.f",
        "m.softcap - __fdividef(1.f", WGMMA),
    Bug("paged_prefill.cu", "the wait is one group short", "vx_cp_wait<1>();", "vx_cp_wait<2>();",
        PREFILL),
    Bug("paged_prefill.cu", "no barrier after the wait",
        "    __syncthreads();\n    const elem* keys", "    const elem* keys", PREFILL),
    Bug("paged_prefill.cu", "a stage is refilled while it is read",
        "    __syncthreads();  // this stage", "    // this stage", PREFILL),
    Bug("paged_prefill.cu", "queries are overwritten before all have them",
        "    __syncthreads();  // the second stage", "    // the second stage", PREFILL),
    Bug("paged_prefill.cu", "values are not transposed", "vx_ldmatrix_x4_trans(", "vx_ldmatrix_x4(",
        PREFILL),
    Bug("paged_prefill.cu", "a query sees the next key", "key > position)", "key > position + 1)",
        PREFILL),
    Bug("paged_prefill.cu", "rows of a stage are too close", "#define STRIDE (VX_HEAD + 8)",
        "#define STRIDE (VX_HEAD + 4)", PREFILL),
    Bug("paged_prefill.cu", "the only stage is never filled again",
        "if (first > begin) load_keys", "if (first < begin) load_keys", PREFILL),
    Bug("gated_act.cu", "gate and up change places", "activated(gate[j]) * up[j]",
        "activated(up[j]) * gate[j]", ROWS),
    Bug("gate.cu", "a head has the gate of the next feature", "gates[i / span]", "gates[i % span]",
        ROWS),
    Bug("gate.cu", "gate and features change places", "v[j] *= opened(open[j])",
        "v[j] = open[j] * opened(v[j])", ROWS),
    Bug("scale_by.cu", "all features have the first value", "w[i / span]", "w[0]", ROWS),
    Bug("linear_gemv.cu", "pieces beyond the end are added", "if (i + u * step >= k) break;", "",
        f"{ROWS}:gemv"),
    Bug("outputs.h", "the bias of the wrong row", "bias[row0 + r]", "bias[row0]",
        f"{ROWS}:gemv"),
    Bug("linear_mma.cu", "the parts of a fragment change places",
        "first[4] = {top.x, low.x, top.y, low.y}", "first[4] = {top.x, top.y, low.x, low.y}",
        f"{ROWS}:mma"),
    Bug("linear_mma.cu", "tokens of the second tile are those of the first",
        "low = unit.x[VX_TILES - 1]", "low = unit.x[0]", f"{ROWS}:mma"),
    Bug("linear_mma.cu", "the second half of the products is forgotten",
        "sums[0][r][e] + sums[1][r][e]", "sums[0][r][e]", f"{ROWS}:mma"),
    Bug("linear_mma.cu", "a piece takes the next one's first columns",
        "if (unit + s >= end) break;", "", f"{ROWS}:mma"),
    Bug("linear_mma.cu", "the ring is filled from its own columns", "(s + IN_FLIGHT) * COLS",
        "s * COLS", f"{ROWS}:mma"),
    Bug("linear_mma.cu", "a split has the columns of the first",
        "piece = blockIdx.z * WARPS + warp", "piece = warp", f"{ROWS}:mma"),
    Bug("outputs.h", "a token beyond the last is written",
        "|| token0 + token >= m) continue;\n    float sum = add_tree",
        ") continue;\n    float sum = add_tree", f"{ROWS}:mma"),
    Bug("outputs.h", "the first block to arrive adds", "*arrived + 1 == count", "*arrived == 0",
        f"{ROWS}:mma"),
    Bug("outputs.h", "a block announces what its threads still write",
        "arrived) {\n  __syncthreads();\n", "arrived) {\n", f"{ROWS}:splits"),
    Bug("outputs.h", "no fence before the counter",
        "    __threadfence();\n    *arrived", "    *arrived", f"{ROWS}:splits"),
    Bug("outputs.h", "no fence behind the counter",
        "count - 1);\n    __threadfence();\n", "count - 1);\n", f"{ROWS}:splits"),
    Bug("outputs.h", "no barrier behind the counter",
        "  }\n  __syncthreads();\n  return *arrived", "  }\n  return *arrived", f"{ROWS}:splits"),
    Bug("outputs.h", "splits are added from the last on", "for (int s = 1; s < splits; s++)",
        "for (int s = splits - 1; s > 0; s--)", f"{ROWS}:splits"),
    Bug("outputs.h", "the last split is not added", "s < splits; s++", "s < splits - 1; s++",
        f"{ROWS}:mma"),
    Bug("sample_noise.h", "nine rounds of Philox", "round < 10", "round < 9", SAMPLER),
    Bug("sample_rows.h", "the higher id wins a tie", "b.id < a.id", "b.id > a.id", SAMPLER),
    Bug("sample.cu", "no barrier after the bins are cleared",
        "threadIdx.x + THRESHOLD_THREADS] = 0;\n    __syncthreads();",
        "threadIdx.x + THRESHOLD_THREADS] = 0;", SAMPLER),
    Bug("sample.cu", "top_k takes one too few", "limit, top_k[row], 0.f",
        "limit, top_k[row] - 1, 0.f", SAMPLER),
    Bug("sample.cu", "the noise of another id", "gumbel(words[j]))", "gumbel(words[0]))",
        SAMPLER),
    Bug("sample_edit.cu", "edits and penalties race", "  __syncthreads();  // an id", "  // an id",
        SAMPLER),
    Bug("sample_edit.cu", "a mask hides NaN", "mask && !refuses &&", "mask &&", SAMPLER),
    Bug("logprobs.cu", "ranks count the chosen id", "> logit ?", ">= logit ?", SAMPLER),
    Bug("gguf_blocks.h", "a nibble of the wrong half", "word >> 4 & 0x0f0f0f0fu) | fifth",
        "word & 0x0f0f0f0fu) | fifth", GGUF),
    Bug("gguf_blocks.h", "the wrong half of a table", "(nibbles & 0x8888) >> 1", "0", GGUF),
    Bug("gguf_blocks.h", "a scale's high bits of the wrong group", "block[104 + group % 4]",
        "block[104 + group % 2]", GGUF),
    Bug("gguf_blocks.h", "codes borrow from their neighbours", "((codes | 0x80808080u) - less)",
        "(codes - less)", GGUF),
    Bug("gguf_linear.cu", "minima of halves change places",
        "run.low[0] * first + run.low[1] * last", "run.low[1] * first + run.low[0] * last",
        f"{GGUF}:gemv"),
    Bug("gather.cu", "a refused id is fed", "max(sampled[-tokens[i] - 1], 0)",
        "sampled[-tokens[i] - 1]", f"{ROWS}:begins"),
    Bug("gather.cu", "unused patches are written", " && patches[2 * i] >= 0)", ")",
        f"{ROWS}:begins"),
    Bug("gather.cu", "columns in the order of another row", "columns[i]]", "columns[blockIdx.x]]",
        f"{ROWS}:columns"),
    Bug("w4_codes.h", "a zero of the wrong row", "record[SCALES_BYTES + row]",
        "record[SCALES_BYTES]", W4),
    Bug("w4_linear.cu", "the wait is one tile short", "vx_cp_wait<STAGES - 2>();",
        "vx_cp_wait<STAGES - 1>();", f"{W4}:linear"),
    Bug("w4_linear.cu", "records of other lanes are read too early",
        "    __syncwarp();  // the records", "    // the records", f"{W4}:linear"),
    Bug("w4_linear.cu", "a stage is filled while it is read", "    empty = stage;",
        "    empty = stage + STAGE_BYTES < ring_end ? stage + STAGE_BYTES : ring;", f"{W4}:linear"),
    Bug("w4_linear.cu", "sums over the rings of warps that are not done",
        "  __syncthreads();  // the rings end", "  // the rings end", f"{W4}:linear"),
    Bug("w4_linear.cu", "halves share a scale", "(VX_FOLDS * r + fold) * RECORD_BYTES",
        "(VX_FOLDS * r) * RECORD_BYTES", f"{W4}:linear"),
    Bug("w4_linear.cu", "steps change places", "fragment(a[i], codes, high, step,",
        "fragment(a[i], codes, high, step ^ 1,", f"{W4}:linear"),
    Bug("w4_linear.cu", "high bits of the other step", "2 * (i + 4 * s) - 4",
        "2 * (i + 4 * !s) - 4", f"{W4}:linear"),
    Bug("w4_linear.cu", "high bits of half the rows are not copied", "lane >= 16) break",
        "lane >= 8) break", f"{W4}:linear"),
    Bug("w4_dequantize.cu", "a row of the tile's other half is gathered", "row % 16 / 8, half",
        "0, half", f"{W4}:dequantize"),
    Bug("w4_dequantize.cu", "high bits of the other half", "lane * 8 + half * 4", "lane * 8",
        f"{W4}:dequantize"),
    Bug("w4_linear.cu", "columns beyond the last", "tile * TILE_COLS + HALF_COLS < k", "true",
        f"{W4}:linear"),
    Bug("outputs.h", "a split's tokens overlap", "((size_t)blockIdx.z * m + token0 + token)",
        "((size_t)blockIdx.z + token0 + token)", f"{W4}:linear"),
    Bug("outputs.h", "the counters do not start again", "(int)atomicInc(counter, count - 1)",
        "(int)atomicAdd(counter, 1u)", f"{W4}:linear"),
    Bug("w4_linear.cu", "the minimum is not counted from the middle",
        "(row.low + MIDDLE * row.scale)", "row.low", f"{W4}:linear"),
    Bug("w4_dequantize.cu", "odd columns change places", "4 * (h + 2 * p + 4 * odd)",
        "4 * (h + 2 * odd + 4 * p)", f"{W4}:dequantize"),
    Bug("w4_tile.h", "pair and odd stay where they are", "0x3120", "0x3210", f"{W4}:repack"),
    Bug("w4_tile.h", "high bits of rows change places", "high_bits(t) | high_bits(b) << 2",
        "high_bits(b) | high_bits(t) << 2", f"{W4}:repack"),
    Bug("w4_tile.h", "codes of 8 bits change rows", "0x7632", "0x3276", f"{W4}:repack"),
    Bug("w4_repack_blocks.cu", "fragments are read too early", "  __syncwarp();\n", "",
        f"{W4}:repack"),
    Bug("w4_repack_blocks.cu", "columns beyond the last", "    u32 codes = 0;",
        "    u32 codes = ~0u;", f"{W4}:repack"),
    Bug("w4_repack_blocks.cu", "a minimum of NaN is taken", "!(fabsf(minimum) <= MOST)",
        "fabsf(minimum) > MOST", f"{W4}:found"),
    Bug("w4_repack_blocks.cu", "the minimum's sign", "-run.low[group]", "run.low[group]",
        f"{W4}:repack"),
    Bug("w4_repack_blocks.cu", "signed codes are not counted from the middle",
        "^ 0x80808080u", "^ 0u", f"{W4}:repack"),
    Bug("w4_repack_words.cu", "odd rows are beside the even", "i / 2 + i % 2 * (PER_WORD / 2)",
        "i", WORDS),
    Bug("w4_repack_words.cu", "a zero beyond its bits", "+ add) & CODE_MASK", "+ add) & 255",
        WORDS),
    Bug("w4_repack_words.cu", "columns stay in order", "columns ? columns[first + i]", "false ? 0",
        WORDS),
    Bug("w4_repack_words.cu", "factors are written by every half", "group << group_shift == first",
        "true", WORDS),
    Bug("w4_repack_words.cu", "a negative zero is taken", "zero < 0 || ", "", WORDS),
    Bug("w4_repack_words.cu", "a scale of NaN is taken", "!(size < VX_INFINITY)",
        "size >= VX_INFINITY", WORDS),
    Bug("codes8_mma.cu", "the wait is one tile short", "vx_cp_wait<STAGES - 2>();",
        "vx_cp_wait<STAGES - 1>();", f"{CODES8}:mma"),
    Bug("code_values.h", "signs of a word's lower half change places", "0x3a24 : 0x1804",
        "0x3b24 : 0x1904", f"{CODES8}:mma"),
    Bug("code_values.h", "a sign remains among the exponents", "0xbf80bf80", "0xffc0ffc0",
        f"{CODES8}:mma"),
    Bug("code_values.h", "values are half as large", "0x7b807b80u", "0x7b007b00u",
        f"{CODES8}:mma"),
    Bug("codes8_mma.cu", "columns beyond the last", "at < k ? *", "true ? *", f"{CODES8}:mma"),
    Bug("codes8_mma.cu", "the second row has the first one's scale", "scales[2 * r + e / 2]",
        "scales[2 * r]", f"{CODES8}:mma"),
    Bug("codes8_mma.cu", "scales of the next block", "tile * COLS >> group_shift",
        "(tile + 1) * COLS >> group_shift", f"{CODES8}:mma"),
    Bug("elementwise.cu", "one beyond the last element", "if (i >= count)", "if (i > count)",
        f"{ROWS}:softcap"),
    Bug("elementwise.cu", "a cap that does not scale back", "cap * tanhf", "tanhf",
        f"{ROWS}:softcap"),
    Bug("gguf_dequantize.cu", "minima are added", "__fsub_rn(__fmul_rn", "__fadd_rn(__fmul_rn",
        f"{GGUF}:dequantised_values"),
    Bug("wrappers.cu", "a copy is read while it is under way", "  vx_cp_wait<0>();\n", "",
        WRAPPERS),
    Bug("wgmma_wrappers.cu", "a product is not waited for", "  vx_wgmma_wait<0>();\n", "",
        "test_cuda_wgmma.py"),
    Bug("codes8_blocks.cu", "the wait is one stage short", "vx_cp_wait<STAGES - 2>();",
        "vx_cp_wait<STAGES - 1>();", f"{CODES8}:test_blocks"),
    Bug("codes8_blocks.cu", "a stage is filled while it is read",
        "    __syncthreads();  // all have copied", "    // all have copied",
        f"{CODES8}:test_blocks"),
    Bug("codes8_blocks.cu", "outputs are read from chunks that tokens are not read from",
        "2 * s + lane / 8)", "2 * s + (lane / 8 ^ 1))", f"{CODES8}:test_blocks"),
    Bug("codes8_blocks.cu", "halves of a step change places", "2 * s + lane / 16)",
        "2 * s + 1 - lane / 16)", f"{CODES8}:test_blocks"),
    Bug("codes8_blocks.cu", "the scale of the token 8 above", "scales[t][e / 2]", "scales[t][0]",
        f"{CODES8}:test_blocks"),
    Bug("codes8_blocks.cu", "columns beyond the last", "at < k ? 16 : 0", "16",
        f"{CODES8}:test_blocks"),
    Bug("codes8_blocks.cu", "scales of blocks without their padding", "scales_pitch(groups, BLOCK)",
        "groups", f"{CODES8}:test_blocks"),
    Bug("codes8.h", "a group's scale is one of half of it", "GROUP / VX_VEC / 2; lanes",
        "GROUP / VX_VEC / 4; lanes", f"{CODES8}:128_columns"),
    Bug("outputs.h", "a column beyond the segment is written",
        "* pitch + row0 + r", "* n + row0 + r", f"{GGUF}:gemv"),
    Bug("quantize_q8.cu", "the second sum is the first", "__shfl_sync(VX_ALL, sum, 16)",
        "__shfl_sync(VX_ALL, sum, 0)", f"{GGUF}:gemv"),
)  # fmt: skip


def survives(bug: Bug) -> bool:
    """Whether the tests pass in spite of it."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "kernels"
        shutil.copytree(KERNELS, copy)
        path = copy / bug.source
        text = path.read_text()
        assert bug.old in text, f"{bug.source} has no {bug.old!r}: update this list"
        path.write_text(text.replace(bug.old, bug.new))
        file, _, expression = bug.test.partition(":")
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", str(TESTS / file)]
        command += ["-p", "no:cacheprovider", *(["-k", expression] if expression else [])]
        environment = {**os.environ, FOLDER_VARIABLE: str(copy)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest failed to run:\n{done.stdout}{done.stderr}")
    return done.returncode == 0


def main() -> int:
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    chosen = [bug for bug in BUGS if word in f"{bug.source}: {bug.what}"]
    survivors = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for bug, survived in zip(chosen, pool.map(survives, chosen), strict=True):
            print("SURVIVES" if survived else "found   ", f"{bug.source}: {bug.what}", flush=True)
            survivors += survived
    print(f"{len(chosen) - survivors} of {len(chosen)} planted bugs were found")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
