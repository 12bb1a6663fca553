"""Kernels between the QKV projection and the output projection of an attention layer."""

from __future__ import annotations

from vllmx_core.errors import ConfigError

from vllmx_cuda.kernel_specs.types import (
    ANY_DTYPE,
    HALF_DTYPES,
    VECTORS,
    Kernel,
    Launch,
    Options,
    Sizes,
    at_least,
    at_most,
    ceil_div,
    has_tensor_cores,
    kernel,
    multiple_of,
    shared_bytes,
    vector_width,
)

HEAD_SIZES = (*range(4, 257, 4), *range(288, 513, 32))
KV_ELEM, KV_E4M3, KV_INT8 = 0, 1, 2
"""Values of VX_KV: pages as activations are, or codes with a scale a token and head."""
KV_TYPES = (KV_ELEM, KV_E4M3, KV_INT8)
_HEADS_A_BLOCK = 4
_DECODE_THREADS = 128
_GROUPS = (1, 2, 3, 4, 5, 6, 7)
_PREFILL_KEYS = (64, 32, 16)
_WGMMA_QUERIES = 128
_WGMMA_HEAD_SIZES = (64, 128, 192, 256)
"""The head sizes of paged_prefill_wgmma: whole chunks of 64 columns."""
_MMA_GROUPS = tuple(range(1, 17))
_MMA_HEAD_SIZES = (*range(16, 128, 16), *range(128, 257, 32))


