"""Measures the speed of this machine's products: times a small decoder of random weights on the
chosen backend, in each type of weights."""

from __future__ import annotations

import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from vllmx_core.backend import Backend, LoadedModel, LoadOptions
from vllmx_core.model import Model
from vllmx_core.plan import SamplingRows, StepPlan
from vllmx_core.plugins.registry import Registry
from vllmx_core.weights.part import WeightPart
from vllmx_core.weights.tensor import RawTensor
from vllmx_models.formats.gguf.blocks import TYPES_BY_NAME, TensorType, weight_part
from vllmx_models.formats.gguf.quantize.encoders import QUANTIZERS, encoder_for

ROWS = (1, 8, 32, 512)
"""Tokens of a step that are measured; between them times are interpolated."""
PROBE_BYTES = 192 << 20
"""The minimum size of a probe's weights, larger than caches; layers are added up to it, or up to
the size of the model if that is smaller."""
MAX_LAYERS = 48
HIDDEN = 1024
VOCABULARY = 2048
CONTEXT = 512
ROUNDS = 7
_TILE = 32
"""Rows that are quantised; the others are copies, which are equally fast."""


@dataclass(frozen=True, slots=True)
class MeasuredRates:
    """Measured seconds of a step by its tokens, for each weight type."""

    title: str
    seconds: Mapping[str, Sequence[float]]
    """The seconds by type, one for each of `ROWS`."""
    bits: Mapping[str, float]
    fixed: Callable[[int, float], float] = lambda layers, rows: 0.0
    """Seconds of a step outside its products, by its layers and tokens."""

    def seconds_per_value(self, kind: str, bits: float, rows: float) -> float:
        """See `vllmx.sizing.forecast.Rates`. For a type that was not measured, uses the one of the
        nearest size."""
        if kind not in self.seconds:
            kind = min(self.bits, key=lambda name: abs(self.bits[name] - bits))
        times = self.seconds[kind]
        return interpolated(rows, times)

    def seconds_per_byte(self) -> float:
        """The time to read a byte, by the reading of 16-bit weights."""
        kind = max(self.bits, key=lambda name: self.bits[name])
        return self.seconds[kind][0] * 8 / self.bits[kind]

    def fixed_seconds(self, layers: int, rows: float) -> float:
        """See `vllmx.sizing.forecast.Rates`."""
        return self.fixed(layers, rows)


def interpolated(rows: float, times: Sequence[float]) -> float:
    """Interpolates between the numbers of rows that were measured, and in proportion beyond the
    last one."""
    if rows <= ROWS[0]:
        return times[0]
    if rows >= ROWS[-1]:
        return times[-1] * rows / ROWS[-1]
    right = bisect_right(ROWS, rows)
    low, high = ROWS[right - 1], ROWS[right]
    share = (rows - low) / (high - low)
    return times[right - 1] + (times[right] - times[right - 1]) * share


def measure(
    registry: Registry,
    backend: Backend,
    kinds: Collection[str],
    tell: Callable[[str, int, int], None],
    num_values: int,
) -> MeasuredRates:
    """Measures the rates of GGUF types on a backend, for a model with this many numbers in its
    weights. `tell(doing, done, total)` shows the progress."""
    seconds, bits = {}, {}
    ordered = sorted(kinds)
    with quiet_log():
        for index, kind in enumerate(ordered):
            tell("measuring", index, len(ordered))
            block = TYPES_BY_NAME[kind]
            bits[kind] = 8 * block.num_bytes / block.values
            seconds[kind] = _measure_kind(registry, backend, block, num_values)
        tell("measuring", len(ordered), len(ordered))
    title = backend.environment().get("processor") or backend.name
    return MeasuredRates(title, seconds, bits)


def measurable(kind: str) -> bool:
    """True if random weights of the type can be made here."""
    return kind in ("BF16", "F16") or kind in QUANTIZERS


def _measure_kind(
    registry: Registry, backend: Backend, block: TensorType, num_values: int
) -> list[float]:
    least = min(num_values, PROBE_BYTES * block.values / block.num_bytes)
    layers = 1
    while layers < MAX_LAYERS and _values(_probe(registry, layers)) < least:
        layers += 1
    model = _probe(registry, layers)
    options = LoadOptions(
        max_model_len=CONTEXT,
        max_num_seqs=max(ROWS[:-1]),
        max_num_batched_tokens=max(ROWS),
        num_kv_blocks=1 + CONTEXT // 16,
    )
    loaded = backend.load(model, RandomWeights(registry, model, block), options)
    try:
        values = _values(model)
        return [_step_seconds(loaded, rows) / values for rows in ROWS]
    finally:
        loaded.close()


