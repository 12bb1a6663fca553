"""Time and memory of loading a model, beside llama.cpp's where it is built and the model is a GGUF.

    python bench/load.py models/qwen3-0.6b-random/q8_0.gguf
    python bench/load.py models/qwen3-0.6b-random --isq q4_k_m --repeat 3 --json

Every run is a process of its own, engines in turn; the first round brings the file into the page
cache and is not counted.

- load: from opening the checkpoint to a model that can run, as vllmx logs it.
- process: from the start of the process to the end of its first step, over one token. llama.cpp's
  is the whole of `llama-bench -p 1 -n 0 -r 1 --no-warmup`.
- peak: the greatest resident set, mapped pages of files among them.
- private: what is the process's own after that step (the greatest RssAnon seen).
- bound: the file, 64 MiB of KV cache and 150 MB.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from vllmx_core.system.processors import available_processors

BENCH = Path(__file__).resolve().parent
KV_BYTES = 64 << 20
SPARE_BYTES = 150_000_000
WORKER = """
import json, sys
from vllmx import LLM, SamplingParams
with LLM(**json.loads(sys.argv[1])) as llm:
    params = SamplingParams(max_tokens=1, temperature=0.0)
    llm.generate([{"prompt_token_ids": [5]}], params, use_tqdm=False)
    print(llm.info.load_seconds, llm.info.weight_bytes)
"""


@dataclass(frozen=True)
class Run:
    """What one process took."""

    engine: str
    process_s: float
    load_s: float | None
    peak_bytes: int
    private_bytes: int


def run(engine: str, command: Sequence[str]) -> tuple[Run, str]:
    """Runs a command, and returns its standard output with it. Raises RuntimeError when it
    fails."""
    started = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.DEVNULL)
        peak = private = 0
        while process.poll() is None:
            sizes = _status(process.pid)
            peak, private = max(peak, sizes.get("VmHWM", 0)), max(private, sizes.get("RssAnon", 0))
            time.sleep(0.002)
        seconds = time.perf_counter() - started
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)} exited {process.returncode}")
        output.seek(0)
        return Run(engine, seconds, None, peak, private), output.read()


def _status(pid: int) -> dict[str, int]:
    """Sizes of a process in bytes; none of one that has just ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    words = (line.split() for line in lines if line.endswith(" kB"))
    return {name.rstrip(":"): int(size) * 1024 for name, size, _ in words}


def vllmx(model: Path, isq: str | None, threads: int) -> Run:
    options = {
        "model": str(model),
        "isq": isq,
        "num_threads": threads,
        "max_num_seqs": 16,
        "kv_cache_memory_bytes": KV_BYTES,
    }
    found, output = run("vllmx", [sys.executable, "-c", WORKER, json.dumps(options)])
    return replace(found, load_s=float(output.split()[0]))


def llama_cpp(program: Path, model: Path, threads: int) -> Run:
    sizes = ["-p", "1", "-n", "0", "-r", "1", "--no-warmup", "-t", str(threads)]
    return run("llama.cpp", [str(program), "-m", str(model), *sizes])[0]


def stored_bytes(model: Path) -> int:
    """The size of the weights' files."""
    files = [model] if model.is_file() else model.glob("*.safetensors")
    return sum(file.stat().st_size for file in files)


def table(runs: Sequence[Run], bound: int) -> str:
    lines = ["| | load, s | process, s | peak, MB | private, MB | bound, MB |", "|-|-|-|-|-|-|"]
    for engine in dict.fromkeys(each.engine for each in runs):
        own = [each for each in runs if each.engine == engine]
        loads = [each.load_s for each in own if each.load_s is not None]
        load = f"{statistics.median(loads):.2f}" if loads else ""
        process = statistics.median(each.process_s for each in own)
        peak = max(each.peak_bytes for each in own) / 1e6
        private = max(each.private_bytes for each in own) / 1e6
        sizes = f"{peak:.0f} | {private:.0f} | {bound / 1e6:.0f}"
        lines.append(f"| {engine} | {load} | {process:.2f} | {sizes} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("model", type=Path)
    add("--isq")
    add("--repeat", type=int, default=3)
    add("--threads", type=int, default=available_processors())
    add("--peer-bin", type=Path, default=BENCH / ".peers" / "llama.cpp" / "build" / "bin")
    add("--json", action="store_true")
    options = parser.parse_args()
    program = options.peer_bin / "llama-bench"
    with_peer = program.exists() and options.model.suffix == ".gguf" and options.isq is None
    if not with_peer:
        print(f"llama.cpp is left out: no {program}, or no GGUF file as it is", file=sys.stderr)
    rounds = []
    for _ in range(options.repeat + 1):
        rounds.append([vllmx(options.model, options.isq, options.threads)])
        if with_peer:
            rounds[-1].append(llama_cpp(program, options.model, options.threads))
    runs = [each for one in rounds[1:] for each in one]
    bound = stored_bytes(options.model) + KV_BYTES + SPARE_BYTES
    if options.json:
        print(json.dumps({"bound_bytes": bound, "runs": [asdict(each) for each in runs]}))
    else:
        print(table(runs, bound))


if __name__ == "__main__":
    main()
