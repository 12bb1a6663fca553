"""Measures vllmx as a user calls it: `LLM.generate` with scheduler, sampler and detokenizer."""

from __future__ import annotations

from functools import partial

from vllmx import LLM, SamplingParams

from cpu_peers.worker import affordable, job_from_argv, rate_of_generate, record


def main() -> None:
    job = job_from_argv()
    longest = max(case.num_prompt_tokens + case.num_steps + 1 for case in job.cases)
    llm = LLM(
        job.model,
        backend="cpu",
        num_threads=job.threads,
        max_model_len=longest,
        max_num_seqs=max(case.batch for case in job.cases),
        enable_prefix_caching=False,
    )

    def generate(prompts: list[list[int]], num_tokens: int) -> None:
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.0)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        for result in llm.generate(inputs, params, use_tqdm=False):
            if len(result.outputs[0].token_ids) != num_tokens:
                raise RuntimeError(f"a request ended early: {result.outputs[0].finish_reason}")

    generate([[1] * 64] * 2, 4)
    for case in affordable(job.cases):
        record(job, case, partial(rate_of_generate, case, generate))


if __name__ == "__main__":
    main()
