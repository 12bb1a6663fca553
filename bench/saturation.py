"""Clients that send their next request when the last one is answered, over HTTP, beside a peer.

    python bench/saturation.py --model models/qwen3-0.6b-random
    python bench/saturation.py --model models/qwen3-0.6b-random --peer-url http://127.0.0.1:8000 \\
        --peer-model models/qwen3-0.6b-random

Starts `vllmx serve` with its defaults (`--flags` adds to them) and sends prompts of `--input-len`
ids, each answered by `--output-len` tokens, `--clients` at a time. `--peer-url` is any server with
OpenAI's completions, vLLM's for one: it gets the same requests, round by round in turn, so both
should be started with as many threads, and be idle otherwise. `bench/random_model.py` writes the
model.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from served import running, vllmx
from vllmx.bench.figures import show
from vllmx.bench.serving import Load, closed_loop

_NUM_IDS = 1000


def measure(options: argparse.Namespace) -> list[dict[str, float | int | str]]:
    """A record for each server, number of clients and round; a first, short round is not kept."""
    counts = [int(count) for count in options.clients.split(",")]
    name = options.model.name
    flags = ("--model", str(options.model), "--served-model-name", name, *options.flags.split())
    records: list[dict[str, float | int | str]] = []
    with running("vllmx", vllmx(*flags)) as server:
        servers = [("vllmx", server.url, name)]
        if options.peer_url is not None:
            servers.append(("peer", options.peer_url.rstrip("/"), options.peer_model or name))
        for number in range(options.rounds + 1):
            for count in counts:
                for label, url, model in servers:
                    num_requests = count * (options.requests if number else 1)
                    load = Load(
                        url,
                        model,
                        _NUM_IDS,
                        options.input_len,
                        options.output_len,
                        num_requests,
                        seed=number,
                    )
                    found = asyncio.run(closed_loop(load, count))
                    if number:
                        records.append({"server": label, "round": number, **found})
    return records


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--clients", default="1,16", help="numbers of clients")
    parser.add_argument("--requests", type=int, default=8, help="of each client")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--flags", default="", help="more flags of vllmx serve")
    parser.add_argument("--peer-url", help="another server, without /v1")
    parser.add_argument("--peer-model", help="the model's name there (default: the folder's)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    print(show(measure(options), as_json=options.json))


if __name__ == "__main__":
    main()
