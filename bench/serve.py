"""CPU of the API process for a streamed token, beside a bare hypercorn, and open-loop latencies.

    python bench/serve.py [--streams 64,256] [--kinds text] [--rounds 4] [--real]
        [--api-workers 2,4] [--rates 2,4,8 [--peers llama.cpp,vllm]] [--json]

`--streams`: so many requests start together and stream `--tokens` tokens each, one a step of
`--step-ms`, from a fake model that costs nothing: what is left is HTTP, detokenizing, JSON and the
way from the engine core. The same load runs on `bench/bare_sse.py` (hypercorn and starlette sending
ready bytes), round by round in turn. Figures are CPU microseconds of the API process alone for each
token, requests and connections included: median and range; with `--api-workers`, of all of them
together. `--kinds`: what is streamed, of `text` (completions), `content`, `reasoning` and `tools`
(chats that are read: markers of thoughts and calls are looked for, and are found once). `--real`
adds the demo model on the best backend.

`--rates`: Poisson arrivals a second on the demo model (`--model`), whatever the server does, with
latencies as clients see them, and the CPU time of a token in the processes that answer (`api_us`:
of llama-server, which has one, the whole) and in all of a server (`all_us`). `--peers`: servers of
other engines get the same requests, round by round in turn; `peers_cpu.py` sets them up. `--streams
""` leaves the first part out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import poisson
from served import Server, running, vllmx
from vllmx.bench.figures import show
from vllmx.bench.sse_client import Streamed, stream_completion
from vllmx_testing.fake_checkpoint import install_fake_plugin, make_fake_checkpoint

Record = dict[str, Any]


PROMPT = "Once upon a time a fox found a lamp."
CHAT = {"messages": [{"role": "user", "content": PROMPT}]}
TEXT = {"type": "object", "properties": {"text": {"type": "string", "minLength": 4000}}}
TELL = {"name": "tell", "parameters": TEXT | {"required": ["text"]}}
CALL = {
    "tools": [{"type": "function", "function": TELL}],
    "tool_choice": "required",
    "bad_words": ["h"],
}
"""A call that must come, and at once: `<think>` cannot be written without an h."""
KINDS: dict[str, tuple[str, Record]] = {
    "text": ("/v1/completions", {"prompt": PROMPT}),
    "content": ("/v1/chat/completions", CHAT),
    "reasoning": ("/v1/chat/completions", CHAT | {"chat_template_kwargs": {"think": True}}),
    "tools": ("/v1/chat/completions", CHAT | CALL),
}
TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}\n{% endfor %}{% if think %}<think>\n{% endif %}"
)
"""Thoughts are open where they are asked for. No special tokens: the fake model has none."""


async def one_round(server: Server, kind: str, streams: int, tokens: int) -> Record:
    """`streams` requests at once; CPU of the server over all of them."""
    path, asked = KINDS[kind]
    body = asked | {"max_tokens": tokens, "ignore_eos": True}
    before, started = server.cpu_s(), time.perf_counter()
    results = await asyncio.gather(
        *(stream_completion(server.url, path, body) for _ in range(streams))
    )
    elapsed = time.perf_counter() - started
    return _round_figures(results, server.cpu_s() - before, elapsed)


def _round_figures(results: list[Streamed], cpu_s: float, elapsed_s: float) -> Record:
    failed = [result.error for result in results if result.error is not None]
    if failed:
        raise SystemExit(f"{len(failed)} of {len(results)} streams failed: {failed[0]}")
    tokens = sum(result.completion_tokens for result in results)
    events = sum(len(result.event_s) for result in results)
    return {
        "us_per_token": cpu_s / tokens * 1e6,
        "us_per_event": cpu_s / events * 1e6,
        "events_per_token": events / tokens,
        "tokens_per_s": tokens / elapsed_s,
        "cpu_share": cpu_s / elapsed_s,
    }


def cpu_per_token(
    asked: list[tuple[Server, str]], streams: int, tokens: int, rounds: int
) -> list[Record]:
    """One record for each server and kind; they take turns, and a short round first is not
    counted."""
    found: list[list[Record]] = [[] for _ in asked]
    for number in range(rounds + 1):
        for (server, kind), records in zip(asked, found, strict=True):
            record = asyncio.run(one_round(server, kind, streams, tokens if number else 8))
            if number:
                records.append(record)
    return [
        _summary(server, kind, streams, records)
        for (server, kind), records in zip(asked, found, strict=True)
    ]


def _summary(server: Server, kind: str, streams: int, rounds: list[Record]) -> Record:
    costs = [float(record["us_per_token"]) for record in rounds]

    def median(name: str) -> float:
        return round(statistics.median(float(record[name]) for record in rounds), 2)

    return {
        "server": server.name,
        "kind": kind,
        "streams": streams,
        "us_per_token": median("us_per_token"),
        "min": round(min(costs), 2),
        "max": round(max(costs), 2),
        "us_per_event": median("us_per_event"),
        "events_per_token": median("events_per_token"),
        "tokens_per_s": median("tokens_per_s"),
        "cpu_share": median("cpu_share"),
        "memory_mb": round(server.memory_mb(), 1),
    }


def fake_model(folder: Path, step_s: float) -> Path:
    """A model that draws ids below 128 alone: whole characters, so that every token is an event."""
    behaviour: dict[str, Any] = {"step_s": step_s, "verify_pages": False, "strict": False}
    return make_fake_checkpoint(folder, vocab_size=128, eos_id=None, **behaviour)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", default="64,256", help="numbers of streams; empty: none")
    parser.add_argument("--kinds", default="text", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--real", action="store_true", help="the demo model as well")
    parser.add_argument("--api-workers", default="", help="the fake model with so many processes")
    parser.add_argument("--json", action="store_true")
    poisson.add_options(parser)
    options = parser.parse_args()
    tables: dict[str, list[Record]] = {}
    if options.streams:
        tables["cpu"] = _measure_cpu(options)
    if options.rates:
        tables |= poisson.measure(options)
    if options.json:
        print(json.dumps(tables, indent=1))
        return
    for table in tables.values():
        print(show(table, as_json=False), end="\n\n")


def _measure_cpu(options: argparse.Namespace) -> list[Record]:
    step_s = options.step_ms / 1e3
    records: list[Record] = []
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        plugins = {"PYTHONPATH": str(install_fake_plugin(Path(scratch) / "plugins"))}
        folder = fake_model(Path(scratch) / "model", step_s)
        script = str(Path(__file__).with_name("bare_sse.py"))
        bare = [sys.executable, script, "--step-ms", str(options.step_ms)]
        template = Path(scratch) / "template.jinja"
        template.write_text(TEMPLATE)
        flags = [
            *("--model", str(folder), "--backend", "fake", "--max-num-seqs", "256"),
            *("--chat-template", str(template)),
            *("--reasoning-parser", "qwen3", "--tool-parser", "hermes"),
        ]
        servers = [
            stack.enter_context(running("bare hypercorn", bare)),
            stack.enter_context(running("vllmx, fake model", vllmx(*flags), plugins)),
        ]
        for number in filter(None, options.api_workers.split(",")):
            several = vllmx(*flags, "--api-workers", number)
            name = f"vllmx, fake model, {number} API processes"
            servers.append(stack.enter_context(running(name, several, plugins)))
        if options.real:
            servers.append(stack.enter_context(running("vllmx, demo model", vllmx())))
        for streams in map(int, options.streams.split(",")):
            asked = [(server, "text") for server in servers]
            asked += [(servers[1], kind) for kind in options.kinds.split(",") if kind != "text"]
            records += cpu_per_token(asked, streams, options.tokens, options.rounds)
    return records


if __name__ == "__main__":
    main()
