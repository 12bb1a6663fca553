"""Greedy ids of a model of Qwen3-0.6B's shape beside transformers: one line, right or WRONG.

    python bench/gpu/ids.py [--rehearse]

Weights are random, of the values that bf16 holds. transformers computes in float32; where two
logits lie closer together than bf16 rounds, either id is right. So each id that the backend chose
must have, by transformers and behind the same tokens, nearly the greatest logit.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from checkpoints import SHAPES
from devices import opener
from vllmx_core.backend import LoadedModel, LoadOptions
from vllmx_core.plan import SamplingRows
from vllmx_core.weights.tensor import bf16_to_f32, f32_to_bf16
from vllmx_cuda.backend import CudaBackend
from vllmx_models.families.qwen import qwen3
from vllmx_testing.plans import Row, make_plan, sampling_rows
from vllmx_testing.synthetic import ArraySource

PROMPT, TOKENS, PAGE = 37, 32, 16
OPTIONS = LoadOptions(
    dtype="bf16", max_model_len=128, max_num_seqs=2, max_num_batched_tokens=128, num_kv_blocks=16
)
TOLERANCE = 0.05
"""The tolerance as a share of the spread of a position's logits: what two to thirty layers in bf16
are off by."""


def weights(config: dict[str, Any]) -> dict[str, Any]:
    """Name in a checkpoint -> float32 values that bf16 holds, on the scale of trained models."""
    random, found = np.random.default_rng(4), {}
    for spec in qwen3(dict(config)).weights():
        for part in spec.parts:
            if spec.kind == "vector":
                found[part.name] = np.ones(part.rows, np.float32)
            elif part.name not in found:
                values = random.standard_normal((part.rows, spec.cols), np.float32)
                found[part.name] = bf16_to_f32(f32_to_bf16(values * spec.cols**-0.5))
    return found


def chosen_ids(
    config: dict[str, Any], arrays: dict[str, Any], prompt: list[int], rehearse: bool
) -> list[int]:
    """Greedy ids of the backend: the prompt in one step, then a token a step."""
    loaded = CudaBackend(opener(rehearse)).load(qwen3(dict(config)), ArraySource(arrays), OPTIONS)
    ids = greedy_ids(loaded, prompt)
    loaded.close()
    return ids


def greedy_ids(loaded: LoadedModel, prompt: list[int]) -> list[int]:
    rows: SamplingRows = sampling_rows(1, temperature=0.0)
    blocks, ids = list(range(-(-128 // PAGE))), []
    tokens, context = prompt, 0
    for _ in range(TOKENS):
        plan = make_plan([Row(tokens, context, blocks)], PAGE)
        ids.append(int(loaded.step(plan, rows).result().ids[0]))
        context += len(tokens)
        tokens = ids[-1:]
    return ids


def verdict(
    config: dict[str, Any], arrays: dict[str, Any], prompt: list[int], ids: list[int], device: str
) -> tuple[bool, str]:
    """Whether transformers agrees, and a line that says so."""
    import torch
    import transformers

    known = {k: v for k, v in config.items() if k not in ("architectures", "torch_dtype")}
    with torch.device(device):
        model: Any = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**known))
    state = {name: torch.from_numpy(values) for name, values in arrays.items()}
    if known["tie_word_embeddings"]:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    model.eval()
    with torch.no_grad():
        all_ids = torch.tensor([prompt + ids[:-1]], device=device)
        logits = model(all_ids).logits[0, len(prompt) - 1 :].float().cpu().numpy()
    best, taken = logits.max(1), logits[np.arange(len(ids)), ids]
    gaps = (best - taken) / logits.std(1)
    equal = int((logits.argmax(1) == ids).sum())
    right = bool(gaps.max() < TOLERANCE)
    return right, (
        f"{'right' if right else 'WRONG'}: {equal} of {len(ids)} greedy ids are transformers'; the"
        f" others' logits lie at most {gaps.max():.2g} of the spread below (limit {TOLERANCE})"
    )


def main() -> int:
    rehearse = "--rehearse" in sys.argv
    config = SHAPES["tiny" if rehearse else "0.6b"]
    arrays = weights(config)
    prompt = np.random.default_rng(3).integers(0, config["vocab_size"], PROMPT).tolist()
    ids = chosen_ids(config, arrays, prompt, rehearse)
    right, line = verdict(config, arrays, prompt, ids, "cpu" if rehearse else "cuda")
    print(line)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
