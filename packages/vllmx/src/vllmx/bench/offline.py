"""Throughput and latency of the engine in this process."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from vllmx.bench.figures import spread

if TYPE_CHECKING:
    from vllmx_engine.llm import LLM
    from vllmx_engine.wire.outputs import RequestOutput


def random_prompts(llm: LLM, count: int, length: int, seed: int) -> list[list[int]]:
    """Prompts of random ids, so that no two share a prefix."""
    source = random.Random(seed)  # noqa: S311 - test data
    vocab_size = llm.info.vocab_size
    return [[source.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


def throughput(
    llm: LLM, batches: Sequence[int], input_len: int, output_len: int, repeat: int
) -> Iterator[dict[str, float | int]]:
    """Measures, for each n, n prompts at once: the median run of `repeat`."""
    params = llm.sampling_params(max_tokens=output_len, ignore_eos=True, temperature=0.0)
    llm.generate(random_prompts(llm, 1, 8, 0), params, use_tqdm=False)  # warm
    for n in batches:
        runs = []
        for round_number in range(repeat):
            prompts = random_prompts(llm, n, input_len, 1000 * n + round_number)
            started = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            runs.append((time.perf_counter() - started, outputs))
        elapsed, outputs = sorted(runs, key=lambda run: run[0])[len(runs) // 2]
        yield {
            "n": n,
            "input_len": input_len,
            "output_len": output_len,
            "seconds": round(elapsed, 3),
            "requests_per_s": round(n / elapsed, 3),
            "output_tokens_per_s": round(n * output_len / elapsed, 2),
            "total_tokens_per_s": round(n * (input_len + output_len) / elapsed, 2),
            "decode_tokens_per_s": round(decode_rate(outputs), 2),
        }


def decode_rate(outputs: Sequence[RequestOutput]) -> float:
    """Tokens a second after the last prompt was in."""
    metrics = [output.metrics for output in outputs if output.metrics is not None]
    begin = max(m.first_token_s or 0.0 for m in metrics)
    end = max(m.last_token_s or 0.0 for m in metrics)
    tokens = sum(m.num_generation_tokens - 1 for m in metrics)
    return tokens / (end - begin) if end > begin else float("nan")


def latency(
    llm: LLM, batches: Sequence[int], input_len: int, output_len: int, repeat: int
) -> Iterator[dict[str, float | int]]:
    """Measures, for each n, the spread of the whole time and of the time to first token over
    `repeat` runs."""
    params = llm.sampling_params(max_tokens=output_len, ignore_eos=True, temperature=0.0)
    llm.generate(random_prompts(llm, 1, 8, 0), params, use_tqdm=False)  # warm
    for n in batches:
        whole, first = [], []
        for round_number in range(repeat):
            prompts = random_prompts(llm, n, input_len, 1000 * n + round_number)
            started = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            whole.append(time.perf_counter() - started)
            first += [
                output.metrics.first_token_s - output.metrics.arrival_s
                for output in outputs
                if output.metrics is not None and output.metrics.first_token_s is not None
            ]
        yield {
            "n": n,
            "input_len": input_len,
            "output_len": output_len,
            **spread("latency", whole),
            **spread("first_token", first),
        }
