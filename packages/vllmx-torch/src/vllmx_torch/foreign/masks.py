"""Attention masks of a module of transformers.

Modules make their masks by functions of `transformers.masking_utils`, which ask an entry of a table
for the tensor. Ours makes a `NamedMask` that holds no values but remembers the rule it stands for:
an attention layer that is handed one says by it which tokens it sees, and a mask that the module
has changed on the way (by the slopes of ALiBi, say) is not a `NamedMask` any more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllmx_core.errors import UnsupportedModelError

MaskRule = Callable[[Any, Any, Any, Any], Any]
"""(batch entry, head, query position, key position) -> whether the query sees the key."""


class NamedMask(Tensor):
    """A mask (1, 1, Q, C) without values; operations on it give plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    rule: MaskRule


def named_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: MaskRule,
    device: torch.device,
    **_: Any,
) -> NamedMask:
    """An entry of `AttentionMaskInterface`."""
    one = torch.ones((), dtype=torch.bool, device=device)
    mask = one.expand(batch_size, 1, q_length, kv_length).as_subclass(NamedMask)
    mask.rule = mask_function
    return mask


def window_of(rule: MaskRule, max_model_len: int) -> int | None:
    """The number of tokens that a query sees, the newest included; None: all before it. Raises
    UnsupportedModelError for a rule that is neither."""
    last = max_model_len - 1
    seen = _seen(rule, last, max_model_len)
    window = int(seen.sum())
    edges = {0, 1, last // 2, last, *(window + step for step in (-2, -1, 0, 1, window))}
    for query in sorted(edge for edge in edges if 0 <= edge <= last):
        keys = torch.arange(min(query + 2, max_model_len))
        wanted = (keys <= query) & (keys > query - window)
        if not torch.equal(_seen(rule, query, len(keys)), wanted):
            raise UnsupportedModelError(
                "its attention has a mask that is neither causal nor a window, which vllmx does not"
                " have"
            )
    return None if window == max_model_len else window


def _seen(rule: MaskRule, query: int, count: int) -> Tensor:
    """(count,) which keys a query sees."""
    zero, keys = torch.zeros(1, dtype=torch.int64), torch.arange(count)
    try:
        seen = torch.as_tensor(rule(zero, zero, zero + query, keys))
        return seen.to("cpu", torch.bool).expand(count)
    except (RuntimeError, NotImplementedError, IndexError, TypeError) as error:
        raise UnsupportedModelError(
            f"its attention has a mask that depends on the input ({type(error).__name__}), which"
            " vllmx does not have"
        ) from error
