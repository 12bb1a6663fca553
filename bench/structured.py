"""What structured output costs: rows that follow grammars beside plain ones, in one process.

    python bench/structured.py [--model demo] [--rows 32] [--tokens 128] [--rounds 5]
        [--no-latencies] [--json]

Rounds go through all cases in turn, so that a slow minute of the machine hits each of them; medians
are what to quote, min and max show how noisy the machine was. `cpu_s` is processor time of this
process, in which the engine core runs for all figures of throughput.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from vllmx import LLM, AsyncLLM, EngineConfig, SamplingParams, StructuredOutputsParams
from vllmx_engine.core import commit

ENDLESS = {
    "type": "array",
    "minItems": 10_000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 8, "maxLength": 60},
            "count": {"type": "integer"},
            "kind": {"enum": ["alpha", "beta", "gamma"]},
        },
        "required": ["name", "count", "kind"],
        "additionalProperties": False,
    },
}
CONTACT = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 12},
        "last_name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string", "maxLength": 12},
                "zip": {"type": "integer", "minimum": 10000, "maximum": 99999},
            },
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
        "is_member": {"type": "boolean"},
    },
    "required": ["first_name", "last_name", "age", "address", "is_member"],
    "additionalProperties": False,
}
HOSTILE = StructuredOutputsParams(
    grammar="start: s\ns: s s | A | B | C\nA: /[a-z]+/\nB: /[a-m0-9]+/\nC: /.{1,50}/\n"
)


class Bench:
    """Times by case, over the rounds."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.rows: int = arguments.rows
        self.tokens: int = arguments.tokens
        self.found: dict[str, list[float]] = defaultdict(list)

    def params(self, form: StructuredOutputsParams | None, **fields: Any) -> list[SamplingParams]:
        values = {"temperature": 1.0, "max_tokens": self.tokens, "ignore_eos": True} | fields
        return [
            SamplingParams(seed=seed, structured_outputs=form, **values)
            for seed in range(self.rows)
        ]

    def generate(self, llm: LLM, name: str, params: list[SamplingParams]) -> None:
        prompts = [f"Data {row}:" for row in range(len(params))]
        started, cpu = time.perf_counter(), time.process_time()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        self.found[f"{name}: tokens/s"].append(tokens / seconds)
        self.found[f"{name}: cpu_s"].append(time.process_time() - cpu)

    def in_process(self, llm: LLM) -> None:
        """One round of throughput."""
        compact = StructuredOutputsParams(json=CONTACT, disable_any_whitespace=True)
        endless = StructuredOutputsParams(json=ENDLESS)
        self.generate(llm, "plain", self.params(None))
        self.generate(llm, "schema", self.params(endless))
        half = self.rows // 2
        self.generate(llm, "half schema", self.params(None)[:half] + self.params(endless)[half:])
        self.generate(llm, "compact JSON", self.params(compact, max_tokens=400))
        kept, commit.MIN_FORCED_TOKENS = commit.MIN_FORCED_TOKENS, 1 << 30
        self.generate(llm, "compact JSON, no token forced", self.params(compact, max_tokens=400))
        commit.MIN_FORCED_TOKENS = kept

    async def behind_a_core(self, llm: AsyncLLM) -> None:
        """One round of latencies."""
        known = StructuredOutputsParams(json=CONTACT)
        for name, form in (("plain", None), ("known schema", known)):
            self.found[f"{name}: first token ms"].append(await self._first_token(llm, form))
        for name, form in (("plain", None), ("slow grammars", HOSTILE)):
            others = [asyncio.ensure_future(self._read(llm, each)) for each in self.params(form)]
            self.found[f"p99 ms beside {name}"].append(await self._p99(llm))
            for other in others:
                other.cancel()
            await asyncio.gather(*others, return_exceptions=True)

    async def _first_token(self, llm: AsyncLLM, form: StructuredOutputsParams | None) -> float:
        params = SamplingParams(max_tokens=2, structured_outputs=form)
        started = time.perf_counter()
        async with await llm.submit("A person:", params) as stream:
            async for _ in stream:
                return 1000 * (time.perf_counter() - started)
        raise AssertionError("no token came")

    async def _read(self, llm: AsyncLLM, params: SamplingParams) -> None:
        while True:
            async with await llm.submit("Once", params) as stream:
                async for _ in stream:
                    pass

    async def _p99(self, llm: AsyncLLM) -> float:
        """The 99th percentile of the time between the tokens of one plain stream."""
        gaps: list[float] = []
        params = SamplingParams(max_tokens=4 * self.tokens, ignore_eos=True)
        async with await llm.submit("Once upon a time", params) as stream:
            last = time.perf_counter()
            async for _ in stream:
                now = time.perf_counter()
                gaps.append(1000 * (now - last))
                last = now
        return statistics.quantiles(gaps[1:], n=100)[98]


async def latencies(bench: Bench, config: EngineConfig, rounds: int) -> None:
    async with await AsyncLLM.start(config) as llm:
        await bench.behind_a_core(llm)
        for name in [name for name in bench.found if "ms" in name]:
            del bench.found[name]  # of the round that warmed everything up
        for _ in range(rounds):
            await bench.behind_a_core(llm)


def rounds_of(count: int, each: Callable[[], None], bench: Bench) -> None:
    """One round that is not counted, then `count` that are."""
    each()
    bench.found.clear()
    for _ in range(count):
        each()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-latencies", action="store_true", help="throughput alone")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    bench = Bench(arguments)
    config = {"model": arguments.model, "max_num_seqs": 2 * arguments.rows}
    with LLM(**config) as llm:
        rounds_of(arguments.rounds, lambda: bench.in_process(llm), bench)
    if not arguments.no_latencies:
        asyncio.run(latencies(bench, EngineConfig(**config), arguments.rounds))
    if arguments.json:
        print(json.dumps(bench.found))
        return
    for name, values in bench.found.items():
        middle = statistics.median(values)
        print(f"{name:45} {middle:10.2f}   ({min(values):.2f} to {max(values):.2f})")


if __name__ == "__main__":
    main()
