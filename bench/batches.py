"""Tokens a second of `vllmx run-batch` beside those of `LLM.generate`, on the same prompts.

    python bench/batches.py [--model demo] [--rows 32] [--requests 512] [--tokens 64] [--rounds 3]
        [--json]

At most `--rows` run together. A batch is run with all of the requests and with an eighth of them,
in turn with `generate`; what the greater one takes longer is the time of the rest of its requests,
without start and end. So an eighth must be more than the rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from vllmx import LLM, EngineConfig, SamplingParams
from vllmx.bench.figures import show
from vllmx_server.batches.offline import run_batch

_SMALL = 8
"""The smaller batch has one request of so many."""


def prompts(count: int, round_number: int) -> list[str]:
    """Others in each round, so that no cache knows them."""
    return [
        f"{round_number}/{number}: once upon a time a fox found a lamp" for number in range(count)
    ]


def generate_s(llm: LLM, texts: list[str], tokens: int) -> float:
    """Seconds of one call."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    started = time.perf_counter()
    outputs = llm.generate(texts, params, use_tqdm=False)
    assert all(len(output.outputs[0].token_ids) == tokens for output in outputs)
    return time.perf_counter() - started


def batch_s(config: EngineConfig, texts: list[str], tokens: int) -> float:
    """Seconds of one run, start and end included."""
    body = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions",
         "body": {"prompt": text, **body}}
        for number, text in enumerate(texts)
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder) / "in.jsonl", Path(folder) / "out.jsonl"
        source.write_text("".join(json.dumps(line) + "\n" for line in lines))
        started = time.perf_counter()
        batch = run_batch(config, source, output, lambda _: None)
        elapsed = time.perf_counter() - started
    assert (batch.completed, batch.failed) == (len(texts), 0), batch
    return elapsed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    engine = {"model": options.model, "max_num_seqs": options.rows}
    config = EngineConfig(**engine)
    count, tokens = options.requests, options.tokens
    found: dict[str, list[float]] = {"generate": [], "batch": []}
    with LLM(**engine) as llm:
        generate_s(llm, prompts(count // _SMALL, -1), tokens)
        for number in range(options.rounds):
            texts = prompts(count, number)
            found["generate"].append(count * tokens / generate_s(llm, texts, tokens))
            some = texts[: count // _SMALL]
            rest_s = batch_s(config, texts, tokens) - batch_s(config, some, tokens)
            found["batch"].append((count - len(some)) * tokens / rest_s)
    records: list[dict[str, Any]] = [
        {
            "what": what,
            "tokens_per_s": round(statistics.median(values)),
            "min": round(min(values)),
            "max": round(max(values)),
        }
        for what, values in found.items()
    ]
    print(show(records, as_json=options.json))


if __name__ == "__main__":
    main()
