"""Engines that divide a model among two processes of one pinned core each, as our ranks do.

llama.cpp divides by its RPC backend: two of its servers compute, one thread each, and its own
benchmark sends them work, by layers or by columns. vllm-cpu has two ranks of its own.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from cpu_peers import vllm_cpu
from cpu_peers.cases import Case, Job, Sample
from cpu_peers.llama_cpp import LlamaCpp
from cpu_peers.servers import free_port
from cpu_peers.subprocess_peer import SubprocessPeer
from cpu_peers.weights import Weights

MODES = {"layers": "layer", "columns": "tensor"}
NAMES = (*(f"llama.cpp-{mode}" for mode in MODES), "vllm-cpu")
SERVER = "ggml-rpc-server"
_START_S = 30.0


class SplitLlama(LlamaCpp):
    """llama.cpp's programs, whose work two servers of its own do."""

    def __init__(self, folder: Path, mode: str) -> None:
        super().__init__(folder)
        self.name = f"llama.cpp-{mode}"
        self._mode = MODES[mode]
        self._servers: Sequence[str] = ()
        if mode == "columns":
            self.flash_settings = ("on",)  # it refuses the other

    def missing(self, weights: Weights) -> str | None:
        if not (self._bin / SERVER).exists():
            return f"{self._bin} holds no {SERVER}: run peers_cpu.py with --setup-llama"
        return super().missing(weights)

    def measure(self, job: Job) -> list[Sample]:
        with ExitStack() as stack:
            cores = sorted(os.sched_getaffinity(0))[: job.ranks]
            servers = [stack.enter_context(_server(self._bin / SERVER, core)) for core in cores]
            self._servers = servers
            return super().measure(replace(job, threads=1))

    def _command(self, program: str, job: Job, flash: str) -> list[str]:
        divided = ["--rpc", ",".join(self._servers), "-sm", self._mode, "-ngl", "99"]
        return [*super()._command(program, job, flash), *divided]


@contextmanager
def _server(program: Path, core: int) -> Iterator[str]:
    """Runs one of llama.cpp's servers on a core. Yields its address; RuntimeError without one."""
    port = free_port()
    command = ["taskset", "-c", str(core), str(program), "-H", "127.0.0.1", "-p", str(port)]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen([*command, "-t", "1", "-d", "CPU"], stdout=quiet, stderr=quiet)
    try:
        _wait_for(process, port)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _wait_for(process: subprocess.Popen[bytes], port: int) -> None:
    end = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise RuntimeError(f"{SERVER} does not listen: run peers_cpu.py with --setup-llama again")


def split_peer(name: str, peers_dir: Path) -> SplitLlama | SubprocessPeer:
    """The engine of one of `NAMES`."""
    if name == "vllm-cpu":
        python = vllm_cpu.folder_in(peers_dir) / "bin" / "python"
        return SubprocessPeer(name, "vllm_worker", str(python), "vllm")
    return SplitLlama(peers_dir / "llama.cpp", name.removeprefix("llama.cpp-"))


class Beside:
    """Peers beside which one model is measured; a peer that cannot, or fails, is left out.

    Args:
        folder: what vllm-cpu measures beside a GGUF file, which it does not read.
    """

    def __init__(
        self, names: Sequence[str], peers_dir: Path, model: Weights, folder: Path | None, ranks: int
    ) -> None:
        self._ranks = ranks
        self._peers: dict[str, tuple[SplitLlama | SubprocessPeer, Weights]] = {}
        for name in names:
            peer = split_peer(name, peers_dir)
            weights = model
            if folder is not None and name == "vllm-cpu":
                weights = replace(model, model=folder)
            reason = peer.missing(weights)
            if reason is None:
                self._peers[name] = peer, weights
            else:
                print(f"{name} is left out: {reason}", file=sys.stderr)

    @property
    def names(self) -> list[str]:
        return list(self._peers)

    def speeds(self, case: Case) -> dict[str, float]:
        """Tokens per second of one round of each."""
        found: dict[str, float] = {}
        for name, (peer, weights) in list(self._peers.items()):
            paths = str(weights.model), str(weights.gguf)
            job = Job(*paths, (case,), self._ranks, None, 0.0, ranks=self._ranks)
            try:
                samples = peer.measure(job)
            except RuntimeError as error:
                print(f"{name} failed and is left out: {error}", file=sys.stderr)
                del self._peers[name]
                continue
            if samples:
                found[name] = max(sample.tokens_per_s for sample in samples)
        return found
