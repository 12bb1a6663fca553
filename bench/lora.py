"""Speed of the CPU backend with LoRA adapters.

    python bench/lora.py --model FOLDER [--rank 16] [--batches 1,8] [--context 200] [--rounds 5]
        [--threads N]

Decode steps of the backend, greedy sampling included, as in bench/peers_cpu.py. The forms take
turns in each round: the model alone, with room for adapters that no row uses, with one adapter for
all rows, and with an adapter for each row. Adapters change all linear layers. Medians over the
rounds of tokens per second, and of the rounds' ratios to the model alone.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from cpu_peers.cases import Job, make_cases
from cpu_peers.vllmx_step_worker import measure_decode, options_for, touch_pages
from vllmx_core.adapters import Adapter, AdapterRoom, LowRank, module_key
from vllmx_core.backend import ForwardStep, HasAdapters, LoadedInfo, LoadedModel, StepHandle
from vllmx_core.model import Model
from vllmx_core.plan import SamplingRows, StepPlan
from vllmx_core.plugins.checkpoint import build_model, open_checkpoint
from vllmx_core.plugins.registry import load_registry
from vllmx_core.system.processors import available_processors

SLOTS = 8
FORMS = ("alone", "room", "one", "each")


class Adapted(LoadedModel):
    """A loaded model whose rows use adapters: none, one for all, or one each."""

    def __init__(self, model: LoadedModel, form: str) -> None:
        self._model, self._form = model, form

    @property
    def info(self) -> LoadedInfo:
        return self._model.info

    def step(self, plan: StepPlan, rows: SamplingRows) -> StepHandle:
        count = plan.num_rows
        slots = np.zeros(count) if self._form == "one" else np.arange(count) % SLOTS
        if self._form in ("one", "each"):
            plan = replace(plan, adapters=slots.astype(np.int32))
        return self._model.step(plan, rows)

    def forward(self, plan: StepPlan) -> ForwardStep:
        return self._model.forward(plan)

    def close(self) -> None:
        self._model.close()


def random_adapter(model: Model, rank: int, seed: int) -> Adapter:
    """Changes of all linear layers but the head."""
    random = np.random.default_rng(seed)
    sizes: dict[str, tuple[int, int]] = {}
    for spec in model.weights():
        if spec.kind == "linear" and spec.role != "vocabulary":
            for part in spec.parts:
                sizes[module_key(part.name.removesuffix(".weight"))] = part.rows, spec.cols
    return Adapter(
        {
            name: LowRank(
                random.standard_normal((rank, cols)).astype(np.float32) * 0.01,
                random.standard_normal((rows, rank)).astype(np.float32) * 0.01,
            )
            for name, (rows, cols) in sizes.items()
        }
    )


def load(job: Job, rank: int) -> dict[str, LoadedModel]:
    """The model without and with room for adapters."""
    registry = load_registry()
    spec, _ = registry.choose_backend("cpu")
    found = {}
    for name, room in (("alone", None), ("room", AdapterRoom(SLOTS, rank))):
        checkpoint = open_checkpoint(registry, Path(job.model))
        model = build_model(registry, checkpoint)
        options = replace(options_for(job.cases, threads=job.threads), adapters=room)
        found[name] = spec.load()().load(model, checkpoint.weights, options)
        if isinstance(found[name], HasAdapters) and room is not None:
            for slot in range(SLOTS):
                found[name].set_adapter(slot, random_adapter(model, rank, slot))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=available_processors())
    arguments = parser.parse_args()
    batches = [int(part) for part in arguments.batches.split(",")]
    cases = make_cases([], batches, [arguments.context])
    job = Job(arguments.model, "", tuple(cases), arguments.threads, None, 0.0)
    models = load(job, arguments.rank)
    for model in models.values():
        touch_pages(model)
    print("| tokens/s | " + " | ".join(FORMS) + " |\n" + "|-" * (len(FORMS) + 1) + "|")
    for case in cases:
        speeds: dict[str, list[float]] = {form: [] for form in FORMS}
        for _ in range(arguments.rounds):
            for form in FORMS:
                model = models["alone" if form == "alone" else "room"]
                speeds[form].append(measure_decode(Adapted(model, form), case))
                print(f"{case.label} {form} {speeds[form][-1]:.4g}", file=sys.stderr)
        cells = []
        for form in FORMS:
            pairs = zip(speeds[form], speeds["alone"], strict=True)
            ratio = statistics.median(own / first for own, first in pairs)
            cells.append(f"{statistics.median(speeds[form]):.4g} ({ratio:.2f})")
        print(f"| {case.label} | " + " | ".join(cells) + " |")
    for model in models.values():
        model.close()


if __name__ == "__main__":
    main()
