"""The models of `test_metal_ring`, and their logits."""

from __future__ import annotations

from typing import Any

import numpy as np
from vllmx_core.backend import LoadedModel, LoadOptions
from vllmx_core.plan import F32
from vllmx_testing.plans import Row, make_plan, sampling_rows

from .test_sharding import CONFIGS, LLAMA, TEXT

BESIDE = LLAMA | {
    "architectures": ["CohereForCausalLM"],
    "model_type": "cohere",
    "attention_bias": True,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.25,
}
"""Attention and MLP read the same, so that their sums do not depend on each other; one rank adds a
bias."""
MODELS: dict[str, dict[str, Any]] = {
    "tied": CONFIGS["2 kv heads, tied"],
    "biases": CONFIGS["biases everywhere"],
    "experts": CONFIGS["a shared expert"],
    "beside": BESIDE,
}


def options(**more: Any) -> LoadOptions:
    return LoadOptions(dtype="f32", max_model_len=64, num_kv_blocks=4, max_num_seqs=2, **more)


def chunks(loaded: LoadedModel) -> F32:
    """(T, V) logits of the text in two steps, the second enqueued before the first is read, and
    between them one of another row that has no logits."""
    handles = []
    for begin, end in ((0, 9), (0, 3), (9, len(TEXT))):
        wants, block = ("none", 1) if end == 3 else ("all", 3)
        count = 0 if wants == "none" else end - begin
        whole = np.arange(count, dtype=np.int32)
        rows = sampling_rows(count, num_logprobs=[0] * count, whole=whole)
        plan = make_plan([Row(TEXT[begin:end], begin, [block], wants)], 16)
        if len(handles) == 2:
            handles[0] = handles[0].result()
        handles.append(loaded.step(plan, rows))
    found = [handles[0], *(handle.result() for handle in handles[1:])]
    return np.concatenate([one.logits for one in found if one.logits is not None])
