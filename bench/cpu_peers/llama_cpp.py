"""llama.cpp, measured by its own `llama-bench` and `llama-batched-bench`, built for this machine.

Both time bare decoding without sampling, which is the engine's best face. On a CPU flash attention
may gain or lose: a case first runs with it on and off, from then on only with what was faster.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from vllmx_models.formats.gguf.file import GGUFFile

from cpu_peers.cases import Case, Job, Sample
from cpu_peers.host_load import ForeignLoad, wait_until_quiet
from cpu_peers.weights import Weights

TARGETS = ("llama-bench", "llama-batched-bench")
"""What the benchmark runs."""
_BUILT = (*TARGETS, "llama-perplexity", "llama-quantize", "llama-server", "ggml-rpc-server")
"""The others run, write and serve the files that are compared, and compute a part of them."""
CMAKE_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DGGML_LLAMAFILE=ON",
    "-DGGML_OPENMP=ON",
    "-DGGML_RPC=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_SERVER=ON",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_BUILD_TOOLS=ON",
)
_TILE_LOAD = "_tile_loadconfig(&tc);"
_TILE_FENCE = 'asm volatile("" : : "m"(tc));'
_PADDING = 256
"""llama.cpp rounds the context of every sequence up to a multiple of this."""
_ATTEMPTS = 10
"""llama-batched-bench prints from a thread and may exit before that is done; the smaller the model,
the more often its result is lost."""


def build(folder: Path, jobs: int) -> None:
    """Downloads the source package of llama-cpp-python and compiles the llama.cpp inside it into
    `folder`/build/bin; some minutes. Raises CalledProcessError when a step fails."""
    source, output = folder / "source", folder / "build"
    if not source.exists():
        _download(folder / "sdist", source)
    llama = source / "vendor" / "llama.cpp"
    _keep_tile_config(llama / "ggml" / "src" / "ggml-cpu" / "amx" / "mmq.cpp")
    subprocess.run(["cmake", "-S", str(llama), "-B", str(output), *CMAKE_FLAGS], check=True)
    compile_all = ["cmake", "--build", str(output), f"-j{jobs}", "--target", *_BUILT]
    # Long and not urgent: leave the cores to whoever needs them.
    subprocess.run(compile_all, check=True, preexec_fn=lambda: os.nice(10))


def _keep_tile_config(path: Path) -> None:
    """Keeps the whole tile configuration: GCC before 12.4 and 13.3 takes `_tile_loadconfig` to read
    8 bytes and removes the stores to the other 56 (its bug 114098), so that the AMX kernels of
    quantised types end in SIGILL."""
    text = path.read_text()
    if _TILE_FENCE not in text:
        path.write_text(text.replace(_TILE_LOAD, f"{_TILE_FENCE} {_TILE_LOAD}"))


def _download(sdist: Path, source: Path) -> None:
    """Unpacks the newest source package into `source`."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "-d", str(sdist)]
    subprocess.run([*pip, "--no-binary", "llama-cpp-python", "llama-cpp-python"], check=True)
    unpacked = sdist / "unpacked"
    with tarfile.open(next(sdist.glob("*.tar.gz"))) as archive:
        archive.extractall(unpacked, filter="data")
    shutil.move(next(unpacked.iterdir()), source)
    shutil.rmtree(sdist)


