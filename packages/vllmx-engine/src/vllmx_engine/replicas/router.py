"""Chooses the replica of each request: the one with the least predicted time to its first token.

Pure bookkeeping: no I/O, no event loop, and no clock but the `now_s` of its callers. A router that
knows less than the truth (a block evicted just now, load reported a moment ago) chooses a slower
replica at worst; each core looks up its own cache.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
from vllmx_core.records import Record

from vllmx_engine.wire.messages import ReplicaLoad

__all__ = ["Choice", "ReplicaLoad", "Router"]
Seconds = npt.NDArray[np.float64]

_UNKNOWN_TOKEN_S = 1e-4
"""Seconds of a prompt token while no replica has measured one."""
_SLOWED = 0.1
"""Weight of a second by which a running sequence is delayed; a second of the new request has 1."""
_DELAYED = 1.0
"""Weight of a second by which a prompt delays those that wait. Without it a crowded service moves
sessions away from their blocks, which makes more work, and so a greater crowd."""
_ANSWER_TOKENS = 200
"""Tokens for which a new sequence is expected to lengthen the steps of others."""
_STAY_SHARE, _STAY_S = 0.1, 0.005
"""A session stays with its replica if that costs at most so much more than the best one."""
_MAX_SESSIONS = 100_000
_SAME_S = 1e-6


class Choice(Record):
    """The replica chosen for a request, and what this was based on."""

    replica: int
    num_cached_tokens: int
    """Tokens of its prompt that the replica is thought to have, or to have soon."""
    first_token_s: float
    """The predicted seconds to the first token."""
    cost_s: float
    """The same, with the weighted seconds by which others are slowed."""
    prefill_s: float
    num_blocks: int
    """Blocks that the replica does not have."""
    num_rows: int
    session: str
    missing: Sequence[bytes]
    """Digests of full blocks that the replica will have once the prompt is computed."""


class _Pending(Record):
    """A request that was started and has not finished."""

    slot: int
    number: int
    choice: Choice


class Router:
    """Knows which replica has which blocks, and how long each would take.

    Replicas are named by small integers, see `add`. Each of several routers over the same replicas
    sees what the others sent through `ReplicaLoad` alone.

    Args:
        block_size: tokens of a block, all of whose digests are in `choose`.
    """

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._slots: dict[int, int] = {}
        """Replica -> its bit in masks and its place in arrays."""
        self._all = self._some(())
        self._replicas: list[int] = []
        """The replica of each slot; -1: the slot is free."""
        self._held: list[set[bytes]] = []
        self._where: dict[bytes, int] = {}
        """Digest -> mask of the replicas that have announced it."""
        self._expected: dict[bytes, int] = {}
        """Digest -> mask of replicas that were sent a prompt with it and have not announced it."""
        self._requests: dict[str, _Pending] = {}
        self._unseen: list[deque[tuple[int, str]]] = []
        """The numbers and ids of started requests that no report includes yet, by slot."""
        self._num_sent: list[int] = []
        self._sessions: OrderedDict[str, int] = OrderedDict()
        self._turn = 0
        self._loads: list[ReplicaLoad] = []
        self._figures = np.zeros((len(ReplicaLoad.__struct_fields__), 0))
        self._at_s: Seconds = np.zeros(0)
        """The time of each slot's last report."""
        self._ahead = np.zeros((3, 0))
        """(3, slots) seconds of prefill, rows and blocks of the requests in `_unseen`."""

    # --- replicas ---------------------------------------------------------------------------------
    @property
    def replicas(self) -> Collection[int]:
        """The replicas that may be chosen."""
        return self._slots.keys()

    def add(self, replica: int) -> None:
        """A replica that has just started, and holds nothing, may be chosen from now on."""
        if replica in self._slots:
            self.remove(replica)
        if -1 in self._replicas:
            slot = self._replicas.index(-1)
        else:
            slot = len(self._replicas)
            self._replicas.append(-1)
            self._held.append(set())
            self._unseen.append(deque())
            self._num_sent.append(0)
            self._loads.append(ReplicaLoad())
            self._figures = np.pad(self._figures, ((0, 0), (0, 1)))
            self._ahead = np.pad(self._ahead, ((0, 0), (0, 1)))
            self._at_s = np.pad(self._at_s, (0, 1))
        self._slots[replica], self._replicas[slot] = slot, replica
        self._all = self._some(self._slots)
        self._num_sent[slot] = 0
        self._take(slot, ReplicaLoad(), 0.0)

    def remove(self, replica: int) -> None:
        """Forgets a replica, what it held, and the requests that were started there."""
        slot = self._slots.pop(replica, None)
        if slot is None:
            return
        self._all = self._some(self._slots)
        for request_id in [one for one, at in self._requests.items() if at.slot == slot]:
            self.finished(request_id)
        self._drop(slot, self._held[slot])
        self._held[slot] = set()
        self._unseen[slot].clear()
        self._ahead[:, slot] = 0.0
        self._replicas[slot] = -1

    def filed(self, replica: int, digests: Iterable[bytes]) -> None:
        """A replica has these blocks from now on."""
        slot = self._slots.get(replica)
        if slot is None:
            return
        bit, where, held = 1 << slot, self._where, self._held[slot]
        for digest in digests:
            held.add(digest)
            where[digest] = where.get(digest, 0) | bit
            if digest in self._expected:
                self._unexpect(slot, (digest,))

    def evicted(self, replica: int, digests: Iterable[bytes]) -> None:
        """A replica has these blocks no more."""
        slot = self._slots.get(replica)
        if slot is None:
            return
        gone = [digest for digest in digests if digest in self._held[slot]]
        self._held[slot].difference_update(gone)
        self._drop(slot, gone)

    def load(self, replica: int, load: ReplicaLoad, now_s: float) -> None:
        """Takes a replica's report."""
        slot = self._slots.get(replica)
        if slot is not None:
            self._take(slot, load, now_s)

    def load_of(self, replica: int) -> ReplicaLoad:
        """The last report of a replica that may be chosen."""
        return self._loads[self._slots[replica]]

    # --- requests ---------------------------------------------------------------------------------
    def choose(
        self,
        digests: Sequence[bytes],
        num_tokens: int,
        session: str = "",
        *,
        now_s: float,
        num_rows: int = 1,
        among: Collection[int] | None = None,
        num_moved: int = 0,
    ) -> Choice:
        """The replica for a prompt; `started` must follow if it is sent there. Raises LookupError
        without replicas to choose from.

        Args:
            digests: of the prompt's full blocks, in order.
            session: a name under which requests belong together; empty: none.
            num_rows: choices of the request, which share the prompt.
            among: the replicas to choose from; None: all.
            num_moved: first blocks that any of them gets from another replica.
        """
        slots, mask = self._all if among is None else self._some(among)
        if not mask:
            raise LookupError("no replica to choose from")
        hits = np.maximum(self._hits(digests, mask)[slots], num_moved)  # (N,) blocks
        cached = np.minimum(hits * self._size, num_tokens - 1)
        prefill_s, first_s, slowed_s = self._costs(slots, cached, num_tokens, now_s, num_rows)
        costs_s = first_s + slowed_s
        best = self._best(slots, costs_s, session)
        num_hits, slot = int(hits[best]), int(slots[best])
        return Choice(
            replica=self._replicas[slot],
            num_cached_tokens=int(cached[best]),
            first_token_s=float(first_s[best]),
            cost_s=float(costs_s[best]),
            prefill_s=float(prefill_s[best]),
            num_blocks=-(-num_tokens // self._size) - num_hits,
            num_rows=num_rows,
            session=session,
            missing=digests[num_hits:],
        )

    def started(self, request_id: str, choice: Choice) -> None:
        """A request was sent to the replica that was chosen for it."""
        slot = self._slots.get(choice.replica)
        if slot is None or request_id in self._requests:
            return
        self._num_sent[slot] += 1
        number = self._num_sent[slot]
        self._requests[request_id] = _Pending(slot, number, choice)
        self._unseen[slot].append((number, request_id))
        self._ahead[:, slot] += choice.prefill_s, choice.num_rows, choice.num_blocks
        bit, expected = 1 << slot, self._expected
        for digest in choice.missing:
            expected[digest] = expected.get(digest, 0) | bit
        if choice.session:
            self._sessions[choice.session] = choice.replica
            self._sessions.move_to_end(choice.session)
            if len(self._sessions) > _MAX_SESSIONS:
                self._sessions.popitem(last=False)

    def finished(self, request_id: str) -> None:
        """A request has ended, or left its replica. Unknown ones are ignored."""
        pending = self._requests.pop(request_id, None)
        if pending is None:
            return
        if pending.number > self._loads[pending.slot].num_taken:
            self._forget_ahead(pending)
        self._unexpect(pending.slot, pending.choice.missing)

    # --- inside -----------------------------------------------------------------------------------
    def _some(self, replicas: Iterable[int]) -> tuple[npt.NDArray[np.intp], int]:
        """The slots of these replicas, those that may be chosen, and their mask."""
        slots = sorted({self._slots[one] for one in replicas if one in self._slots})
        return np.array(slots, np.intp), sum(1 << slot for slot in slots)

    def _hits(self, digests: Sequence[bytes], alive: int) -> npt.NDArray[np.intp]:
        """(slots,) the number of first blocks that each of a mask has or is about to have."""
        masks: list[bytes] = []
        counts: list[int] = []
        """A mask for each length of a hit."""
        size = -(-len(self._replicas) // 8)
        where, expected = self._where, self._expected
        count = 0
        for digest in digests:
            still = alive & (where.get(digest, 0) | expected.get(digest, 0))
            if still != alive:
                masks.append((alive & ~still).to_bytes(size, "little"))
                counts.append(count)
                alive = still
                if not alive:
                    break
            count += 1
        masks.append(alive.to_bytes(size, "little"))
        counts.append(count)
        bits = np.frombuffer(b"".join(masks), np.uint8).reshape(len(masks), size)
        return np.array(counts) @ np.unpackbits(bits, axis=1, bitorder="little").astype(np.intp)

    def _costs(
        self,
        slots: npt.NDArray[np.intp],
        cached: npt.NDArray[np.intp],
        num_tokens: int,
        now_s: float,
        num_rows: int,
    ) -> tuple[Seconds, Seconds, Seconds]:
        """(N,) each: seconds of the prompt alone, until the first token, and by which others are
        slowed."""
        (_, running, waiting, queued_s, token_s, work_s, stretch, row_s, *rest) = self._figures[
            :, slots
        ]
        free_rows, free_blocks, turn_s, turn_blocks, _ = rest
        ahead_s, ahead_rows, ahead_blocks = self._ahead[:, slots]
        is_known = token_s > 0.0
        usual_s = token_s[is_known].mean() if is_known.any() else _UNKNOWN_TOKEN_S
        token_s = np.where(is_known, token_s, usual_s)
        new = num_tokens - cached
        prefill_s = new * (token_s + work_s * (cached + new / 2))
        since_s = np.maximum(now_s - self._at_s[slots], 0.0)
        queue_s = np.maximum(queued_s * stretch - since_s, 0.0) + ahead_s * stretch
        short_rows = np.maximum(ahead_rows + waiting + num_rows - free_rows, 0.0)
        blocks = ahead_blocks + new / self._size
        short_blocks = np.maximum(blocks - free_blocks, 0.0) / np.maximum(turn_blocks, 1.0)
        wait_s = turn_s * np.maximum(short_rows, short_blocks)
        # Prompts before this one are computed while it waits for others to end.
        first_s = np.maximum(queue_s, wait_s) + prefill_s * stretch
        slowed_s = _SLOWED * (running + ahead_rows) * (prefill_s + _ANSWER_TOKENS * row_s)
        # Wherever it goes: later requests go where fewer wait.
        slowed_s += _DELAYED * (waiting + ahead_rows).mean() * prefill_s * stretch
        return prefill_s, first_s, slowed_s

    def _best(self, slots: npt.NDArray[np.intp], costs_s: Seconds, session: str) -> int:
        """The place of the best replica; of equal ones, that with the fewest sequences, in turn."""
        least_s = costs_s.min()
        home = self._slots.get(self._sessions.get(session, -1)) if session else None
        if home is not None:
            at = np.flatnonzero(slots == home)
            if at.size and costs_s[at[0]] <= least_s * (1 + _STAY_SHARE) + _STAY_S:
                return int(at[0])
        same = np.flatnonzero(costs_s <= least_s + _SAME_S)
        if same.size == 1:
            return int(same[0])
        busy = self._figures[1:3, slots[same]].sum(axis=0) + self._ahead[1, slots[same]]
        same = same[busy == busy.min()]
        self._turn += 1
        return int(same[self._turn % same.size])

    def _take(self, slot: int, load: ReplicaLoad, now_s: float) -> None:
        unseen = self._unseen[slot]
        self._loads[slot] = load
        self._figures[:, slot] = msgspec.structs.astuple(load)
        self._at_s[slot] = now_s
        while unseen and unseen[0][0] <= load.num_taken:
            number, request_id = unseen.popleft()
            pending = self._requests.get(request_id)
            if pending is not None and (pending.slot, pending.number) == (slot, number):
                self._forget_ahead(pending)
        if not unseen:
            self._ahead[:, slot] = 0.0  # sums of floats leave a rest

    def _forget_ahead(self, pending: _Pending) -> None:
        choice = pending.choice
        self._ahead[:, pending.slot] -= choice.prefill_s, choice.num_rows, choice.num_blocks

    def _drop(self, slot: int, digests: Iterable[bytes]) -> None:
        keep, where = ~(1 << slot), self._where
        for digest in digests:
            rest = where[digest] & keep
            if rest:
                where[digest] = rest
            else:
                del where[digest]

    def _unexpect(self, slot: int, digests: Iterable[bytes]) -> None:
        bit, expected = 1 << slot, self._expected
        for digest in digests:
            mask = expected.get(digest, 0)
            if mask == bit:
                del expected[digest]
            elif mask & bit:
                expected[digest] = mask ^ bit
