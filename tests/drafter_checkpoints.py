"""Random EAGLE-3 and DFlash drafters as their authors store them, and their formulas in float64."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

F64 = npt.NDArray[np.float64]


@dataclass
class Formula:
    """What both share. `read` is the flat config of the drafter's layers."""

    read: Mapping[str, Any]
    tensors: Mapping[str, npt.NDArray[Any]]
    embedding: F64
    """(V, E) the drafter's, or its target's."""
    head: F64
    """(D, E)"""

    def weight(self, name: str, kind: str = "weight") -> F64:
        """A tensor; zero where the file has none."""
        other = name.replace("layers.0.", "midlayer.")
        stored = self.tensors.get(f"{name}.{kind}", self.tensors.get(f"{other}.{kind}"))
        return np.zeros(1) if stored is None else stored.astype(np.float64)

    def rms(self, x: F64, w: F64) -> F64:
        found: F64 = x / np.sqrt((x * x).mean(-1, keepdims=True) + self.read["rms_norm_eps"]) * w
        return found

    def heads(self, name: str, x: F64, positions: Sequence[int] | None) -> F64:
        """(T, heads, D) of a projection, with norm and rotation where the layer has them."""
        size = self.read["head_dim"]
        y = x @ self.weight(name).T + self.weight(name, "bias")
        y, norm = y.reshape(len(x), -1, size), self.weight(name.replace("_proj", "_norm"))
        if norm.size > 1:
            y = self.rms(y, norm)
        if positions is None:
            return y
        angles = np.outer(positions, self.read["rope_theta"] ** (-np.arange(0, size, 2) / size))
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        a, b = y[..., : size // 2], y[..., size // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def attend(self, layer: str, q: F64, k: F64, v: F64, mask: npt.NDArray[np.bool_]) -> F64:
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat(group, 1), v.repeat(group, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        scores = np.where(mask, scores, -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        found = np.einsum("hqk,khd->qhd", scores / scores.sum(-1, keepdims=True), v)
        o = f"{layer}.self_attn.o_proj"
        return found.reshape(len(q), -1) @ self.weight(o).T + self.weight(o, "bias")

    def feed(self, layer: str, x: F64) -> F64:
        y = self.rms(x, self.weight(f"{layer}.post_attention_layernorm"))
        gate, up, down = (self.weight(f"{layer}.mlp.{n}_proj") for n in ("gate", "up", "down"))
        gated = y @ gate.T
        return x + (gated / (1 + np.exp(-gated)) * (y @ up.T)) @ down.T

    def logits(self, x: F64) -> F64:
        """(T, V), -inf for ids that the drafter lacks."""
        found = x @ self.head.T
        if "d2t" not in self.tensors:
            return found
        whole = np.full((len(x), len(self.embedding)), -np.inf)
        whole[:, np.arange(len(self.head)) + self.tensors["d2t"]] = found
        return whole


class Eagle3Formula(Formula):
    """Rows of known tokens, then of drafted ones."""

    flags: Mapping[str, bool] = {}

    def joined(self, states: F64) -> F64:
        """(T, 3E) -> (T, E)."""
        if self.flags.get("fc_norm"):
            parts = np.split(states, 3, -1)
            normed = [self.rms(one, self.weight(f"fc_norm.{i}")) for i, one in enumerate(parts)]
            states = np.concatenate(normed, -1)
        return states @ self.weight("fc").T

    def run(self, tokens: Sequence[int], x: F64) -> tuple[F64, F64]:
        """(T, E) what drafted tokens read, and (T, V) logits."""
        count, positions = len(tokens), range(1, len(tokens) + 1)
        mask = np.tril(np.ones((count, count), np.bool_))
        for index in range(self.read.get("num_hidden_layers", 1)):
            layer = f"layers.{index}"
            if index:
                y = self.rms(x, self.weight(f"{layer}.input_layernorm"))
            else:
                embedded = self.embedding[list(tokens)]
                hidden = self.rms(x, self.weight(f"{layer}.hidden_norm"))
                normed = self.rms(embedded, self.weight(f"{layer}.input_layernorm"))
                y = np.concatenate([normed, hidden], -1)
                x = hidden if self.flags.get("norm_before_residual") else x
            q, k, v = (
                self.heads(f"{layer}.self_attn.{name}_proj", y, where)
                for name, where in (("q", positions), ("k", positions), ("v", None))
            )
            x = self.feed(layer, x + self.attend(layer, q, k, v, mask))
        normed = self.rms(x, self.weight("norm"))
        return normed if self.flags.get("norm_output") else x, self.logits(normed)

    def draft(self, tokens: Sequence[int], states: F64, count: int) -> list[int]:
        """The likeliest ids behind known ones, by the target's states (T - 1, 3E) at all but the
        last."""
        fed, x, found = list(tokens[1:]), self.joined(states), []
        for _ in range(count):
            hidden, logits = self.run(fed, x)
            found.append(int(logits[-1].argmax()))
            fed.append(found[-1])
            x = np.concatenate([x, hidden[-1:]])
        return found


class DFlashFormula(Formula):
    """A block behind a context."""

    mask_token = 0
    mask: F64 | None = None
    """The embedding of mask tokens, where it is not that of their id."""
    windows: Sequence[int | None] = ()
    """Of each layer, which attends to earlier tokens of the block alone where it has one."""
    from_last = False

    def block(self, last: int, states: F64, count: int) -> F64:
        """(count, V) logits of drafted tokens behind `last`, by the target's states (T, n * E) at
        the tokens before it."""
        length = len(states)
        context = self.rms(states @ self.weight("fc").T, self.weight("hidden_norm"))
        masks = count - 1 if self.from_last else count
        x = self.embedding[[last, *[self.mask_token] * masks]]
        if self.mask is not None:
            x[1:] = self.mask
        positions = np.arange(length + 1 + masks)
        own = positions[length:]
        for index, window in enumerate(self.windows):
            layer = f"layers.{index}"
            y = self.rms(x, self.weight(f"{layer}.input_layernorm"))
            whole = np.concatenate([context, y])
            q = self.heads(f"{layer}.self_attn.q_proj", y, own)
            k = self.heads(f"{layer}.self_attn.k_proj", whole, positions)
            v = self.heads(f"{layer}.self_attn.v_proj", whole, None)
            mask = np.ones((len(own), len(positions)), np.bool_)
            if window is not None:
                behind = own[:, None] - positions
                mask = (behind >= 0) & (behind < window)
            x = self.feed(layer, x + self.attend(layer, q, k, v, mask))
        logits = self.logits(self.rms(x, self.weight("norm")))
        return logits if self.from_last else logits[1:]


def random_tensors(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Any]:
    """Matrices that keep the size of what they multiply, and vectors near one."""
    random = np.random.default_rng(seed)
    found = {}
    for name, shape in shapes.items():
        drawn = random.standard_normal(shape).astype(np.float32)
        found[name] = drawn * shape[-1] ** -0.5 if len(shape) > 1 else 1 + 0.2 * drawn
    return found


def layer_shapes(read: Mapping[str, Any], layer: str, width: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a layer that attends over `width` features."""
    size, inner, head = read["hidden_size"], read["intermediate_size"], read["head_dim"]
    heads, kv = read["num_attention_heads"] * head, read["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {
        f"{layer}.self_attn.q_proj.weight": (heads, width),
        f"{layer}.self_attn.k_proj.weight": (kv, width),
        f"{layer}.self_attn.v_proj.weight": (kv, width),
        f"{layer}.self_attn.o_proj.weight": (size, heads),
        f"{layer}.mlp.gate_proj.weight": (inner, size),
        f"{layer}.mlp.up_proj.weight": (inner, size),
        f"{layer}.mlp.down_proj.weight": (size, inner),
        f"{layer}.input_layernorm.weight": (size,),
        f"{layer}.post_attention_layernorm.weight": (size,),
    }
    if read["model_type"] == "qwen3":
        shapes |= {f"{layer}.self_attn.{name}_norm.weight": (head,) for name in "qk"}
    if read.get("attention_bias"):
        rows = {"q": heads, "k": kv, "v": kv, "o": size}
        shapes |= {f"{layer}.self_attn.{name}_proj.bias": (n,) for name, n in rows.items()}
    return shapes


def save(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(dict(config)))


Ids = int | Sequence[int] | None
"""The ids of a drafter, or how many; None: all of its target's."""


def some_ids(vocab_size: int, ids: int | Sequence[int], seed: int = 0) -> tuple[Any, Any]:
    """`d2t` (D,) and `t2d` (vocab_size,) of these ids, or of so many."""
    if isinstance(ids, int):
        ids = np.random.default_rng(seed).permutation(vocab_size)[:ids].tolist()
    chosen = np.zeros(vocab_size, np.bool_)
    chosen[list(ids)] = True
    return np.sort(ids) - np.arange(len(ids)), chosen


def how_many(ids: Ids, vocab_size: int) -> int:
    return vocab_size if ids is None else ids if isinstance(ids, int) else len(ids)


def eagle3(
    folder: Path,
    target: Mapping[str, Any],
    embedding: F64,
    *,
    ids: Ids = None,
    layers: int = 1,
    layer: str = "midlayer",
    model_type: str = "llama",
    own_embedding: bool = False,
    flags: Mapping[str, bool] | None = None,
    seed: int = 3,
    **config: Any,
) -> Eagle3Formula:
    """Saves a drafter for a target with this config and (V, E) `embedding`, and returns its
    formula. `layer`: "midlayer" as SafeAILab stores it, "layers.0" as `speculators` does."""
    size, vocab_size, flags = target["hidden_size"], target["vocab_size"], flags or {}
    count = how_many(ids, vocab_size)
    read = {
        "model_type": model_type,
        "vocab_size": vocab_size,
        "hidden_size": size,
        "intermediate_size": 2 * size,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": size // 4,
        "num_hidden_layers": layers,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "max_position_embeddings": 4096,
        "attention_bias": bool(config.pop("attention_bias", False)),
    }
    shapes = layer_shapes(read, layer, 2 * size)
    for index in range(1, layers):
        shapes |= layer_shapes(read, f"layers.{index}", size)
    shapes |= {
        f"{layer}.hidden_norm.weight": (size,),
        "norm.weight": (size,),
        "fc.weight": (size, 3 * size),
        "lm_head.weight": (count, size),
    }
    if flags.get("fc_norm"):
        shapes |= {f"fc_norm.{index}.weight": (size,) for index in range(3)}
    if own_embedding:
        shapes["embed_tokens.weight"] = (vocab_size, size)
    tensors = random_tensors(shapes, seed)
    if ids is not None:
        tensors["d2t"], tensors["t2d"] = some_ids(vocab_size, ids)
    if layer == "midlayer":
        saved = {"architectures": ["LlamaForCausalLMEagle3"], **read, **flags}
    else:
        saved = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": read,
            **flags,
        }
    save(folder, {**saved, "draft_vocab_size": count, "torch_dtype": "float32"} | config, tensors)
    if own_embedding:
        embedding = tensors["embed_tokens.weight"].astype(np.float64)
    found = Eagle3Formula(read, tensors, embedding, tensors["lm_head.weight"].astype(np.float64))
    found.flags = flags
    return found


def dflash(
    folder: Path,
    target: Mapping[str, Any],
    embedding: F64,
    head: F64,
    points: Sequence[int],
    *,
    block: int = 8,
    layers: int = 2,
    ids: Ids = None,
    window: int | None = None,
    from_speculators: bool = False,
    from_last: bool = False,
    mask: bool = False,
    seed: int = 5,
    **config: Any,
) -> DFlashFormula:
    """Saves a drafter of `layers` layers, with `window` in the first one, and returns its
    formula. Embedding and head are the target's (V, E)."""
    size, vocab_size = target["hidden_size"], target["vocab_size"]
    read = {
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": size,
        "intermediate_size": 2 * size,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": size // 4,
        "num_hidden_layers": layers,
        "rms_norm_eps": 1e-6,
        "rope_theta": 20000.0,
        "max_position_embeddings": 4096,
    }
    if window is not None:
        kinds = ["sliding_attention"] + ["full_attention"] * (layers - 1)
        read |= {"layer_types": kinds, "sliding_window": window, "use_sliding_window": True}
    shapes: dict[str, tuple[int, ...]] = {
        "norm.weight": (size,),
        "hidden_norm.weight": (size,),
        "fc.weight": (size, len(points) * size),
    }
    for index in range(layers):
        shapes |= layer_shapes(read, f"layers.{index}", size)
    if ids is not None:
        shapes["lm_head.weight"] = (how_many(ids, vocab_size), size)
    if mask:
        shapes["mask_embedding"] = (size,)
    tensors = random_tensors(shapes, seed)
    if ids is not None:
        tensors["d2t"], tensors["t2d"] = some_ids(vocab_size, ids)
        head = tensors["lm_head.weight"].astype(np.float64)
    if from_speculators:
        saved = {
            "architectures": ["DFlashDraftModel"],
            "speculators_model_type": "dflash",
            "transformer_layer_config": read,
            "aux_hidden_state_layer_ids": list(points),
            "mask_token_id": vocab_size - 2,
            "draft_vocab_size": how_many(ids, vocab_size),
            "sample_from_anchor": from_last,
        }
    else:
        ours = {"mask_token_id": vocab_size - 2, "target_layer_ids": [one - 1 for one in points]}
        layers_of_target = target["num_hidden_layers"]
        saved = {
            "architectures": ["DFlashDraftModel"],
            **read,
            "dflash_config": ours,
            "num_target_layers": layers_of_target,
        }
    save(folder, {**saved, "block_size": block, "dtype": "float32"} | config, tensors)
    found = DFlashFormula(read, tensors, embedding, head)
    found.mask_token, found.from_last = vocab_size - 2, from_last
    found.windows = [window] + [None] * (layers - 1)
    found.mask = tensors["mask_embedding"].astype(np.float64) if mask else None
    return found
