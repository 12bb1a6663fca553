"""The attention calls of a module of transformers, found by running it once without values.

The module is built on the device "meta" and run over three tokens. Every attention layer must call
our function exactly once. A module that does not keeps something else between steps, or has
attention of its own: it runs over the cache objects that it makes itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config as fx_config
from vllmx_core.errors import UnsupportedModelError
from vllmx_core.ops.attention import AttentionSpec

from vllmx_torch.foreign.attention import NAME, AttentionCall, AttentionShape, Seam, register
from vllmx_torch.foreign.caches import CachedModule, cache_numbers
from vllmx_torch.foreign.config import refusal
from vllmx_torch.foreign.masks import window_of

_FX: Any = fx_config
"""The place where torch keeps what lets routers of experts run without values."""
_TOKENS = 3
_FURTHER = 256
"""Tokens by which the growth of a cache is measured: compressed ones grow in steps."""
_OWN_ATTENTION = (
    "its attention is code of its own (for ALiBi, perhaps) that transformers lets no attention"
    " function take the place of"
)


@dataclass(frozen=True, slots=True)
class Layer:
    """One attention layer."""

    shape: AttentionShape
    """Each of its calls must have this shape."""
    window: int | None
    """Tokens that it sees, the newest included; None: all."""

    @property
    def head_size(self) -> int:
        """The head size of its pages: keys and values of unequal size are padded to the larger
        one."""
        return max(self.shape.key_size, self.shape.value_size)

    def spec(self, number: int) -> AttentionSpec:
        """Our attention's options for it."""
        shape = self.shape
        return AttentionSpec(
            number,
            shape.num_heads,
            shape.num_kv_heads,
            self.head_size,
            shape.scale,
            window=self.window,
            softcap=shape.softcap,
        )


@dataclass(frozen=True, slots=True)
class Survey:
    """Facts about a module, known before its weights are read."""

    calls: tuple[AttentionCall, ...]
    """The calls of each attention layer, in their order."""
    vocab_size: int
    parameters: tuple[int, ...]
    """The size of each of its tensors; tied ones count once."""
    widest: int
    """Features of the widest activation of a token, the logits apart."""
    state_numbers: int = 0
    """Numbers in the cache object of a short sequence, for a module that runs over such; see
    `vllmx_torch.foreign.caches`."""
    token_numbers: int = 0
    """Further numbers in it for each token."""

    def layers(self, max_model_len: int) -> tuple[Layer, ...]:
        """The attention layers. Raises UnsupportedModelError for a mask that is not ours."""
        masks = {id(call.mask): call.mask for call in self.calls if call.mask is not None}
        windows = {key: window_of(mask.rule, max_model_len) for key, mask in masks.items()}
        return tuple(
            # A mask decides, as it does in transformers' own plain attention.
            Layer(call.shape, windows.get(id(call.mask), call.shape.window))
            for call in self.calls
        )


def survey(cls: type[Any], config: Any) -> Survey:
    """Builds and runs the module. Raises UnsupportedModelError for whatever our attention or a
    step of several sequences could not honour."""
    _refuse_by_name(cls, config)
    register()
    module = _build(cls, config, NAME)
    if any(
        "position" in name and getattr(part, "padding_idx", None) is not None
        for name, part in module.named_modules()
    ):
        raise UnsupportedModelError("it counts positions from behind its padding id")
    calls, logits = _run(module)
    return Survey(_in_order(calls, config), logits.shape[-1], *_sizes(module, logits.shape[-1]))


