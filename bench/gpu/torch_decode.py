"""The same decode steps by transformers and torch: compiled, captured in CUDA graphs.

    python bench/gpu/torch_decode.py "torch 0.6b" OUT.json [--ceilings FILE] [--rehearse]

The model is made on the device from the config alone, bf16, with a static cache of the context;
torch.compile in its mode "reduce-overhead", which captures graphs. Compiling costs most of the
time: few cases are measured, and those that were are written at once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from checkpoints import COMMON, SHAPES

STARTED_S = time.perf_counter()
CASES = ((1, 1024), (64, 1024), (16, 1024), (256, 1024))
STEPS = 12


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", help="torch 0.6b or torch 8b")
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--ceilings", type=Path)
    parser.add_argument("--rehearse", action="store_true", help="tiny, eager, on the CPU")
    chosen = parser.parse_args()
    ceilings = json.loads(chosen.ceilings.read_text()) if chosen.ceilings else {}
    shape = "tiny" if chosen.rehearse else chosen.part.removeprefix("torch ")
    measure(shape, chosen.out, STARTED_S + chosen.seconds, ceilings, rehearse=chosen.rehearse)
    return 0


def measure(
    shape: str, out: Path, deadline_s: float, ceilings: dict[str, float], *, rehearse: bool
) -> dict[str, Any]:
    import torch
    import transformers

    device = "cpu" if rehearse else "cuda"
    found: dict[str, Any] = {"torch": torch.__version__, "transformers": transformers.__version__}
    config = transformers.Qwen3Config(
        **{k: v for k, v in SHAPES[shape].items() if k not in ("architectures", "torch_dtype")}
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model: Any = transformers.Qwen3ForCausalLM(config)
    model.eval()
    torch.set_default_dtype(torch.float32)
    forward = model if rehearse else torch.compile(model, mode="reduce-overhead", dynamic=False)
    weights = sum(p.numel() for n, p in model.named_parameters() if "embed_tokens" not in n)
    if config.tie_word_embeddings:
        weights += config.vocab_size * config.hidden_size
    values = 2 * config.num_hidden_layers * COMMON["head_dim"] * COMMON["num_key_value_heads"]
    for batch, context in ((1, 64),) if rehearse else CASES:
        if time.perf_counter() > deadline_s:
            found["cut"] = f"out of time before decode {batch} x {context}"
            break
        seconds = _decode_s(model, forward, batch, context, device)
        read = 2 * (weights + batch * context * values)
        found[f"decode {batch} x {context}"] = {
            "device_ms": seconds * 1e3, "tokens_s": batch / seconds,
            "share_of_copy": read / seconds / 1e9 / ceilings.get("copy_gb_s", float("inf")),
        }  # fmt: skip
        out.write_text(json.dumps(found, indent=1))
    out.write_text(json.dumps(found, indent=1))
    return found


def _decode_s(model: Any, forward: Any, batch: int, context: int, device: str) -> float:
    """Seconds of a step by the wall clock, steps one behind the other without waiting. Attention
    runs over the whole static cache, however few of its places are filled."""
    import torch
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=context)
    ids = torch.zeros((batch, 1), dtype=torch.long, device=device)

    def step() -> None:
        nonlocal ids
        output = forward(input_ids=ids, past_key_values=cache, use_cache=True)
        ids = output.logits[:, -1].argmax(-1, keepdim=True).clone()

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    with torch.inference_mode():
        for _ in range(4):  # compiles, captures
            step()
        wait()
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            for _ in range(STEPS):
                step()
            wait()
            times.append((time.perf_counter() - begin) / STEPS)
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())
