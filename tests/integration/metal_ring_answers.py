"""What `test_metal_ring` asks of one rank and of two that MLX joins: a process has one ring."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

import psutil
from vllmx import LLM, SamplingParams
from vllmx_core.errors import RankLostError

LIMITS: dict[str, Any] = {
    "backend": "metal",
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "num_kv_blocks": 24,
    "max_model_len": 128,
}
SYSTEM = "You are a teller of short stories for small children, who like animals. "
PROMPTS = [SYSTEM + "Once upon a time", SYSTEM + "The capital of", "A cat"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, logprobs=2)
BAD_WORDS = SamplingParams(temperature=0.0, max_tokens=4, bad_words=["Once upon", "there was"])


def answers(llm: LLM) -> list[list[int]]:
    """Prompts in chunks with a common prefix, twice, so that there are hits; rows sampled late."""
    found = []
    for params in (GREEDY, BAD_WORDS, GREEDY):
        found += [list(one.outputs[0].token_ids) for one in llm.generate(PROMPTS, params)]
    return found


def after_a_kill(llm: LLM) -> tuple[str, float]:
    """What a request is told of a rank that dies while it is answered, and after how long."""
    (rank,) = [one for one in psutil.Process().children() if "rank_process" in str(one.cmdline())]
    killed_s = time.monotonic()
    rank.kill()
    while time.monotonic() < killed_s + 240.0:
        try:
            llm.generate(PROMPTS, GREEDY)
        except RankLostError as error:
            return error.message, time.monotonic() - killed_s
    raise AssertionError("the end of a rank went unnoticed")


def main() -> None:
    log: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: log.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("vllmx.metal").addHandler(handler)
    logging.getLogger("vllmx").setLevel("INFO")
    with LLM("demo", **LIMITS) as llm:
        expected = answers(llm)
    with LLM("demo", tensor_parallel_size=2, num_threads=2, **LIMITS) as llm:
        found = answers(llm)
        message, seconds = after_a_kill(llm)
    print(
        json.dumps(
            {
                "log": log,
                "expected": expected,
                "found": found,
                "message": message,
                "seconds": seconds,
            }
        )
    )


if __name__ == "__main__":
    sys.exit(main())
