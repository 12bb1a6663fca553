"""The same steps by transformers and torch: prefills, and decode captured in CUDA graphs, as it is
and compiled.

    python bench/gpu/torch_decode.py "torch 0.6b" OUT.json [--ceilings FILE] [--rehearse]

The model is made on the device from the config alone, bf16. First prefills, eager, for products
bound them ("prefill"); then decode with a static cache of the context: eager code in a captured
graph, which takes seconds ("captured"), and torch.compile in its mode "reduce-overhead", which
captures graphs by itself ("decode"). Compiling costs most of the time: few cases are measured,
those that were are written at once, and one that fails leaves its error.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from checkpoints import COMMON, SHAPES, prefill_flop, share

STARTED_S = time.perf_counter()
CASES = ((1, 1024), (64, 1024), (16, 1024), (256, 1024))
PREFILLS = (512, 2048, 8192)
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
    compiled = _compiled(model, rehearse)
    weights = sum(p.numel() for n, p in model.named_parameters() if "embed_tokens" not in n)
    if config.tie_word_embeddings:
        weights += config.vocab_size * config.hidden_size
    values = 2 * config.num_hidden_layers * COMMON["head_dim"] * COMMON["num_key_value_heads"]
    for length in (24,) if rehearse else PREFILLS:
        if time.perf_counter() > deadline_s:
            break
        prefill = partial(_prefill, model, SHAPES[shape], length, device, ceilings)
        _note(found, f"prefill {length}", prefill)
        out.write_text(json.dumps(found, indent=1))
    cases = ((1, 64),) if rehearse else CASES
    for kind, (batch, context) in [(k, c) for k in ("captured", "decode") for c in cases]:
        name = f"{kind} {batch} x {context}"
        if time.perf_counter() > deadline_s:
            found["cut"] = f"out of time before {name}"
            break
        forward = compiled if kind == "decode" else model
        read = 2 * (weights + batch * context * values)
        decode = partial(_decode, model, forward, (batch, context), read, device, ceilings)
        _note(found, name, decode)
        out.write_text(json.dumps(found, indent=1))
    out.write_text(json.dumps(found, indent=1))
    return found


def _note(found: dict[str, Any], name: str, case: Callable[[], dict[str, float | None]]) -> None:
    """What a case finds, or how it fails."""
    try:
        found[name] = case()
    except Exception as error:
        traceback.print_exc()
        found[f"{name} failed"] = f"{type(error).__name__}: {error}"[:300]


def _decode(
    model: Any,
    forward: Any,
    case: tuple[int, int],
    read: int,
    device: str,
    ceilings: dict[str, float],
) -> dict[str, float | None]:
    """read: bytes of a step."""
    seconds = _decode_s(model, forward, *case, device)
    return {
        "device_ms": seconds * 1e3,
        "tokens_s": case[0] / seconds,
        "share_of_copy": share(read / seconds / 1e9, ceilings.get("copy_gb_s")),
    }


def _prefill(
    model: Any, config: Any, length: int, device: str, ceilings: dict[str, float]
) -> dict[str, float | None]:
    """One prompt into a cache that grows, and the logits of its last token."""
    import torch

    ids = torch.arange(length, device=device)[None] % config["vocab_size"]
    with torch.inference_mode():
        seconds = _median_s(lambda: model(input_ids=ids, logits_to_keep=1), 3, device)
    flop_s = prefill_flop(config, length) / seconds
    return {
        "device_ms": seconds * 1e3,
        "tokens_s": length / seconds,
        "share_of_matmul": share(flop_s / 1e12, ceilings.get("bf16_tflop_s")),
    }


def _median_s(step: Callable[[], object], steps: int, device: str) -> float:
    """Seconds of a step by the wall clock, steps one behind the other without waiting."""
    import torch

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    for _ in range(4):  # compiles
        step()
    wait()
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        wait()
        times.append((time.perf_counter() - begin) / steps)
    return statistics.median(times)


def _compiled(model: Any, rehearse: bool) -> Any:
    """Compiles a function; without a GPU it is traced as for one and then run as it is."""
    import torch

    if rehearse:
        return torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
    return torch.compile(model, mode="reduce-overhead", dynamic=False)


def _decode_s(model: Any, forward: Any, batch: int, context: int, device: str) -> float:
    """Seconds of a step. Attention runs over the whole static cache, however few of its places are
    filled."""
    import torch
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=context)
    ids = torch.zeros((batch, 1), dtype=torch.long, device=device)

    def advance(call: Any) -> None:
        output = call(input_ids=ids, past_key_values=cache, use_cache=True)
        ids.copy_(output.logits[:, -1].argmax(-1, keepdim=True))

    with torch.inference_mode():
        # the cache makes its tensors in its first step: inside a compiled one they would not be
        # known to stay where they are, and torch would not capture
        advance(model)
        step = _captured(lambda: advance(model)) if forward is model else lambda: advance(forward)
        return _median_s(step, STEPS, device)


def _captured(call: Callable[[], None]) -> Callable[[], None]:
    """Replays one CUDA graph; without a GPU, the call itself."""
    import torch

    if not torch.cuda.is_available():
        return call
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    replay: Callable[[], None] = graph.replay
    return replay


if __name__ == "__main__":
    sys.exit(main())
