"""Sends KV blocks from one replica to another, which continues the prompt.

A core that needs blocks connects to the core that computes them like any client, checks that both
have the same model and options, and requests blocks by name. The other core copies them out between
two steps, those of each chunk of the prompt behind the chunk's step, and sends them from a thread
while it computes the next chunk. Each block carries a keyed checksum, its parent's digest and its
content, so a damaged or wrong block counts as a miss.
"""

from __future__ import annotations

import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from vllmx_core.backend import CopyOut
from vllmx_core.errors import ConfigError
from vllmx_core.records import Record

from vllmx_engine.core.disk_store import sealed, unsealed
from vllmx_engine.core.scheduler import Scheduler
from vllmx_engine.core.tiered_prefixes import TieredPrefixes
from vllmx_engine.core.tiers import STATES, BlockHead, Fetch, KeptBlock, name_of
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

LOOK_S = 0.5
"""Seconds after which a silent replica's blocks may be found to be wanted no more."""
_MESSAGE_BYTES = 1 << 20
"""Bytes of blocks in one message: decoding it keeps the engine's thread from running."""
_RECEIVE_BYTES = 1 << 20
_Copy = tuple[Sequence[BlockHead], CopyOut]
_Emit = Callable[[Blocks], object]


class _Asked(Record):
    """Blocks that another replica wants."""

    names: deque[bytes]
    """Names of blocks that were not sent yet, in the order in which they are computed."""
    request_id: str
    emit: _Emit


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
        self.blocks_of, self._connect = blocks_of, connect
        self._sender = ThreadPoolExecutor(1, "vllmx-kv-send")
        self._asked: list[_Asked] = []
        self._tiers = tiers.tiers
        self._tiers.pull = self.pull

    # --- from here --------------------------------------------------------------------------------
    def hand_on(self, names: Sequence[bytes], request_id: str, emit: _Emit) -> None:
        """Sends the named blocks that are on the device; while a request computes others, those
        follow. Ends with the last of the named states."""
        self._asked.append(_Asked(deque(names), request_id, emit))
        self.send_new()

    def left(self, emit: _Emit) -> None:
        """A replica is gone."""
        self._asked = [one for one in self._asked if one.emit != emit]

    def send_new(self) -> None:
        """Sends what the last step has computed of the blocks that others want."""
        self._asked = [one for one in self._asked if not self._send_new(one)]

    def _send_new(self, asked: _Asked) -> bool:
        """True if all was sent that will ever be there."""
        cache, names = self._scheduler.cache, asked.names
        is_last = asked.request_id not in self._scheduler.live
        heads, rows, states = list[BlockHead](), list[int](), list[bytes]()
        while names:
            digest, group = names[0][:-1], names[0][-1]
            is_block = group < len(self._scheduler.limits.windows)
            block = cache.block_of(digest, group) if is_block else -1
            entry = cache.entry(block)
            if entry is not None:
                heads.append(BlockHead(names[0], *entry[1:]))
                rows.append(block)
            elif not is_last:
                break
            elif group == STATES:
                states.append(digest)
            names.popleft()
        copies = list[_Copy]()
        if rows:
            copies.append((heads, self._movable.blocks.copy_out(np.array(rows, np.int32))))
        copies += self._states(states)
        if copies or is_last:
            self._sender.submit(_send, copies, cache.key, asked.emit, is_last)
        return is_last

    def _states(self, digests: Sequence[bytes]) -> list[_Copy]:
        """The last of these states that there are."""
        states, movable = self._scheduler.states, self._movable.states
        if states is None or movable is None:
            return []
        found = [one for digest in digests if (one := states.pool.find(digest)) is not None]
        if not found:
            return []
        digest, parent, content = found[-1].entry
        copy = movable.copy_out(np.array([found[-1].slot], np.int32))
        return [([BlockHead(name_of(digest, STATES), parent, content)], copy)]

    # --- to here ----------------------------------------------------------------------------------
    def pull(self, fetch: Fetch) -> Iterator[dict[bytes, KeptBlock]]:
        """See `Pull`."""
        names = sorted(fetch.names, key=lambda name: name[-1] == STATES)  # as they are computed
        num_bytes, seconds = 0, 0.0
        reader: FrameReader[FromCore] = FrameReader(from_core_decoder)
        with self._connect(fetch.source) as connection:
            connection.settimeout(LOOK_S)
            while not fetch.is_given_up:
                begin_s, is_within = time.monotonic(), reader.is_within
                try:
                    data = connection.recv(_RECEIVE_BYTES)
                except TimeoutError:
                    continue
                if not data:
                    raise ConnectionResetError("it has ended")
                if not is_within:  # it had nothing to send before
                    begin_s = time.monotonic()
                for message in reader.feed(data):
                    match message:
                        case Ready(info):
                            self._check(info)
                            connection.sendall(encode_frame(PullBlocks(names, fetch.source_id)))
                        case Failed(error):
                            raise error.rebuild()
                        case Blocks(sent, is_last):
                            yield {name: self._opened(name, row) for name, row in sent.items()}
                            num_bytes += sum(map(len, sent.values()))
                            if is_last:
                                if num_bytes:
                                    seconds += time.monotonic() - begin_s
                                    self._tiers.was_pulled(num_bytes, seconds)
                                return
                seconds += time.monotonic() - begin_s

    def _opened(self, name: bytes, data: bytes) -> KeptBlock:
        block = unsealed(self._scheduler.cache.key, name, data)
        if block is None:
            raise ValueError("it has sent a damaged block")
        return KeptBlock.unpacked(block)

    def _check(self, info: CoreInfo) -> None:
        if info.blocks_of != self.blocks_of:
            theirs = info.blocks_of or f"nothing, since its --role is {info.role}"
            raise ConfigError(
                f"it keeps blocks of {theirs}, and this one of {self.blocks_of}: start both with"
                " the same files, version and flags"
            )


def _send(copies: Sequence[_Copy], key: bytes, emit: _Emit, is_last: bool) -> None:
    found, num_bytes = dict[bytes, bytes](), 0
    try:
        for heads, copy in copies:
            for head, row in zip(heads, copy.result(), strict=True):
                block = KeptBlock(head.parent, head.content, row).packed()
                found[head.name] = sealed(key, head.name, block)
                num_bytes += len(block)
                if num_bytes >= _MESSAGE_BYTES:
                    emit(Blocks(found, is_last=False))
                    found, num_bytes = {}, 0
    except Exception:  # the other replica computes them
        logger.exception("KV blocks could not be copied out")
    if found or is_last:
        emit(Blocks(found, is_last=is_last))
