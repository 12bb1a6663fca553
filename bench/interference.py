"""Time between tokens of running streams while long prompts come in.

    python bench/interference.py --model models/qwen3-0.6b-random [--target-itl auto]
    python bench/interference.py --model models/qwen3-0.6b-random --prompt 4096 --split

With --split one replica computes prompts and another one decodes (`--prefill-replicas 1`).

`--rows` streams decode all the time; prompts of `--prompt` tokens arrive one after the other, the
first ones uncounted (the scheduler learns from them what a step costs). What is counted are the
gaps between tokens of the streams from a prompt's arrival to its first token, beside the gaps
while no prompt is under way.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from vllmx.bench.figures import show
from vllmx_core.config import EngineConfig
from vllmx_core.sampling import SamplingParams
from vllmx_engine.async_llm import AsyncLLM
from vllmx_engine.replicas.frontend import ReplicaFrontend

_NUM_IDS = 1000
_BREAK_S = 1.0
"""The seconds between two prompts."""


class Gaps:
    """Seconds between tokens of all streams, with the moment of the later token."""

    def __init__(self) -> None:
        self._taken: list[tuple[float, float]] = []

    def add(self, now_s: float, gap_s: float) -> None:
        self._taken.append((now_s, gap_s))

    def within(self, spans: Sequence[tuple[float, float]]) -> list[float]:
        """The gaps whose later token came within one of the spans."""
        return [gap for at, gap in self._taken if any(a <= at <= b for a, b in spans)]


def prompt_of(length: int) -> list[int]:
    return random.choices(range(_NUM_IDS), k=length)


async def decode(llm: AsyncLLM, gaps: Gaps, stop: asyncio.Event) -> None:
    """One stream after the other, until `stop`."""
    while not stop.is_set():
        params = SamplingParams(max_tokens=400, ignore_eos=True, temperature=0.0)
        before = None
        async with await llm.submit(prompt_of(32), params, kind="delta") as stream:
            async for output in stream:
                now = time.perf_counter()
                if before is not None and output.outputs[0].token_ids:
                    gaps.add(now, now - before)
                before = now
                if stop.is_set():
                    return


async def first_token(llm: AsyncLLM, length: int) -> tuple[float, float]:
    """The times at which the prompt arrived and at which its first token came."""
    start = time.perf_counter()
    params = SamplingParams(max_tokens=1, temperature=0.0)
    async for _ in await llm.submit(prompt_of(length), params):
        pass
    return start, time.perf_counter()


async def work(llm: AsyncLLM, length: int, counts: list[int], stop: asyncio.Event) -> None:
    """One request of the lowest priority after the other, until `stop`."""
    while not stop.is_set():
        params = SamplingParams(max_tokens=100, ignore_eos=True, temperature=0.0)
        stream = await llm.submit(prompt_of(length), params, kind="delta", priority=(1 << 31) - 1)
        async with stream:
            async for output in stream:
                counts.append(len(output.outputs[0].token_ids))
                if stop.is_set():
                    return


async def measure_batch(options: argparse.Namespace) -> list[dict[str, float | str]]:
    """Rounds of streams alone and of both together; last, the batch alone."""
    config = EngineConfig(
        model=str(options.model),
        max_model_len=2048,
        max_num_seqs=32,
        target_itl=options.target_itl,
        enable_prefix_caching=False,
    )
    found: dict[str, tuple[Gaps, list[int], list[float]]] = {}
    async with await AsyncLLM.start(config) as llm:
        for round_ in range(options.prompts):
            for name, rows, batch in (
                ("streams alone", options.rows, 0),
                ("streams and a batch", options.rows, options.batch),
                ("a batch alone", 0, options.batch + options.rows),
            ):
                gaps, counts, spans = found.setdefault(name, (Gaps(), [], []))
                stop = asyncio.Event()
                kept = gaps if round_ else Gaps()  # the first one teaches what steps cost
                tokens = counts if round_ else []
                begin = time.perf_counter()
                tasks = [asyncio.create_task(decode(llm, kept, stop)) for _ in range(rows)]
                tasks += [
                    asyncio.create_task(work(llm, options.prompt, tokens, stop))
                    for _ in range(batch)
                ]
                await asyncio.sleep(5 * _BREAK_S)
                stop.set()
                await asyncio.gather(*tasks)
                if round_:
                    spans.append(time.perf_counter() - begin)
    return [
        {
            "while": name,
            "gaps": len(gaps.within([(0.0, math.inf)])),
            **_percentiles(gaps.within([(0.0, math.inf)]) or [0.0]),
            "batch_tokens_per_s": round(sum(counts) / sum(spans)),
        }
        for name, (gaps, counts, spans) in found.items()
    ]


async def measure(options: argparse.Namespace) -> list[dict[str, float | str]]:
    config = EngineConfig(
        model=str(options.model),
        max_model_len=max(2048, options.prompt + 64),
        max_num_seqs=32,
        target_itl=options.target_itl,
        enable_prefix_caching=options.split,
        replicas=1 + options.split,
        prefill_replicas=int(options.split),
    )
    gaps, stop = Gaps(), asyncio.Event()
    async with await AsyncLLM.start(config) as llm:
        streams = [asyncio.create_task(decode(llm, gaps, stop)) for _ in range(options.rows)]
        await asyncio.sleep(2 * _BREAK_S)
        for _ in range(options.warm_up):
            await first_token(llm, options.prompt)
        busy, idle = [], []
        for _ in range(options.prompts):
            begin = time.perf_counter()
            await asyncio.sleep(_BREAK_S)
            busy.append(await first_token(llm, options.prompt))
            idle.append((begin + _BREAK_S / 4, busy[-1][0]))
        stop.set()
        await asyncio.gather(*streams)
        if options.split:
            assert isinstance(llm._frontend, ReplicaFrontend)
            stats = llm._frontend.stats
            print(f"tokens that moved: {stats.peer_tokens}; failures: {stats.num_peer_failures}")
    first_token_s = float(np.median([end - start for start, end in busy]))
    return [
        {"while": name, "gaps": len(found), **_percentiles(found), "first_token_s": first}
        for name, found, first in (
            ("decoding alone", gaps.within(idle), 0.0),
            (f"a prompt of {options.prompt}", gaps.within(busy), round(first_token_s, 2)),
        )
    ]


def _percentiles(gaps_s: Sequence[float]) -> dict[str, float]:
    values = np.percentile(np.array(gaps_s) * 1e3, [50, 90, 99, 100])
    names = ("p50_ms", "p90_ms", "p99_ms", "max_ms")
    return {name: round(float(v), 1) for name, v in zip(names, values, strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--target-itl", default="auto")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=1000)
    parser.add_argument("--prompts", type=int, default=6, help="prompts that are counted")
    parser.add_argument("--warm-up", type=int, default=1, help="prompts that are not")
    parser.add_argument("--batch", type=int, default=0, help="requests of the lowest priority")
    parser.add_argument("--split", action="store_true", help="compute prompts at another replica")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    measured = measure_batch(options) if options.batch else measure(options)
    print(show(asyncio.run(measured), as_json=options.json))


if __name__ == "__main__":
    main()
