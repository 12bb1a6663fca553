"""Tokens a second of `vllmx run-batch` and of /v1/batches beside those of `LLM.generate`, on the
same prompts.

    python bench/batches.py [--model demo] [--rows 32] [--requests 512] [--tokens 64] [--rounds 3]
        [--json]

    python bench/batches.py --beside [--lines 50000] [--rounds 3]

`--beside`: milliseconds of a chat of one token, asked again and again by one client: alone, beside
eight clients like it, and beside a batch of `--lines` lines; and what the batch makes meanwhile and
alone. The four take turns of a few seconds.

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
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from served import running, vllmx
from vllmx import LLM, EngineConfig, SamplingParams
from vllmx.bench.figures import show
from vllmx_server.offline import run_batch

_SMALL = 8
"""The smaller batch has one request of so many."""
_POLL_S = 0.05
_QUIET_S = 2.0
"""The seconds after which a batch makes way for nobody any more."""
_TURN_S = 5.0
"""The seconds that each case of `--beside` is looked at before it is the next one's turn."""


def prompts(count: int, round_number: int) -> list[str]:
    """Others in each round, so that no cache knows them, and all of one length: a digit more is a
    token more, and what is compared would have more to compute."""
    return [
        f"{round_number:04}/{number:04}: once upon a time a fox found a lamp"
        for number in range(count)
    ]


