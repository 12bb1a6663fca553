"""The time of a step outside its matrix products: the host's work, and the small ops of each layer.

The demo model runs through the whole engine, whole and with fewer layers. Subtracting the time of
its products (by the rates of large matrices) leaves one part for each layer and one for the step.
Models as small as the demo spend most of their time there, large ones a few percent.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from vllmx_core.plugins.checkpoint import resolve_path
from vllmx_core.plugins.registry import Registry
from vllmx_core.records import Record
from vllmx_models.formats.header_only import opened_header

from vllmx.bench.offline import decode_rate, random_prompts
from vllmx.sizing.facts import Facts, facts_of
from vllmx.sizing.forecast import PROMPT, Rates, product_seconds
from vllmx.sizing.measured import ROWS, interpolated, quiet_log

if TYPE_CHECKING:
    from vllmx_engine.llm import LLM

FEWER_LAYERS = 2
ROUNDS = 5
OUTPUT = 48
"""Tokens that are decoded for a measurement."""
_INPUT = 8


class FixedCosts(Record):
    """Seconds outside products for each of `ROWS`: per step, and per layer."""

    step: Sequence[float]
    layer: Sequence[float]

    def seconds(self, layers: int, rows: float) -> float:
        """The time of a step with so many tokens."""
        return interpolated(rows, self.step) + layers * interpolated(rows, self.layer)


def measure_fixed(registry: Registry, backend: str, rates: Rates) -> FixedCosts:
    """Measures the fixed costs of a backend by its name, in some seconds."""
    with TemporaryDirectory(prefix="vllmx-plan-") as folder, ExitStack() as stack:
        stack.enter_context(quiet_log())
        whole = resolve_path(registry, "demo")
        short = _with_fewer_layers(whole, Path(folder))
        models = [(path, _facts(registry, path)) for path in (short, whole)]
        engines = [stack.enter_context(_engine(path, backend)) for path, _ in models]
        seconds = [_medians(engines, _decoding(rows)) for rows in ROWS[:-1]]
        seconds.append(_medians(engines, _prompt))
    rests = [
        [one - _products(facts, rates, rows) for one, (_, facts) in zip(both, models, strict=True)]
        for rows, both in zip(ROWS, seconds, strict=True)
    ]
    return divided(rests, [facts.num_layers for _, facts in models])


def divided(rests: Sequence[Sequence[float]], layers: Sequence[int]) -> FixedCosts:
    """Divides the times of two models, in the order of `ROWS`, into a part for each layer and one
    for the step, neither below zero."""
    few, many = layers
    layer = [max(0.0, (long - short) / (many - few)) for short, long in rests]
    rest = [max(0.0, long - many * each) for (_, long), each in zip(rests, layer, strict=True)]
    return FixedCosts(rest, layer)


def _with_fewer_layers(whole: Path, folder: Path) -> Path:
    """A folder with the model `whole`, without its later layers."""
    for path in whole.iterdir():
        if path.name != "config.json":
            (folder / path.name).symlink_to(path)
    config = json.loads((whole / "config.json").read_text())
    text = json.dumps({**config, "num_hidden_layers": FEWER_LAYERS})
    (folder / "config.json").write_text(text)
    return folder


def _facts(registry: Registry, path: Path) -> Facts:
    with opened_header(registry, str(path), None) as header:
        return facts_of(header, registry)


def _engine(path: Path, backend: str) -> LLM:
    from vllmx_engine.llm import LLM

    return LLM(
        str(path),
        backend=backend,
        max_model_len=2 * PROMPT,
        max_num_seqs=max(ROWS[:-1]),
        max_num_batched_tokens=PROMPT,
        num_kv_blocks=4 * PROMPT // 16,
        enable_prefix_caching=False,
    )


def _medians(engines: Sequence[LLM], measure: Callable[[LLM], float]) -> list[float]:
    """The median of each engine; they take turns after a warm-up round."""
    rounds = [[measure(engine) for engine in engines] for _ in range(1 + ROUNDS)][1:]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def _decoding(rows: int) -> Callable[[LLM], float]:
    """Seconds of a step that decodes so many rows."""

    def measure(llm: LLM) -> float:
        return rows / decode_rate(_generated(llm, rows, _INPUT, OUTPUT))

    return measure


def _prompt(llm: LLM) -> float:
    begin = time.perf_counter()
    _generated(llm, 1, PROMPT, 1)
    return time.perf_counter() - begin


def _generated(llm: LLM, rows: int, input_len: int, output_len: int) -> Any:
    params = llm.sampling_params(max_tokens=output_len, ignore_eos=True, temperature=0.0)
    return llm.generate(random_prompts(llm, rows, input_len, 0), params, use_tqdm=False)


def _products(facts: Facts, rates: Rates, rows: int) -> float:
    heads = 1 if rows == PROMPT else rows
    return product_seconds(facts.forms[0], rates, rows, heads)
