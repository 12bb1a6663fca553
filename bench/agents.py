"""Agents that come back after a pause: cached tokens and time to first token, with and without
tiers below the device and sessions.

    python bench/agents.py --model models/qwen3-0.6b-random [--sessions 32 --turns 8]

Each session begins with the same system prompt and adds a tool's result in each turn; between turns
it pauses. The KV cache has a quarter of the blocks that all sessions need (`--share`).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from vllmx.bench.figures import show
from vllmx_core.config import EngineConfig
from vllmx_core.sampling import SamplingParams
from vllmx_engine.async_llm import AsyncLLM

_NUM_IDS = 1000
_BLOCK = 16


class Turns:
    """Tokens of all prompts, those that were cached, and seconds to the first token."""

    def __init__(self) -> None:
        self.tokens = self.cached = 0
        self.first_s: list[float] = []

    def figures(self, name: str, wall_s: float) -> dict[str, float | str]:
        """A line of the table."""
        p50, p90 = np.percentile(np.array(self.first_s) * 1e3, [50, 90])
        return {
            "with": name,
            "turns": len(self.first_s),
            "cached": round(self.cached / self.tokens, 3),
            "first_token_p50_ms": round(float(p50), 1),
            "first_token_p90_ms": round(float(p90), 1),
            "wall_s": round(wall_s, 1),
        }


async def session(
    llm: AsyncLLM, number: int, options: argparse.Namespace, turns: Turns, *, is_named: bool
) -> None:
    """All turns of one session, which are the same in each run."""
    rng = random.Random(number)
    text = random.Random(-1).choices(range(_NUM_IDS), k=options.system)
    params = SamplingParams(max_tokens=options.answer, ignore_eos=True, temperature=0.0)
    for _ in range(options.turns):
        await asyncio.sleep(rng.uniform(*options.pause))
        text += rng.choices(range(_NUM_IDS), k=options.result)
        begin, first_s, answer = time.perf_counter(), 0.0, list[int]()
        name = f"s{number}" if is_named else ""
        async with await llm.submit(text, params, kind="delta", session_id=name) as stream:
            async for output in stream:
                first_s = first_s or time.perf_counter() - begin
                answer += output.outputs[0].token_ids
        turns.tokens += len(text)
        turns.cached += output.num_cached_tokens or 0
        turns.first_s.append(first_s)
        text += answer


async def measure(options: argparse.Namespace) -> list[dict[str, float | str]]:
    length = options.system + options.turns * (options.result + options.answer)
    blocks = int(options.share * options.sessions * length / _BLOCK)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        off: Mapping[str, Any] = {"session_share": 0.0}
        for name, fields in (
            ("nothing", off),
            ("sessions", {"session_share": 0.9}),
            ("a disk", {**off, "kv_disk": folder}),
        ):
            config = EngineConfig(
                model=str(options.model),
                max_model_len=length + _BLOCK,
                max_num_seqs=32,
                num_kv_blocks=max(blocks, length // _BLOCK + 2),
                **fields,
            )
            turns, begin = Turns(), time.perf_counter()
            async with await AsyncLLM.start(config) as llm:
                tasks = (
                    session(llm, number, options, turns, is_named=name == "sessions")
                    for number in range(options.sessions)
                )
                await asyncio.gather(*tasks)
            found.append(turns.figures(name, time.perf_counter() - begin))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--sessions", type=int, default=32)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--system", type=int, default=1500, help="tokens of the system prompt")
    parser.add_argument("--result", type=int, default=150, help="tokens of a tool's result")
    parser.add_argument("--answer", type=int, default=50, help="tokens of an answer")
    parser.add_argument("--pause", type=float, nargs=2, default=(2.0, 30.0), help="seconds")
    parser.add_argument("--share", type=float, default=0.25, help="of the blocks that all need")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    print(show(asyncio.run(measure(options)), as_json=options.json))


if __name__ == "__main__":
    main()
