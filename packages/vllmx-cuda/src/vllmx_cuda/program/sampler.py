"""The sampler on the device: a few launches, one download.

`kernel_specs.sampling` gives the order of launches. The parameters of each row come with the step's
other arrays; edits, penalties and masks, which few requests have, go in a copy of their own.
Nothing here waits: a step's results are read when its event has happened, and its ids stay on the
device for the next step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from vllmx_core.plan import AnyArray, LogprobRows, SamplingRows, StepResult

from vllmx_cuda.device.device import Device
from vllmx_cuda.device.memory import Bytes, Memory
from vllmx_cuda.kernel_specs import KERNELS, Variant
from vllmx_cuda.kernel_specs.sampling import BINS, CANDIDATES, FEW, num_chunks
from vllmx_cuda.program.staging import ALIGNMENT, SLOTS, StepMemory, is_plain

_ENTRIES = (
    "mask_logits",
    "edit_logits",
    "sample_max",
    "sample_candidates",
    "sample_among",
    "sample_count",
    "sample_collect",
    "sample_threshold",
    "sample_draw",
    "sample_pick",
    "logprob_chunks",
    "logprob_rows",
)
_FIRST_BYTES = 1 << 16


def sampler_bytes(vocab_size: int, max_rows: int) -> int:
    """Device memory of a sampler, but for what long lists of edits and counts make it grow by."""
    chunk = 6 * 4 + 8 * CANDIDATES
    row = 4 * vocab_size + chunk * num_chunks(vocab_size) + 12 * BINS + 4
    return max_rows * row + 3 * _FIRST_BYTES


Draw = Literal["greedy", "few", "any"]
"""The most that a step's rows need: the greatest logit; draws from `FEW` ids; any draw."""
DRAWS: tuple[Draw, ...] = ("greedy", "few", "any")