class LlamaCpp:
    """Runs the built programs, one short process for each sample."""

    name = "llama.cpp"
    flash_settings: Sequence[str] = ("on", "off")
    """What is tried."""

    def __init__(self, folder: Path) -> None:
        self._bin = folder / "build" / "bin"
        self._faster: dict[tuple[str, Case, bool], str] = {}
        """Flash attention, by file, case, and whether a core is busy."""

    def missing(self, weights: Weights) -> str | None:
        if not all((self._bin / target).exists() for target in TARGETS):
            return f"{self._bin} holds no llama-bench: run with --setup-llama"
        if not weights.gguf.exists():
            return f"{weights.gguf} is missing: write the model with random_model.py --gguf"
        return None

    def measure(self, job: Job) -> list[Sample]:
        samples: list[Sample] = []
        for case in job.cases:
            measure = self._single if case.batch == 1 else self._batched
            key = (job.gguf, case, job.busy_pid is not None)
            settings = [self._faster[key]] if key in self._faster else self.flash_settings
            speeds = {flash: measure(job, case, flash) for flash in settings}
            self._faster[key] = max(speeds, key=lambda flash: speeds[flash].tokens_per_s)
            samples += speeds.values()
        return samples

    def _single(self, job: Job, case: Case, flash: str) -> Sample:
        if case.kind == "prefill":
            sizes = ["-p", str(case.context), "-n", "0"]
        else:
            sizes = ["-p", "0", "-n", str(case.num_steps), "-d", str(case.num_prompt_tokens)]
        command = [*self._command("llama-bench", job, flash), *sizes, "-r", "1", "-o", "json"]
        output, foreign = _run(command, job)
        return Sample(case.label, json.loads(output)[0]["avg_ts"], foreign, f"fa {flash}")

    def _batched(self, job: Job, case: Case, flash: str) -> Sample:
        """The prompt is computed once and copied for every row (`-pps` with one KV buffer a row),
        so that a long context does not cost minutes; but not before experts: rows behind one prompt
        choose nearly the same of them, so that a step would read less than half."""
        row_tokens = case.num_prompt_tokens + case.num_steps
        row_tokens += -row_tokens % _PADDING
        sizes = ["-npp", str(case.num_prompt_tokens), "-ntg", str(case.num_steps)]
        sizes += ["--no-kv-unified", "-npl", str(case.batch), "-c", str(case.batch * row_tokens)]
        sizes += ["-b", "2048", "-ub", "512", "--output-format", "jsonl"]
        command = [*self._command("llama-batched-bench", job, flash), *sizes]
        if has_experts(Path(job.gguf)):
            return self._batch_speed(command, job, case, flash)
        try:
            return self._batch_speed([*command, "-pps"], job, case, flash)
        except RuntimeError as error:
            if "M-RoPE" not in str(error):
                raise
            # It cannot go on behind a copied prompt there: each row computes its own.
            return self._batch_speed(command, job, case, flash)

    def _batch_speed(self, command: list[str], job: Job, case: Case, flash: str) -> Sample:
        for _ in range(_ATTEMPTS):
            output, foreign = _run(command, job)
            for line in output.splitlines():
                if line.startswith("{"):
                    speed = json.loads(line)["speed_tg"]
                    return Sample(case.label, speed, foreign, f"fa {flash}")
        raise RuntimeError(f"{' '.join(command)} printed no result in {_ATTEMPTS} attempts")

    def _command(self, program: str, job: Job, flash: str) -> list[str]:
        return [str(self._bin / program), "-m", job.gguf, "-t", str(job.threads), "-fa", flash]

    def environment(self) -> dict[str, Any]:
        """The version that was built, for the record."""
        info = self._bin.parent.parent / "source" / "PKG-INFO"
        lines = info.read_text().splitlines() if info.exists() else []
        version = next((x.split()[1] for x in lines if x.startswith("Version:")), "unknown")
        return {"llama-cpp-python": version, "cmake": " ".join(CMAKE_FLAGS)}


@cache
def has_experts(path: Path) -> bool:
    """Whether a GGUF file's layers choose among experts."""
    file = GGUFFile(path)
    counts = [value for key, value in file.metadata.items() if key.endswith(".expert_count")]
    file.close()
    return any(counts)


def _run(command: list[str], job: Job) -> tuple[str, float | None]:
    """Standard output, and the cores that others used. Raises RuntimeError with the end of the
    program's messages when it fails."""
    wait_until_quiet(job.quiet_wait_s, job.busy_pid)
    with ForeignLoad(job.busy_pid) as load:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} exited {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout, load.cores
