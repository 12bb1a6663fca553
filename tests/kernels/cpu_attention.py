"""One layer of paged attention on the CPU as tests give it: its pages, its steps, and the oracle in
float64."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from vllmx_core import kv_dtypes as kv_quant
from vllmx_core.plan import F32, I32, AnyArray
from vllmx_cpu.memory import allocate
from vllmx_cpu.native import Isa, library
from vllmx_cpu.structs import KV_DTYPES, VX_DTYPES, VxAttention, VxStep

RunOp = Callable[[Isa, str, ctypes.Structure, VxStep, int], None]
EPS = 1e-6
MULTIPLIED_AS_BF16 = ("bf16", *kv_quant.CODED)
Span = tuple[int, int, int]
"""(first position, end, sequence): a row of a step."""


@dataclass(frozen=True)
class Case:
    """One attention layer."""

    heads: int = 4
    kv_heads: int = 2
    head_size: int = 64
    page: int = 16
    kv: str = "f32"
    rotary: int = 0
    interleaved: bool = False
    norm: bool = False
    sinks: bool = False
    window: int = 0
    softcap: float = 0.0
    causal: bool = True
    out: str = "f32"

    @property
    def width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_size


class Layer:
    """The data of a case: constants, and pages full of NaN for `sequences` sequences of up to
    `length` tokens whose blocks lie in a random order."""

    def __init__(self, case: Case, length: int, sequences: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.case = case
        self.rope: F32 | None = None
        if case.rotary:
            frequencies = 10000.0 ** (-np.arange(case.rotary // 2) * 2 / case.rotary)
            angles = np.arange(length)[:, None] * frequencies
            self.rope = np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
        ones = np.random.default_rng(7)  # the same constants whatever the page seed
        self.q_norm = (1 + 0.1 * ones.standard_normal(case.head_size)).astype(np.float32)
        self.k_norm = (1 + 0.1 * ones.standard_normal(case.head_size)).astype(np.float32)
        self.sinks = ones.standard_normal(case.heads).astype(np.float32)
        width = -(-length // case.page)
        count = sequences * width
        self.table = rng.permutation(count).reshape(sequences, width).astype(np.int32)
        sizes = (case.kv_heads, case.head_size, case.page, KV_DTYPES[case.kv])
        self.k = allocate(count * library().vx_k_page_bytes(*sizes))
        self.v = allocate(count * library().vx_v_page_bytes(*sizes))
        self.k[:] = 0xFF
        self.v[:] = 0xFF
        self.workspace = allocate(
            library().vx_attention_workspace_bytes(
                case.heads, case.kv_heads, case.head_size, length, 5
            )
        )

    def arguments(self, qkv: F32, out: AnyArray) -> VxAttention:
        case = self.case

        def constant(array: F32 | None, used: bool) -> int | None:
            return array.ctypes.data if used and array is not None else None

        return VxAttention(
            qkv=qkv.ctypes.data, out=out.ctypes.data, out_dtype=VX_DTYPES[case.out],
            num_heads=case.heads, num_kv_heads=case.kv_heads, head_size=case.head_size,
            rotary_dim=case.rotary, interleaved=case.interleaved, block_size=case.page,
            kv_dtype=KV_DTYPES[case.kv], window=case.window, causal=case.causal,
            scale=case.head_size**-0.5, softcap=case.softcap, norm_eps=EPS,
            rope=constant(self.rope, True), q_norm=constant(self.q_norm, case.norm),
            k_norm=constant(self.k_norm, case.norm), sinks=constant(self.sinks, case.sinks),
            k_pages=self.k.ctypes.data, v_pages=self.v.ctypes.data,
            workspace=self.workspace.ctypes.data, workspace_bytes=len(self.workspace),
        )  # fmt: skip


@dataclass
class Step:
    """The arrays of one step, and the native struct over them."""

    rows: list[Span]
    layer: Layer
    arrays: dict[str, I32] = field(default_factory=dict)

    def native(self) -> VxStep:
        page, table = self.layer.case.page, self.layer.table
        positions = np.concatenate([np.arange(first, end) for first, end, _ in self.rows])
        lengths = [end - first for first, end, _ in self.rows]
        sequence = np.repeat([which for *_, which in self.rows], lengths)
        blocks = table[[which for *_, which in self.rows]]
        values = {
            "tokens": np.zeros(len(positions)),
            "positions": positions,
            "slots": table[sequence, positions // page] * page + positions % page,
            "query_start": np.cumsum([0, *lengths]),
            "context_len": np.array([end for _, end, _ in self.rows]),
            "block_tables": blocks,
            "logit_rows": np.zeros(1),
        }
        self.arrays = {
            name: np.ascontiguousarray(value, np.int32) for name, value in values.items()
        }
        pointers = {name: array.ctypes.data for name, array in self.arrays.items()}
        width = blocks.shape[1]
        return VxStep(
            T=len(positions), R=len(self.rows), L=0, B=width, block_stride=width, **pointers
        )


def attend(
    run_op: RunOp, isa: Isa, layer: Layer, qkv: F32, rows: list[Span], threads: int
) -> AnyArray:
    """qkv: (sequences, length, width), from which the rows take their tokens; (T, H * D)."""
    tokens = np.concatenate([qkv[which, first:end] for first, end, which in rows])
    case = layer.case
    dtype = np.float32 if case.out == "f32" else np.uint16
    out = np.full((len(tokens), case.heads * case.head_size), 77, dtype)
    step = Step(rows, layer)
    run_op(isa, "attention", layer.arguments(tokens, out), step.native(), threads)
    return out


def random_qkv(case: Case, sequences: int, length: int) -> F32:
    rng = np.random.default_rng(length)
    return rng.standard_normal((sequences, length, case.width)).astype(np.float32)


def expected(layer: Layer, qkv: F32) -> AnyArray:
    """One sequence in float64; k and v as the pages hold them, q as the kernel multiplies it."""
    case, length = layer.case, len(qkv)
    heads = qkv.reshape(length, case.heads + 2 * case.kv_heads, case.head_size).astype(np.float64)
    q, k, v = np.split(heads, [case.heads, case.heads + case.kv_heads], axis=1)
    if case.norm:
        q, k = _norm(q, layer.q_norm), _norm(k, layer.k_norm)
    if layer.rope is not None:
        q, k = _rotate(q, layer, length), _rotate(k, layer, length)
    k_dtype, v_dtype = kv_quant.sides(case.kv)
    k, v = _stored(k, k_dtype), _stored(v, v_dtype)
    if k_dtype == "q4":
        q = kv_quant.turned(_stored(kv_quant.turned(q), "bf16"))
    elif case.kv in MULTIPLIED_AS_BF16:
        q = _stored(q, "bf16")
    group = case.heads // case.kv_heads
    q, k, v = q.swapaxes(0, 1), _by_head(k, group), _by_head(v, group)
    scores = q @ k.swapaxes(1, 2) * case.head_size**-0.5
    if case.softcap:
        scores = case.softcap * np.tanh(scores / case.softcap)
    scores[:, ~_visible(case, length)] = -np.inf
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    if case.sinks:
        total += np.exp(layer.sinks[:, None, None] - top)
    out: AnyArray = weights / total @ v
    return out.swapaxes(0, 1).reshape((length, -1))


def _by_head(x: AnyArray, group: int) -> AnyArray:
    """(T, K, D) -> (H, T, D), as products of matrices take it: einsum would add one by one."""
    heads: AnyArray = x.swapaxes(0, 1).repeat(group, 0)
    return heads


def _norm(x: AnyArray, weight: F32) -> AnyArray:
    normed: AnyArray = x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight
    return normed


def _rotate(x: AnyArray, layer: Layer, length: int) -> AnyArray:
    case, table = layer.case, layer.rope
    assert table is not None
    half = case.rotary // 2
    cosine, sine = (
        part.astype(np.float64)[:, None] for part in (table[:length, :half], table[:length, half:])
    )
    if case.interleaved:
        first, second = slice(0, case.rotary, 2), slice(1, case.rotary, 2)
    else:
        first, second = slice(0, half), slice(half, case.rotary)
    out = x.copy()
    out[..., first] = x[..., first] * cosine - x[..., second] * sine
    out[..., second] = x[..., second] * cosine + x[..., first] * sine
    return out


def _stored(x: AnyArray, dtype: str) -> AnyArray:
    return kv_quant.rounded(x.astype(np.float32), dtype).astype(np.float64)


def _visible(case: Case, length: int) -> AnyArray:
    query, key = np.arange(length)[:, None], np.arange(length)[None]
    seen = key <= query if case.causal else np.ones((length, length), bool)
    if case.window:
        seen = seen & (key > query - case.window) & (key < query + case.window)
    return seen


def relative_error(got: AnyArray, want: AnyArray) -> float:
    return float(np.abs(got - want).max() / np.abs(want).max())
