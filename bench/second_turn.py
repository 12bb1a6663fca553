"""Time to the first token where a model with recurrent layers has seen most of a prompt before.

    python bench/random_model.py models/hybrid --shape qwen3.5-moe-small
    python bench/second_turn.py models/hybrid --rounds 3

Two cases, by `LLM.generate` with one token wanted, beside a prompt of the same length that nobody
has seen: the second turn of a conversation, behind a first one of so many tokens and its answer;
and a system prompt of so many tokens that is met for the third time (the second one finds its
blocks without states, and leaves some there). Random ids, the same on every machine; medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
from output_file import output_file
from vllmx import LLM, SamplingParams

QUESTION, ANSWER = 40, 100
"""Tokens of what a user adds, and of an answer."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--json", type=output_file)
    args = parser.parse_args()
    longest = args.tokens + 2 * QUESTION + ANSWER + 8
    with LLM(str(args.folder), backend=args.backend, max_model_len=longest, max_num_seqs=4) as llm:
        bench = Bench(llm, args.tokens)
        bench.first_token(bench.text(256))  # whatever is made on the first call
        rounds = [(bench.second_turn(), bench.system_prompt()) for _ in range(args.rounds)]
    found = {}
    for name, times in zip(
        ("second turn", "system prompt"), zip(*rounds, strict=True), strict=True
    ):
        seen, unseen = (statistics.median(column) for column in zip(*times, strict=True))
        found[name] = {"seen_s": seen, "unseen_s": unseen, "ratio": seen / unseen}
        print(f"{name}: {seen:.3f} s, unseen {unseen:.2f} s, ratio {seen / unseen:.3f}")
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1))


class Bench:
    """Times of one loaded model; each text is new unless it repeats another on purpose."""

    def __init__(self, llm: LLM, tokens: int) -> None:
        self._llm, self._tokens = llm, tokens
        self._random = np.random.default_rng(0)

    def text(self, length: int) -> list[int]:
        ids: list[int] = self._random.integers(0, self._llm.info.vocab_size, length).tolist()
        return ids

    def first_token(self, prompt: list[int]) -> float:
        return self._run(prompt, 1)[0]

    def second_turn(self) -> tuple[float, float]:
        """Seconds to the first token of a second turn, and of as long a text that is new."""
        first = self.text(self._tokens)
        answer = self._run(first, ANSWER)[1]
        prompt = [*first, *answer, *self.text(QUESTION)]
        return self.first_token(prompt), self.first_token(self.text(len(prompt)))

    def system_prompt(self) -> tuple[float, float]:
        """The same of a system prompt that is met for the third time."""
        system = self.text(self._tokens)
        for _ in range(2):
            self.first_token([*system, *self.text(QUESTION)])
        seen = self.first_token([*system, *self.text(QUESTION)])
        return seen, self.first_token(self.text(len(system) + QUESTION))

    def _run(self, prompt: list[int], tokens: int) -> tuple[float, list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        started = time.perf_counter()
        (output,) = self._llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        return time.perf_counter() - started, list(output.outputs[0].token_ids)


if __name__ == "__main__":
    main()
