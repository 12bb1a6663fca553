"""Checks that ranks sampled the same ids, to find bugs.

Ranks of one host compare checksums, and a step with a difference raises. Rank 0 sends its ids to
other hosts, whose ranks compare them: on a difference the group ends a moment later.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Iterable

import numpy as np
from vllmx_core.plan import I32

from vllmx_tp.frames import SentFrame
from vllmx_tp.futex import fence, is_behind, publish
from vllmx_tp.region import NUM_CHECKSUMS, Region, Word

COMPARE_VARIABLE = "VLLMX_TP_COMPARE"
"""1: every step's ids are compared between the ranks that sample."""

_WAIT_S = 50e-6


def compares() -> bool:
    """True if the comparison was asked for."""
    return os.environ.get(COMPARE_VARIABLE) == "1"


class SampledIds:
    """Checksums of one rank's ids for each step, which the others read."""

    def __init__(self, region: Region, rank: int) -> None:
        self._region, self._rank = region, rank
        self._checksums, self._told = region.checksums(rank), region.word(rank, Word.CHECKED)

    def tell(self, ids: I32) -> None:
        """Publishes the checksum of the next step's ids."""
        told = int(self._told[0])
        self._checksums[told % NUM_CHECKSUMS] = zlib.crc32(ids.tobytes())
        publish(self._told, (told + 1) & 0xFFFFFFFF)

    def difference(self, others: Iterable[int], check: Callable[[], None]) -> str | None:
        """Waits for the others' checksums of the last step and describes a difference, or returns
        None. Raises what `check` raises meanwhile."""
        number = int(self._told[0])
        last = (number - 1) % NUM_CHECKSUMS
        for rank in others:
            told = self._region.word(rank, Word.CHECKED)
            while is_behind(int(told[0]), number):
                check()
                time.sleep(_WAIT_S)
            fence()
            if int(self._region.checksums(rank)[last]) != int(self._checksums[last]):
                return f"rank {rank} sampled other ids than rank {self._rank} in step {number}"
        return None


def sampled_frame(number: int, ids: I32) -> SentFrame:
    """The ids that rank 0 sampled in a step, counted from 1."""
    return SentFrame(np.concatenate([np.array([number], np.int64).view(np.int32), ids]))


def read_sampled(words: I32) -> tuple[int, I32]:
    """See `sampled_frame`."""
    return int(words[:2].view(np.int64)[0]), words[2:]
