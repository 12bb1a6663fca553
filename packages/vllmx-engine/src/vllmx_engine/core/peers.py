"""Sends KV blocks from one replica to another, which continues the prompt.

A core that needs blocks connects to the core that has them like any client, checks that both have
the same model and options, and requests blocks by name. The other core copies them out between two
steps and sends them from a thread. Each block carries a keyed checksum, its parent's digest and its
content, so a damaged or wrong block counts as a miss.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from vllmx_core.backend import CopyOut
from vllmx_core.errors import ConfigError
from vllmx_core.system.deadline import Deadline

from vllmx_engine.core.disk_store import sealed, unsealed
from vllmx_engine.core.scheduler import Scheduler
from vllmx_engine.core.tiered_prefixes import TieredPrefixes
from vllmx_engine.core.tiers import STATES, BlockHead, KeptBlock, name_of
from vllmx_engine.wire.ipc import (
    Blocks,
    Failed,
    FrameReader,
    FromCore,
    PullBlocks,
    Ready,
    encode_frame,
    from_core_decoder,
)
from vllmx_engine.wire.messages import CoreInfo

logger = logging.getLogger("vllmx.tiers")

PULL_S = 10.0
"""Seconds within which a replica must send all blocks of a prompt."""
_MESSAGE_BYTES = 16 << 20
"""Bytes of blocks in one message."""
_RECEIVE_BYTES = 1 << 20
_Copy = tuple[Sequence[BlockHead], CopyOut]


class Peers:
    """The other replicas of a core. Its thread calls `hand_on`, any thread `pull`.

    Args:
        blocks_of: see `CoreInfo.blocks_of`.
        connect: connects to a core by its address. Raises OSError and VllmxError.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        tiers: TieredPrefixes,
        blocks_of: str,
        connect: Callable[[str], socket.socket],
    ) -> None:
        self._scheduler, self._movable = scheduler, tiers.movable
        self._batch = max(1, _MESSAGE_BYTES // max(1, tiers.block_bytes))
        self.blocks_of, self._connect = blocks_of, connect
        self._sender = ThreadPoolExecutor(1, "vllmx-kv-send")
        self._tiers = tiers.tiers
        self._tiers.pull = self.pull

    # --- from here --------------------------------------------------------------------------------
    def hand_on(self, names: Sequence[bytes], emit: Callable[[Blocks], object]) -> None:
        """Sends the named blocks that are on the device, and the last of the named states."""
        cache, states = self._scheduler.cache, self._scheduler.states
        heads, rows, snapshot = list[BlockHead](), list[int](), None
        for name in names:
            digest, group = name[:-1], name[-1]
            if group == STATES and states is not None:
                snapshot = states.pool.find(digest) or snapshot
            elif group < len(self._scheduler.limits.windows):
                block = cache.block_of(digest, group)
                entry = cache.entry(block)
                if entry is not None:
                    heads.append(BlockHead(name, *entry[1:]))
                    rows.append(block)
        copies = list[_Copy]()
        if rows:
            copies.append((heads, self._movable.blocks.copy_out(np.array(rows, np.int32))))
        if snapshot is not None and self._movable.states is not None:
            digest, parent, content = snapshot.entry
            copy = self._movable.states.copy_out(np.array([snapshot.slot], np.int32))
            copies.append(([BlockHead(name_of(digest, STATES), parent, content)], copy))
        self._sender.submit(_send, copies, cache.key, emit)

    # --- to here ----------------------------------------------------------------------------------
    def pull(self, source: str, names: Sequence[bytes]) -> dict[bytes, KeptBlock]:
        """Returns the named blocks that the core at `source` has. Raises OSError, ValueError, and
        VllmxError if it has another model or other options."""
        blocks = [name for name in names if name[-1] != STATES]
        starts = range(0, len(blocks), self._batch)
        asked = [blocks[start : start + self._batch] for start in starts]
        asked += [states] if (states := [name for name in names if name[-1] == STATES]) else []
        found: dict[bytes, KeptBlock] = {}
        num_answers, num_bytes, first_s = 0, 0, 0.0
        with self._connect(source) as connection:
            for message in _messages(connection, Deadline(PULL_S)):
                match message:
                    case Ready(info):
                        self._check(info)
                        for part in asked:
                            connection.sendall(encode_frame(PullBlocks(part)))
                    case Failed(error):
                        raise error.rebuild()
                    case Blocks(sent):
                        for name, data in sent.items():
                            block = unsealed(self._scheduler.cache.key, name, data)
                            if block is None:
                                raise ValueError("it has sent a damaged block")
                            found[name] = KeptBlock.unpacked(block)
                        num_answers += 1
                        if num_answers == 1:  # it came once the other core's step was over
                            first_s = time.monotonic()
                        else:
                            num_bytes += sum(map(len, sent.values()))
                        if num_answers == len(asked):
                            if num_bytes:
                                self._tiers.was_pulled(num_bytes, time.monotonic() - first_s)
                            return found
        raise ConnectionResetError("it has ended")

    def _check(self, info: CoreInfo) -> None:
        if info.blocks_of != self.blocks_of:
            theirs = info.blocks_of or f"nothing, since its --role is {info.role}"
            raise ConfigError(
                f"it keeps blocks of {theirs}, and this one of {self.blocks_of}: start both with"
                " the same files, version and flags"
            )


def _messages(connection: socket.socket, deadline: Deadline) -> Iterator[FromCore]:
    reader: FrameReader[FromCore] = FrameReader(from_core_decoder)
    while True:
        connection.settimeout(deadline.left_s(PULL_S))
        data = connection.recv(_RECEIVE_BYTES)
        if not data:
            return
        yield from reader.feed(data)


def _send(copies: Sequence[_Copy], key: bytes, emit: Callable[[Blocks], object]) -> None:
    found: dict[bytes, bytes] = {}
    try:
        for heads, copy in copies:
            for head, row in zip(heads, copy.result(), strict=True):
                block = KeptBlock(head.parent, head.content, row).packed()
                found[head.name] = sealed(key, head.name, block)
    except Exception:  # the other replica computes them
        logger.exception("KV blocks could not be copied out")
    emit(Blocks(found))
