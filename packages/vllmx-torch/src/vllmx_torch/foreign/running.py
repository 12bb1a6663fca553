"""A module of transformers on the device, run over the rows of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from vllmx_core.errors import UnsupportedModelError
from vllmx_core.weights.part import WeightSource

from vllmx_torch.attention import Scratch, paged_attention
from vllmx_torch.foreign.attention import AttentionCall, Seam, own_value
from vllmx_torch.foreign.caches import CachedModule
from vllmx_torch.foreign.model import TransformersModel
from vllmx_torch.foreign.survey import Layer, run_module
from vllmx_torch.foreign.weights import load_module
from vllmx_torch.kv_cache import LayerPages
from vllmx_torch.step import TorchStep

_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.05}
"""The tolerated difference of one token's logits at two places in a batch, as a share of the
greatest."""


def load_running(
    model: TransformersModel, source: WeightSource, dtype: torch.dtype, device: torch.device
) -> RunningModule | CachedModule:
    """Loads the module of a model. Raises WeightFormatError, and UnsupportedModelError where tokens
    of a step would disturb each other outside of attention, or a cache of the module's own does
    not continue a prompt."""
    module = load_module(model, source, dtype, device)
    vocab_size, longest = model.shape.vocab_size, model.shape.max_model_len
    if not model.layers:
        cached = CachedModule(module)
        cached.check(vocab_size, longest, _TOLERANCE[dtype], device)
        return cached
    running = RunningModule(module, model.layers)
    running.check_rows(vocab_size, longest, dtype, device)
    return running


class RunningModule:
    """Turns steps into logits. The module sees the step as one sequence of all its tokens, each
    with its own position; its attention is answered out of the pages of each token's row."""

    def __init__(self, module: nn.Module, layers: Sequence[Layer]) -> None:
        self._module, self._seam = module, Seam(module)
        self._layers = tuple(layers)
        self._specs = tuple(layer.spec(number) for number, layer in enumerate(layers))

    def logits(self, step: TorchStep, pages: Sequence[LayerPages], scratch: Scratch) -> Tensor:
        """(L, V) float32."""
        answer = partial(self._attend, step=step, pages=pages, scratch=scratch)
        return self._run(step.tokens, step.positions, step.logit_rows, answer)

    def _run(
        self,
        tokens: Tensor,
        positions: Tensor,
        rows: Tensor,
        answer: Callable[[AttentionCall], Tensor],
    ) -> Tensor:
        self._seam.answer = answer
        try:
            return run_module(self._module, tokens, positions, rows)
        finally:
            self._seam.answer = None

    def _attend(
        self,
        call: AttentionCall,
        step: TorchStep,
        pages: Sequence[LayerPages],
        scratch: Scratch,
    ) -> Tensor:
        """(T, H, Dv)."""
        layer, spec = self._layers[call.layer], self._specs[call.layer]
        if call.shape != layer.shape:
            raise UnsupportedModelError(
                f"layer {call.layer} asks for {call.shape}, after {layer.shape} when it was loaded"
            )
        q, k, v = (x.float() for x in call.padded())
        sinks = None if call.sinks is None else call.sinks.float()
        out = paged_attention(q, k, v, spec, sinks, step, pages[call.layer], scratch)
        return out[..., : layer.shape.value_size]

    @torch.inference_mode()
    def check_rows(
        self, vocab_size: int, max_model_len: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Raises UnsupportedModelError for a module in which tokens meet anywhere but in its
        attention, or whose positions are not those it is given: with an attention that lets each
        token see itself alone, the logits of a token must not depend on its place in the batch
        nor on the others there."""
        ids = [1 + (vocab_size - 2) * share // 5 for share in range(1, 5)]
        places = [max_model_len * share // 5 for share in range(1, 5)]
        first, second = [0, 1, 2], [3, 1, 0]
        found = []
        for chosen in (first, second):
            tokens, positions = (
                torch.tensor([listed[one] for one in chosen], device=device)
                for listed in (ids, places)
            )
            every = torch.arange(len(chosen), device=device)
            found.append(self._run(tokens, positions, every, own_value))
        one, other = found[0][[0, 1]], found[1][[2, 1]]
        greatest = float(one.abs().nan_to_num().max())
        if not torch.allclose(
            one, other, rtol=0, atol=_TOLERANCE[dtype] * greatest, equal_nan=True
        ):
            raise UnsupportedModelError(
                f"{type(self._module).__name__} of transformers mixes tokens outside of its"
                " attention, or counts positions by itself: it cannot run several sequences in"
                " one step"
            )
