"""The attention function that modules of transformers call, and what is answered to it.

The function that is registered with transformers holds no state: a call goes to the `Seam` that
hangs on the module's own attributes, and whoever runs the module says what the seam answers: a
survey on the device "meta", the pages of a step, or a check that mixes no tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from vllmx_core.errors import UnsupportedModelError

from vllmx_torch.foreign.masks import NamedMask, named_mask

NAME = "vllmx"
"""The name of our attention function in transformers' tables."""
_SEAM = "vllmx_seam"
_HARMLESS = frozenset(
    {
        "cache_position",
        "dropout",
        "layer_idx",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "training",
        "use_cache",
    }
)
"""Further arguments that a module may pass to its attention: about training or outputs, or already
used. The batch has no padding and there is no cache, so arguments about those change nothing."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The options of a layer's attention, the same in each step."""

    num_heads: int
    num_kv_heads: int
    key_size: int
    value_size: int
    scale: float
    softcap: float | None
    window: int | None
    """The window by the call's own word; its mask may say more."""
    sinks: bool


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of one layer: T tokens, H query heads, K key heads."""

    layer: int
    shape: AttentionShape
    query: Tensor  # (T, H, D)
    key: Tensor  # (T, K, D)
    value: Tensor  # (T, K, Dv)
    mask: NamedMask | None
    sinks: Tensor | None  # (H,)

    def padded(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of one size, with zeros behind the shorter ones: those of queries
        and keys change no product."""
        size = max(self.shape.key_size, self.shape.value_size)
        query, key, value = (
            functional.pad(x, (0, size - x.shape[-1])) if x.shape[-1] < size else x
            for x in (self.query, self.key, self.value)
        )
        return query, key, value


class Seam:
    """Joins a module and what its attention is answered with: (T, H, Dv) for each call."""

    def __init__(self, module: nn.Module) -> None:
        self.answer: Callable[[AttentionCall], Tensor] | None = None
        for part in module.modules():
            part.__dict__[_SEAM] = self  # `setattr` would look for parameters in it


def register() -> None:
    """Makes our functions known to transformers, under `NAME`."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, named_mask)


def _attention(
    module: nn.Module,
    query: Tensor,  # (1, H, T, D)
    key: Tensor,  # (1, K, T, D)
    value: Tensor,  # (1, K, T, Dv)
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """An entry of `AttentionInterface`. Raises UnsupportedModelError for whatever it is given and
    cannot honour."""
    seam = module.__dict__.get(_SEAM)
    if seam is None or seam.answer is None:
        raise UnsupportedModelError("its attention is called outside of a step")
    _refuse(module, query, key, attention_mask, is_causal, others)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    shape = AttentionShape(
        query.shape[1],
        key.shape[1],
        key.shape[3],
        value.shape[3],
        scale,
        softcap or None,
        sliding_window or None,
        s_aux is not None,
    )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    mask = attention_mask if isinstance(attention_mask, NamedMask) else None
    answered = seam.answer(AttentionCall(_layer(module), shape, q, k, v, mask, s_aux))
    return answered.to(query.dtype)[None], None


def _layer(module: nn.Module) -> int:
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise UnsupportedModelError("its attention layers have no number")
    return layer


def _refuse(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    is_causal: bool | None,
    others: Mapping[str, Any],
) -> None:
    """Raises UnsupportedModelError for what would be ignored."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not causal:
        raise UnsupportedModelError("a layer of its attention looks forward as well as back")
    if mask is not None and not isinstance(mask, NamedMask):
        raise UnsupportedModelError(
            "its attention is given a mask that its own code has made or changed, such as ALiBi's"
        )
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise UnsupportedModelError("its attention reads other tokens than those of the step")
    for name, value in others.items():
        if name not in _HARMLESS and value is not None and value is not False:
            raise UnsupportedModelError(
                f"its attention is given {name!r}, which vllmx's attention does not have"
            )


def own_value(call: AttentionCall) -> Tensor:
    """Each token's own value, as if it saw no other."""
    group = call.shape.num_heads // call.shape.num_kv_heads
    return torch.repeat_interleave(call.value, group, dim=1)
