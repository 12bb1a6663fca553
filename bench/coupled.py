"""Acceptance of draft tokens on the demo model next to the best that any rule could reach.

    python bench/coupled.py [--draft q4_k] [--temperature 0.7 1.0] [--requests 64] [--tokens 64]

The draft model is the target in another type. `optimal` is the mean of 1 - TV, the overlap of the
two distributions at each position of answers that the target drew: the acceptance of optimal
rejection sampling. `coupled` draws both models' tokens with the same noise, as vllmx does; `greedy`
drafts the draft model's most likely token; `own noise` draws the draft with other noise.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from vllmx import LLM, SamplingParams
from vllmx.bench.figures import show
from vllmx_core.arrays import NUMPY
from vllmx_core.sampling import gumbel_noise

PROMPTS = ("Once upon a time", "Tom and Lily", "One day, a", "The cat said", "In the park")


def logprobs_of(llm: LLM, rows: list[list[int]], starts: list[int]) -> np.ndarray:
    """(N, V) log-probabilities at the generated positions of all rows."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=-1)
    found = []
    for row, start in zip(rows, starts, strict=True):
        output = llm.generate([row], params, use_tqdm=False)[0]
        assert output.prompt_logprobs is not None
        for at in range(start, len(row)):
            entry = output.prompt_logprobs[at]
            assert entry is not None
            values = np.full(llm.info.vocab_size, -np.inf)
            for token, one in entry.items():
                values[token] = one.logprob
            found.append(values)
    return np.array(found)


def tempered(logprobs: np.ndarray, temperature: float) -> np.ndarray:
    """(N, V) probabilities at a temperature."""
    scaled = logprobs / temperature
    found = np.exp(scaled - scaled.max(axis=1, keepdims=True))
    return np.asarray(found / found.sum(axis=1, keepdims=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draft", default="q4_k")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.7, 1.0])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    common: dict[str, Any] = {"max_model_len": 256, "max_logprobs": -1}
    table = []
    with LLM("demo", **common) as target, LLM("demo", isq=options.draft, **common) as draft:
        for temperature in options.temperature:
            params = [
                SamplingParams(max_tokens=options.tokens, temperature=temperature, seed=seed)
                for seed in range(options.requests)
            ]
            prompts = [PROMPTS[seed % len(PROMPTS)] for seed in range(options.requests)]
            outputs = target.generate(prompts, params, use_tqdm=False)
            rows = [[*each.prompt_token_ids, *each.outputs[0].token_ids] for each in outputs]
            starts = [len(each.prompt_token_ids) for each in outputs]
            p = tempered(logprobs_of(target, rows, starts), temperature)
            q = tempered(logprobs_of(draft, rows, starts), temperature)
            noise, other = (
                gumbel_noise(
                    NUMPY, p, np.full(len(p), seed, np.uint64), np.arange(len(p), dtype=np.int32)
                )
                for seed in (1, 2)
            )
            with np.errstate(divide="ignore"):
                chosen = (np.log(p) + noise).argmax(axis=1)
                coupled = (np.log(q) + noise).argmax(axis=1)
                own = (np.log(q) + other).argmax(axis=1)
            table.append(
                {
                    "temperature": temperature,
                    "positions": len(p),
                    "optimal": round(float(np.minimum(p, q).sum(axis=1).mean()), 3),
                    "coupled": round(float((chosen == coupled).mean()), 3),
                    "greedy": round(float((chosen == q.argmax(axis=1)).mean()), 3),
                    "own noise": round(float((chosen == own).mean()), 3),
                }
            )
    print(show(table, as_json=options.json))


if __name__ == "__main__":
    main()
