"""A model folder that `FakeBackend` serves, and the plugin that opens it.

Everything up to the device takes its usual path: plugin, source of models, format, architecture,
backend. `FakePlugin` registers them in one process; `install_fake_plugin` makes them visible to
every process whose PYTHONPATH has the folder.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn

from vllmx_core.errors import WeightFormatError
from vllmx_core.model import KVSpec, ModelShape, Ops, StateSpec, StepInputs, Weight
from vllmx_core.plan import AnyArray
from vllmx_core.plugins.checkpoint import Checkpoint
from vllmx_core.plugins.hooks import hookimpl
from vllmx_core.plugins.specs import BackendSpec, ModelSourceSpec, ModelSpec, WeightFormatSpec
from vllmx_core.weights.part import WeightPart
from vllmx_core.weights.spec import WeightSpec

from vllmx_testing.fake_rules import FakeRules

WEIGHTS_FILE = "weights.fake"
_MODULE = "vllmx_testing"


class FakeModel:
    """An architecture without weights. `config["fake"]` may hold fields of `FakeRules` and
    arguments of `FakeLoadedModel` (step_s, token_s, fail_steps, hang_steps, ...)."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        fake = dict(config.get("fake", {}))
        rules = {key: fake.pop(key) for key in FakeRules.__slots__ if key in fake}
        self.rules = FakeRules(**{"vocab_size": config["vocab_size"], **rules})
        self.behaviour: dict[str, Any] = fake
        self._max_model_len = int(config.get("max_position_embeddings", 4096))

    @property
    def shape(self) -> ModelShape:
        states = (StateSpec(1, 1, 2),) if self.rules.has_states else ()
        return ModelShape(
            self.rules.vocab_size, 8, self._max_model_len, (KVSpec(1, 8),), "f32", states
        )

    def weights(self) -> tuple[WeightSpec, ...]:
        return ()

    def constants(self, max_model_len: int) -> Mapping[str, AnyArray]:
        return {}

    def forward(self, ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> NoReturn:
        raise NotImplementedError("FakeModel has no math: load it with FakeBackend")


class NoWeights:
    """A `WeightSource` with nothing in it."""

    def names(self) -> Collection[str]:
        return ()

    def part(self, name: str) -> WeightPart:
        raise WeightFormatError(f"a fake checkpoint has no tensor {name!r}")

    def close(self) -> None:
        pass


class FakePlugin:
    """Backend "fake" (by name only), architecture FakeForCausalLM, format "fake" and a source that
    takes local folders as they are. `Registry.add(FakePlugin, "test:fake")`."""

    @staticmethod
    @hookimpl
    def vllmx_backends() -> tuple[BackendSpec, ...]:
        implementation = f"{_MODULE}.fake:FakeBackend"
        probe = f"{_MODULE}.fake_checkpoint:probe"
        return (BackendSpec("fake", implementation, probe=probe, priority=-1),)

    @staticmethod
    @hookimpl
    def vllmx_models() -> tuple[ModelSpec, ...]:
        implementation = f"{_MODULE}.fake_checkpoint:FakeModel"
        return (ModelSpec("fake", implementation, ("FakeForCausalLM",), ("fake",)),)

    @staticmethod
    @hookimpl
    def vllmx_weight_formats() -> tuple[WeightFormatSpec, ...]:
        implementation = f"{_MODULE}.fake_checkpoint:open_checkpoint"
        return (WeightFormatSpec("fake", implementation, patterns=(f"*{WEIGHTS_FILE}",)),)

    @staticmethod
    @hookimpl
    def vllmx_model_sources() -> tuple[ModelSourceSpec, ...]:
        implementation = f"{_MODULE}.fake_checkpoint:local_folder"
        return (ModelSourceSpec("fake", implementation, priority=100),)


def probe() -> None:
    """It runs everywhere."""


def local_folder(model: str, revision: str | None, progress: bool) -> Path | None:
    """A model source that knows the folders made by `make_fake_checkpoint` alone."""
    path = Path(model)
    return path if (path / WEIGHTS_FILE).is_file() else None


def open_checkpoint(path: Path) -> Checkpoint:
    """A weight format that reads config.json and nothing else."""
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    generation = path / "generation_config.json"
    extra = json.loads(generation.read_text(encoding="utf-8")) if generation.is_file() else {}
    return Checkpoint(path, config, NoWeights(), extra)


def make_fake_checkpoint(
    folder: Path,
    *,
    vocab_size: int = 320,
    max_model_len: int = 4096,
    eos_id: int | None = 256,
    adds_special_tokens: bool = False,
    **fake: Any,
) -> Path:
    """Writes a folder that loads as a model: config.json, a byte-level tokenizer.json (ids 0-255
    are the bytes, then <|end|>, <|user|>, <|assistant|>), a chat template and an empty weight file.

    Args:
        adds_special_tokens: the tokenizer puts <|end|> before each text.
        fake: see `FakeModel`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["FakeForCausalLM"],
        "model_type": "fake",
        "vocab_size": vocab_size,
        "max_position_embeddings": max_model_len,
        "eos_token_id": eos_id,
        "fake": {"eos_id": eos_id, **fake},
    }
    specials = ["<|end|>", "<|user|>", "<|assistant|>"]
    template = (
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer_config = {"eos_token": specials[0], "chat_template": template}
    for name, content in (
        ("config.json", config),
        ("tokenizer.json", _byte_tokenizer(specials, adds_special_tokens)),
        ("tokenizer_config.json", tokenizer_config),
    ):
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    (folder / WEIGHTS_FILE).touch()
    return folder


def install_fake_plugin(folder: Path) -> Path:
    """Writes the metadata of a distribution "vllmx-fake" with the entry point, so that processes
    with `folder` on PYTHONPATH see `FakePlugin`. Returns the folder."""
    info = folder / "vllmx_fake-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllmx-fake\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[vllmx]\nfake = {_MODULE}.fake_checkpoint:FakePlugin\n"
    )
    return folder


def _byte_tokenizer(specials: list[str], adds_special_tokens: bool) -> dict[str, Any]:
    """tokenizer.json of a byte-level BPE without merges; printable stand-ins as GPT-2 has them."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    stand_in = {byte: chr(byte) for byte in printable}
    stand_in |= {byte: chr(256 + i) for i, byte in enumerate(others)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    added = [
        {"id": 256 + i, "content": text, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for i, text in enumerate(specials)
    ]
    first = {"SpecialToken": {"id": specials[0], "type_id": 0}}
    prefixing = {
        "type": "TemplateProcessing",
        "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [],
        "special_tokens": {specials[0]: {"id": specials[0], "ids": [256], "tokens": specials[:1]}},
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {**level, "use_regex": True},
        "post_processor": prefixing if adds_special_tokens else None,
        "decoder": {**level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {stand_in[byte]: byte for byte in range(256)},
            "merges": [],
        },
    }
