"""How long it takes from nothing to the first token of a model on disk, as a user starts it.

    python bench/gpu/start.py "start, model" OUT.json [--rehearse]   writes the model beside OUT
    python bench/gpu/start.py "start, cold" OUT.json [--rehearse]    and so for "start, warm"

The clock begins with the process: Python, imports, tokenizer, weights from the page cache, kernels,
graphs, and a prompt's first text. What is cold or warm is the folder of compiled kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

FOLDER = "start-model"
_BOS, _EOS = "bos_token_id", "eos_token_id"


def write_model(folder: Path, shape: str) -> None:
    """A checkpoint as from a hub, of random weights."""
    sys.path.append(str(Path(__file__).parents[1]))
    from checkpoints import SHAPES, RandomSource
    from synthetic_vocab import make_vocabulary, tokenizer_config, tokenizer_json

    config = SHAPES[shape]
    vocabulary = make_vocabulary(config["vocab_size"])
    of_text = {_BOS: vocabulary.bos_id, _EOS: vocabulary.eos_id, "model_type": "qwen3"}
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in {
        "config.json": config | of_text,
        "tokenizer.json": tokenizer_json(vocabulary),
        "tokenizer_config.json": tokenizer_config(),
    }.items():
        (folder / name).write_text(json.dumps(content))
    source, begin, header = RandomSource(config, "bf16"), 0, {}
    for name in source.names():
        weight = source.part(name).stored().buffers["weight"]
        end = begin + weight.data.nbytes
        header[name] = {"dtype": "BF16", "shape": weight.shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in source.names():
            source.part(name).stored().buffers["weight"].data.tofile(file)


def first_token(folder: Path, *, rehearse: bool) -> dict[str, float]:
    """Seconds of this process until a model is loaded, and until it says something."""
    from vllmx_core.config import EngineConfig
    from vllmx_core.plugins.registry import load_registry
    from vllmx_core.sampling import SamplingParams
    from vllmx_engine.engine import Engine

    backend, registry = "cuda", load_registry()
    sizes: dict[str, Any] = {}
    if rehearse:
        from devices import EmulatedPlugin

        backend, sizes = "emulated", {"max_num_seqs": 2, "max_num_batched_tokens": 64}
        registry.add(EmulatedPlugin, "bench:emulated")
    imported_s = age_s()
    config = EngineConfig(model=str(folder), backend=backend, **sizes)
    with Engine(config, registry=registry) as engine:
        loaded_s = age_s()
        greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        _, _, stream = engine.generate_stream(greedy, "a b")
        next(stream, None)  # random weights may say nothing but halves of characters
        found = {"imports_s": imported_s, "loaded_s": loaded_s, "first_token_s": age_s()}
        list(stream)
    return found


def age_s() -> float:
    """The age of this process, by the kernel's clock."""
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["start, model", "start, cold", "start, warm"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, help="not needed: nothing here can be cut")
    parser.add_argument("--ceilings", type=Path, help="not needed")
    parser.add_argument("--rehearse", action="store_true", help="tiny, on the emulator")
    chosen = parser.parse_args()
    folder = chosen.out.parent / FOLDER
    found: dict[str, float] = {}
    if chosen.part == "start, model":
        write_model(folder, "tiny" if chosen.rehearse else "0.6b")
    else:
        found = first_token(folder, rehearse=chosen.rehearse)
    chosen.out.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
