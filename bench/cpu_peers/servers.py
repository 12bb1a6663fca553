"""How the servers of other engines are started on the model that ours serves.

All of them hold as many sequences of the same length at most, compute with as many threads in
16 bits, and write no line for a request. What they are not told is their default.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cpu_peers import vllm_cpu
from cpu_peers.weights import Weights

LLAMA, VLLM = "llama.cpp", "vllm"
_HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Room:
    """What each server is to hold, and with how many threads it computes."""

    sequences: int
    tokens: int
    """The length of each sequence."""
    threads: int


@dataclass(frozen=True, slots=True)
class Start:
    """How a server is started, and what it says when it serves."""

    command: Sequence[str]
    find_url: Callable[[str], str | None]
    environment: Mapping[str, str] = field(default_factory=dict)


def start_of(
    peer: str, peers_dir: Path, weights: Weights, room: Room, flags: Sequence[str]
) -> Start:
    """How a peer serves a model. FileNotFoundError, with the remedy, for one that is not here."""
    make = {LLAMA: _llama, VLLM: _vllm}[peer]
    return make(peers_dir, weights, room, flags)


def _llama(peers_dir: Path, weights: Weights, room: Room, flags: Sequence[str]) -> Start:
    program = peers_dir / "llama.cpp" / "build" / "bin" / "llama-server"
    _require(program, "run bench/peers_cpu.py --setup-llama")
    _require(weights.gguf, "write the model with random_model.py --gguf")
    threads = str(room.threads)
    command = [
        *(str(program), "-m", str(weights.gguf), "--alias", weights.name),
        *("--host", _HOST, "--port", "0", "--no-webui"),
        *("-np", str(room.sequences), "-c", str(room.sequences * room.tokens)),
        *("-t", threads, "-tb", threads),
        # No prompt comes twice: to keep those that ended would only take its time.
        *("--cache-ram", "0"),
    ]
    return Start([*command, *flags], llama_url)


def _vllm(peers_dir: Path, weights: Weights, room: Room, flags: Sequence[str]) -> Start:
    python = vllm_cpu.folder_in(peers_dir) / "bin" / "python"
    _require(python, "run bench/peers_cpu.py --setup-vllm")
    _require(weights.model / "model.safetensors", "give a folder, as random_model.py writes it")
    port = free_port()
    command = [
        # Its command `vllm` asks for the version of a package that is called otherwise here.
        *(str(python), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(weights.model), "--served-model-name", weights.name),
        *("--host", _HOST, "--port", str(port), "--disable-uvicorn-access-log"),
        *("--max-num-seqs", str(room.sequences), "--max-model-len", str(room.tokens)),
        *("--dtype", "bfloat16"),
    ]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{room.threads - 1}",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return Start([*command, *flags], lambda text: vllm_url(text, port), environment)


def llama_url(text: str) -> str | None:
    """The address of llama-server, which it says once the model is loaded."""
    found = re.search(r"listening on (http://[\d.]+:\d+)\b", text)
    return found[1] if found else None


def vllm_url(text: str, port: int) -> str | None:
    """The address of vLLM's server, once that says that it has come up."""
    return f"http://{_HOST}:{port}" if "Application startup complete" in text else None


def free_port() -> int:
    """A port that nobody listens at: vLLM does not say which one it was given."""
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _require(path: Path, remedy: str) -> None:
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: {remedy}")
