"""Agents that come back after a pause, over HTTP: cached tokens and time to first token, without
tiers below the KV cache, with sessions, with a disk, and beside other engines' servers.

    python bench/random_model.py models/qwen3-0.6b-random --gguf
    python bench/agents.py --model models/qwen3-0.6b-random --peers llama.cpp,vllm

Each session begins with the same system prompt and adds a tool's result in each turn; between turns
it pauses. The KV cache has a quarter of the tokens that all sessions need (`--share`). llama.cpp
keeps as many slots as have room in that, once alone and once with its cache in host memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from cpu_peers import servers
from cpu_peers.host_load import available_processors
from cpu_peers.weights import Weights
from poisson import BENCH, PEERS, model_files
from served import running, vllmx
from vllmx.bench.figures import show
from vllmx.bench.processes import first_url

_NUM_IDS = 1000
_BLOCK, _VLLM_BLOCK = 16, 32
"""Tokens; vLLM wants multiples of 32 on a CPU."""
_SLOT_STEP = 256
"""llama.cpp rounds the tokens of a slot up to a multiple of this."""
OURS = ("no tiers", "sessions", "disk")


@dataclass(frozen=True)
class Case:
    """A server, and how its turns are asked for."""

    name: str
    start: servers.Start
    is_llama: bool = False
    """It gets llama.cpp's own route, which returns ids; the others get OpenAI's."""
    names_sessions: bool = False


class Turns:
    """Tokens of all prompts, those that were cached, and seconds to the first token."""

    def __init__(self) -> None:
        self.tokens = self.cached = 0
        self.first_s: list[float] = []

    def figures(self, name: str, wall_s: float) -> dict[str, float | str]:
        """A line of the table."""
        p50, p90 = np.percentile(np.array(self.first_s) * 1e3, [50, 90])
        return {
            "server": name,
            "turns": len(self.first_s),
            "hit_tokens": self.cached,
            "hits": round(self.cached / self.tokens, 3),
            "first_token_p50_ms": round(float(p50), 1),
            "first_token_p90_ms": round(float(p90), 1),
            "wall_s": round(wall_s, 1),
        }


def cases_of(options: argparse.Namespace, weights: Weights, disk: str) -> list[Case]:
    """The servers, in their order. FileNotFoundError, with the remedy, for one that is not here."""
    length = options.system + options.turns * (options.result + options.answer) + _BLOCK
    tokens = max(length, int(options.share * options.sessions * length))
    threads, peers_dir = available_processors(), options.peers_dir.absolute()
    own = vllmx(
        *("--model", str(weights.model), "--served-model-name", weights.name),
        *("--max-num-seqs", str(options.sessions), "--max-model-len", str(length)),
        *("--num-gpu-blocks-override", str(-(-tokens // _BLOCK)), "--num-threads", str(threads)),
    )
    kept = (("--session-share", "0"), ("--session-share", "0.9"), ("--kv-disk", disk))
    cases = [
        Case(name, servers.Start([*own, *flags], first_url), names_sessions=name == "sessions")
        for name, flags in zip(OURS, kept, strict=True)
    ]
    if servers.LLAMA in options.peers:
        slot = length + -length % _SLOT_STEP
        room = servers.Room(max(1, tokens // slot), slot, threads)
        for name, ram in ((servers.LLAMA, "0"), (f"{servers.LLAMA} with host memory", "-1")):
            start = servers.start_of(
                servers.LLAMA, peers_dir, weights, room, ["--cache-ram", ram, "-no-kvu"]
            )
            cases.append(Case(name, start, is_llama=True))
    if servers.VLLM in options.peers:
        flags = ["--enforce-eager", "--enable-prefix-caching", "--enable-prompt-tokens-details"]
        flags += ["--block-size", str(_VLLM_BLOCK)]
        blocks = -(-tokens // _VLLM_BLOCK) + 1  # one is never used
        flags += ["--num-gpu-blocks-override", str(blocks)]
        room = servers.Room(options.sessions, length, threads)
        start = servers.start_of(servers.VLLM, peers_dir, weights, room, flags)
        cases.append(Case(servers.VLLM, start))
    return [case for case in cases if not options.only or case.name in options.only]


async def turn(
    client: httpx.AsyncClient, case: Case, model: str, ids: Sequence[int], session: str, length: int
) -> tuple[float, list[int], int]:
    """Seconds to the first token of an answer, its ids, and the prompt's cached tokens."""
    body: dict[str, Any] = {
        "prompt": list(ids),
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
    }
    if case.is_llama:
        path, body = "/completion", {**body, "n_predict": length, "return_tokens": True}
    else:
        path = "/v1/completions"
        body |= {"model": model, "max_tokens": length, "return_token_ids": True}
        body["stream_options"] = {"include_usage": True}
        if case.names_sessions:
            body["session_id"] = session
    begin, first_s, answer, cached = time.perf_counter(), 0.0, list[int](), 0
    async with client.stream("POST", path, json=body) as response:
        async for line in response.aiter_lines():
            if response.status_code != 200:
                raise RuntimeError(f"{case.name}: {response.status_code} {line}")
            if not line.startswith("data: {"):
                continue
            new, hits = taken(json.loads(line[6:]))
            if new and not first_s:
                first_s = time.perf_counter() - begin
            answer += new
            cached = max(cached, hits)
    if case.is_llama:  # it leaves out tokens that end within a character
        answer += [0] * (length - len(answer))
    if len(answer) != length:
        raise RuntimeError(f"{case.name} sent {len(answer)} token ids, {length} were asked for")
    return first_s or time.perf_counter() - begin, answer, cached