def store_vector(head_size: int) -> int:
    """VX_VEC of kv_store: a warp covers the head in one pass if possible."""
    return min(vector_width(head_size), max(1, vector_width(head_size // 32 or 1)))


def decode_vector(head_size: int) -> int:
    """VX_VEC of paged_decode; at most 32 lanes share a head."""
    return 16 if head_size > 256 else vector_width(head_size)


def group_tile(group: int, head_size: int) -> int:
    """VX_GROUP: how many of the `group` query heads of a KV head share a block: the greatest
    divisor up to 4, or the group itself if it is below 8; up to 2 for large heads, which take the
    registers."""
    if head_size > 256:
        return 2 - group % 2
    return group if group in _GROUPS else max(n for n in (4, 3, 2, 1) if group % n == 0)


def mma_group(group: int) -> int:
    """VX_GROUP of paged_prefill: the greatest divisor up to 16."""
    return max(n for n in _MMA_GROUPS if group % n == 0)


def decode_group(group: int, head_size: int) -> int:
    """VX_GROUP of paged_decode_mma: as many query heads as fit into registers."""
    most = _most_decode_heads(head_size)
    return max(n for n in range(1, most + 1) if group % n == 0)


def _most_decode_heads(head_size: int) -> int:
    return 16 if head_size <= 192 else 8


def decodes_by_mma(dtype: str, head_size: int, arch: int) -> bool:
    """True if paged_decode_mma can replace paged_decode; `arch`: 75, 90, ..."""
    return head_size in _MMA_HEAD_SIZES and has_tensor_cores(dtype, arch)


def _prefill_queries(head_size: int) -> int:
    """Query rows of a block of paged_prefill: 64, or half where two warps share the dimensions."""
    return 32 if head_size > 256 else 64


def prefill_tile_tokens(tile_group: int, head_size: int) -> int:
    """The most tokens of a row in a tile of paged_prefill."""
    return _prefill_queries(head_size) // tile_group


def prefills_by_wgmma(dtype: str, head_size: int, kv: int, arch: int) -> bool:
    """True if paged_prefill_wgmma can replace paged_prefill; `kv`: of KV_TYPES."""
    able = arch == 90 and has_tensor_cores(dtype, arch)
    return able and kv == KV_ELEM and head_size in _WGMMA_HEAD_SIZES


def wgmma_tile_tokens(tile_group: int) -> int:
    """The most tokens of a row in a tile of paged_prefill_wgmma."""
    return _WGMMA_QUERIES // tile_group


def prefill_keys(head_size: int, arch: int) -> int:
    """VX_KEYS: as many keys at a time as fit into shared memory; 0: no variant fits."""
    most = 64 if head_size <= 128 else 32
    fitting = (n for n in _PREFILL_KEYS if _prefill_bytes(head_size, n) <= shared_bytes(arch))
    return next((keys for keys in fitting if keys <= most), 0)


def _prefill_bytes(head_size: int, keys: int) -> int:
    stages = 1 if keys == 16 else 2
    rows = stages * 2 * keys + (0 if head_size <= 128 else _prefill_queries(head_size))
    return rows * (head_size + 8) * 2


def _check_heads(sizes: Sizes) -> None:
    at_least("kv_heads", sizes["kv_heads"], 1)
    multiple_of("heads", sizes["heads"], sizes["kv_heads"])


def _store(sizes: Sizes, options: Options) -> Launch:
    if sizes["kv_heads"]:  # else queries alone
        _check_heads(sizes)
    total = sizes["heads"] + 2 * sizes["kv_heads"]
    grid = (sizes["tokens"], ceil_div(total, _HEADS_A_BLOCK), 1)
    return Launch(grid, 32 * _HEADS_A_BLOCK)


def _decode(sizes: Sizes, options: Options) -> Launch:
    _check_heads(sizes)
    at_most("head size / VX_VEC", options["VX_HEAD"] // options["VX_VEC"], 32, "lanes of a warp")
    tiles = sizes["heads"] // options["VX_GROUP"]
    return Launch((sizes["items"], tiles, 1), _DECODE_THREADS)


def _decode_mma(sizes: Sizes, options: Options) -> Launch:
    _check_heads(sizes)
    group, head, float_bytes = options["VX_GROUP"], options["VX_HEAD"], 4
    at_most("VX_GROUP", group, _most_decode_heads(head), f"registers, with heads of {head}")
    queries = ceil_div(group, 8) * 8 * head // 2
    shared = float_bytes * (12 * group + max(4 * group * 68, queries))
    if options["VX_STORE"]:
        shared += 2 * group * head + float_bytes * 4 * head
        assert group * sizes["kv_heads"] == sizes["heads"], sizes
    return Launch((sizes["items"], sizes["heads"] // group, 1), _DECODE_THREADS, shared)


def _combine(sizes: Sizes, options: Options) -> Launch:
    return Launch((sizes["tokens"], sizes["heads"], 1), _DECODE_THREADS)


def _prefill(sizes: Sizes, options: Options) -> Launch:
    _check_heads(sizes)
    head, keys = options["VX_HEAD"], options["VX_KEYS"]
    if head % 16:
        raise ConfigError(f"paged_prefill needs head sizes that 16 divides, got {head}")
    grid = (sizes["tiles"], sizes["heads"] // options["VX_GROUP"], 1)
    return Launch(grid, 128, _prefill_bytes(head, keys))


def _prefill_wgmma(sizes: Sizes, options: Options) -> Launch:
    _check_heads(sizes)
    head = options["VX_HEAD"]
    rows = _WGMMA_QUERIES + 4 * (128 if head == 128 else 64)
    grid = (sizes["tiles"], sizes["heads"] // options["VX_GROUP"], 1)
    return Launch(grid, 256, rows * head * 2)


_HEAD_OPTIONS = {
    "VX_DTYPE": ANY_DTYPE,
    "VX_HEAD": HEAD_SIZES,
    "VX_KV": KV_TYPES,
    "VX_VEC": VECTORS,
}
_DECODE_OPTIONS = {**_HEAD_OPTIONS, "VX_VEC": (16, 8, 4, 2, 1), "VX_GROUP": _GROUPS}


PAGED_DECODE = kernel(
    "paged_decode.cu",
    "paged_decode(in elem* q, in kv* k_pages, in kv* v_pages, in f32* k_scales?, in f32* v_scales?,"
    " in i32* items, in i32* first_item, in i32* positions, in i32* block_table, in f32* sinks?,"
    " out elem* out, out f32* partial, out f32* weights, i32 heads, i32 kv_heads, i32 table_stride,"
    " i32 page_shift, i32 window, f32 scale, f32 softcap)",
    "items heads kv_heads",
    _decode,
    _DECODE_OPTIONS,
)

PAGED_DECODE_MMA = kernel(
    "paged_decode_mma.cu",
    "paged_decode_mma(in elem* q, inout kv* k_pages, inout kv* v_pages, inout f32* k_scales?,"
    " inout f32* v_scales?, in i32* items, in i32* first_item, in i32* positions,"
    " in i32* block_table, in f32* sinks?, out elem* out, out f32* partial, out f32* weights,"
    " inout u32* arrivals, in i32* rope_rows?, in f32* q_norm?, in f32* k_norm?, in f32* rope?,"
    " i32 tokens, i32 heads, i32 kv_heads, i32 table_stride, i32 page_shift, i32 window, f32 scale,"
    " f32 softcap, i32 rotary_dim, i32 interleaved, f32 eps)",
    "items heads kv_heads",
    _decode_mma,
    {
        "VX_DTYPE": HALF_DTYPES,
        "VX_HEAD": _MMA_HEAD_SIZES,
        "VX_KV": KV_TYPES,
        "VX_GROUP": _MMA_GROUPS,
        "VX_STORE": (0, 1),
    },
    tensor_cores=True,
    early=(),
)


PAGED_PREFILL = kernel(
    "paged_prefill.cu",
    "paged_prefill(in elem* q, in kv* k_pages, in kv* v_pages, in f32* k_scales?,"
    " in f32* v_scales?, in i32* tiles, in i32* context_len, in i32* block_table, in f32* sinks?,"
    " in i32* seen?, out elem* out, i32 heads, i32 kv_heads, i32 table_stride, i32 page_shift,"
    " i32 window, i32 causal, f32 scale, f32 softcap)",
    "tiles heads kv_heads",
    _prefill,
    {
        "VX_DTYPE": HALF_DTYPES,
        "VX_HEAD": HEAD_SIZES,
        "VX_KV": KV_TYPES,
        "VX_GROUP": _MMA_GROUPS,
        "VX_KEYS": _PREFILL_KEYS,
    },
    tensor_cores=True,
)

PAGED_PREFILL_WGMMA = Kernel(
    entry="paged_prefill_wgmma",
    source="paged_prefill_wgmma.cu",
    options={
        "VX_DTYPE": HALF_DTYPES,
        "VX_HEAD": _WGMMA_HEAD_SIZES,
        "VX_GROUP": _MMA_GROUPS,
    },
    arguments=tuple(one for one in PAGED_PREFILL.arguments if one.name != "seen"),
    sizes=PAGED_PREFILL.sizes,
    rule=_prefill_wgmma,
    tensor_cores=True,
    architectures=(90,),
)

KERNELS = (
    kernel(
        "kv_store.cu",
        "kv_store(in elem* qkv, in i32* positions, in i32* slots, in f32* q_norm?, in f32* k_norm?,"
        " in f32* rope?, out elem* q, inout kv* k_pages, inout kv* v_pages, inout f32* k_scales?,"
        " inout f32* v_scales?, i32 heads, i32 kv_heads, i32 rotary_dim, i32 interleaved,"
        " i32 page_shift, f32 eps)",
        "tokens heads kv_heads",
        _store,
        _HEAD_OPTIONS,
    ),
    PAGED_DECODE,
    PAGED_DECODE_MMA,
    kernel(
        "paged_decode.cu",
        "paged_combine(in f32* partial, in f32* weights, in i32* first_item, in f32* sinks?,"
        " inout elem* out, i32 heads)",
        "tokens heads",
        _combine,
        _DECODE_OPTIONS,
    ),
    PAGED_PREFILL,
    PAGED_PREFILL_WGMMA,
)
