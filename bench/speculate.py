"""Speculation over HTTP next to other engines: tokens a second with and without drafts.

    python bench/random_model.py models/chain --shape qwen3-0.6b-chain --gguf
    python bench/speculate.py ngram --model models/chain --peers llama.cpp,vllm --rounds 3
    python bench/random_model.py models/weak --shape qwen3-0.6b-weak-chain --gguf
    python bench/speculate.py twin --model models/weak --peers llama.cpp --rounds 3

Each engine serves the model twice or more, without drafts and with them, on as many threads.
Requests are greedy, one at a time, and each server gets the same ones, in turn. `tokens_per_s`
counts the tokens behind the first one: median and range over the rounds. `ratio` is to the same
engine without drafts, `accepted` the share of draft tokens that were kept in the requests before
the timed ones, `as_known` how many of their texts were those of our server without drafts.

The model counts (`chain` in model_shapes.py): behind each id it draws the next one, in every engine
and type, for the cost of any model of its shape. `ngram`: the prompt is a file, a run of ids with
edits (some replaced, some missing, some added, one edit in `--edit-every` tokens); the answer is
the run itself. So drafts from the prompt are wrong at each edit, as when a model edits code.
`twin`: the weak chain draws what its layers add, too, so that a copy in 4 bits is right in about
nine of ten tokens; prompts are ids at random. llama.cpp's draft model is the Q4_K_M file of the
same weights (llama-server has the loop of llama-speculative-simple); ours makes its own at start.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from cpu_peers import servers
from cpu_peers.host_load import available_processors
from cpu_peers.weights import Weights, weights_of
from output_file import output_file
from served import Server, running, vllmx
from vllmx.bench.figures import show
from vllmx.bench.processes import first_url
from vllmx.bench.sse_client import stream_completion

BENCH = Path(__file__).resolve().parent
OURS = "vllmx"
PEERS = (servers.LLAMA, servers.VLLM)
_CONTEXT_STEP = 256
"""llama.cpp rounds the context of a sequence up to a multiple of this."""
_FIRST_ID = 300
"""The ids below are bytes, which are no text alone."""
_FENCE = 8
"""Ids before the file and before the answer, as Markdown has them around code."""

Flags = dict[str, dict[str, list[str]]]
"""The flags of each engine's servers, by what they draft with."""


def ngram_flags(tokens: int) -> Flags:
    """Engines that look for a fixed number of tokens get it as they have it by default, and
    llama.cpp as few tokens as ours and vLLM's, which suits short runs between edits."""
    look_up = {"prompt_lookup_min": 2, "prompt_lookup_max": 5, "num_speculative_tokens": tokens}
    few = ["--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", str(tokens)]
    simple = ["--spec-type", "ngram-simple"]
    return {
        OURS: {"off": [], "ngram": ["--speculate", "ngram"]},
        servers.LLAMA: {"off": [], "ngram-simple": simple, "ngram-simple, 3": [*simple, *few]},
        servers.VLLM: {
            "off": [],
            "ngram": ["--speculative-config", json.dumps({"method": "ngram", **look_up})],
        },
    }


def twin_flags(draft: Path, tokens: int) -> Flags:
    """A draft model in 4 bits, with as many tokens as pay and with a fixed number of them."""
    fixed = ["--speculate", "twin", "--speculate-tokens", str(tokens)]
    theirs = ["--spec-type", "draft-simple", "-md", str(draft), "--spec-draft-n-max", str(tokens)]
    return {
        OURS: {"off": [], "twin": ["--speculate", "twin"], f"twin, {tokens}": fixed},
        servers.LLAMA: {"off": [], f"q4_k_m, {tokens}": theirs},
    }


@dataclass
class Measured:
    """A server and what it did."""

    server: Server
    engine: str
    drafts: str
    speeds: list[float] = field(default_factory=list)
    """Tokens a second of each request."""
    answers: list[str] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)

    def record(self, plain: Measured, known: list[str]) -> dict[str, float | int | str]:
        """A line of the table. `plain`: the same engine without drafts."""
        speed = statistics.median(self.speeds)
        return {
            "engine": self.engine,
            "drafts": self.drafts,
            "tokens_per_s": round(speed, 2),
            "min": round(min(self.speeds), 2),
            "max": round(max(self.speeds), 2),
            "ratio": round(speed / statistics.median(plain.speeds), 3),
            "accepted": round(statistics.mean(self.accepted), 3) if self.accepted else "-",
            "as_known": f"{sum(map(str.__eq__, self.answers, known))} of {len(known)}",
        }


def edited_file(seed: int, length: int, edit_every: int, vocab_size: int) -> list[int]:
    """Ids of a prompt: a fence, a run of `length` ids with edits, other ids, the fence, and the
    first id of the run, behind which the model goes on with the run."""
    rng = np.random.default_rng(seed)
    first = int(rng.integers(_FIRST_ID, vocab_size - length - 8))

    def other(count: int) -> list[int]:
        found: list[int] = rng.integers(_FIRST_ID, vocab_size - 8, count).tolist()
        return found

    fence, file, place = other(_FENCE), list[int](), 0
    while place < length:
        kept = min(int(rng.integers(1, 2 * edit_every)), length - place)
        file += range(first + place, first + place + kept)
        lost, added = [(1, 1), (2, 2), (0, 3), (3, 0)][rng.integers(4)]
        file += other(added)
        place += kept + lost
    return [*fence, *file, *other(_FENCE), *fence, first]


