"""Finds how far a prefix is there, on the device and in the tiers below it together."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from vllmx_core.records import Record

from vllmx_engine.core.prefix_cache import PrefixCache
from vllmx_engine.core.prefixes import Hit, Prefixes
from vllmx_engine.core.sequence import Sequence
from vllmx_engine.core.state_slots import SlotPool
from vllmx_engine.core.tiers import STATES, name_of

Has = Callable[[bytes], bool]
"""True if a block or states with this name can be had."""


class Reach(Record):
    """A prefix that the device and the tiers have together."""

    num_blocks: int
    missing: list[tuple[int, int]]
    """Blocks of it that the device lacks: the number of each in the sequence, and its group."""
    lacks_states: bool
    names: list[bytes]
    """The names of both, in order."""


class PrefixReach:
    """Looks through the blocks of sequences; changes nothing.

    Args:
        slots: of a model with recurrent layers.
    """

    def __init__(self, prefixes: Prefixes, cache: PrefixCache, slots: SlotPool | None) -> None:
        self._prefixes, self._cache, self._slots = prefixes, cache, slots

    def longest(self, sequence: Sequence, hit: Hit, has: Has, most: int | None = None) -> Reach:
        """The longest prefix beyond a hit whose missing blocks and states can be had."""
        end, length = self._prefixes.num_findable(sequence), hit.num_blocks
        if most is not None:
            end = min(end, length + most)
        full = self._prefixes.full_groups
        if not full:
            length = end
            if end:
                self._prefixes.digest_at(sequence, end - 1)
        while full and length < end:
            digest = self._prefixes.digest_at(sequence, length)
            if not all(self._there(digest, group, has) for group in full):
                break
            length += 1
        lacks_states = False
        while length > hit.num_blocks:
            missing = self._missing(sequence, length, has)
            if missing is not None:
                length = missing
                continue
            if self._slots is None:
                break
            digest = sequence.digests[length - 1]
            lacks_states = self._slots.find(digest) is None
            if not lacks_states or has(name_of(digest, STATES)):
                break
            length -= 1
        if length <= hit.num_blocks:
            return Reach(hit.num_blocks, [], False, [])
        absent = sorted(
            (index, group)
            for group, first in self._prefixes.first_needed(length)
            for index in range(first, length)
            if self._cache.block_of(sequence.digests[index], group) < 0
        )
        names = [name_of(sequence.digests[index], group) for index, group in absent]
        if lacks_states:
            names.append(name_of(sequence.digests[length - 1], STATES))
        return Reach(length, absent, lacks_states, names)

    def present(self, sequence: Sequence, reach: Reach) -> dict[tuple[int, int], int]:
        """The blocks of a reach that the device has, by their number and group."""
        found: dict[tuple[int, int], int] = {}
        for group, first in self._prefixes.first_needed(reach.num_blocks):
            for index in range(first, reach.num_blocks):
                block = self._cache.block_of(sequence.digests[index], group)
                if block >= 0:
                    found[index, group] = block
        return found

    def unknown(
        self, sequence: Sequence, end: int, firsts: Mapping[int, int], has: Has
    ) -> list[bytes]:
        """The blocks and states of a prefix that are neither on the device nor had elsewhere.

        Args:
            firsts: the first block that each group needs, if that is not 0.
        """
        groups = [*range(self._prefixes.num_groups), *([STATES] * (self._slots is not None))]
        names = list[bytes]()
        for index in range(end):
            digest = self._prefixes.digest_at(sequence, index)
            for group in groups:
                is_here = group != STATES and self._cache.block_of(digest, group) >= 0
                name = name_of(digest, group)
                if index >= firsts.get(group, 0) and not (is_here or has(name)):
                    names.append(name)
        return names

    def _there(self, digest: bytes, group: int, has: Has) -> bool:
        return self._cache.block_of(digest, group) >= 0 or has(name_of(digest, group))

    def _missing(self, sequence: Sequence, length: int, has: Has) -> int | None:
        """The last block that a prefix needs in a window and that nobody has."""
        full = self._prefixes.full_groups
        spans = [one for one in self._prefixes.first_needed(length) if one[0] not in full]
        for index in range(length - 1, min((first for _, first in spans), default=length) - 1, -1):
            digest = sequence.digests[index]
            for group, first in spans:
                if index >= first and not self._there(digest, group, has):
                    return index
        return None
