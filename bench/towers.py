"""Towers for images on the CPU beside transformers, in bfloat16, by as many threads, and the pace
of running rows while images arrive.

    python bench/towers.py --setup models/towers          # writes both shapes, 4 GB
    python bench/towers.py models/towers --rounds 3
    python bench/towers.py --setup models/whole --shapes qwen3-vl-2b --text-layers 28
    python bench/towers.py models/whole --shapes qwen3-vl-2b --pace

Random weights in the shapes of the towers of Qwen3-VL-2B and of Gemma 3 (SigLIP with its projector,
images of 448 pixels a side); a text model of four layers behind each, or of more. One image of
1,024 patches. vllmx: seconds of a pass as its backend counts them. transformers: the tower's own
pass. Each engine runs in a process of its own, one after the other in each round; milliseconds,
medians. The pace (of Qwen3-VL alone): times between steps in which four rows decode, while an image
of 1,024 patches comes as the one before has ended, and without images before and after that.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from cpu_peers.host_load import available_processors

QWEN = "qwen3-vl-2b"
GEMMA = "gemma3"
SHAPES = (QWEN, GEMMA)
GRID = (1, 32, 32)
PATCHES = 1024
WIDTH = 3 * 2 * 16 * 16
"""Values of a patch of Qwen3-VL: two frames of 16 by 16 points in three colours."""
GEMMA_PATCH, GEMMA_SIDE = 14, 448
"""Points on a side of a patch, and of an image of 1,024 patches."""
START, PAD, END = 94, 95, 96
PASSES = 3
ALONE_S, BESIDE_S = 4.0, 15.0
"""Seconds without images, before and after those with them."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--setup", action="store_true", help="write the models, measure nothing")
    parser.add_argument("--pace", action="store_true", help="of running rows, while images arrive")
    parser.add_argument("--text-layers", type=int, default=4, help="of what --setup writes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--threads", type=int, default=available_processors())
    parser.add_argument("--worker", choices=WORKERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(WORKERS[args.worker](args.folder, args.threads)))
    elif args.setup:
        for shape in args.shapes.split(","):
            write(args.folder / shape, shape, args.text_layers)
    elif args.pace:
        pace(args.folder / QWEN, args.threads)
    else:
        compare(args)


def compare(args: argparse.Namespace) -> None:
    taken: dict[tuple[str, str], list[float]] = {}
    for _ in range(args.rounds):
        for shape in args.shapes.split(","):
            for worker in WORKERS:
                here = [sys.executable, __file__, str(args.folder / shape), "--worker", worker]
                done = subprocess.run(
                    [*here, "--threads", str(args.threads)], stdout=subprocess.PIPE, check=True
                )
                found = json.loads(done.stdout.splitlines()[-1])
                taken.setdefault((shape, worker), []).append(found)
                print(f"{shape} {worker}: {found:.0f} ms", file=sys.stderr)
    print("| 1,024 patches, ms | " + " | ".join(WORKERS) + " | the other / vllmx |\n|-|-|-|-|")
    for shape in args.shapes.split(","):
        ours, theirs = (statistics.median(taken[shape, worker]) for worker in WORKERS)
        print(f"| {shape} | {ours:.0f} | {theirs:.0f} | {theirs / ours:.2f} |")


def write(folder: Path, shape: str, layers: int) -> None:
    """A checkpoint with random weights."""
    import torch

    hub: Any = import_module("transformers")  # whose types know none of the classes
    torch.manual_seed(0)
    if shape == GEMMA:
        model = hub.Gemma3ForConditionalGeneration(gemma_config(hub, layers))
    else:
        model = hub.Qwen3VLForConditionalGeneration(qwen_config(hub, layers))
    model.to(torch.bfloat16).save_pretrained(folder)


TEXT = {
    "vocab_size": 97,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
}


def qwen_config(hub: Any, layers: int) -> Any:
    """Qwen3-VL-2B's widths with so many layers of text."""
    text = {
        **TEXT,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "head_dim": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    }
    vision = {
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_heads": 16,
        "deepstack_visual_indexes": [5, 11, 17],
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 2048,
        "num_position_embeddings": 2304,
    }
    return hub.Qwen3VLConfig(
        text_config=text,
        image_token_id=PAD,
        vision_start_token_id=START,
        vision_end_token_id=END,
        video_token_id=93,
        tie_word_embeddings=False,
        vision_config=vision,
    )


def gemma_config(hub: Any, layers: int) -> Any:
    """Gemma 3 4B's widths with so many layers of text."""
    text = {
        **TEXT,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "head_dim": 256,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "pad_token_id": 0,
    }
    vision = {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "patch_size": GEMMA_PATCH,
        "image_size": GEMMA_SIDE,
    }
    return hub.Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=PATCHES // 4,
        image_token_index=PAD,
        boi_token_index=START,
        eoi_token_index=END,
    )


def loaded(folder: Path, threads: int) -> tuple[Any, Any]:
    """The model and its tower, on the CPU backend."""
    from vllmx_core.backend import LoadOptions
    from vllmx_core.model import encoder_of
    from vllmx_core.plugins.checkpoint import open_checkpoint
    from vllmx_core.plugins.registry import load_registry
    from vllmx_cpu.backend import CpuBackend

    registry = load_registry()
    checkpoint = open_checkpoint(registry, folder)
    model = registry.model_for(checkpoint.config).load()(checkpoint.config)
    options = LoadOptions(
        dtype="bf16", max_model_len=4096, num_kv_blocks=1200, num_threads=threads, max_num_seqs=8
    )
    return CpuBackend().load(model, checkpoint.weights, options), encoder_of(model)


