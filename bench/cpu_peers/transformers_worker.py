"""Measures Hugging Face transformers on torch: `forward` with its own cache, greedy, no `generate`.

A batch at a long context takes one prefill, whose cache is then copied for every row.
"""

from __future__ import annotations

import os
from functools import partial

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import DynamicCache

from cpu_peers.cases import Case
from cpu_peers.worker import job_from_argv, rate, record


def prefill(model: PreTrainedModel, num_tokens: int) -> DynamicCache:
    """Runs random tokens through the model in one piece."""
    cache = DynamicCache(config=model.config)
    ids = torch.randint(model.config.vocab_size, (1, num_tokens))
    model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache


def decode(model: PreTrainedModel, cache: DynamicCache, case: Case) -> None:
    ids = torch.randint(model.config.vocab_size, (case.batch, 1))
    for _ in range(case.num_steps):
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
        ids = logits[:, -1].argmax(-1, keepdim=True)


def measure(model: PreTrainedModel, case: Case) -> float:
    if case.kind == "prefill":
        return rate(case.context, lambda: prefill(model, case.context))
    cache = prefill(model, case.num_prompt_tokens)
    cache.batch_repeat_interleave(case.batch)
    return rate(case.batch * case.num_steps, lambda: decode(model, cache, case))


def main() -> None:
    job = job_from_argv()
    torch.set_num_threads(job.threads)
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.bfloat16)
    with torch.inference_mode():
        prefill(model, 64)
        for case in job.cases:
            record(job, case, partial(measure, model, case))


if __name__ == "__main__":
    main()
