"""Routing among replicas: cached tokens and time to first token beside simpler policies, and what
routing costs.

    python bench/router.py [--replicas 4 --model demo --rounds 3]

Sessions of chats share a few system prompts, each with its own turns; those of a popular prompt are
many. Each policy gets the same ones, and the caches are empty at the start of each run.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from vllmx.bench.figures import show
from vllmx_core.config import EngineConfig
from vllmx_core.sampling import SamplingParams
from vllmx_engine.async_llm import AsyncLLM
from vllmx_engine.replicas.digests import PromptDigests
from vllmx_engine.replicas.flights import Call, Flight
from vllmx_engine.replicas.frontend import ReplicaFrontend
from vllmx_engine.replicas.router import Choice, Router
from vllmx_engine.wire.messages import CoreInfo, CoreOutput, CoreRequest, ReplicaLoad, pack_ids

_NUM_IDS = 1000
Choose = Callable[..., Choice]


def policies(router: Router, count: int) -> dict[str, Choose]:
    """Each keeps the router's bookkeeping and decides by itself."""
    own, turn = router.choose, iter(range(1 << 60))

    def round_robin(*args: Any, **options: Any) -> Choice:
        return own(*args, **options | {"among": [next(turn) % count]})

    def session_hash(digests: Any, size: int, session: str = "", **options: Any) -> Choice:
        number = random.Random(session).randrange(count)
        return own(digests, size, session, **options | {"among": [number]})

    return {"round robin": round_robin, "session hash": session_hash, "router": own}


async def session(
    llm: AsyncLLM, number: int, options: argparse.Namespace, first_s: list[float]
) -> tuple[int, int]:
    """All turns of a session; its prompt tokens, and those that were cached."""
    rng = random.Random(number)
    await asyncio.sleep(rng.uniform(0, options.seconds))
    prompt = min(int(rng.paretovariate(0.8)), options.prompts)
    text = random.Random(-prompt).choices(range(_NUM_IDS), k=options.system)
    params = SamplingParams(max_tokens=options.answer, ignore_eos=True, temperature=0.0)
    tokens = cached = 0
    for _ in range(options.turns):
        text += rng.choices(range(_NUM_IDS), k=int(rng.expovariate(1 / 40)) + 8)
        begun_s, is_first = time.perf_counter(), True
        stream = await llm.submit(text, params, session_id=f"{number}")
        async for output in stream:
            if is_first:
                first_s.append(time.perf_counter() - begun_s)
                cached += output.num_cached_tokens
                is_first = False
            text += output.outputs[0].token_ids
        tokens += len(text) - options.answer
        await asyncio.sleep(rng.expovariate(1 / options.pause))
    return tokens, cached


async def measured(options: argparse.Namespace) -> list[dict[str, float | str]]:
    """A line for each policy and round."""
    config = EngineConfig(
        model=options.model,
        replicas=options.replicas,
        num_threads=options.replicas,
        num_kv_blocks=options.blocks,
        max_queue=4096,
    )
    async with await AsyncLLM.start(config) as llm:
        frontend = llm._frontend
        assert isinstance(frontend, ReplicaFrontend)
        router = frontend._dispatch.router
        print(show(costs(llm.info), as_json=False), flush=True)
        rows: list[dict[str, float | str]] = []
        for round_ in range(options.rounds + 1):
            for name, choose in policies(router, options.replicas).items():
                await llm.reset_prefix_cache()
                router.choose = choose  # type: ignore[method-assign]
                first_s: list[float] = []
                sizes = await asyncio.gather(
                    *(session(llm, one, options, first_s) for one in range(options.sessions))
                )
                del router.choose
                if not round_:  # the cost models have seen nothing before
                    continue
                p50, p90 = np.percentile(np.array(first_s) * 1e3, [50, 90])
                rows.append(
                    {
                        "policy": name,
                        "round": round_,
                        "cached": round(sum(c for _, c in sizes) / sum(t for t, _ in sizes), 3),
                        "first_token_p50_ms": round(float(p50), 1),
                        "first_token_p90_ms": round(float(p90), 1),
                    }
                )
    return rows


def costs(info: CoreInfo) -> list[dict[str, float | str]]:
    """Microseconds of routing a prompt of 2,048 tokens, and of a streamed token more than with one
    core."""
    prompt = pack_ids(random.Random(0).choices(range(_NUM_IDS), k=2048))
    params = SamplingParams(max_tokens=64)
    request = CoreRequest(request_id="1.0", prompt=prompt, params=params, max_tokens=64, seed=0)
    digests = PromptDigests(bytes(32), "demo", info, lambda name: "")
    rows: list[dict[str, float | str]] = []
    for count in (1, 8, 64, 1000):
        router, known = Router(info.block_size), digests.of(request)[1:]
        for replica in range(count):
            router.add(replica)
            router.load(replica, ReplicaLoad(token_s=1e-4), 0.0)
            router.filed(replica, known[: 40 * (replica % 4)])

        def route(router: Router = router) -> None:
            choice = router.choose(digests.of(request)[1:], 2048, now_s=1.0)
            router.started("one", choice)
            router.finished("one")

        rows.append({"what": f"route 2k tokens to one of {count}", "us": _best_us(route)})
    call = Call("1.0", [], 0)
    flight = Flight(call, request, core_id="3:1.0")
    by_id = {"3:1.0": flight}
    output = CoreOutput(request_id="3:1.0", ids=[5])

    def take() -> None:
        found = by_id.get(output.request_id)
        assert found is not None
        found.take(output)

    rows.append({"what": "streamed token, renamed", "us": _best_us(take)})
    return rows


def _best_us(work: Callable[[], None], times: int = 50) -> float:
    """Processor time, whatever else runs."""
    best = float("inf")
    for _ in range(20):
        begun_s = time.process_time()
        for _ in range(times):
            work()
        best = min(best, (time.process_time() - begun_s) / times)
    return round(best * 1e6, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sessions", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=15.0, help="in which sessions begin")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--pause", type=float, default=2.0, help="mean seconds between turns")
    parser.add_argument("--prompts", type=int, default=16, help="system prompts")
    parser.add_argument("--system", type=int, default=900, help="tokens of each")
    parser.add_argument("--answer", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=600, help="of each replica")
    options = parser.parse_args()
    print(show(asyncio.run(measured(options)), as_json=False))


if __name__ == "__main__":
    main()
