"""The metal backend on a Mac: batch 1, 8 and 32 in bf16, 8 and 4 bits, beside mlx-lm and llama.cpp.

    python bench/metal.py --model Qwen/Qwen3-0.6B                  # prints what it would run
    python bench/metal.py --model Qwen/Qwen3-0.6B --run --json result.json
    python bench/metal.py --model Qwen/Qwen3-0.6B --run --peers mlx-lm,llama.cpp \\
        --mlx-models mlx-community/Qwen3-0.6B-bf16,mlx-community/Qwen3-0.6B-4bit \\
        --gguf Qwen3-0.6B-Q4_0.gguf

    python bench/metal.py --model Qwen/Qwen3-0.6B --run --weights bf16 --prompt 4096 --tokens 16 \\
        --batches 1,4 --prefill-kernel off,on

The last one decides whether our own prefill kernel (`VLLMX_METAL_PAGED_PREFILL`) should be the
default: it compares it with MLX's attention first, then measures prefill with and without it.

Decode speed is that of `LLM.generate`: the time of a long answer less that of a short one, so that
load, prefill and templates fall out. The share of the memory bandwidth counts the weights once a
step (KV pages are left out), beside `--bandwidth` in GB/s or, without it, a copy that is measured
first. Peers print their own figures, which time bare decoding.

On Linux it runs on MLX's CPU device: good for trying the script, not for figures.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from output_file import output_file

BITS = {"bf16": None, "q8_0": "q8_0", "q4_0": "q4_0"}
"""Name -> `--isq`: quantised while it loads."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One case of vllmx."""

    weights: str
    prefill_kernel: str
    batch: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    bandwidth_share: float


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    commands = list(peer_commands(args))
    if not args.run:
        print(plan_text(args, commands))
        return 0
    facts = machine()
    if "on" in args.prefill_kernel and not facts["on a GPU"]:
        sys.exit("--prefill-kernel on needs Apple's GPU, MLX has none here: leave it off")
    bandwidth = args.bandwidth * 1e9 if args.bandwidth else copy_bandwidth()
    print(json.dumps(facts | {"bandwidth_gb_per_s": round(bandwidth / 1e9, 1)}))
    if "on" in args.prefill_kernel:
        print("the prefill kernel differs from MLX's attention by", prefill_differences())
    figures = [
        figure
        for kernel in args.prefill_kernel
        for name in args.weights
        for figure in measure(args, name, kernel, bandwidth)
    ]
    print(table(figures))
    for command in commands:
        print("\n$", " ".join(command), flush=True)
        if subprocess.run(command, check=False).returncode:
            print("failed; see above", file=sys.stderr)
    if args.json:
        record = {
            "machine": facts,
            "bandwidth_bytes_per_s": bandwidth,
            "figures": [asdict(figure) for figure in figures],
        }
        args.json.write_text(json.dumps(record, indent=1))
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", required=True, help="folder or hub id, in bf16")
    parser.add_argument("--run", action="store_true", help="measure instead of printing the plan")
    parser.add_argument("--batches", type=_numbers, default=[1, 8, 32])
    parser.add_argument("--weights", type=lambda s: s.split(","), default=list(BITS))
    parser.add_argument(
        "--prefill-kernel",
        type=lambda s: s.split(","),
        default=["off"],
        help="off, on or both: our own kernel for prompts",
    )
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=128, help="decoded tokens that are timed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bandwidth", type=float, help="of the chip by Apple's data, in GB/s")
    parser.add_argument("--peers", type=lambda s: s.split(","), default=[])
    parser.add_argument("--mlx-models", type=lambda s: s.split(","), default=[])
    parser.add_argument("--gguf", type=lambda s: s.split(","), default=[])
    parser.add_argument("--json", type=output_file)
    args = parser.parse_args(arguments)
    unknown = set(args.weights) - set(BITS) | set(args.peers) - {"mlx-lm", "llama.cpp"}
    unknown |= set(args.prefill_kernel) - {"off", "on"}
    if unknown:
        parser.error(f"unknown {', '.join(sorted(unknown))}: weights are {', '.join(BITS)}")
    return args


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def plan_text(args: argparse.Namespace, commands: Sequence[Sequence[str]]) -> str:
    lines = [
        f"vllmx on {args.model}: {', '.join(args.weights)} x batches {args.batches}, prompts of"
        f" {args.prompt} tokens, {args.tokens} decoded, {args.rounds} rounds; add --run",
        "close other programs, plug the machine in, and note its chip and memory",
    ]
    lines += ["$ " + " ".join(command) for command in commands]
    if not commands:
        lines.append("no peers: --peers mlx-lm,llama.cpp with --mlx-models and --gguf")
    return "\n".join(lines)


