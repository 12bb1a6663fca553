"""One decode step with sampling, launched kernel by kernel, for a profiler to look at.

    ncu ... python bench/gpu/profiled.py [--rehearse]

Two layers of Qwen3-0.6B's shape with its whole vocabulary, a context of 1,024, and the sampling
that Qwen3 asks for, so that linear_mma, paged_decode_mma and sample_candidates all run.
"""

from __future__ import annotations

import sys
from typing import Any

from checkpoints import SHAPES, RandomSource
from devices import opener
from vllmx_core.backend import LoadOptions
from vllmx_cuda.backend import CudaBackend
from vllmx_models.families.qwen import qwen3
from vllmx_testing.plans import Row, make_plan, sampling_rows

PAGE = 16


def main() -> int:
    rehearse = "--rehearse" in sys.argv
    context = 60 if rehearse else 1024
    config: dict[str, Any] = {**SHAPES["tiny" if rehearse else "0.6b"], "num_hidden_layers": 2}
    options = LoadOptions(
        dtype="bf16",
        max_model_len=2 * context,
        max_num_seqs=2,
        max_num_batched_tokens=context,
        num_kv_blocks=-(-2 * context // PAGE),
        enforce_eager=True,
    )
    backend = CudaBackend(opener(rehearse), tune_s=0)
    loaded = backend.load(qwen3(config), RandomSource(config, "bf16"), options)
    rows = sampling_rows(1, temperature=0.6, top_p=0.95, top_k=20, seed=1)
    blocks = list(range(-(-context // PAGE)))
    for tokens, before in (([7] * (context - 1), 0), ([7], context - 1)):
        plan = make_plan([Row(tokens, before, blocks)], PAGE)
        print(f"sampled {loaded.step(plan, rows).result().ids.tolist()}")
    loaded.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
