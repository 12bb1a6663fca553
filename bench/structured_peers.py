"""What structured output costs over HTTP, of several engines in one run; each beside itself.

    python bench/structured_peers.py vllmx=http://localhost:8000 vllm=http://localhost:8100
        llama.cpp=http://localhost:8080 [--model NAME] [--rows 32] [--tokens 64] [--rounds 3]

The servers run already, with the same model and room for twice the rows. Rounds go through engines
and cases in turn. Of each engine: tokens a second of rows that are free and of rows that follow a
schema; the time to the first token of a prompt that is free, and of one whose schema the engine
has seen; p99 between the tokens of one free stream while clients send plain prompts, and while they
send schemas that are refused or that take long to compile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections import defaultdict
from typing import Any

from structured import CONTACT, ENDLESS
from vllmx.bench.sse_client import Streamed, stream_completion

Body = dict[str, Any]
PATH = "/v1/completions"
_MOST_S = 45
"""A stream that takes longer beside an attack counts as endless."""
LONG = ENDLESS | {"minItems": 60}
"""llama.cpp writes every repetition out, and refuses more than some thousands."""
_PLAIN_S = 1.1
"""The seconds between plain prompts, so that as many are answered as of those with hostile schemas.
"""
_HOSTILE: tuple[Body, ...] = (
    {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(5000)}},
    {"enum": [f"choice number {i} of many" for i in range(20_000)]},
    {"type": "string", "pattern": "^(a?){60}(b|c|[d-f]*){40}$"},
    {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}},
    {
        "type": "array",
        "items": {"type": "array", "minItems": 500, "maxItems": 2000},
        "minItems": 900,
        "maxItems": 4000,
    },
)


def hostile(number: int) -> Body:
    """One that no cache knows."""
    return _HOSTILE[number % len(_HOSTILE)] | {"title": f"number {number}"}


class Engine:
    """A server under test. Raises RuntimeError where it refuses what must be answered."""

    def __init__(self, name: str, url: str, model: str) -> None:
        self.name = name
        self._url = url
        self._model = model
        self.found: dict[str, list[float]] = defaultdict(list)
        self.num_hostile = 0

    def _body(self, prompt: str, tokens: int, schema: Body | None) -> Body:
        body: Body = {"model": self._model, "prompt": prompt, "max_tokens": tokens}
        body |= {"temperature": 1.0, "ignore_eos": True}
        if schema is not None and self.name == "llama.cpp":
            body["json_schema"] = schema
        elif schema is not None:
            body["structured_outputs"] = {"json": schema}
        return body

    async def ask(self, prompt: str, tokens: int, schema: Body | None = None) -> Streamed:
        found = await stream_completion(self._url, PATH, self._body(prompt, tokens, schema))
        if found.error is not None:
            raise RuntimeError(f"{self.name}: {found.error}")
        return found

    async def rows(self, case: str, rows: int, tokens: int, schema: Body | None) -> None:
        started = time.perf_counter()
        each = (self.ask(f"Data {row}:", tokens, schema) for row in range(rows))
        answers = await asyncio.gather(*each)
        seconds = time.perf_counter() - started
        count = sum(answer.completion_tokens for answer in answers)
        self._note(f"{case}: tokens/s", count / seconds)

    async def first_tokens(self, count: int) -> None:
        """Measures the first token of prompts that are free and of those with a schema that was
        seen before, in turn."""
        for _ in range(count):
            for case, schema in (("plain", None), ("known schema", CONTACT)):
                answer = await self.ask("A person:", 2, schema)
                self.found[f"{case}: first token ms"].append(1000 * answer.first_token_s)

    async def gaps(self, case: str, tokens: int, *, hostile: bool) -> None:
        """p99 of one stream, while two clients send short prompts, free ones or with hostile
        schemas: some of those pass, and so cost steps as other prompts do."""
        attackers = [asyncio.ensure_future(self._attack(hostile)) for _ in range(2)]
        try:
            async with asyncio.timeout(_MOST_S):
                answer = await self.ask("Once upon a time", tokens)
            gaps = sorted(1000 * gap for gap in answer.gaps_s[1:])
        except TimeoutError:
            gaps = [float("inf")] * 2
        for attacker in attackers:
            attacker.cancel()
        await asyncio.gather(*attackers, return_exceptions=True)
        self._note(f"{case}: p99 ms", gaps[round(0.99 * (len(gaps) - 1))])
        self._note(f"{case}: greatest gap ms", gaps[-1])

    def _note(self, case: str, value: float) -> None:
        self.found[case].append(value)
        print(f"{self.name}: {case} {value:.2f}", file=sys.stderr, flush=True)

    async def _attack(self, is_hostile: bool) -> None:
        while True:
            self.num_hostile += 1
            schema = hostile(self.num_hostile) if is_hostile else None
            await stream_completion(self._url, PATH, self._body("x", 1, schema))
            await asyncio.sleep(0.2 if is_hostile else _PLAIN_S)


async def measure(engines: list[Engine], rows: int, tokens: int, rounds: int) -> None:
    """The attacks come last, engine by engine, for some go on with what nobody waits for."""
    for engine in engines:
        await engine.rows("plain", 4, 8, None)
        await engine.rows("schema", 4, 8, LONG)
        await engine.first_tokens(1)
        engine.found.clear()
    for _ in range(rounds):
        for engine in engines:
            await engine.rows("plain", rows, tokens, None)
            await engine.rows("schema", rows, tokens, LONG)
            await engine.first_tokens(10)
    for engine in engines:
        for _ in range(rounds):
            await engine.gaps("beside plain prompts", 4 * tokens, hostile=False)
        for _ in range(rounds):
            await engine.gaps("beside hostile schemas", 4 * tokens, hostile=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engines", nargs="+", help="NAME=URL; vllmx, vllm or llama.cpp")
    parser.add_argument("--model", default="m", help="its name on the servers")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    engines = [
        Engine(name, url, options.model)
        for name, _, url in (each.partition("=") for each in options.engines)
    ]
    asyncio.run(measure(engines, options.rows, options.tokens, options.rounds))
    if options.json:
        print(json.dumps({engine.name: engine.found for engine in engines}))
        return
    for engine in engines:
        for case, values in engine.found.items():
            middle, least, most = statistics.median(values), min(values), max(values)
            print(f"{engine.name:10} {case:42} {middle:9.2f}   ({least:.2f} to {most:.2f})")


if __name__ == "__main__":
    main()
