"""Bugs in the sources of the sampler."""

from __future__ import annotations

from .bug import Bug

SAMPLER = "test_cuda_sampler.py"
BUGS = (
    Bug("sample_noise.h", "nine rounds of Philox", "round < 10", "round < 9", SAMPLER),
    Bug("sample_rows.h", "the higher id wins a tie", "b.id < a.id", "b.id > a.id", SAMPLER),
    Bug("sample.cu", "no barrier after the bins are cleared",
        "threadIdx.x + THRESHOLD_THREADS] = 0;\n    __syncthreads();",
        "threadIdx.x + THRESHOLD_THREADS] = 0;", SAMPLER),
    Bug("sample.cu", "top_k takes one too few", "limit, top_k[row], 0.f",
        "limit, top_k[row] - 1, 0.f", SAMPLER),
    Bug("sample.cu", "the noise of another id", "gumbel(words[j]))", "gumbel(words[0]))",
        SAMPLER),
    Bug("sample_edit.cu", "edits and penalties race", "  __syncthreads();  // an id", "  // an id",
        SAMPLER),
    Bug("sample_edit.cu", "a mask hides NaN", "mask && !refuses &&", "mask &&", SAMPLER),
    Bug("logprobs.cu", "ranks count the chosen id", "> logit ?", ">= logit ?", SAMPLER),
)  # fmt: skip
