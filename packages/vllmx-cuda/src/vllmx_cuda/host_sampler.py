"""Sampling on the host, by the reference: what runs until the device's own sampler covers a step.

It waits for the logits, so nothing of the next step overlaps with it. Correct, and slow.
"""

from __future__ import annotations

import numpy as np
from vllmx_core.plan import F32, SamplingRows, StepResult
from vllmx_core.reference_sampler import sample

from vllmx_cuda.device import Device, Memory
from vllmx_cuda.staging import StepMemory


class HostSampler:
    """Samples the (L, V) logits of one step after the other.

    Args:
        last_ids: (L,) int32 on the device: where the next step looks for the ids of this one.
    """

    def __init__(
        self, device: Device, vocab_size: int, max_rows: int, max_tokens: int, last_ids: Memory
    ) -> None:
        self._device, self._vocab_size, self._last_ids = device, vocab_size, last_ids
        self._logits = device.pinned(4 * max_rows * vocab_size)
        self._tokens = device.pinned(4 * max_tokens)
        self._ids = device.pinned(4 * max_rows)

    def sample(
        self, logits: Memory, step: StepMemory, logit_rows: np.ndarray, rows: SamplingRows
    ) -> StepResult:
        """Waits for the step; the ids are on their way to `last_ids` when it returns.

        Args:
            logit_rows: (L,) of the plan, without padding.
        """
        count = len(logit_rows)
        raw = self._logits[: 4 * count * self._vocab_size]
        tokens = self._tokens[: step.tokens.num_bytes]
        self._device.download(raw, logits)
        self._device.download(tokens, step.tokens)
        self._device.synchronize()
        values: F32 = raw.view(np.float32).reshape(count, self._vocab_size)
        result = sample(values, rows, tokens.view(np.int32)[logit_rows])
        if count:
            self._ids[: 4 * count].view(np.int32)[...] = result.ids
            self._device.upload(self._last_ids, self._ids[: 4 * count])
            self._device.synchronize()  # the buffer is this step's alone until the copy has run
        return result
