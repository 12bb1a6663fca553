"""Two stages of a model on the CPU, a core each, cut by bytes of weights and by what layers take.

    python bench/stages.py MODEL... [--rounds 3] [--json]
    python bench/stages.py --make FOLDER

MODEL is a folder or a GGUF file. For each cut: the layers of each stage, the milliseconds that each
stage takes as a whole for 16 rows that decode, the slowest one's part of their sum (0.5 at best),
and the tokens a second of two groups of 16 rows, a step of each in flight: medians of rounds in
which the cuts take turns. "all bytes" counts every expert, "bytes" those that 16 rows ask for.
`--make` writes a model of random weights whose first twelve layers are dense and whose other four
have experts; it needs torch and transformers.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from cpu_peers.cases import make_cases
from cpu_peers.vllmx_step_worker import BLOCK_SIZE, row_blocks, write_pages
from tp import staged_speed
from vllmx.bench.figures import Record, show
from vllmx_core.backend import LoadedModel
from vllmx_core.config import EngineConfig
from vllmx_core.recorded.recording import record
from vllmx_core.sharding.stage_costs import byte_costs, measured_cuts, weight_bytes
from vllmx_core.sharding.stage_cuts import Cut, balanced, layers_between, places
from vllmx_engine.core.found_model import find_model
from vllmx_engine.core.load import load_model, open_model
from vllmx_tp.loading import on_cores, rank_options
from vllmx_tp.stage_times import segment_seconds, small_options

STAGES = 2
(CASE,) = make_cases([], [32], [40])


def configuration(model: str, layers: str | None) -> EngineConfig:
    """Two stages of one core each, with room for the case."""
    return EngineConfig(
        model=model,
        backend="cpu",
        pipeline_parallel_size=STAGES,
        pipeline_layers=layers,
        num_threads=STAGES,
        max_model_len=row_blocks(CASE) * BLOCK_SIZE,
        max_num_seqs=CASE.batch,
        block_size=BLOCK_SIZE,
        num_kv_blocks=CASE.batch * row_blocks(CASE),
    )


def cuts_of(model: str) -> dict[str, tuple[str, list[float]]]:
    """The layers of each stage and the seconds of each, by the way to cut."""
    opened = open_model(find_model(configuration(model, "bytes")))
    source, backend = opened.checkpoint.weights, opened.backend.load()()
    options = small_options(rank_options(opened.options, 1.0, 1, STAGES), opened.model)
    recording = record(opened.model, options.max_model_len)
    cuts, ops = places(recording.steps, opened.model.shape), recording.steps.ops
    specs = {spec.name: spec for spec in recording.specs}
    every = [
        sum(weight_bytes(specs[ref.name], source) for ref in op.weights if ref.name in specs)
        if op.name != "embedding"
        else 0.0
        for op in ops
    ]
    some = byte_costs(recording, source)

    def seconds(chosen: list[Cut]) -> list[float]:
        with on_cores([0]):
            return segment_seconds(backend, opened.model, recording, chosen, source, options)

    chosen = {
        "all bytes": balanced(cuts, every, STAGES),
        "bytes": balanced(cuts, some, STAGES),
        "measured": measured_cuts(cuts, some, seconds(cuts), STAGES),
    }
    found = {
        how: (",".join(map(str, layers_between(one, ops))), seconds(list(one)))
        for how, one in chosen.items()
    }
    opened.checkpoint.weights.close()
    return found


def loaded(model: str, layers: str) -> LoadedModel:
    """The stages, as `vllmx serve` loads them."""
    found = find_model(configuration(model, layers))
    opened = open_model(found)
    try:
        ranked = load_model(found, opened)
    finally:
        opened.checkpoint.weights.close()
    write_pages(ranked)
    return ranked


def compare(model: str, rounds: int) -> list[Record]:
    """One record a way to cut."""
    found = cuts_of(model)
    speeds: dict[str, list[float]] = {layers: [] for layers, _ in found.values()}
    engines = {layers: loaded(model, layers) for layers in speeds}
    for _ in range(rounds):
        for layers, engine in engines.items():
            speeds[layers].append(staged_speed(engine, CASE))
        print(Path(model).name, {k: f"{v[-1]:.4g}" for k, v in speeds.items()}, file=sys.stderr)
    for engine in engines.values():
        engine.close()
    return [
        {
            "model": Path(model).name,
            "cut": how,
            "layers": layers,
            "ms of each": ", ".join(f"{1e3 * one:.1f}" for one in seconds),
            "slowest": round(max(seconds) / sum(seconds), 3),
            "tokens/s": round(statistics.median(speeds[layers]), 1),
        }
        for how, (layers, seconds) in found.items()
    ]


def make(folder: str) -> None:
    """1 GB of bfloat16."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=128,
        mlp_only_layers=list(range(12)),
        max_position_embeddings=4096,
    )
    kind: Any = transformers.AutoModelForCausalLM
    kind.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--make", metavar="FOLDER")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.make:
        make(args.make)
        return
    records = [one for model in args.models for one in compare(model, args.rounds)]
    print(show(records, as_json=args.json))


if __name__ == "__main__":
    main()
