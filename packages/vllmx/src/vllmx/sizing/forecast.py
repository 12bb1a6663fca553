"""Forecasts what fits on a machine and how fast it runs, from the bytes that a step reads, the
products that it computes and the fixed costs of each step and layer. Attention's arithmetic is
ignored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from vllmx_core.backend import LoadOptions
from vllmx_core.cache.capacity import BlockSizes, CachePlan, plan_cache
from vllmx_core.cache.groups import blocks_of, longest_sequence
from vllmx_core.errors import CapacityError
from vllmx_core.model import ModelShape

from vllmx.sizing.facts import Facts, Form, Matrices

STEP_TOKENS = 2048
BLOCK_SIZE = 16
ACTIVATION_WIDTHS = 24
"""Bytes of a token's activations, divided by the hidden size; within a third of the backends'
buffers."""
PROMPT = 512
BATCHES = (1, 8, 32)


class Rates(Protocol):
    """The speed of a machine's matrix products."""

    def seconds_per_value(self, kind: str, bits: float, rows: float) -> float:
        """The time to multiply `rows` rows by a matrix of a type, for each of its numbers."""
        ...

    def seconds_per_byte(self) -> float:
        """The time to read the KV cache, a byte."""
        ...

    def fixed_seconds(self, layers: int, rows: float) -> float:
        """Seconds of a step with so many tokens outside its products: the host's work, and the
        small ops of each layer."""
        ...


@dataclass(frozen=True, slots=True)
class Wish:
    """The model and workload that the user wants to run."""

    context: int
    """Tokens of each sequence."""
    rows: int
    """Sequences at a time."""
    memory_fraction: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """One form of a model on one machine."""

    form: str
    weight_bytes: float
    kv_token_bytes: float
    """The bytes of one token in the layers without a window."""
    longest_context: int
    """Tokens of a sequence that runs alone; 0: the model does not fit."""
    rows: int
    """Sequences of `Wish.context` tokens that fit; 0: none."""
    decode: dict[int, float]
    """Tokens a second in all, by the number of sequences."""
    prefill: float
    """Tokens a second of a prompt of 512."""


def forecast(facts: Facts, form: Form, rates: Rates, memory_bytes: float, wish: Wish) -> Forecast:
    """Forecasts a form on a machine with so much free memory."""
    shape, layers = facts.shape, facts.num_layers
    cache = _cache(shape, form, memory_bytes, wish)
    longest = rows = 0
    windows: tuple[int | None, ...] = (None,)
    if cache is not None:
        windows = cache.layout.windows
        longest = longest_sequence(
            windows, cache.num_blocks, BLOCK_SIZE, STEP_TOKENS, shape.max_model_len
        )
        each = blocks_of(windows, wish.context, BLOCK_SIZE, STEP_TOKENS)
        rows = min(cache.num_blocks // max(1, each), cache.states.num_seqs)
    context = min(wish.context, shape.max_model_len)
    kv = _kv_bytes(shape, context)
    return Forecast(
        form.name,
        form.num_bytes,
        _kv_bytes(shape, 1),
        longest,
        rows,
        {
            n: n / (_decode_seconds(shape, form, rates, n, kv) + rates.fixed_seconds(layers, n))
            for n in BATCHES
        },
        PROMPT
        / (product_seconds(form, rates, PROMPT, heads=1) + rates.fixed_seconds(layers, PROMPT)),
    )


def _cache(shape: ModelShape, form: Form, memory: float, wish: Wish) -> CachePlan | None:
    activations = STEP_TOKENS * ACTIVATION_WIDTHS * shape.hidden_size
    options = LoadOptions(
        max_model_len=shape.max_model_len,
        shrink_to_fit=True,
        max_num_batched_tokens=STEP_TOKENS,
        block_size=BLOCK_SIZE,
        group_caches=not shape.whole_prompts,
        memory_fraction=wish.memory_fraction,
    )
    used = int(form.num_bytes) + activations
    try:
        return plan_cache(shape, options, "bf16", BlockSizes("any"), int(memory), used)
    except CapacityError:
        return None


def _kv_bytes(shape: ModelShape, tokens: int) -> float:
    """The bytes that a sequence of so many tokens reads in a step, in 16 bits."""
    return sum(
        2
        * kv.num_kv_heads
        * (kv.head_size + kv.value_size)
        * min(tokens, kv.window or tokens)
        / kv.ratio
        for kv in shape.kv_specs
    )


def _decode_seconds(
    shape: ModelShape, form: Form, rates: Rates, rows: int, kv_bytes: float
) -> float:
    states = 2 * shape.state_slot_bytes  # read and written
    cache = rows * (kv_bytes + states) * rates.seconds_per_byte()
    return product_seconds(form, rates, rows, heads=rows) + cache


def product_seconds(form: Form, rates: Rates, rows: int, heads: int) -> float:
    """The time of all products of a step with so many tokens, of which `heads` want logits."""
    return sum(_of(matrices, rates, rows, heads) for matrices in form.matrices)


def _of(matrices: Matrices, rates: Rates, rows: int, heads: int) -> float:
    if matrices.use in ("table", "tower"):
        return 0.0
    used, each = float(matrices.count), float(rows)
    if matrices.use == "head":
        each = heads
    if matrices.use == "experts":
        share = matrices.chosen / matrices.count
        used = matrices.count * (1 - (1 - share) ** rows)  # under uniform routing
        each = rows * matrices.chosen / used
    seconds = rates.seconds_per_value(matrices.kind, matrices.bits, each)
    return used * matrices.values * seconds


def choose(found: list[Forecast], wish: Wish) -> Forecast | None:
    """The most precise form that fits the wish; `found` is ordered by precision."""
    return next((each for each in found if each.rows >= wish.rows), None)
