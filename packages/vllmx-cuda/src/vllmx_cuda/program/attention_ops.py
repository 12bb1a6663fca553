"""Attention as launches: the store of keys and values, decoding by items, prompts by tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllmx_core.ops.attention import Attention

from vllmx_cuda.kernel_specs.attention import (
    decode_group,
    decode_vector,
    group_tile,
    store_vector,
)
from vllmx_cuda.program.layout import decodes_on_tensor_cores, visibility
from vllmx_cuda.program.prefill import PrefillKernel, prefill_kernel
from vllmx_cuda.program.staging import StepMemory, StepSizes

if TYPE_CHECKING:
    from vllmx_cuda.program.lower import Enqueue, Lowering


def attention(op: Attention, to: Lowering) -> Enqueue:
    """Items first: where tokens have none, their combination writes zeros, and tiles then the
    answers."""
    store, decode = _store(op, to), _decode(op, to)
    spec = op.spec
    kernel = prefill_kernel(spec, to.dtype, to.kv, to.device.info.arch, wgmma=to.wgmma)
    prefill = _prefill(op, to, kernel) if kernel else None

    def enqueue(sizes: StepSizes, step: StepMemory) -> None:
        store(sizes, step)
        if sizes.items:
            decode(sizes, step)
        if prefill is not None and any(sizes.tiles):
            prefill(sizes, step)

    return enqueue


def _store(op: Attention, to: Lowering) -> Enqueue:
    spec = op.spec
    qkv, pages = to.place(op.qkv), to.pages[spec.layer]
    rope, q_norm, k_norm = map(to.vector, (op.rope, op.q_norm, op.k_norm))
    kernel = to.variant(
        "kv_store", VX_HEAD=spec.head_size, VX_KV=to.kv, VX_VEC=store_vector(spec.head_size)
    )
    heads = {"heads": spec.num_heads, "kv_heads": 0 if spec.shared else spec.num_kv_heads}
    values = (
        *heads.values(),
        spec.rotary_dim,
        int(spec.interleaved),
        to.page_shift,
        spec.norm_eps,
    )

    def enqueue(sizes: StepSizes, step: StepMemory) -> None:
        to.device.launch(
            kernel, {"tokens": sizes.tokens, **heads},
            (
                qkv, step.positions, step.slots[pages.group], q_norm, k_norm, rope,
                to.scratch.queries,
                pages.k, pages.v, pages.k_scales, pages.v_scales, *values,
            ),
        )  # fmt: skip

    return enqueue


def _decode(op: Attention, to: Lowering) -> Enqueue:
    spec = op.spec
    y, pages, scratch = to.place(op.out), to.pages[spec.layer], to.scratch
    sinks, seen = to.vector(op.sinks), visibility(spec)
    options = {
        "VX_HEAD": spec.head_size,
        "VX_KV": to.kv,
        "VX_VEC": decode_vector(spec.head_size),
        "VX_GROUP": group_tile(spec.num_heads // spec.num_kv_heads),
    }
    combine = to.variant("paged_combine", **options)
    if decodes_on_tensor_cores(spec, to.dtype, to.device.info.arch):
        group = decode_group(spec.num_heads // spec.num_kv_heads, spec.head_size)
        decode = to.variant("paged_decode_mma", VX_HEAD=spec.head_size, VX_KV=to.kv, VX_GROUP=group)
    else:
        decode = to.variant("paged_decode", **options)
    heads = {"heads": spec.num_heads, "kv_heads": spec.num_kv_heads}
    window, softcap = spec.window or 0, spec.softcap or 0.0

    def enqueue(sizes: StepSizes, step: StepMemory) -> None:
        items, first_item = step.items[seen], step.first_item[seen]
        to.device.launch(
            decode, {"items": sizes.items, **heads},
            (
                scratch.queries, pages.k, pages.v, pages.k_scales, pages.v_scales, items,
                first_item, step.positions, step.block_tables[pages.group], sinks, y,
                scratch.partial,
                scratch.weights, *heads.values(), step.table_stride, to.page_shift,
                window, spec.scale, softcap,
            ),
        )  # fmt: skip
        to.device.launch(
            combine,
            {"tokens": sizes.tokens, "heads": spec.num_heads},
            (scratch.partial, scratch.weights, first_item, sinks, y, spec.num_heads),
        )

    return enqueue


def _prefill(op: Attention, to: Lowering, chosen: PrefillKernel) -> Enqueue:
    spec = op.spec
    y, pages = to.place(op.out), to.pages[spec.layer]
    sinks, kernel = (
        to.vector(op.sinks),
        to.variant(chosen.entry, **chosen.options),
    )
    heads = {"heads": spec.num_heads, "kv_heads": spec.num_kv_heads}
    values = (spec.window or 0, int(spec.causal), spec.scale, spec.softcap or 0.0)

    def enqueue(sizes: StepSizes, step: StepMemory) -> None:
        tiles = step.tiles[chosen.tile_tokens]
        to.device.launch(
            kernel, {"tiles": tiles.num_bytes // 16, **heads},
            (
                to.scratch.queries, pages.k, pages.v, pages.k_scales, pages.v_scales, tiles,
                step.context_len, step.block_tables[pages.group], sinks, y, *heads.values(),
                step.table_stride, to.page_shift, *values,
            ),
        )  # fmt: skip

    return enqueue
