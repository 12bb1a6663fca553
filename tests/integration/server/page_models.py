"""Tiny models in place of those that pages of docs/ name, where their commands look for them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file
from vllmx_demo.source import MODEL_FOLDER

from tests import forked

from ..audio_models import FAMILIES as AUDIO_FAMILIES  # noqa: TID252
from ..audio_models import save as save_audio  # noqa: TID252
from ..image_files import write_text, write_tower  # noqa: TID252 - no package to name
from ..image_models import FAMILIES, save  # noqa: TID252
from ..t5_models import make as make_t5  # noqa: TID252
from ..t5_models import save as save_t5  # noqa: TID252
from ..whisper_models import make as make_whisper  # noqa: TID252
from ..whisper_models import save as save_whisper  # noqa: TID252

TEXT = ("my-model", "model", "MODEL", "qwen3", "qwen3-8b", "Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B")
FILES = ("my-model-Q4_K_M.gguf", "model.gguf", "a.gguf", "b.gguf", "in.gguf")
HUB = {
    "Qwen/Qwen3-0.6B": "text",
    "Qwen/Qwen3-4B": "text",
    "Qwen/Qwen3-8B": "text",
    "org/repo": "file",
    "Qwen/Qwen3-Embedding-0.6B": "embed",
    "Qwen/Qwen3-Reranker-0.6B": "rerank",
    "BAAI/bge-reranker-v2-m3": "classify",
    "Qwen/Qwen3.5-4B": "images",
    "ggml-org/Qwen3-VL-2B-Instruct-GGUF": "image files",
    "Qwen/Qwen2-Audio-7B-Instruct": "audio chats",
    "openai/whisper-large-v3-turbo": "audio",
    "google/flan-t5-large": "encoder-decoder",
}
"""Repositories in the cache of the hub, and what lies there: see `MAKERS`."""

Make = Callable[[str], Path]


def makes(root: Path) -> Make:
    """Gives the folder of a kind of model, which is made when it is first asked for."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = root / kind
            made[kind].mkdir()
            MAKERS[kind](made[kind])
        return made[kind]

    return make


def _text(folder: Path, **config: Any) -> None:
    """The demo, of a length that the pages ask for."""
    for file in Path(MODEL_FOLDER).iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file)
    own = json.loads((Path(MODEL_FOLDER) / "config.json").read_text())
    own |= {"max_position_embeddings": 1 << 17, **config}
    (folder / "config.json").write_text(json.dumps(own))


def _file(folder: Path) -> None:
    source = folder / "source"
    source.mkdir()
    _text(source)
    for name, kind in ((FILES[0], "q4_k_m"), ("my-model-Q8_0.gguf", "q8_0")):
        done = forked.run("quantize", str(source), str(folder / name), "--type", kind)
        assert done.returncode == 0, done.stderr


def _classify(folder: Path) -> None:
    """The layers of the demo with a head of one score."""
    _text(folder, architectures=["Qwen3ForSequenceClassification"], num_labels=1)
    width = json.loads((folder / "config.json").read_text())["hidden_size"]
    head = np.random.default_rng(0).standard_normal((1, width), np.float32)
    layers, last = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    (folder / "model.safetensors").rename(folder / layers)
    save_file({"score.weight": head}, folder / last)
    with safe_open(folder / layers, "np") as file:
        places = dict.fromkeys(file.keys(), layers) | {"score.weight": last}
    index = json.dumps({"weight_map": places})
    (folder / "model.safetensors.index.json").write_text(index)


def _images(folder: Path) -> None:
    save(FAMILIES["qwen3_vl"].make(), folder)


def _image_files(folder: Path) -> None:
    model = FAMILIES["qwen3_vl"].make()
    save(model, folder)
    write_text(folder / "Qwen3-VL-2B-Instruct-Q8_0.gguf", "qwen3_vl", model)
    write_tower(folder / "mmproj-F16.gguf", "qwen3_vl", model)


def _audio_chats(folder: Path) -> None:
    family = AUDIO_FAMILIES["qwen2_audio"]
    save_audio(family, family.make(), folder)


MAKERS: dict[str, Callable[[Path], object]] = {
    "text": _text,
    "file": _file,
    "embed": lambda folder: _text(folder, architectures=["Qwen3Model"]),
    "rerank": lambda folder: _text(folder, classifier_from_token=["a", "b"]),
    "classify": _classify,
    "images": _images,
    "image files": _image_files,
    "audio chats": _audio_chats,
    "audio": lambda folder: save_whisper(make_whisper(), folder),
    "encoder-decoder": lambda folder: save_t5(make_t5(), folder),
}


def furnish(folder: Path, told: str, page: str, stand_in: Make) -> None:
    """Lays what commands name into the folder where they run, which has the cache of the hub too.
    `told`: the commands; `page`: the text of their page."""

    def link(name: str, target: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(target)

    for name in TEXT:
        if name in told:
            link(name, stand_in("text"))
    for name in FILES:
        if name in told:
            link(name, stand_in("file") / FILES[0])
    for name, kind in HUB.items():
        if name in told:
            cached = f"hub/models--{name.replace('/', '--')}"
            link(f"{cached}/snapshots/{'0' * 40}", stand_in(kind))
            (folder / cached / "refs").mkdir()
            (folder / cached / "refs" / "main").write_text("0" * 40)
    if "mmproj" in told:
        seeing = stand_in("image files")
        for name in ("Qwen3-VL-2B-Instruct-Q4_K_M.gguf", "seeing.gguf"):
            link(name, seeing / "Qwen3-VL-2B-Instruct-Q8_0.gguf")
        for name in ("towers/mmproj-F16.gguf", "mmproj.gguf"):
            link(name, seeing / "mmproj-F16.gguf")
        link("tokenizer", seeing)
    if "in.jsonl" in told:
        body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}
        line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
        (folder / "in.jsonl").write_text(json.dumps(line) + "\n")
    if "mcp.json" in told:
        pytest.importorskip("mcp", reason="the package mcp is not installed")
        program, settings = (
            re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL)[0] for kind in ("python", "json")
        )
        (folder / "weather.py").write_text(program)
        (folder / "mcp.json").write_text(settings.replace('"python"', json.dumps(sys.executable)))
    if "rank.key" in told:  # stages on several hosts are shown before how to make it
        (folder / "rank.key").write_text("ab" * 32)
        (folder / "rank.key").chmod(0o600)
