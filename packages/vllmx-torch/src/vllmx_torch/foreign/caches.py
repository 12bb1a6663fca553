"""Modules that keep something else between tokens than keys and values of our pages: states of
recurrent layers, taps of convolutions, keys and values of attention of their own.

Such a module runs the rows of a step one after the other, each over the cache object that the
module itself makes for a sequence. A state slot holds one such object, so preemption and prefix
hits copy caches as they copy the states of a native model. The cache of a sequence grows with its
attention layers; a slot is counted with what max_model_len tokens need.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllmx_core.errors import UnsupportedModelError, shown
from vllmx_core.ops.formulas import states_after

from vllmx_torch.attention import Scratch
from vllmx_torch.kv_cache import LayerPages
from vllmx_torch.step import TorchStep

logger = logging.getLogger("vllmx.torch")

_NAMES = ("past_key_values", "cache_params", "state")
"""Parameters of a module's `forward`, and fields of its output, that hold its cache."""
_CHECKED = 24
"""Tokens of the prompt by which a load checks that a module continues its cache."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """A way to call a module so that it continues from its cache."""

    positions: bool
    """It is given the positions of the tokens, which it does not count itself."""
    chunks: bool
    """It takes several tokens behind a cache; others take one."""
    reads_again: bool = False
    """It has no cache: all tokens of the sequence are read again."""


_CONTINUATIONS = [
    *(Continuation(positions, chunks) for chunks in (True, False) for positions in (False, True)),
    Continuation(positions=False, chunks=True, reads_again=True),
]
"""Fast ones first."""


class CachedModule:
    """Turns steps into logits, row by row. See `vllmx_torch.foreign.op.ForeignModule`."""

    def __init__(self, module: Any) -> None:
        self._module = module  # a `PreTrainedModel`
        self._accepted = inspect.signature(module.forward).parameters
        self._caches: dict[int, Any] = {}  # by state slot
        self._how = _CONTINUATIONS[0]

    def logits(self, step: TorchStep, pages: Sequence[LayerPages], scratch: Scratch) -> Tensor:
        """(L, V) float32."""
        plan = step.plan
        after, wanted = states_after(plan), np.zeros(plan.num_tokens, bool)
        wanted[plan.logit_rows] = True
        found: dict[int, Tensor] = {}
        for row, (source, target) in enumerate(zip(*plan.state_slots, strict=True)):
            first, last = (int(edge) for edge in plan.query_start[row : row + 2])
            cache = self._caches[int(source)] if source >= 0 else None
            if source != target:
                cache = deepcopy(cache)
            ends = [*(first + 1 + np.flatnonzero(after[first : last - 1] >= 0)), last]
            for end in map(int, ends):
                tokens, positions = step.tokens[first:end], step.positions[first:end]
                logits, cache = self.extend(tokens, positions, cache)
                found |= {first + int(at): logits[at] for at in np.flatnonzero(wanted[first:end])}
                if after[end - 1] >= 0:
                    self._caches[int(after[end - 1])] = deepcopy(cache)
                first = end
            self._caches[int(target)] = cache
        if not found:
            width = self._module.config.get_text_config().vocab_size
            return torch.zeros((0, width), device=step.tokens.device)
        return torch.stack([found[int(token)] for token in plan.logit_rows]).float()

    def extend(self, tokens: Tensor, positions: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """(T,), (T,) and the cache before them -> (T, V), and the cache behind them."""
        if self._how.reads_again:
            read = tokens if cache is None else torch.cat([cache, tokens])
            out = self._module(input_ids=read[None], use_cache=False)
            return out.logits[0, -len(tokens) :], read
        size = len(tokens) if cache is None or self._how.chunks else 1
        found = []
        for some, places in zip(tokens.split(size), positions.split(size), strict=True):
            given: dict[str, Any] = {"input_ids": some[None], "use_cache": True}
            if cache is not None:
                given[next(name for name in _NAMES if name in self._accepted)] = cache
            if self._how.positions and "position_ids" in self._accepted:
                given["position_ids"] = places[None]
            out = self._module(**given)
            cache = next((out[name] for name in _NAMES if out.get(name) is not None), None)
            found.append(out.logits[0])
        return torch.cat(found), cache

    @torch.inference_mode()
    def check(self, vocab_size: int, max_model_len: int, tolerance: float, device: Any) -> None:
        """Chooses how the module continues from its cache: as it reads a whole prompt. Raises
        UnsupportedModelError where it does not."""
        count = min(_CHECKED, max_model_len)
        tokens = 3 + 7 * torch.arange(count, device=device) % max(1, vocab_size - 4)
        positions = torch.arange(count, device=device)
        wanted, _ = self.extend(tokens, positions, None)
        edges = [0, count // 2 - 1, count // 2, count]
        reason = ""
        for self._how in _CONTINUATIONS:
            cache, found = None, []
            try:
                for first, last in pairwise(edges):
                    # Another sequence between two chunks, for modules that keep states themselves.
                    self.extend(tokens.flip(0), positions, None)
                    logits, cache = self.extend(tokens[first:last], positions[first:last], cache)
                    found.append(logits)
            except Exception as error:  # a module's code raises anything
                reason = f"{type(error).__name__}: {error}"
                continue
            reason = "its logits differ"
            worst = (torch.cat(found) - wanted).abs().max()
            if cache is not None and float(worst) <= tolerance * float(wanted.abs().max()):
                if self._how.reads_again:
                    logger.warning(
                        "%s of transformers has no cache that vllmx can continue: each step reads"
                        " all tokens of a sequence again",
                        type(self._module).__name__,
                    )
                return
        raise UnsupportedModelError(
            f"{type(self._module).__name__} of transformers does not continue a prompt as it reads"
            f" the whole prompt, so it looks forward as well as back ({shown(reason)})"
        )


def cache_numbers(cache: Any) -> int:
    """Counts the numbers in all tensors that an object holds."""
    seen: set[int] = set()

    def count(held: Any) -> int:
        if id(held) in seen:
            return 0
        seen.add(id(held))
        if isinstance(held, Tensor):
            return held.numel()
        if isinstance(held, dict):
            return sum(map(count, held.values()))
        if isinstance(held, list | tuple):
            return sum(map(count, held))
        return count(vars(held)) if hasattr(held, "__dict__") else 0

    return count(cache)
