"""Latencies of servers under Poisson arrivals, as clients see them, and CPU time for each token.

Ours runs alone or beside the servers of other engines on the same model: each of them gets the same
requests at the same times, one server after the other in each round, so that a slow minute of the
machine hits all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cpu_peers import servers
from cpu_peers.host_load import available_processors
from cpu_peers.weights import ORIGINAL, Weights, quantise, weights_of
from served import Server, running, vllmx
from vllmx.bench.figures import percentile
from vllmx.bench.serving import Load, arrivals
from vllmx.bench.sse_client import Streamed
from vllmx_demo.source import MODEL_FOLDER

Record = dict[str, Any]
BENCH = Path(__file__).resolve().parent
PEERS = (servers.LLAMA, servers.VLLM)
OURS = "vllmx"
_NUM_IDS = 1000
_CONTEXT_STEP = 256
"""llama.cpp rounds the context of every sequence up to a multiple of this."""
_WARM_UP = 4
_FIGURES = ("first_p50_ms", "first_p99_ms", "gap_p50_ms", "gap_p99_ms", "api_us", "all_us")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of arrivals."""
    add = parser.add_argument
    add("--rates", type=_numbers, default=[], help="arrivals a second, of each server")
    add("--peers", type=_names, default=[], help=f"servers beside ours, of {','.join(PEERS)}")
    add("--model", type=Path, help="folder of random_model.py --gguf (default: the demo)")
    add("--requests", type=int, default=64, help="requests of each rate and round")
    add("--input-len", type=int, default=64, help="ids of each prompt")
    add("--output-len", type=int, default=64, help="tokens of each answer")
    add("--max-num-seqs", type=int, default=32, help="sequences that a server decodes together")
    add("--peers-dir", type=Path, default=BENCH / ".peers", help="where peers are installed")
    add("--llama-flags", default="", help="more flags of llama-server")
    add("--vllm-flags", default="--enforce-eager", help="more flags of vllm serve")


@dataclass(slots=True)
class Taken:
    """What a server did at a rate, in all rounds."""

    results: list[Streamed] = field(default_factory=list)
    seconds: float = 0.0
    api_s: float = 0.0
    """CPU time of the processes that answer ..."""
    all_s: float = 0.0
    """... and of these with those that compute."""

    def figures(self) -> Record:
        """Percentiles over all rounds, in milliseconds; CPU time in microseconds a token."""
        good = [each for each in self.results if each.error is None and each.event_s]
        first = [each.first_token_s for each in good]
        gaps = [gap for each in good for gap in each.gaps_s]
        tokens = sum(each.completion_tokens for each in good)
        events = sum(len(each.event_s) for each in good)
        shares = {"p50": 0.5, "p99": 0.99}
        return {
            "requests": len(self.results),
            "failed": len(self.results) - len(good),
            "tokens_per_s": round(tokens / self.seconds, 1),
            **{f"first_{name}_ms": _ms(percentile(first, part)) for name, part in shares.items()},
            **{f"gap_{name}_ms": _ms(percentile(gaps, part)) for name, part in shares.items()},
            "events_per_token": round(events / max(1, tokens), 2),
            "api_us": round(self.api_s / max(1, tokens) * 1e6, 1),
            "all_us": round(self.all_s / max(1, tokens) * 1e6, 1),
        }


def measure(options: argparse.Namespace) -> dict[str, list[Record]]:
    """The tables `open_loop` and, beside peers, `ratios`."""
    peers_dir = options.peers_dir.absolute()
    weights = model_files(options.model, peers_dir)
    tokens = options.input_len + options.output_len + 1
    room = servers.Room(
        options.max_num_seqs, tokens + -tokens % _CONTEXT_STEP, available_processors()
    )
    flags = {servers.LLAMA: options.llama_flags, servers.VLLM: options.vllm_flags}
    with ExitStack() as stack:
        started = [stack.enter_context(running(OURS, _ours(weights, room)))]
        for peer in options.peers:
            start = servers.start_of(peer, peers_dir, weights, room, flags[peer].split())
            one = running(peer, start.command, start.environment, start.find_url)
            started.append(stack.enter_context(one))
        load = Load("", weights.name, _NUM_IDS, options.input_len, options.output_len, _WARM_UP)
        taken = in_turn(started, load, options)
    table = [
        {"server": name, "rate": rate, **each.figures()} for (name, rate), each in taken.items()
    ]
    found = {"open_loop": table}
    return found | ({"ratios": ratios(table)} if options.peers else {})


def in_turn(
    started: Sequence[Server], load: Load, options: argparse.Namespace
) -> dict[tuple[str, float], Taken]:
    """What each server did at each rate. The requests of a round are the same for all of them; a
    few are sent first that do not count."""
    taken = {(server.name, rate): Taken() for rate in options.rates for server in started}
    for server in started:
        _send(server, load, options.rates[-1], _WARM_UP, 0, Taken())
    for number in range(1, options.rounds + 1):
        for rate in options.rates:
            for server in started:
                into = taken[server.name, rate]
                _send(server, load, rate, options.requests, number, into)
    return taken


def _send(server: Server, load: Load, rate: float, count: int, seed: int, into: Taken) -> None:
    own = Load(
        server.url, load.model, load.vocab_size, load.input_len, load.output_len, count, seed=seed
    )
    api_s, all_s, began = server.cpu_s(), server.whole_cpu_s(), time.perf_counter()
    into.results += asyncio.run(arrivals(own, rate))
    into.seconds += time.perf_counter() - began
    into.api_s += server.cpu_s() - api_s
    into.all_s += server.whole_cpu_s() - all_s


def ratios(table: Sequence[Record]) -> list[Record]:
    """How many times ours each figure of a peer is, at each rate: above 1, ours is the better."""
    ours = {record["rate"]: record for record in table if record["server"] == OURS}
    return [
        {
            "peer / vllmx": record["server"],
            "rate": record["rate"],
            **{name: _ratio(record[name], ours[record["rate"]][name]) for name in _FIGURES},
        }
        for record in table
        if record["server"] != OURS
    ]


def model_files(folder: Path | None, peers_dir: Path) -> Weights:
    """The model as a folder and as a GGUF file. None: the demo, copied to where a GGUF may lie
    beside it."""
    if folder is None:
        folder = peers_dir / "demo"
        if not (folder / f"{ORIGINAL}.gguf").exists():
            shutil.copytree(MODEL_FOLDER, folder, dirs_exist_ok=True)
            quantise(folder, folder / f"{ORIGINAL}.gguf", ORIGINAL)
    return weights_of(folder, [])[0]


def _ours(weights: Weights, room: servers.Room) -> list[str]:
    return vllmx(
        *("--model", str(weights.model), "--served-model-name", weights.name),
        *("--max-num-seqs", str(room.sequences), "--max-model-len", str(room.tokens)),
        *("--num-threads", str(room.threads)),
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)


def _ratio(theirs: float, ours: float) -> float:
    return round(theirs / ours, 2) if ours else float("nan")


def _numbers(text: str) -> list[float]:
    return [float(word) for word in text.split(",") if word]


def _names(text: str) -> list[str]:
    names = [word for word in text.split(",") if word]
    for name in names:
        if name not in PEERS:
            raise argparse.ArgumentTypeError(f"unknown peer {name!r}; known: {', '.join(PEERS)}")
    return names
