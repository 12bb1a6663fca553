"""Speed of decoding with sparse attention and with full attention over the same layers.

    python bench/sparse_attention.py [--contexts 2000,8000,32000] [--layers 2] [--steps 20]
        [--rounds 5] [--threads N]

Layers of a quarter of GLM-5's width (1,536 features, 16 heads, 8 heads of the indexer; latents of
512 and 64 numbers and 2,048 picks as published) with random weights and a dense feed-forward, on
the CPU backend. The pages hold random numbers, so that picks are scattered. Both models take turns
in each round. The shortest step of one row in each round, sampling included: its median over the
rounds, and the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
from vllmx_core.backend import LoadedModel, LoadOptions
from vllmx_core.plugins.registry import load_registry
from vllmx_core.system.processors import available_processors
from vllmx_cpu.backend import CpuBackend
from vllmx_cpu.loaded import CpuLoadedModel
from vllmx_testing.model_suite import random_weights
from vllmx_testing.plans import Row, make_plan, sampling_rows

PAGE = 16
CONFIG: dict[str, Any] = {
    "vocab_size": 1024, "hidden_size": 1536, "intermediate_size": 3072,
    "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 512,
    "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
    "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 8, "first_k_dense_replace": 1 << 10,
    "n_routed_experts": 8, "moe_intermediate_size": 64, "n_group": 1, "topk_group": 1,
    "max_position_embeddings": 1 << 17, "rope_theta": 1e6, "torch_dtype": "bfloat16",
}  # fmt: skip
MODELS = {"sparse": "GlmMoeDsaForCausalLM", "full": "Glm4MoeLiteForCausalLM"}


def load(name: str, layers: int, context: int, threads: int) -> LoadedModel:
    """A model of random weights whose pages hold random numbers."""
    config = CONFIG | {"architectures": [MODELS[name]], "num_hidden_layers": layers}
    if name == "full":
        config = {key: value for key, value in config.items() if not key.startswith("index")}
    model = load_registry().model_for(config).load()(config)
    blocks = -(-context // PAGE) + 1
    options = LoadOptions(
        max_model_len=blocks * PAGE,
        max_num_seqs=1,
        max_num_batched_tokens=64,
        block_size=PAGE,
        num_kv_blocks=blocks,
        num_threads=threads,
        kv_cache_dtype="bf16",
    )
    loaded = CpuBackend().load(model, random_weights(model), options)
    assert isinstance(loaded, CpuLoadedModel)
    random = np.random.default_rng(0)
    for pages in loaded.pages:
        for part in (pages.k, pages.v):
            values = random.standard_normal(part.nbytes // 2, np.float32).view(np.uint32) >> 16
            part[: 2 * len(values)] = values.astype(np.uint16).view(np.uint8)
    return loaded


def step_ms(loaded: LoadedModel, context: int, steps: int) -> float:
    """The shortest time of a step whose row has this context: others may use the machine."""
    rows, times = sampling_rows(1), []
    table = np.random.default_rng(1).permutation(loaded.info.num_kv_blocks).tolist()
    for number in range(steps):
        plan = make_plan([Row([number % 1000], context - 1, table)], PAGE)
        begin = time.perf_counter()
        loaded.step(plan, rows).result()
        times.append(1e3 * (time.perf_counter() - begin))
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--contexts", default="2000,8000,32000")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=available_processors())
    arguments = parser.parse_args()
    contexts = [int(part) for part in arguments.contexts.split(",") if part]
    models = {
        name: load(name, arguments.layers, max(contexts), arguments.threads) for name in MODELS
    }
    print("| context | sparse, ms | full, ms | full / sparse |\n|-|-|-|-|")
    for context in contexts:
        found: dict[str, list[float]] = {name: [] for name in MODELS}
        for _ in range(arguments.rounds):
            for name, loaded in models.items():
                found[name].append(step_ms(loaded, context, arguments.steps))
        sparse, full = (statistics.median(found[name]) for name in MODELS)
        pairs = zip(found["full"], found["sparse"], strict=True)
        ratio = statistics.median(one / other for one, other in pairs)
        print(f"| {context:,} | {sparse:.2f} | {full:.2f} | {ratio:.2f} |", flush=True)
    for loaded in models.values():
        loaded.close()


if __name__ == "__main__":
    main()
