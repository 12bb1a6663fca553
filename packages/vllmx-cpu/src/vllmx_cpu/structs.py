"""ctypes mirrors of the structs in native/vx.h, native/ops.h and native/team.h, field by field."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_size_t, c_void_p

VX_DTYPES = {"f32": 0, "f16": 1, "bf16": 2}
KV_DTYPES = {"bf16": 2, "f16": 1, "f32": 0, "int8": 3, "fp8": 4, "q4": 5, "q8,q4": 6}
ITEM_BYTES = {"f32": 4, "f16": 2, "bf16": 2}
BLOCK_KINDS = {
    "Q4_0": 16,
    "Q8_0": 17,
    "Q4_K": 18,
    "Q5_K": 19,
    "Q6_K": 20,
    "Q4_1": 21,
    "Q5_0": 22,
    "Q5_1": 23,
    "Q2_K": 24,
    "Q3_K": 25,
    "IQ4_NL": 26,
    "IQ4_XS": 27,
    "MXFP4": 28,
}
"""GGUF types that are multiplied as they are."""
AFFINE_KINDS = {
    (4, 32): "affine4_32",
    (4, 64): "affine4_64",
    (4, 128): "affine4_128",
    (8, 32): "affine8_32",
    (8, 64): "affine8_64",
    (8, 128): "affine8_128",
}
"""(bits, columns that share a scale and a zero) -> kind."""
FLOAT8_KIND, FLOAT8_COLS = "float8", 128
CODED_KINDS = {kind: 32 + index for index, kind in enumerate(AFFINE_KINDS.values())} | {
    FLOAT8_KIND: 40
}
"""Kinds of one code a weight, with separate scales."""
WEIGHT_KINDS = VX_DTYPES | BLOCK_KINDS | CODED_KINDS
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}
NO_ACTIVATION = -1
GATES = ACTIVATIONS | {"sigmoid": 4, "identity": 5, "tanh": 6, "relu2": 7}
"""Kinds of native/gate.cpp."""


ROW_KINDS = {"int8": 48, "fp8": 49}
"""Rows with one scale each, as encode.h numbers them."""


def pointers(names: str) -> list[tuple[str, type[c_void_p]]]:
    """Fields of a struct that are addresses."""
    return [(name, c_void_p) for name in names.split()]


def ints(names: str) -> list[tuple[str, type[c_int32]]]:
    """Fields of a struct that are int32."""
    return [(name, c_int32) for name in names.split()]


def floats(names: str) -> list[tuple[str, type[c_float]]]:
    """Fields of a struct that are float32."""
    return [(name, c_float) for name in names.split()]


class VxStep(Structure):
    """The arrays of one step."""

    _fields_ = [
        *ints("T R L B block_stride"),
        *pointers("tokens positions slots query_start context_len block_tables logit_rows"),
        *pointers("token_types state_from state_to state_after adapters"),
    ]


class VxRecord(Structure):
    """One op of a recorded step: function, arguments, and whether it works on the logit rows."""

    _fields_ = [("run", c_void_p), ("args", c_void_p), ("pooled", c_int32)]


class VxJob(Structure):
    """A step in flight."""

    _fields_ = [
        ("records", POINTER(VxRecord)),
        ("num_records", c_int32),
        ("step", VxStep),
        *pointers("tokens previous_ids"),
        ("num_previous_ids", c_int32),
        ("seconds", c_double),
        ("record_seconds", c_void_p),
        ("done", c_int32),
    ]


class VxWeight(Structure):
    """A packed matrix."""

    _fields_ = [
        *pointers("data bias"),
        *ints("kind rows cols tiles gated features"),
        ("columns", c_void_p),
    ]


class VxLinear(Structure):
    """Arguments of `linear`."""

    _fields_ = [
        ("w", VxWeight),
        *pointers("x y panels"),
        *ints("activation logit_rows"),
        ("softcap", c_float),
        ("stride", c_int32),
    ]


class VxEmbedding(Structure):
    """Arguments of `embedding`."""

    _fields_ = [("w", VxWeight), ("y", c_void_p), ("source", c_int32), ("offset", c_int32)]


class VxNorm(Structure):
    """Arguments of `rms_norm` and `layer_norm`."""

    _fields_ = [*pointers("x residual weight bias sum y"), ("width", c_int32), ("eps", c_float)]


class VxElementwise(Structure):
    """Arguments of `gated_act`, `activation`, `add` and `scale`."""

    _fields_ = [*pointers("x other y"), *ints("width activation"), ("factor", c_float)]


class VxAttention(Structure):
    """Arguments of `attention`."""

    _fields_ = [
        ("qkv", c_void_p), ("out", c_void_p), ("out_dtype", c_int32), ("num_heads", c_int32),
        ("num_kv_heads", c_int32), ("head_size", c_int32), ("rotary_dim", c_int32),
        ("interleaved", c_int32), ("block_size", c_int32), ("kv_dtype", c_int32),
        ("window", c_int32), ("causal", c_int32), ("scale", c_float), ("softcap", c_float),
        ("norm_eps", c_float), ("rope", c_void_p), ("q_norm", c_void_p), ("k_norm", c_void_p),
        ("sinks", c_void_p), ("k_pages", c_void_p), ("v_pages", c_void_p),
        ("workspace", c_void_p), ("workspace_bytes", c_size_t), ("group", c_int32),
        ("shared", c_int32), ("rope_rows", c_void_p), ("bias", c_void_p), ("bias_length", c_int32),
    ]  # fmt: skip


class VxSpanAttention(Structure):
    """Arguments of `span_attention`; native/attention.h."""

    _fields_ = [("attention", VxAttention), ("images", c_void_p)]


class VxRoute(Structure):
    """Arguments of `route`; native/route.cpp."""

    _fields_ = [
        *pointers("logits bias factor ids weights"),
        *ints("count chosen score groups groups_kept best_two renormalise"),
        *floats("eps scale"),
        ("table", c_void_p),
        ("jitter", c_float),
    ]


class VxLatentAttention(Structure):
    """Arguments of `latent_attention`; native/latent_attention.h."""

    _fields_ = [
        ("k_b", VxWeight), ("v_b", VxWeight), ("q", c_void_p), ("latent", c_void_p),
        ("out", c_void_p), ("rope", c_void_p), ("norm", c_void_p), ("pages", c_void_p),
        ("panels", c_void_p), ("workspace", c_void_p), ("workspace_bytes", c_size_t),
        ("num_heads", c_int32), ("rank", c_int32), ("nope_size", c_int32),
        ("rotary_dim", c_int32), ("value_size", c_int32), ("interleaved", c_int32),
        ("block_size", c_int32), ("kv_dtype", c_int32), ("group", c_int32), ("scale", c_float),
        ("norm_eps", c_float), ("picked", c_void_p), ("num_picked", c_int32),
    ]  # fmt: skip


class VxIndexer(Structure):
    """Arguments of `indexer`; native/indexer.h."""

    _fields_ = [
        ("q", c_void_p), ("key", c_void_p), ("weights", c_void_p), ("out", c_void_p),
        ("rope", c_void_p), ("pages", c_void_p), ("workspace", c_void_p), ("num_heads", c_int32),
        ("head_size", c_int32), ("rotary_dim", c_int32), ("picked", c_int32),
        ("interleaved", c_int32), ("block_size", c_int32), ("kv_dtype", c_int32),
        ("group", c_int32), ("stride", c_int32), ("ratio", c_int32),
    ]  # fmt: skip


class VxSegmentAttention(Structure):
    """Arguments of `segment_attention`; native/segment_attention.h."""

    _fields_ = [
        *pointers("qkv out rope rope_rows workspace"),
        ("workspace_bytes", c_size_t),
        *ints("num_heads num_kv_heads head_size rotary_dim interleaved dtype window"),
        ("scale", c_float),
        ("images", c_void_p),
        *ints("piece pieces"),
        ("bias", c_void_p),
        ("bias_length", c_int32),
    ]
    kept: object
    """The memory of `bias`."""


class VxExperts(Structure):
    """Arguments of `experts`; native/experts.h."""

    _fields_ = [
        ("gate_up", VxWeight),
        ("down", VxWeight),
        *pointers("x ids weights y panels workspace"),
        *ints("count chosen first activation"),
        *floats("clamp alpha"),
    ]


class VxSampler(Structure):
    """Arguments of `sample`; native/sampler.h."""

    _fields_ = [
        ("logits", c_void_p), ("vocab_size", c_int32), ("max_logprobs", c_int32),
        *(
            (name, c_void_p)
            for name in (
                "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
                "frequency_penalty", "presence_penalty", "seed", "position", "target",
                "num_logprobs", "edit_start", "edit_ids", "edit_values", "count_start",
                "count_ids", "output_counts", "pending", "mask_index", "masks", "group_from", "ids",
                "chosen", "rank", "top_ids", "top", "whole_index", "whole", "workspace",
            )
        ),
    ]  # fmt: skip


class VxEncode(Structure):
    """Rows to be quantised; native/encode.h."""

    _fields_ = [
        *ints("kind source_kind"),
        ("source", c_void_p),
        ("rows", c_int64),
        *ints("cols measure"),
        *pointers("out scales"),
        ("squared_error", c_double),
        ("squared_value", c_double),
    ]


MIRRORED = (VxStep, VxRecord, VxJob, VxWeight, VxEncode)
"""Structs other than arguments of an op, whose sizes vx_struct_bytes knows by name."""