def generate_s(llm: LLM, texts: list[str], tokens: int) -> float:
    """Seconds of one call."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    started = time.perf_counter()
    outputs = llm.generate(texts, params, use_tqdm=False)
    assert all(len(output.outputs[0].token_ids) == tokens for output in outputs)
    return time.perf_counter() - started


def lines_of(texts: list[str], tokens: int) -> str:
    """The input of a batch."""
    body = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    lines = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": text, **body},
        }
        for number, text in enumerate(texts)
    ]
    return "".join(json.dumps(line) + "\n" for line in lines)


def http_batch_s(url: str, texts: list[str], tokens: int) -> float:
    """Seconds of one batch of a server, from its creation on."""
    with httpx.Client(base_url=url, timeout=60) as client:
        upload = {"file": ("in.jsonl", lines_of(texts, tokens))}
        file = client.post("/v1/files", files=upload, data={"purpose": "batch"}).json()
        ask = {"input_file_id": file["id"], "endpoint": "/v1/completions"}
        started = time.perf_counter()
        batch = client.post("/v1/batches", json=ask | {"completion_window": "24h"}).json()
        while batch["status"] not in ("completed", "failed", "expired", "cancelled"):
            time.sleep(_POLL_S)
            batch = client.get(f"/v1/batches/{batch['id']}").json()
        elapsed = time.perf_counter() - started
    assert batch["request_counts"]["completed"] == len(texts), batch
    return elapsed


def batch_s(config: EngineConfig, texts: list[str], tokens: int) -> float:
    """Seconds of one run, start and end included."""
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder) / "in.jsonl", Path(folder) / "out.jsonl"
        source.write_text(lines_of(texts, tokens))
        started = time.perf_counter()
        batch = run_batch(config, source, output, lambda _: None)
        elapsed = time.perf_counter() - started
    assert (batch.completed, batch.failed) == (len(texts), 0), batch
    return elapsed


class Batch:
    """A batch of a server that goes on until it is cancelled."""

    def __init__(self, client: httpx.Client, texts: list[str], tokens: int) -> None:
        self._client = client
        upload = {"file": ("in.jsonl", lines_of(texts, tokens))}
        file = client.post("/v1/files", files=upload, data={"purpose": "batch"}).json()
        body = {"input_file_id": file["id"], "endpoint": "/v1/completions"}
        made = client.post("/v1/batches", json=body | {"completion_window": "24h"}).json()
        self._path = f"/v1/batches/{made['id']}"
        while not self.completed():
            time.sleep(_POLL_S)

    def completed(self) -> int:
        """Lines that are answered."""
        count: int = self._client.get(self._path).json()["request_counts"]["completed"]
        return count

    def cancel(self) -> None:
        self._client.post(self._path + "/cancel")
        while self._client.get(self._path).json()["status"] != "cancelled":
            time.sleep(_POLL_S)


def chats_ms(client: httpx.Client, model: str, seconds: float) -> list[float]:
    """Milliseconds of each of the chats that one client asks for, one after the other."""
    found: list[float] = []
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        text = f"{len(found)}: what is the capital of France?"
        body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 1}
        begun_s = time.perf_counter()
        client.post("/v1/chat/completions", json=body).raise_for_status()
        found.append((time.perf_counter() - begun_s) * 1e3)
    return found


def beside(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What one client sees, by what goes on meanwhile."""
    waits: dict[str, list[float]] = {"alone": [], "eight clients": [], "a batch": []}
    rates: dict[str, list[float]] = {"a batch": [], "a batch alone": []}
    serve = vllmx(options.model)
    with (
        tempfile.TemporaryDirectory() as folder,
        running("vllmx", [*serve, "--data-dir", folder]) as server,
        httpx.Client(base_url=server.url, timeout=600) as client,
        ThreadPoolExecutor(8) as others,
    ):
        ask = partial(chats_ms, client, options.model)
        ask(1.0)
        for number in range(options.rounds):
            waits["alone"] += ask(_TURN_S)
            with httpx.Client(base_url=server.url, timeout=600) as busy:
                tasks = [
                    others.submit(chats_ms, busy, options.model, _TURN_S + 0.5) for _ in range(8)
                ]
                time.sleep(0.25)
                waits["eight clients"] += ask(_TURN_S)
                for task in tasks:
                    task.result()
            batch = Batch(client, prompts(options.lines, number), options.tokens)
            time.sleep(_QUIET_S)
            for name in ("a batch alone", "a batch"):
                before, begun_s = batch.completed(), time.perf_counter()
                if name in waits:
                    waits[name] += ask(_TURN_S)
                else:
                    time.sleep(_TURN_S)
                took_s = time.perf_counter() - begun_s
                rates[name].append((batch.completed() - before) / took_s)
            batch.cancel()
    found: list[dict[str, Any]] = []
    for name in ("alone", "eight clients", "a batch", "a batch alone"):
        record: dict[str, Any] = {"beside": name}
        if name in waits:
            p50, p90 = np.percentile(np.array(waits[name]), [50, 90])
            record |= {"p50_ms": round(float(p50), 1), "p90_ms": round(float(p90), 1)}
        if name in rates:
            record["lines_per_s"] = round(statistics.median(rates[name]), 1)
        found.append(record)
    return found


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
    parser.add_argument("--beside", action="store_true", help="what others feel of a batch")
    parser.add_argument("--lines", type=int, default=50_000)
    options = parser.parse_args()
    if options.beside:
        print(show(beside(options), as_json=options.json))
        return
    engine = {"model": options.model, "max_num_seqs": options.rows}
    config = EngineConfig(**engine)
    count, tokens = options.requests, options.tokens
    found: dict[str, list[float]] = {"generate": [], "run-batch": [], "/v1/batches": []}
    serve = vllmx(options.model, "--max-num-seqs", str(options.rows))
    with (
        tempfile.TemporaryDirectory() as folder,
        running("vllmx", [*serve, "--data-dir", folder]) as server,
        LLM(**engine) as llm,
    ):
        generate_s(llm, prompts(count // _SMALL, -1), tokens)
        for number in range(options.rounds):
            texts = prompts(count, number)
            found["generate"].append(count * tokens / generate_s(llm, texts, tokens))
            some = texts[: count // _SMALL]
            rest = (count - len(some)) * tokens
            rest_s = batch_s(config, texts, tokens) - batch_s(config, some, tokens)
            found["run-batch"].append(rest / rest_s)
            texts = prompts(count, 1000 + number)
            more_s = http_batch_s(server.url, texts, tokens)
            some_s = http_batch_s(server.url, prompts(len(some), 2000 + number), tokens)
            found["/v1/batches"].append(rest / (more_s - some_s))
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