def peer_commands(args: argparse.Namespace) -> Iterator[list[str]]:
    """What the other engines are measured with, by their own tools."""
    prompt, tokens = str(args.prompt), str(args.tokens)
    if "mlx-lm" in args.peers:
        if args.run and find_spec("mlx_lm") is None:
            sys.exit("mlx-lm is not installed: pip install mlx-lm")
        for model in args.mlx_models:
            for batch in args.batches:
                yield [sys.executable, "-m", "mlx_lm", "benchmark", "--model", model, "-p", prompt,
                       "-g", tokens, "-b", str(batch), "-n", str(args.rounds)]  # fmt: skip
    if "llama.cpp" in args.peers:
        if args.run and shutil.which("llama-batched-bench") is None:
            sys.exit("llama-batched-bench is not on PATH: brew install llama.cpp")
        for file in args.gguf:
            batches = ",".join(map(str, args.batches))
            context = str(max(args.batches) * 2 * (args.prompt + args.tokens))
            yield ["llama-batched-bench", "-m", file, "-c", context, "-npp", prompt, "-ntg", tokens,
                   "-npl", batches, "-ngl", "99"]  # fmt: skip


def machine() -> dict[str, Any]:
    import mlx.core as mx

    return {
        "date": datetime.now(UTC).date().isoformat(),
        "platform": platform.platform(),
        "device": {key: str(value) for key, value in mx.device_info().items()},
        "on a GPU": mx.metal.is_available(),
        **{name: version(name) for name in ("mlx", "vllmx-metal")},
    }


def copy_bandwidth() -> float:
    """Bytes read and written a second by a large copy, the best of five."""
    import mlx.core as mx

    source = mx.zeros(1 << 26, mx.float32)
    mx.eval(source)
    best = 0.0
    for _ in range(6):
        started = time.perf_counter()
        mx.eval(source + 1)
        best = max(best, 2 * source.nbytes / (time.perf_counter() - started))
    return best


def prefill_differences() -> dict[str, float]:
    """The greatest one in each dtype, for values of a standard deviation of one."""
    import mlx.core as mx
    from vllmx_metal.kernel_choice import prefill_difference

    dtypes = (mx.float32, mx.float16, mx.bfloat16)
    return {str(dtype): round(prefill_difference(dtype), 5) for dtype in dtypes}


def measure(args: argparse.Namespace, name: str, kernel: str, bandwidth: float) -> Iterator[Figure]:
    from vllmx import LLM

    os.environ["VLLMX_METAL_PAGED_PREFILL"] = "1" if kernel == "on" else "0"
    longest = args.prompt + args.tokens + 1
    with LLM(
        args.model,
        backend="metal",
        isq=BITS[name],
        max_num_seqs=max(args.batches),
        max_model_len=longest + 16,
    ) as llm:
        for batch in args.batches:
            run(llm, batch, args.prompt, 8)  # kernels are compiled, buffers are there
            prefill, decode = [], []
            for _ in range(args.rounds):
                short = run(llm, batch, args.prompt, 1)
                long = run(llm, batch, args.prompt, args.tokens + 1)
                prefill.append(batch * args.prompt / short)
                decode.append(batch * args.tokens / (long - short))
            speed = statistics.median(decode)
            used = llm.info.weight_bytes * speed / batch
            yield Figure(name, kernel, batch, statistics.median(prefill), speed, used / bandwidth)


_calls = iter(range(1 << 30))


def run(llm: Any, batch: int, prompt: int, tokens: int) -> float:
    """Seconds of `generate`. Prompts differ from each other and from earlier ones, so that none is
    found in the prefix cache."""
    from vllmx import SamplingParams

    call = next(_calls)
    size = llm.info.vocab_size - 8
    prompts = [
        [(call * 131 + row * 17 + i) % size + 4 for i in range(prompt)] for row in range(batch)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    started = time.perf_counter()
    llm.generate(prompts, params)
    return time.perf_counter() - started


def table(figures: Sequence[Figure]) -> str:
    lines = [
        "| weights | prefill kernel | batch | prefill tokens/s | decode tokens/s"
        " | share of bandwidth |",
        "|-|-|-|-|-|-|",
    ]
    lines += [
        f"| {f.weights} | {f.prefill_kernel} | {f.batch} | {f.prefill_tokens_per_s:.0f} |"
        f" {f.decode_tokens_per_s:.1f} | {f.bandwidth_share:.0%} |"
        for f in figures
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
