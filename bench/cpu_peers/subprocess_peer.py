"""An engine that is measured by one of our worker modules, in its own Python process."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from cpu_peers.cases import Job, Sample
from cpu_peers.weights import Weights

BENCH = Path(__file__).resolve().parent.parent


class SubprocessPeer:
    """`python -m cpu_peers.<module>` under the interpreter that has the engine's package."""

    def __init__(
        self, name: str, module: str, python: str, package: str, *, reads_gguf: bool = False
    ) -> None:
        self.name = name
        self._reads_gguf = reads_gguf
        self._module = module
        self._python = python
        self._package = package

    def missing(self, weights: Weights) -> str | None:
        if not Path(self._python).exists():
            return f"{self._python} does not exist: see bench/README.md"
        if self._call(
            "-c", f"import importlib.util as u; {_FIND.format(self._package)}"
        ).returncode:
            return f"{self._python} has no package {self._package!r}"
        if weights.model == weights.gguf:
            return None if self._reads_gguf else "it is not measured on GGUF files"
        if not (weights.model / "model.safetensors").exists():
            return f"{weights.model / 'model.safetensors'} is missing: see random_model.py"
        return None

    def measure(self, job: Job) -> list[Sample]:
        with tempfile.TemporaryDirectory() as folder:
            request, out = Path(folder, "job.json"), Path(folder, "samples.jsonl")
            out.touch()
            replace(job, out=str(out)).write(request)
            done = self._call("-m", f"cpu_peers.{self._module}", str(request), threads=job.threads)
            samples = [Sample(**json.loads(line)) for line in out.read_text().splitlines()]
        if done.returncode:
            raise RuntimeError(f"{self.name} exited {done.returncode}: {done.stderr[-2000:]}")
        return samples

    def _call(self, *arguments: str, threads: int = 1) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(BENCH), "OMP_NUM_THREADS": str(threads)}
        command = [self._python, *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    def environment(self) -> dict[str, Any]:
        """The version of the engine's package, for the record."""
        ask = f"import importlib.metadata as m; print(m.version({self._package!r}))"
        return {self._package: self._call("-c", ask).stdout.strip()}


_FIND = "raise SystemExit(u.find_spec({!r}) is None)"