def survey_cache(cls: type[Any], config: Any) -> Survey:
    """Builds a module that is to run over cache objects of its own, and measures these. Raises
    UnsupportedModelError where it cannot be built."""
    module, text = _build(cls, config, None), config.get_text_config()
    parameters, widest = _sizes(module, text.vocab_size)
    cached, found = CachedModule(module), []
    try:
        with _without_values():
            for count in (_TOKENS, _TOKENS + _FURTHER):
                tokens = torch.zeros(count, dtype=torch.int64, device="meta")
                found.append(cache_numbers(cached.extend(tokens, tokens, None)[1]))
    except Exception:  # its code needs values: all layers have as many heads of keys as of queries
        per_token = 2 * text.num_hidden_layers * text.hidden_size
        found = [_TOKENS * per_token, (_TOKENS + _FURTHER) * per_token]
    each = -(-(found[1] - found[0]) // _FURTHER)
    return Survey((), text.vocab_size, parameters, widest, found[0], each)


def _build(cls: type[Any], config: Any, attention: str | None) -> nn.Module:
    try:
        with torch.device("meta"):
            # Without values any dtype does; the grouped products of experts know this one alone.
            module: nn.Module = cls._from_config(
                deepcopy(config), attn_implementation=attention, dtype=torch.bfloat16
            )
    except Exception as error:  # modules check their configs in their own ways
        raise refusal("transformers cannot build it", error) from error
    return module.eval()


def _sizes(module: nn.Module, vocab_size: int) -> tuple[tuple[int, ...], int]:
    """`Survey.parameters` and `Survey.widest`."""
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    features = [
        linear.out_features
        for linear in module.modules()
        if isinstance(linear, nn.Linear) and linear.out_features != vocab_size
    ]
    return tuple(tensor.numel() for tensor in tensors.values()), max(features, default=0)


@contextmanager
def _without_values() -> Iterator[None]:
    """Lets modules on the device "meta" run."""
    with torch.inference_mode(), _FX.patch(meta_nonzero_assume_all_nonzero=True):
        yield


def _refuse_by_name(cls: type[Any], config: Any) -> None:
    """Raises UnsupportedModelError for what transformers itself says of a class."""
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ())
    others = sorted(kind for kind in kinds if "attention" not in kind or "linear" in kind)
    if others:
        raise UnsupportedModelError(
            f"it has layers of kind {', '.join(map(repr, others))}, which keep something else"
            " between tokens than keys and values"
        )
    if getattr(config.get_text_config(), "num_kv_shared_layers", 0):
        raise UnsupportedModelError(
            "its last layers read keys and values of earlier ones through transformers' own cache"
        )
    if getattr(cls, "_is_stateful", False):
        raise UnsupportedModelError(
            "it keeps something else between tokens than keys and values, with or instead of"
            " attention"
        )
    if not getattr(cls, "_supports_attention_backend", True):
        raise UnsupportedModelError(_OWN_ATTENTION)


def _run(module: nn.Module) -> tuple[list[AttentionCall], Tensor]:
    calls: list[AttentionCall] = []

    def note(call: AttentionCall) -> Tensor:
        calls.append(call)
        shape = call.shape
        return call.query.new_empty(len(call.query), shape.num_heads, shape.value_size)

    seam, tokens = Seam(module), torch.zeros(_TOKENS, dtype=torch.int64, device="meta")
    seam.answer = note
    try:
        with _without_values():
            logits = run_module(module, tokens, tokens, tokens[-1:])
    except UnsupportedModelError:
        raise
    except Exception as error:  # whatever a module does that needs values
        raise refusal("its code cannot be followed without values", error) from error
    finally:
        seam.answer = None
    return calls, logits


def run_module(module: nn.Module, tokens: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
    """(T,), (T,), (L,) -> (L, V) float32 logits."""
    out = module(
        input_ids=tokens[None],
        position_ids=positions[None],
        # Without padding. It also keeps the module from looking for borders between sequences.
        attention_mask=torch.ones_like(tokens)[None],
        logits_to_keep=rows,
        use_cache=False,
    )
    logits: Tensor = out.logits[0].float()
    return logits


def _in_order(calls: Sequence[AttentionCall], config: Any) -> tuple[AttentionCall, ...]:
    if not calls:
        raise UnsupportedModelError(_OWN_ATTENTION)
    numbers = [call.layer for call in calls]
    if sorted(numbers) != list(range(len(calls))):
        raise UnsupportedModelError(
            f"its attention layers are numbered {numbers}, not each once from 0 on"
        )
    wanted = getattr(config.get_text_config(), "num_hidden_layers", len(calls))
    if wanted != len(calls):
        raise UnsupportedModelError(
            f"{len(calls)} of its {wanted} layers have attention, the others keep something else"
        )
    for call in calls:
        heads, kv_heads = call.shape.num_heads, call.shape.num_kv_heads
        if heads % kv_heads:
            raise UnsupportedModelError(
                f"layer {call.layer} has {heads} heads over {kv_heads} of keys"
            )
    return tuple(sorted(calls, key=lambda one: one.layer))
