"""The simulator next to real replicas: `python bench/sim/compare.py --model demo`.

Measures what prompts and steps cost, through the frontend that serves. Then plays sessions,
simulates exactly these arrivals with these costs, and prints the seconds to the first token of
both.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np
from policies import LeastSeconds
from replica import Machine
from simulate import Simulation
from traces import BLOCK_TOKENS, Request

sys.path.append(str(Path(__file__).parents[1]))
from router import policies
from vllmx.bench.figures import show
from vllmx_core.config import EngineConfig
from vllmx_core.sampling import SamplingParams
from vllmx_engine.async_llm import AsyncLLM
from vllmx_engine.replicas.frontend import ReplicaFrontend

_NUM_IDS = 1000
_PROMPTS = (1, 16, 64, 256, 1000)
_ROWS = (1, 2, 4, 8, 16)


def digests_of(ids: Sequence[int]) -> list[bytes]:
    """A digest for each full block."""
    packed, digest = np.array(ids, np.int32).tobytes(), blake2b(digest_size=16)
    found = []
    for start in range(0, len(ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        digest.update(packed[4 * start : 4 * (start + BLOCK_TOKENS)])
        found.append(digest.copy().digest())
    return found


async def timed(llm: AsyncLLM, length: int, max_tokens: int, num_cached: int = 0) -> list[float]:
    """Seconds to the first token of a prompt with so many new tokens, behind as many as are known
    from earlier ones, and between the others."""
    prompt = random.Random(0).choices(range(_NUM_IDS), k=num_cached)
    prompt += random.choices(range(_NUM_IDS), k=length)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
    at_s = [time.perf_counter()]
    async with await llm.submit(prompt, params, kind="delta") as stream:
        async for _ in stream:
            at_s.append(time.perf_counter())
    return np.diff(at_s).tolist()


async def measured(llm: AsyncLLM, options: argparse.Namespace) -> Machine:
    """What requests cost, on one replica after the other."""

    async def together(length: int, max_tokens: int, rows: int) -> list[list[float]]:
        """Runs `rows` requests on each replica."""
        calls = (timed(llm, length, max_tokens) for _ in range(rows * options.replicas))
        return await asyncio.gather(*calls)

    async def prompts_s() -> dict[int, float]:
        """Seconds by length, medians of rounds in turn."""
        found: dict[int, list[float]] = {length: [] for length in _PROMPTS}
        for _ in range(options.rounds):
            for length, seconds in found.items():
                for _ in range(options.replicas):
                    seconds += (await timed(llm, length, 1, options.system))[:1]
        return {length: float(np.median(seconds)) for length, seconds in found.items()}

    async def decode() -> None:
        while True:
            await together(16, 400, 1)

    await together(_PROMPTS[-1], 100, 8)  # the cost models learn
    alone_s, steps = await prompts_s(), []
    for rows in _ROWS:
        gaps = [gap for one in await together(16, 200, rows) for gap in one[10:-10]]
        steps.append((rows, float(np.mean(gaps))))
    decodes = [asyncio.ensure_future(decode()) for _ in range(4)]
    beside_s = await prompts_s()
    for task in decodes:
        task.cancel()
    await asyncio.wait(decodes)
    first, last = _PROMPTS[0], _PROMPTS[-1]
    token_s = (alone_s[last] - alone_s[first]) / (last - first)
    stretches = tuple((one, max(1.05, beside_s[one] / alone_s[one])) for one in _PROMPTS)
    sizes = 64, options.blocks, stretches
    return Machine(token_s, tuple(steps), *sizes, prompts=tuple(alone_s.items()))


async def session(
    llm: AsyncLLM, number: int, options: argparse.Namespace, begun_s: float
) -> list[tuple[Request, float, int]]:
    """The requests of a session, with their seconds to the first token and cached tokens."""
    rng, found = random.Random(number), []
    await asyncio.sleep(rng.uniform(0, options.seconds))
    shared = min(int(rng.paretovariate(0.8)), options.prompts)
    text = random.Random(-shared).choices(range(_NUM_IDS), k=options.system)
    for _ in range(options.turns):
        text += rng.choices(range(_NUM_IDS), k=int(rng.expovariate(1 / 40)) + 8)
        length, first_s, cached = len(text), 0.0, 0
        answer = 8 + int(rng.expovariate(1 / options.answer))
        params = SamplingParams(max_tokens=answer, ignore_eos=True, temperature=0.0)
        at_s = time.perf_counter()
        stream = await llm.submit(text, params, session_id=f"{number}", kind="delta")
        async for output in stream:
            if not first_s:
                first_s, cached = time.perf_counter() - at_s, output.num_cached_tokens
            text += output.outputs[0].token_ids
        blocks = digests_of(text[:-1])
        request = Request(
            at_s - begun_s, blocks, length // BLOCK_TOKENS, length, answer, f"{number}"
        )
        found.append((request, first_s, cached))
        await asyncio.sleep(rng.expovariate(1 / options.pause))
    return found


def row(name: str, waits: Sequence[float], hit: float) -> dict[str, float | str]:
    p50, p90, p99 = np.percentile(np.array(waits) * 1e3, [50, 90, 99])
    figures = {"p50_ms": p50, "p90_ms": p90, "p99_ms": p99}
    return {
        "replicas": name,
        "cached": round(hit, 3),
        **{key: round(float(value), 1) for key, value in figures.items()},
    }


async def compared(options: argparse.Namespace) -> list[dict[str, float | str]]:
    config = EngineConfig(
        model=options.model,
        replicas=options.replicas,
        num_threads=options.replicas,
        num_kv_blocks=options.blocks,
        max_num_seqs=64,
        max_queue=4096,
    )
    async with await AsyncLLM.start(config) as llm:
        assert isinstance(llm._frontend, ReplicaFrontend)
        router = llm._frontend._dispatch.router
        router.choose = policies(router, options.replicas)["round robin"]  # type: ignore[method-assign]
        machine = await measured(llm, options)
        del router.choose
        await llm.reset_prefix_cache()
        begun_s = time.perf_counter()
        played = await asyncio.gather(
            *(session(llm, one, options, begun_s) for one in range(options.sessions))
        )
    print(machine)
    real = sorted((one for each in played for one in each), key=lambda one: one[0].at_s)
    total = sum(one.num_tokens for one, _, _ in real)
    simulation = Simulation(LeastSeconds(options.replicas), machine, options.replicas)
    simulation.run([one for one, _, _ in real])
    hits = sum(min(one.num_hit * BLOCK_TOKENS, one.request.num_tokens) for one in simulation.done)
    waits = [one.first_s - one.request.at_s for one in simulation.done]
    rows = [
        row("real", [first_s for _, first_s, _ in real], sum(one[2] for one in real) / total),
        row("simulated", waits, hits / total),
    ]
    ratios = {
        key: round(float(rows[1][key]) / float(rows[0][key]), 2)
        for key in ("p50_ms", "p90_ms", "p99_ms")
    }
    return [*rows, {"replicas": "ratio", "cached": "", **ratios}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12, help="of each measured cost")
    parser.add_argument("--sessions", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=20.0, help="in which sessions begin")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--pause", type=float, default=2.0, help="mean seconds between turns")
    parser.add_argument("--prompts", type=int, default=16, help="system prompts")
    parser.add_argument("--system", type=int, default=900, help="tokens of each")
    parser.add_argument("--answer", type=int, default=60, help="mean tokens")
    parser.add_argument("--blocks", type=int, default=1200, help="of each replica")
    print(show(asyncio.run(compared(parser.parse_args())), as_json=False))


if __name__ == "__main__":
    main()
