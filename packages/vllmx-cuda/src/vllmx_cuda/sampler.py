"""The sampler on the device: one upload of a step's parameters, a few launches, one download.

`kernel_specs.sampling` gives the order of launches. Nothing here waits: a step's results are read
when its event has happened, and its ids stay on the device for the step behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from vllmx_core.plan import F32, AnyArray, LogprobRows, SamplingRows, StepResult

from vllmx_cuda.device import Bytes, Device, Memory
from vllmx_cuda.kernel_specs import KERNELS, Variant
from vllmx_cuda.kernel_specs.sampling import num_chunks
from vllmx_cuda.staging import ALIGNMENT, SLOTS, StepMemory

_ENTRIES = (
    "mask_logits", "edit_logits", "sample_max", "sample_threshold", "sample_draw", "sample_pick",
    "logprob_chunks", "logprob_rows",
)  # fmt: skip
_ROW_ARRAYS = (
    "temperature", "top_k", "top_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
    "seed", "position", "target", "num_logprobs",
)  # fmt: skip
_FIRST_BYTES = 1 << 16


def sampler_bytes(vocab_size: int, max_rows: int) -> int:
    """Device memory of a sampler, but for what long lists of edits and counts make it grow by."""
    row = 4 * vocab_size + 16 * num_chunks(vocab_size) + 4
    return max_rows * row + 3 * _FIRST_BYTES


class _Growing:
    """Device memory with a pinned buffer for each step in flight, as large as the largest step so
    far. What is replaced may still be in use: the stream's order keeps its next owner behind."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.memory = device.empty(_FIRST_BYTES)
        self._pinned = [device.pinned(_FIRST_BYTES) for _ in range(SLOTS)]
        self._slot = 0

    def reserve(self, num_bytes: int) -> Bytes:
        """The pinned buffer of this step; `memory` is as large."""
        self._slot = (self._slot + 1) % SLOTS
        if num_bytes > self.memory.num_bytes:
            self.memory = self._device.empty(2 * num_bytes)
        if num_bytes > self._pinned[self._slot].nbytes:
            self._pinned[self._slot] = self._device.pinned(self.memory.num_bytes)
        return self._pinned[self._slot][:num_bytes]


@dataclass(frozen=True, slots=True)
class Sampled:
    """A step's results on their way."""

    num_rows: int
    width: int | None
    """Columns of the log-probabilities; None: nobody asked."""
    ids: Bytes
    logprobs: Bytes

    def read(self) -> StepResult:
        """After the copies have run."""
        ids = np.array(self.ids.view(np.int32))
        if self.width is None:
            return StepResult(ids)
        rows, width = self.num_rows, self.width
        words = np.array(self.logprobs.view(np.int32))
        chosen, rank, top_ids, top = np.split(words, [rows, 2 * rows, (2 + width) * rows])
        shape = (rows, width)
        return StepResult(
            ids,
            LogprobRows(
                chosen.view(np.float32), rank, top_ids.reshape(shape),
                top.view(np.float32).reshape(shape),
            ),
        )  # fmt: skip