def draw_of(rows: SamplingRows) -> Draw:
    if rows.all_greedy:
        return "greedy"
    few = (rows.top_k > 0) & (rows.top_k <= FEW)
    return "few" if (few | (rows.temperature == 0) | (rows.target >= 0)).all() else "any"


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
    num_whole: int = 0
    logits: Bytes | None = None
    """The logits of the rows that want them whole, one behind the other."""

    def read(self) -> StepResult:
        """Reads the results, after the copies have run."""
        ids = np.array(self.ids.view(np.int32))
        if self.width is None:
            return StepResult(ids)
        logits = None
        if self.logits is not None:
            logits = np.array(self.logits.view(np.float32)).reshape(self.num_whole, -1)
        rows, width = self.num_rows, self.width
        words = np.array(self.logprobs.view(np.int32))
        chosen, rank, top_ids, top = np.split(words, [rows, 2 * rows, (2 + width) * rows])
        shape = (rows, width)
        return StepResult(
            ids,
            LogprobRows(
                chosen.view(np.float32),
                rank,
                top_ids.reshape(shape),
                top.view(np.float32).reshape(shape),
            ),
            logits,
        )


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
        self._chunk_results = [device.empty(4 * max_rows * self._chunks) for _ in range(6)]
        self._lists = [device.empty(4 * max_rows * self._chunks * CANDIDATES) for _ in range(2)]
        self._bins = device.zeros(4 * max_rows * BINS), device.zeros(8 * max_rows * BINS)
        self._threshold = device.empty(4 * max_rows)
        self._sparse, self._logprobs = _Growing(device), _Growing(device)
        self._chunk_top = device.empty(_FIRST_BYTES)
        self._ids = [device.pinned(4 * max_rows) for _ in range(SLOTS)]
        self._slot = 0

    @property
    def variants(self) -> Sequence[Variant]:
        return list(self._kernels.values())

    def enqueue_ids(self, logits: Memory, step: StepMemory, count: int, draw: Draw) -> None:
        """Enqueues what draws ids from the logits of `count` rows as they are. The launches are the
        same for the same arguments, so that they can be captured."""
        self._pick(logits, step, count, draw)

    def sample(
        self, logits: Memory, step: StepMemory, rows: SamplingRows, *, picked: bool = False
    ) -> Sampled:
        """Enqueues what is left; `rows` may change afterwards.

        Args:
            picked: `enqueue_ids` has run for this step.
        """
        count = rows.num_rows
        self._slot = (self._slot + 1) % SLOTS
        ids = self._ids[self._slot][: 4 * count]
        width = rows.max_logprobs if rows.max_logprobs >= 0 else None
        if not count:
            return Sampled(0, width, ids, ids)
        if not picked:
            edited = logits if is_plain(rows) else self._edit(logits, step, rows)
            self._pick(edited, step, count, draw_of(rows))
        self._device.download(ids, self._last_ids)
        if width is None:
            return Sampled(count, None, ids, ids)
        logprobs = self._score(logits, step, count, width)
        if rows.whole is None:
            return Sampled(count, width, ids, logprobs)
        whole = self._download_rows(logits, rows.whole.tolist())
        return Sampled(count, width, ids, logprobs, rows.whole.size, whole)

    def _download_rows(self, logits: Memory, rows: Sequence[int]) -> Bytes:
        """Logits of these rows, one behind the other, in memory of this step's own: few requests
        want them, and those of a step in flight must stay."""
        row_bytes = 4 * self._vocab_size
        found = self._device.pinned(row_bytes * len(rows))
        for place, row in enumerate(rows):
            part = found[place * row_bytes : (place + 1) * row_bytes]
            self._device.download(part, logits.at(row * row_bytes, row_bytes))
        return found

    def _upload(self, arrays: Mapping[str, AnyArray]) -> dict[str, Memory]:
        """All arrays in one copy."""
        begins, end = {}, 0
        for name, array in arrays.items():
            begins[name] = end
            end += -(-max(1, array.nbytes) // ALIGNMENT) * ALIGNMENT
        packed = self._sparse.reserve(end)
        for name, array in arrays.items():
            raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            packed[begins[name] : begins[name] + raw.nbytes] = raw
        memory = self._sparse.memory
        self._device.upload(memory, packed)
        return {name: memory.at(begin, arrays[name].nbytes) for name, begin in begins.items()}

    def _launch(self, entry: str, count: int, arguments: Sequence[Memory | int | None]) -> None:
        kernel, sizes = self._kernels[entry], {"rows": count}
        if "vocab" in kernel.kernel.sizes:
            sizes["vocab"] = self._vocab_size
        self._device.launch(kernel, sizes, arguments)

    def _edit(self, logits: Memory, step: StepMemory, rows: SamplingRows) -> Memory:
        """Masked and edited in a buffer of their own."""
        given, sparse, count = step.parameters, self._upload(_sparse(rows)), rows.num_rows
        words = 0 if rows.masks is None else rows.masks.shape[1]
        self._launch(
            "mask_logits",
            count,
            [
                logits,
                sparse.get("mask_index"),
                sparse.get("masks"),
                given["target"],
                self._edited,
                self._vocab_size,
                words,
            ],
        )
        names = (
            "edit_start",
            "edit_ids",
            "edit_values",
            "count_start",
            "count_ids",
            "counts",
            "pending",
        )
        self._launch(
            "edit_logits",
            count,
            [
                self._edited,
                *(sparse.get(name) for name in names),
                step.tokens,
                step.logit_rows,
                given["repetition_penalty"],
                given["frequency_penalty"],
                given["presence_penalty"],
                given["target"],
                self._vocab_size,
            ],
        )
        return self._edited

    def _pick(self, edited: Memory, step: StepMemory, count: int, draw: Draw) -> None:
        best, argmax, score, ids, least, listed = self._chunk_results
        lists, list_ids = self._lists
        given, vocab, chunks = step.parameters, self._vocab_size, self._chunks
        tempered, target = given["temperature"], given["target"]
        filters = given["min_x"], given["top_k"], given["top_p"]
        noise = given["seed"], given["position"]
        if draw == "few":
            found = best, argmax, least, listed, lists, list_ids
            wanted = tempered, given["top_k"], target
            self._launch("sample_candidates", count, [edited, *wanted, *found, vocab])
            each = tempered, *filters, *noise, target, self._last_ids
            self._launch("sample_among", count, [edited, *found, *each, vocab, chunks])
            return
        self._launch("sample_max", count, [edited, best, argmax, vocab])
        if draw == "any":
            common = edited, best, argmax, tempered
            rows = *common, *filters, target, *self._bins
            self._launch("sample_count", count, [*rows, vocab])
            self._launch("sample_collect", count, [*rows, listed, lists, vocab])
            last = listed, lists, self._threshold
            self._launch("sample_threshold", count, [*rows, *last, vocab, chunks])
            drawn = self._threshold, *noise, target, score, ids
            self._launch("sample_draw", count, [*common, *drawn, vocab])
        picked = best, argmax, score, ids, tempered, target, self._last_ids
        self._launch("sample_pick", count, [*picked, chunks])

    def _score(self, logits: Memory, step: StepMemory, count: int, width: int) -> Bytes:
        packed = self._logprobs.reserve(4 * count * (2 + 2 * width))
        out, word = self._logprobs.memory, 4 * count
        parts = [
            out.at(0, word),
            out.at(word, word),
            out.at(2 * word, word * width),
            out.at((2 + width) * word, word * width),
        ]
        best, sums = self._chunk_results[2:4]  # of the draw, which is over
        entries = word * self._chunks * width
        if 2 * entries > self._chunk_top.num_bytes:
            self._chunk_top = self._device.empty(2 * entries)
        top, top_ids = self._chunk_top.at(0, entries), self._chunk_top.at(entries, entries)
        wanted = step.parameters["num_logprobs"]
        self._launch(
            "logprob_chunks",
            count,
            [logits, wanted, best, sums, top, top_ids, self._vocab_size, width],
        )
        self._launch(
            "logprob_rows",
            count,
            [
                logits,
                wanted,
                self._last_ids,
                best,
                sums,
                top,
                top_ids,
                *parts,
                self._vocab_size,
                self._chunks,
                width,
            ],
        )
        self._device.download(packed, out)
        return packed


def _sparse(rows: SamplingRows) -> dict[str, AnyArray]:
    """The arrays of edits, penalties and masks, which few rows have, by kernel argument."""
    arrays: dict[str, AnyArray] = {}
    if rows.edits is not None:
        arrays |= {
            "edit_start": rows.edits.start,
            "edit_ids": rows.edits.ids,
            "edit_values": rows.edits.values,
        }
    if rows.counts is not None:
        arrays |= {
            "count_start": rows.counts.start,
            "count_ids": rows.counts.ids,
            "counts": rows.counts.output_counts,
            "pending": rows.counts.pending,
        }
    if rows.masks is not None and rows.mask_index is not None:
        arrays |= {"masks": rows.masks, "mask_index": rows.mask_index}
    return arrays
