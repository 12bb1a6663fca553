"""The owners of slots for recurrent states: rows, snapshots, none.

A slot holds what all recurrent layers keep of one sequence up to one of its tokens. A row writes
its own slot in every step. A snapshot is a slot that a row left behind at the end of a block, filed
under the digest of that block, and read by sequences that continue the same prefix: nothing is
copied.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from vllmx_core.records import MutableRecord

from vllmx_engine.core.prefix_cache import Entry


class Snapshot(MutableRecord, eq=False):
    """The states behind a prefix."""

    slot: int
    entry: Entry
    """The entry of the block that the prefix ends with."""
    is_far: bool
    """It saves so many tokens that it is worth the place of any other."""
    num_hits: int = 0


class SlotPool:
    """Slots 0 ... num_slots - 1.

    A slot is used as many times as rows name it: to write it, to read it in their next step, or to
    file it once its step came back. A snapshot that no row uses is idle: it can be found, and it is
    evicted where slots are short, the least recently used one first, those that are not far before
    those that are.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.evicting: Callable[[Sequence[Snapshot]], None] | None = None
        """Told of a snapshot before its slot is taken for others."""
        self._uses = [0] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._filed: dict[bytes, Snapshot] = {}
        self._of_slot: dict[int, Snapshot] = {}
        self._idle: tuple[OrderedDict[int, None], ...] = (OrderedDict(), OrderedDict())
        """Slots of idle snapshots: of those that are not far, and of those that are."""

    @property
    def num_available(self) -> int:
        """Slots that `take` can hand out to a row."""
        return len(self._free) + sum(map(len, self._idle))

    @property
    def num_snapshots(self) -> int:
        """The number of snapshots that can be found."""
        return len(self._filed)

    def take(self, *, any_snapshot: bool) -> int:
        """A slot with one use, or -1 where there is none. It may be that of an idle snapshot, but
        of one that is far only with `any_snapshot`."""
        if self._free:
            slot = self._free.pop()
        else:
            near, far = self._idle
            idle = near or (far if any_snapshot else None)
            if not idle:
                return -1
            slot, _ = idle.popitem(last=False)
            if self.evicting is not None:
                self.evicting([self._of_slot[slot]])
            self._unfile(self._of_slot[slot])
        self._uses[slot] = 1
        return slot

    def acquire(self, slot: int) -> None:
        """One more use of a slot that is used or holds a snapshot."""
        if not self._uses[slot]:
            del self._idle[self._of_slot[slot].is_far][slot]
        self._uses[slot] += 1

    def release(self, slot: int) -> None:
        """One use fewer. Behind the last one the slot is idle if it holds a snapshot, else free."""
        self._uses[slot] -= 1
        if self._uses[slot]:
            return
        snapshot = self._of_slot.get(slot)
        if snapshot is None:
            self._free.append(slot)
        else:
            self._idle[snapshot.is_far][slot] = None

    def find(self, digest: bytes) -> Snapshot | None:
        """The snapshot behind the block of this digest."""
        return self._filed.get(digest)

    def snapshots(self) -> list[Snapshot]:
        """All that can be found."""
        return list(self._filed.values())

    def holds_snapshot(self, slot: int) -> bool:
        """True if a slot holds a snapshot that can be found."""
        return slot in self._of_slot

    def file(self, slot: int, entry: Entry, *, is_far: bool) -> Snapshot | None:
        """Makes a slot that is used a snapshot; None where the same prefix has one already."""
        if entry[0] in self._filed:
            return None
        snapshot = Snapshot(slot, entry, is_far)
        self._filed[entry[0]] = self._of_slot[slot] = snapshot
        return snapshot

    def forget(self, digest: bytes) -> None:
        """Takes the snapshot of this digest away, if there is one. Rows that use its slot go on
        with it."""
        snapshot = self._filed.get(digest)
        if snapshot is not None:
            self.forget_snapshot(snapshot)

    def forget_snapshot(self, snapshot: Snapshot) -> None:
        """`forget`, but not of one that was filed later."""
        if self._of_slot.get(snapshot.slot) is not snapshot:
            return
        self._unfile(snapshot)
        if not self._uses[snapshot.slot]:
            del self._idle[snapshot.is_far][snapshot.slot]
            self._free.append(snapshot.slot)

    def clear(self) -> None:
        """Forgets all snapshots."""
        for digest in list(self._filed):
            self.forget(digest)

    def _unfile(self, snapshot: Snapshot) -> None:
        del self._filed[snapshot.entry[0]], self._of_slot[snapshot.slot]

    def check(self, used: Iterable[int]) -> None:
        """Asserts that every slot is free, idle, or used exactly as often as `used` names it."""
        counts = [0] * self.num_slots
        for slot in used:
            counts[slot] += 1
        assert counts == self._uses, "uses of slots differ from the rows"
        idle = [slot for slots in self._idle for slot in slots]
        unused = [slot for slot, count in enumerate(counts) if not count]
        assert sorted(self._free + idle) == unused, "slot lost"
        assert all(slot in self._of_slot for slot in idle), "idle without a snapshot"
        assert not any(slot in self._of_slot for slot in self._free), "free with a snapshot"
        filed = {snapshot.slot: snapshot for snapshot in self._filed.values()}
        assert filed == self._of_slot, "a snapshot is filed twice, or not at all"