def _probe(registry: Registry, layers: int) -> Model:
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": 3 * HIDDEN,
        "num_hidden_layers": layers,
        "num_attention_heads": HIDDEN // 64,
        "num_key_value_heads": HIDDEN // 128,
        "head_dim": 128,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
    }
    model: Model = registry.model_for(config).load()(config)
    return model


def _values(model: Model) -> int:
    return sum(spec.rows * spec.cols for spec in model.weights() if spec.kind == "linear")


class RandomWeights:
    """A `WeightSource` for any model without stacks: small random matrices of one type."""

    def __init__(self, registry: Registry, model: Model, block: TensorType) -> None:
        self._block = block
        self._shapes: dict[str, tuple[int, ...]] = {}
        for spec in model.weights():
            for part in spec.parts:
                vector = spec.kind == "vector"
                self._shapes[part.name] = (part.rows,) if vector else (part.rows, spec.cols)
        self._encoder = encoder_for(registry, block.name)
        self._tiles: dict[int, npt.NDArray[np.uint8]] = {}

    def names(self) -> Collection[str]:
        """Names of the tensors of the model's weight map."""
        return self._shapes.keys()

    def part(self, name: str) -> WeightPart:
        """Raises KeyError for a tensor that the model does not have."""
        shape = self._shapes[name]
        if len(shape) == 1:
            ones = np.ones(shape, np.float32).view(np.uint8)
            return weight_part(name, TYPES_BY_NAME["F32"], shape, ones)
        if shape[1] not in self._tiles:
            self._tiles[shape[1]] = self._tile(shape[1])
        tile = self._tiles[shape[1]]
        copies = -(-shape[0] // _TILE)
        row_bytes = len(tile) // _TILE
        return weight_part(name, self._block, shape, np.tile(tile, copies)[: shape[0] * row_bytes])

    def close(self) -> None:
        """Nothing was opened."""

    def _tile(self, cols: int) -> npt.NDArray[np.uint8]:
        values = np.random.default_rng(cols).standard_normal((_TILE, cols), np.float32) * 0.02
        flat = values.reshape(-1)
        if self._block.name == "BF16":
            return (flat.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        if self._block.name == "F16":
            return flat.astype(np.float16).view(np.uint8)
        raw = RawTensor("probe", "f32", values.shape, flat.view(np.uint8))
        return self._encoder.encode(self._block.name, raw).data


def _step_seconds(loaded: LoadedModel, tokens: int) -> float:
    """The median time of a step: with `tokens` sequences, or one prompt for the largest number."""
    plan, rows = _step(loaded.info.block_size, tokens)
    loaded.step(plan, rows).result()
    times = []
    for _ in range(ROUNDS if tokens < ROWS[-1] else 2):
        begin = time.perf_counter()
        loaded.step(plan, rows).result()
        times.append(time.perf_counter() - begin)
    return float(np.median(times))


def _step(block_size: int, tokens: int) -> tuple[StepPlan, SamplingRows]:
    """A step of sequences with one token each, or of one whole prompt."""
    prompt = tokens == ROWS[-1]
    count = 1 if prompt else tokens
    each = tokens // count
    index = np.arange(tokens, dtype=np.int32)
    blocks = -(-each // block_size)
    tables = np.arange(count * blocks, dtype=np.int32).reshape(count, blocks)
    positions = index if prompt else np.zeros(tokens, np.int32)
    slots = index if prompt else index * block_size
    plan = StepPlan(
        tokens=index % VOCABULARY,
        positions=positions,
        slots=(slots,),
        query_start=np.arange(count + 1, dtype=np.int32) * each,
        context_len=np.full(count, each, np.int32),
        block_tables=(tables,),
        logit_rows=np.arange(1, count + 1, dtype=np.int32) * each - 1,
    )
    return plan, SamplingRows.greedy(count)


@contextmanager
def quiet_log() -> Iterator[None]:
    """Hides the log of probes, which are loaded like models."""
    logger = logging.getLogger("vllmx")
    before = logger.level
    logger.setLevel(logging.ERROR)  # one of them leaves most tensors of its checkpoint unread
    try:
        yield
    finally:
        logger.setLevel(before)