def some_text(seed: int, length: int, vocab_size: int) -> list[int]:
    """Ids of a prompt that nothing repeats."""
    rng = np.random.default_rng(seed)
    found: list[int] = rng.integers(_FIRST_ID, vocab_size - 8, length).tolist()
    return found


def answer(one: Measured, body: dict[str, Any]) -> None:
    """Adds the text of an answer, and the share of its draft tokens that were kept where the server
    says it."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(
        f"{one.server.url}/v1/completions", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request) as reply:
        found = json.load(reply)
    one.answers.append(found["choices"][0]["text"])
    if (share := kept_share(found)) is not None:
        one.accepted.append(share)


def kept_share(reply: dict[str, Any]) -> float | None:
    """The share of draft tokens that were kept; None where a reply does not say it."""
    details = reply["usage"].get("completion_tokens_details") or {}
    kept = details.get("accepted_prediction_tokens")
    if kept:
        return float(kept / (kept + details["rejected_prediction_tokens"]))
    timings = reply.get("timings") or {}
    return timings["draft_n_accepted"] / timings["draft_n"] if timings.get("draft_n") else None


def measure(started: Sequence[Measured], options: argparse.Namespace) -> None:
    """Each server's answers to `--requests` prompts in each round; those of a round before are not
    timed and tell texts and drafts."""
    for number in range(options.rounds + 1):
        for index in range(options.requests):
            body = {
                "model": options.name,
                "prompt": _prompt(options, 1000 * number + index),
                "max_tokens": options.output_len,
                "temperature": 0,
                "ignore_eos": True,
            }
            for one in started:
                if not number:
                    answer(one, body)
                    continue
                found = asyncio.run(stream_completion(one.server.url, "/v1/completions", body))
                if found.error is not None:
                    raise SystemExit(f"{one.engine}, {one.drafts}: {found.error}")
                one.speeds.append(1 / found.token_s)
        print(f"round {number} of {options.rounds} is done", file=sys.stderr)


def _prompt(options: argparse.Namespace, seed: int) -> list[int]:
    if options.drafter == "twin":
        return some_text(seed, 64, options.vocab_size)
    return edited_file(seed, options.output_len, options.edit_every, options.vocab_size)


def launched(stack: ExitStack, weights: Weights, options: argparse.Namespace) -> Iterator[Measured]:
    """All servers; says on standard error why an engine is left out."""
    length = 4 * options.output_len + 256
    threads = options.threads or available_processors()
    room = servers.Room(1, length + -length % _CONTEXT_STEP, threads)
    if options.drafter == "twin":
        (draft,) = weights_of(options.model, ["q4_k_m"])
        flags = twin_flags(draft.gguf, options.draft_tokens)
    else:
        flags = ngram_flags(options.draft_tokens)
    for engine in (OURS, *options.peers):
        for drafts, more in flags.get(engine, {}).items():
            try:
                start = _start(engine, weights, room, more, options)
            except FileNotFoundError as error:
                print(f"{engine} is left out: {error}", file=sys.stderr)
                break
            print(f"starting {engine}, {drafts}", file=sys.stderr)
            one = running(engine, start.command, start.environment, start.find_url)
            yield Measured(stack.enter_context(one), engine, drafts)


def _start(
    engine: str, weights: Weights, room: servers.Room, more: list[str], options: argparse.Namespace
) -> servers.Start:
    if engine != OURS:
        common = ["--enforce-eager"] if engine == servers.VLLM else []
        return servers.start_of(engine, options.peers_dir, weights, room, [*common, *more])
    command = vllmx(
        *("--model", str(weights.gguf), "--served-model-name", weights.name),
        *("--max-num-seqs", "1", "--max-model-len", str(room.tokens)),
        *("--num-threads", str(room.threads), *more),
    )
    return servers.Start(command, first_url)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("drafter", choices=("ngram", "twin"))
    add("--model", type=Path, required=True, help="folder of random_model.py --gguf with a chain")
    add("--peers", type=lambda text: text.split(","), default=[], help=f"of {','.join(PEERS)}")
    add("--rounds", type=int, default=3)
    add("--requests", type=int, default=2, help="requests of each server and round")
    add("--output-len", type=int, default=384, help="tokens of each answer, and of the file")
    add("--edit-every", type=int, default=24, help="tokens between edits, on average")
    add("--draft-tokens", type=int, default=0, help="where a number is set (16; twin: 4)")
    add("--threads", type=int, default=0, help="of each server (default: all processors)")
    add("--peers-dir", type=Path, default=BENCH / ".peers", help="where peers are installed")
    add("--json", type=output_file, help="write the table to this file")
    options = parser.parse_args()
    if unknown := ", ".join({*options.peers} - {*PEERS}):
        parser.error(f"unknown peer {unknown}; known: {', '.join(PEERS)}")
    options.peers_dir = options.peers_dir.absolute()
    options.draft_tokens = options.draft_tokens or (4 if options.drafter == "twin" else 16)
    (weights,) = weights_of(options.model, [])
    options.name = weights.name
    options.vocab_size = json.loads((options.model / "config.json").read_text())["vocab_size"]
    with ExitStack() as stack:
        started = list(launched(stack, weights, options))
        measure(started, options)
    plain = {one.engine: one for one in started if one.drafts == "off"}
    table = [one.record(plain[one.engine], started[0].answers) for one in started]
    if options.json:
        options.json.write_text(json.dumps(table, indent=1) + "\n")
    print(show(table, as_json=False))


if __name__ == "__main__":
    main()
