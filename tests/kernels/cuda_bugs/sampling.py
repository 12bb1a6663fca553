"""Bugs in the sources of the sampler."""

from __future__ import annotations

from .bug import Bug

SAMPLER = "test_cuda_sampler.py"
FEW = f"{SAMPLER}:few or flat or whole"
BUGS = (
    Bug("sample_noise.h", "nine rounds of Philox", "round < 10", "round < 9", SAMPLER),
    Bug("sample_rows.h", "the higher id wins a tie", "b.id < a.id", "b.id > a.id", SAMPLER),
    Bug("sample_select.h", "no barrier after the bins are cleared",
        "(&s.words[0][0])[b] = 0;\n    __syncthreads();", "(&s.words[0][0])[b] = 0;", SAMPLER),
    Bug("sample_select.h", "masses lose what they carry", "<< 2 * PIECE_BITS", "<< PIECE_BITS",
        SAMPLER),
    Bug("sample_select.h", "what is above is not taken off the count", "target -= above.count",
        "target -= 0", f"{SAMPLER}:flat"),
    Bug("sample_select.h", "what is above is not taken off the mass", "- above.mass;", "- 0;",
        SAMPLER),
    Bug("sample_select.h", "a bin of the next thread", "threadIdx.x * each + j, scan.found.before",
        "threadIdx.x * each, scan.found.before", SAMPLER),
    Bug("sample_select.h", "lists that are too long are trusted", "most > CANDIDATES", "most < 0",
        SAMPLER),
    Bug("sample_select.h", "the least logit is one too great", "return from_order(low);",
        "return from_order(low + 1);", f"{SAMPLER}:ties"),
    Bug("sample_threshold.cu", "bins keep what they held", "counts[b] = 0, masses[b] = 0;",
        "counts[b] = 0;", SAMPLER),
    Bug("sample_threshold.cu", "top_k takes one too few", "frame.above, filters.top_k, 0.f",
        "frame.above, filters.top_k - 1, 0.f", SAMPLER),
    Bug("sample_threshold.cu", "the last bin is not listed", "bin > frame.last",
        "bin >= frame.last", SAMPLER),
    Bug("sample_threshold.cu", "another share of the mass",
        "least = sum_before<THREADS>(scan, mass, frame.last)",
        "least = sum_before<THREADS>(scan, mass, BINS)", SAMPLER),
    Bug("sample_threshold.cu", "the whole row has something above it", "frame.above = {0, 0, 0};",
        "", SAMPLER),
    Bug("sample_few.cu", "what is as likely is not looked for", "whole || !may_lack",
        "true || !may_lack",
        f"{SAMPLER}:as_likely"),
    Bug("sample_few.cu", "one id too few", "{0, 0, 0}, top_k[row], 0.f",
        "{0, 0, 0}, top_k[row] - 1, 0.f",
        FEW),
    Bug("sample_few.cu", "the noise of another id", "mine.id & 1 ? odd",
        "mine.id & 2 ? odd", FEW),
    Bug("sample_few.cu", "a slot beyond the list", "slot >= CANDIDATES",
        "slot > CANDIDATES", FEW),
    Bug("sample.cu", "the noise of another id", "gumbel(words[j]))", "gumbel(words[0]))",
        SAMPLER),
    Bug("sample_edit.cu", "edits and penalties race", "  __syncthreads();  // an id", "  // an id",
        SAMPLER),
    Bug("sample_edit.cu", "a mask hides NaN", "mask && !refuses &&", "mask &&", SAMPLER),
    Bug("logprobs.cu", "ranks count the chosen id", "> logit ?", ">= logit ?", SAMPLER),
)  # fmt: skip