class DeviceSampler:
    """Samples the (L, V) logits of one step after the other.

    Args:
        last_ids: (L,) int32 on the device: where the next step looks for the ids of this one.
    """

    def __init__(self, device: Device, vocab_size: int, max_rows: int, last_ids: Memory) -> None:
        self._device, self._vocab_size, self._last_ids = device, vocab_size, last_ids
        self._kernels = {entry: KERNELS[entry].variant() for entry in _ENTRIES}
        self._chunks = num_chunks(vocab_size)
        self._edited = device.empty(4 * max_rows * vocab_size)
        self._chunk_results = [device.empty(4 * max_rows * self._chunks) for _ in range(4)]
        self._threshold = device.empty(4 * max_rows)
        self._parameters, self._logprobs = _Growing(device), _Growing(device)
        self._chunk_top = device.empty(_FIRST_BYTES)
        self._ids = [device.pinned(4 * max_rows) for _ in range(SLOTS)]
        self._slot = 0

    @property
    def variants(self) -> Sequence[Variant]:
        return list(self._kernels.values())

    def sample(self, logits: Memory, step: StepMemory, rows: SamplingRows) -> Sampled:
        """Enqueues everything; `rows` may change afterwards."""
        count = rows.num_rows
        self._slot = (self._slot + 1) % SLOTS
        ids = self._ids[self._slot][: 4 * count]
        if not count:
            width = rows.max_logprobs if rows.max_logprobs >= 0 else None
            return Sampled(0, width, ids, ids)
        given = self._upload(_arrays(rows))
        edited = self._edit(logits, step, rows, given)
        self._pick(edited, rows, given)
        self._device.download(ids, self._last_ids)
        if rows.max_logprobs < 0:
            return Sampled(count, None, ids, ids)
        return Sampled(count, rows.max_logprobs, ids, self._score(logits, rows, given))

    def _upload(self, arrays: Mapping[str, AnyArray]) -> dict[str, Memory]:
        """All arrays in one copy."""
        begins, end = {}, 0
        for name, array in arrays.items():
            begins[name] = end
            end += -(-max(1, array.nbytes) // ALIGNMENT) * ALIGNMENT
        packed = self._parameters.reserve(end)
        for name, array in arrays.items():
            raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            packed[begins[name] : begins[name] + raw.nbytes] = raw
        memory = self._parameters.memory
        self._device.upload(memory, packed)
        return {name: memory.at(begin, arrays[name].nbytes) for name, begin in begins.items()}

    def _launch(
        self, entry: str, rows: SamplingRows, arguments: Sequence[Memory | int | None]
    ) -> None:
        kernel, sizes = self._kernels[entry], {"rows": rows.num_rows}
        if "vocab" in kernel.kernel.sizes:
            sizes["vocab"] = self._vocab_size
        self._device.launch(kernel, sizes, arguments)

    def _edit(
        self, logits: Memory, step: StepMemory, rows: SamplingRows, given: Mapping[str, Memory]
    ) -> Memory:
        """Masked and edited in a buffer of their own; as computed where nobody wants that."""
        if rows.edits is None and rows.counts is None and rows.masks is None:
            return logits
        words = 0 if rows.masks is None else rows.masks.shape[1]
        self._launch("mask_logits", rows, [
            logits, given.get("mask_index"), given.get("masks"), given["target"], self._edited,
            self._vocab_size, words,
        ])  # fmt: skip
        sparse = ("edit_start", "edit_ids", "edit_values", "count_start", "count_ids", "counts",
                  "pending")  # fmt: skip
        self._launch("edit_logits", rows, [
            self._edited, *(given.get(name) for name in sparse), step.tokens, step.logit_rows,
            given["repetition_penalty"], given["frequency_penalty"], given["presence_penalty"],
            given["target"], self._vocab_size,
        ])  # fmt: skip
        return self._edited

    def _pick(self, edited: Memory, rows: SamplingRows, given: Mapping[str, Memory]) -> None:
        best, argmax, score, drawn = self._chunk_results
        vocab, chunks = self._vocab_size, self._chunks
        self._launch("sample_max", rows, [edited, best, argmax, vocab])
        if not rows.all_greedy:
            self._launch("sample_threshold", rows, [
                edited, best, argmax, given["temperature"], given["min_x"], given["top_k"],
                given["top_p"], given["target"], self._threshold, vocab, chunks,
            ])  # fmt: skip
            self._launch("sample_draw", rows, [
                edited, best, argmax, given["temperature"], self._threshold, given["seed"],
                given["position"], given["target"], score, drawn, vocab,
            ])  # fmt: skip
        self._launch("sample_pick", rows, [
            best, argmax, score, drawn, given["temperature"], given["target"], self._last_ids,
            chunks,
        ])  # fmt: skip

    def _score(self, logits: Memory, rows: SamplingRows, given: Mapping[str, Memory]) -> Bytes:
        count, width = rows.num_rows, rows.max_logprobs
        packed = self._logprobs.reserve(4 * count * (2 + 2 * width))
        out, word = self._logprobs.memory, 4 * count
        parts = [out.at(0, word), out.at(word, word), out.at(2 * word, word * width),
                 out.at((2 + width) * word, word * width)]  # fmt: skip
        best, sums = self._chunk_results[2:]  # of the draw, which is over
        entries = word * self._chunks * width
        if 2 * entries > self._chunk_top.num_bytes:
            self._chunk_top = self._device.empty(2 * entries)
        top, top_ids = self._chunk_top.at(0, entries), self._chunk_top.at(entries, entries)
        self._launch("logprob_chunks", rows, [
            logits, given["num_logprobs"], best, sums, top, top_ids, self._vocab_size, width,
        ])  # fmt: skip
        self._launch("logprob_rows", rows, [
            logits, given["num_logprobs"], self._last_ids, best, sums, top, top_ids, *parts,
            self._vocab_size, self._chunks, width,
        ])  # fmt: skip
        self._device.download(packed, out)
        return packed


def _arrays(rows: SamplingRows) -> dict[str, AnyArray]:
    """What the kernels read, by their names for it."""
    arrays: dict[str, AnyArray] = {name: getattr(rows, name) for name in _ROW_ARRAYS}
    arrays["min_x"] = _min_x(rows.min_p)
    if rows.edits is not None:
        arrays |= {"edit_start": rows.edits.start, "edit_ids": rows.edits.ids,
                   "edit_values": rows.edits.values}  # fmt: skip
    if rows.counts is not None:
        arrays |= {"count_start": rows.counts.start, "count_ids": rows.counts.ids,
                   "counts": rows.counts.output_counts, "pending": rows.counts.pending}  # fmt: skip
    if rows.masks is not None and rows.mask_index is not None:
        arrays |= {"masks": rows.masks, "mask_index": rows.mask_index}
    return arrays


def _min_x(min_p: F32) -> F32:
    """ln(min_p) as the reference rounds it; -inf: off."""
    with np.errstate(divide="ignore"):
        return np.log(min_p.astype(np.float64)).astype(np.float32)