def vllmx_worker(folder: Path, threads: int) -> float:
    """Milliseconds of a pass: of a step behind it, without those of the step alone."""
    import numpy as np
    from vllmx_core.image_plan import tower_plan
    from vllmx_testing.plans import Row, make_plan, sampling_rows

    model, encoder = loaded(folder, threads)
    random = np.random.default_rng(0)
    patches = random.uniform(-1, 1, (PATCHES, encoder.patch_width)).astype(np.float32)
    keep = np.arange(PATCHES // 4, dtype=np.int32)
    plan = tower_plan(encoder, [patches], [encoder.places(GRID)], keep, PATCHES // 4)
    step = make_plan([Row([1], 0, [0])], 16)

    def seconds() -> float:
        return float(model.step(step, sampling_rows(1)).result().elapsed_s)

    taken = []
    for number in range(PASSES + 1):
        alone = seconds()
        model.encode(plan)
        if number:
            taken.append(seconds() - alone)
        else:
            seconds()
    model.close()
    return 1000 * statistics.median(taken)


def transformers_worker(folder: Path, threads: int) -> float:
    """Milliseconds of a pass."""
    import torch

    hub: Any = import_module("transformers")
    torch.set_num_threads(threads)
    whole = hub.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16).eval()
    torch.manual_seed(0)
    if whole.config.model_type == "gemma3":
        pixels = torch.rand(1, 3, GEMMA_SIDE, GEMMA_SIDE, dtype=torch.bfloat16) * 2 - 1

        def once() -> None:
            features = whole.model.vision_tower(pixel_values=pixels).last_hidden_state
            whole.model.multi_modal_projector(features)
    else:
        patches = (torch.rand(PATCHES, WIDTH) * 2 - 1).to(torch.bfloat16)

        def once() -> None:
            whole.model.visual(patches, grid_thw=torch.tensor([GRID]))

    taken = []
    with torch.inference_mode():
        for _ in range(PASSES + 1):
            begin = time.perf_counter()
            once()
            taken.append(time.perf_counter() - begin)
    return 1000 * statistics.median(taken[1:])


WORKERS: dict[str, Callable[[Path, int], float]] = {
    "vllmx": vllmx_worker,
    "transformers": transformers_worker,
}


def pace(folder: Path, threads: int) -> None:
    """Prints quantiles of the time between tokens of four rows, without images and with them."""
    import numpy as np
    from vllmx_core.config import EngineConfig
    from vllmx_engine.core.engine_core import EngineCore

    model, encoder = loaded(folder, threads)
    config = EngineConfig(model=str(folder))
    core = EngineCore(model, config, max_model_len=4096, vocab_size=97, encoder=encoder)
    random = np.random.default_rng(0)
    for row in range(4):
        core.add(request(f"row {row}", [1, 2, 3], [], 4000))
    for _ in range(20):
        core.step()

    def gaps(seconds: float, images: int) -> list[float]:
        found, end, made = [], time.perf_counter() + seconds, 0
        while (begin := time.perf_counter()) < end:
            if made < images and not any(name.startswith("image") for name in core.request_ids):
                core.add(request(f"image {made}", *with_image(random, made), 1))
                made += 1
            core.step()
            found.append(time.perf_counter() - begin)
        return found

    gaps(6.0, 1)  # learns what a tower takes
    core.abort(["image 0"])
    gaps(0.5, 0)
    before = gaps(ALONE_S, 0)
    beside = gaps(BESIDE_S, 100)
    core.abort([name for name in core.request_ids if name.startswith("image")])
    gaps(0.5, 0)
    alone = before + gaps(ALONE_S, 0)
    median = float(np.median(alone))
    for name, taken in (("alone", alone), ("images arrive", beside)):
        values = 1000 * np.quantile(taken, [0.5, 0.99, 1.0])
        print(
            f"{folder.name}, {name}: p50 {values[0]:.1f} ms, p99 {values[1]:.1f}"
            f" ({values[1] / median / 1000:.2f} times p50 alone), most {values[2]:.1f},"
            f" {len(taken)} steps"
        )
    core.close()


def with_image(random: Any, number: int) -> tuple[list[int], list[Any]]:
    """Ids of a prompt, and its image."""
    import numpy as np
    from vllmx_engine.images.processor import image_input
    from vllmx_engine.wire.images import PreparedImage

    levels = np.tile(np.linspace(-1, 1, 256, dtype=np.float32), (3, 1))
    greys = random.integers(0, 256, (PATCHES, WIDTH), dtype=np.uint8)
    image = PreparedImage.of(greys, levels, GRID, PATCHES // 4)
    return [number % 90, START, *[PAD] * (PATCHES // 4), END], [image_input(2, image)]


def request(name: str, ids: list[int], images: list[Any], answer: int) -> Any:
    from vllmx_core.sampling import SamplingParams
    from vllmx_engine.wire.messages import CoreRequest, pack_ids

    params = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
    return CoreRequest(
        request_id=name,
        prompt=pack_ids(ids),
        images=images,
        params=params,
        max_tokens=answer,
        seed=0,
    )


if __name__ == "__main__":
    main()