def taken(event: Mapping[str, Any]) -> tuple[list[int], int]:
    """The ids that an event of any of these servers brings, and the cached tokens that it names."""
    choices = event.get("choices")
    ids = event.get("tokens") or (choices or [{}])[0].get("token_ids") or []
    details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
    hits = details.get("cached_tokens") or (event.get("timings") or {}).get("cache_n") or 0
    return ids, hits


async def session(
    client: httpx.AsyncClient,
    case: Case,
    model: str,
    number: int,
    options: argparse.Namespace,
    turns: Turns,
) -> None:
    """All turns of one session: pauses and results are the same for each server."""
    rng = random.Random(number)
    text = random.Random(-1).choices(range(_NUM_IDS), k=options.system)
    for _ in range(options.turns):
        await asyncio.sleep(rng.uniform(*options.pause))
        text += rng.choices(range(_NUM_IDS), k=options.result)
        first_s, answer, cached = await turn(
            client, case, model, text, f"s{number}", options.answer
        )
        turns.tokens += len(text)
        turns.cached += cached
        turns.first_s.append(first_s)
        text += answer


async def measure(
    case: Case, url: str, model: str, options: argparse.Namespace
) -> dict[str, float | str]:
    """A line of the table."""
    turns = Turns()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:
        await turn(client, case, model, [1] * 40, "warm", 4)
        begin = time.perf_counter()
        await asyncio.gather(
            *(session(client, case, model, i, options, turns) for i in range(options.sessions))
        )
    return turns.figures(case.name, time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="folder of random_model.py --gguf (the demo)")
    parser.add_argument("--peers", type=_names, default=[], help=f"of {','.join(PEERS)}")
    parser.add_argument("--peers-dir", type=Path, default=BENCH / ".peers")
    parser.add_argument("--only", type=_names, default=[], help="servers of the table's names")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--sessions", type=int, default=32)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--system", type=int, default=1500, help="tokens of the system prompt")
    parser.add_argument("--result", type=int, default=150, help="tokens of a tool's result")
    parser.add_argument("--answer", type=int, default=50, help="tokens of an answer")
    parser.add_argument("--pause", type=float, nargs=2, default=(2.0, 30.0), help="seconds")
    parser.add_argument("--share", type=float, default=0.25, help="of the tokens that all need")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    weights = model_files(options.model, options.peers_dir.absolute())
    found = []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as disk:
            for case in cases_of(options, weights, disk):
                start = case.start
                with running(case.name, start.command, start.environment, start.find_url) as one:
                    found.append(asyncio.run(measure(case, one.url, weights.name, options)))
                print(show(found[-1:], as_json=False), file=sys.stderr)
    print(show(found, as_json=options.json))


def _names(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word]


if __name__ == "__main__":
    main()
