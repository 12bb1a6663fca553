"""Checkpoints with a random layer of multi-token prediction, and its formula by transformers.

The layer is a model of one layer, fed with what the authors' formula makes of an embedding and of
hidden states; it lies in the checkpoint under the authors' names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

_LAYER = re.compile(r"(?:model|backbone)\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Family:
    """The names of a family's tensors; `{}` is the number of layers."""

    layer: str
    module: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str
    offset: float = 0.0
    """Added to the weights of norms."""
    hidden_first: bool = False
    copies: tuple[str, str] | None = None
    """The layer's own embedding and head."""
    own_names: tuple[str, str] | None = None
    """(a name in other layers, the name in this one)."""
    kinds: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the config for a model of this layer alone."""

    @staticmethod
    def of_layer(config: dict[str, Any]) -> set[str]:
        """Keys that a model of one layer has in addition to the config's."""
        kinds = {
            "linear_num_key_heads": "layer_types",
            "n_routed_experts": "first_k_dense_replace",
        }
        found = {added for key, added in kinds.items() if key in config}
        return found | ({"mlp_layer_types"} if config["model_type"] == "glm4_moe_lite" else set())


QWEN = Family(
    "mtp.layers.0", "mtp", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", offset=1.0
)
DEEPSEEK = Family(
    "model.layers.{}", "model.layers.{}", "enorm", "hnorm", "eh_proj", "shared_head.norm",
    copies=("embed_tokens", "shared_head.head"),
)  # fmt: skip
NEMOTRON = Family(
    "mtp.layers.0", "mtp", "layers.0.enorm", "layers.0.hnorm", "layers.0.eh_proj",
    "layers.1.final_layernorm",
)  # fmt: skip
MIMO = Family(
    "model.mtp_layers.0", "model.mtp_layers.0", "token_layernorm", "hidden_layernorm", "input_proj",
    "final_layernorm", hidden_first=True,
)  # fmt: skip
MIMO_V2 = Family(
    "model.mtp.layers.0", "model.mtp.layers.0", "enorm", "hnorm", "eh_proj", "final_layernorm",
    own_names=("post_attention_layernorm", "pre_mlp_layernorm"),
    kinds={"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]},
)  # fmt: skip


@dataclass(frozen=True)
class HeadCheckpoint:
    """A saved checkpoint, and its modules in float64."""

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    family: Family
    target: Any
    layer: Any
    """A model of one layer, or of one for each block."""

    @torch.no_grad()
    def hidden(self, tokens: list[int]) -> torch.Tensor:
        """(T, E) the output of the target's last norm."""
        found: torch.Tensor = self.target.model(torch.tensor([tokens])).last_hidden_state[0]
        return found

    def inputs(self, token: int, hidden: torch.Tensor) -> torch.Tensor:
        """(E,) the input of the layer at a position: the id behind it, and its hidden states."""
        family, embed = self.family, self.layer.get_input_embeddings().weight
        halves = [
            self._normed(embed[token], family.embedding_norm),
            self._normed(hidden, family.hidden_norm),
        ]
        joined = torch.cat(halves[::-1] if family.hidden_first else halves)
        found: torch.Tensor = self._tensor(family.projection) @ joined
        return found

    @torch.no_grad()
    def run(self, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """(T, E) and (T, V) of the layer: its hidden states, and its logits."""
        hidden = self.layer.model(inputs_embeds=torch.stack(inputs)[None]).last_hidden_state[0]
        return hidden, hidden @ self.layer.lm_head.weight.T

    @torch.no_grad()
    def draft(self, tokens: list[int], count: int) -> list[int]:
        """The likeliest `count` ids behind known ones, by the hidden states of all but the last."""
        states = self.hidden(tokens[:-1])
        inputs = [self.inputs(*pair) for pair in zip(tokens[1:], states, strict=True)]
        found: list[int] = []
        for _ in range(count):
            hidden, logits = self.run(inputs)
            found.append(int(logits[-1].argmax()))
            inputs.append(self.inputs(found[-1], hidden[-1]))
        return found

    def _normed(self, x: torch.Tensor, name: str) -> torch.Tensor:
        epsilon = self.config.get("layer_norm_epsilon", self.config["rms_norm_eps"])
        scaled = x * (x.square().mean() + epsilon).rsqrt()
        return scaled * (self._tensor(name) + self.family.offset)

    def _tensor(self, name: str) -> torch.Tensor:
        module = self.family.module.format(self.config["num_hidden_layers"])
        return self.tensors[f"{module}.{name}.weight"].double()


def save_with_head(
    folder: Path,
    config: dict[str, Any],
    family: Family,
    make: Callable[[dict[str, Any]], Any],
    change: Callable[[dict[str, torch.Tensor]], None] = lambda tensors: None,
) -> HeadCheckpoint:
    """Saves a random model with its head.

    Args:
        make: a random model in transformers for a config.
        change: changes the tensors before they are saved.
    """
    target = make(config)
    target.save_pretrained(folder)
    count = config["num_hidden_layers"]
    one = deepcopy(config) | {"num_hidden_layers": 1, "first_k_dense_replace": 0}
    one |= {"layer_types": ["full_attention"], "full_attention_interval": 1, "mlp_only_layers": []}
    one |= {"mlp_layer_types": ["sparse"], "hybrid_override_pattern": "*E"}
    kept = {key for key in one if key in config} | family.of_layer(config)
    layer = make({key: value for key, value in one.items() if key in kept} | {**family.kinds})
    generator = torch.Generator().manual_seed(5)
    tensors = load_file(folder / "model.safetensors")
    module, size = family.module.format(count), config["hidden_size"]
    layers, _, first = family.layer.format(count).rpartition(".")
    with TemporaryDirectory() as other:
        layer.save_pretrained(other)
        for name, tensor in load_file(Path(other) / "model.safetensors").items():
            if (found := _LAYER.match(name)) is not None:
                rest = name[found.end() :]
                if family.own_names is not None:
                    rest = rest.replace(*family.own_names)
                tensors[f"{layers}.{int(first) + int(found[1])}.{rest}"] = tensor
            elif name.endswith((".norm.weight", ".norm_f.weight")):
                tensors[f"{module}.{family.norm}.weight"] = tensor
            elif family.copies is not None:
                own = dict(zip(("model.embed_tokens", "lm_head"), family.copies, strict=True))
                tensors[f"{module}.{own[name.removesuffix('.weight')]}.weight"] = tensor
    for name in (family.embedding_norm, family.hidden_norm):
        drawn = 0.2 * torch.randn(size, generator=generator) + 1 - family.offset
        tensors[f"{module}.{name}.weight"] = drawn
    fc = torch.randn(size, 2 * size, generator=generator) * (2 * size) ** -0.5
    tensors[f"{module}.{family.projection}.weight"] = fc
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for model in (target, layer):
        _load(model, tensors, family, count, is_layer=model is layer)
    saved = json.loads((folder / "config.json").read_text())
    saved |= {"architectures": config["architectures"], "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(saved))
    return HeadCheckpoint(config, tensors, family, target.double(), layer.double())


def _load(
    model: Any, tensors: dict[str, torch.Tensor], family: Family, count: int, *, is_layer: bool
) -> None:
    """Gives modules the embedding and head of the checkpoint, which `change` may have changed."""
    tables = [one for one in tensors if one.endswith(("embed_tokens.weight", "embeddings.weight"))]
    embedding = min(tables, key=len)  # not a copy of the heads
    names = (embedding.removesuffix(".weight"), "lm_head")
    if is_layer and family.copies is not None:
        names = tuple(f"{family.module.format(count)}.{name}" for name in family.copies)  # type: ignore[assignment]
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(tensors[f"{names[0]}.weight"])
        head = tensors.get(f"{names[1]}.weight", tensors[f"{names[0]}.weight"])
        model.lm_head.weight.copy_(head)


def with_few_likely_ids(tensors: dict[str, torch.Tensor]) -> None:
    """Leaves large logits to eight ids, so that random drafts are right now and then."""
    for name, tensor in tensors.items():
        if name.endswith(("lm_head.weight", "shared_head.head.weight")):
            tensor[:100] *= 0.01
            tensor[108:] *= 0.01


def random_model(config: dict[str, Any], seed: int = 0, std: float = 0.2) -> Any:
    torch.manual_seed(seed + config["num_hidden_layers"])
    given = deepcopy(config)
    read = transformers.AutoConfig.for_model(**given, attn_implementation="eager")
    read._experts_implementation = "eager"  # the others have no float64
    model = transformers.AutoModelForCausalLM.from_config(read).float().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=std)
    random = np.random.default_rng(seed)
    for name, buffer in model.named_buffers():
        if name.endswith("bias"):
            buffer.copy_(buffer.new_tensor(0.3 * random.standard_normal(buffer.shape)))
    return model
