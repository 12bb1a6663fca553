"""Full KV blocks by content: a chain of BLAKE2b digests, so that equal prefixes share blocks.

A block's digest covers its parent's digest and its own content: its token ids, then all else that
decides its keys and values, as bytes. The parent of a sequence's first block is its root: the keyed
digest of its cache salt, its adapter and the cache's identity. The key is secret, so nobody can
know a parent or search for collisions. Two sequences share a block only when their roots and all
content up to the block's end agree; the content is compared as well, so that a colliding digest can
at most cost a miss.

A model with several cache groups keeps a block in each of them for the same tokens: a cached block
is found by its group and digest, and each group evicts its blocks independently.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import Protocol

from vllmx_core.backend import LoadedInfo
from vllmx_core.records import Record

from vllmx_engine.wire.messages import CoreInfo, ImageInput

DIGEST_BYTES = 16
_NOWHERE = array("i", [-1])
Entry = tuple[bytes, bytes, bytes]
"""Digest, parent and content of a cached block. A new one is made whenever a block is filed."""


class Run(Record, eq=False):
    """Blocks of a chain, one after the other, that all groups without a window hold."""

    ids: bytes
    """The token ids, which are all that decides their content."""
    digests: list[bytes]
    places: array[int]
    """The blocks of all those groups, one after the other for each digest."""
    entries: list[Entry]
    """The entry of each of `places`."""


class BlockScores(Record, eq=False):
    """Log-probabilities of the tokens that follow those of a cached block, one by one."""

    num_logprobs: int
    """The number of most likely tokens with each."""
    next_token: int
    """The token behind the block, which the last one is of."""
    entries: bytes
    """A list of `TokenLogprobs`, as msgpack."""


class CacheIdentity(Record):
    """Properties that all blocks of one cache share, and blocks of another cache may not."""

    model: str = ""
    """The model's name, or its digest by `vllmx_engine.core.fingerprint`."""
    dtype: str = ""
    """The type of keys and values."""
    block_size: int = 0

    @classmethod
    def of(cls, model: str, info: LoadedInfo | CoreInfo) -> CacheIdentity:
        """The identity of a loaded model's cache, computed in one dtype and kept in another."""
        return cls(model, f"{info.dtype} as {info.kv_cache_dtype}", info.block_size)

    def root(self, key: bytes, salt: str, adapter: str) -> bytes:
        """Parent digest of first blocks under a salt and an adapter."""
        data = repr((self.model, self.dtype, self.block_size, adapter, salt)).encode()
        return blake2b(data, digest_size=DIGEST_BYTES, key=key).digest()


class Watcher(Protocol):
    """Told of the blocks that a cache gains and loses."""

    def filed(self, digest: bytes) -> None: ...

    def evicted(self, digest: bytes) -> None: ...


def block_digest(parent: bytes, content: bytes) -> bytes:
    """The digest of a block that follows `parent`."""
    return blake2b(parent + content).digest()[:DIGEST_BYTES]


def image_content(images: Iterable[ImageInput], block_size: int) -> dict[int, bytes]:
    """The images that each block holds, and where they begin: content other than token ids."""
    found: dict[int, bytes] = {}
    for image in images:
        last = (image.start + image.num_tokens - 1) // block_size
        for block in range(image.start // block_size, last + 1):
            offset = (image.start - block * block_size).to_bytes(8, "little", signed=True)
            found[block] = found.get(block, b"") + image.digest + offset
    return found


class PrefixCache:
    """Digest -> the block of each cache group, and back. It owns no block: see `BlockPool`.

    Args:
        windows: one for each cache group, as in `LoadedInfo.cache_windows`. In a group without a
            window a block is of use with all those before it only, and is kept no longer than they.
        key: of the roots' digests; a new secret by default.
    """

    def __init__(
        self,
        identity: CacheIdentity | None = None,
        windows: tuple[int | None, ...] = (None,),
        key: bytes | None = None,
    ) -> None:
        self.forgotten: Callable[[bytes], None] | None = None
        """Told of the digest of each block that is forgotten."""
        self.watcher: Watcher | None = None
        """Set if others must know what can be hit here."""
        self.identity = identity or CacheIdentity()
        self.key = secrets.token_bytes(32) if key is None else key
        """Set by the owner of blocks that outlive the process, before the first root."""
        self.scores: dict[bytes, BlockScores] = {}
        """Log-probabilities by digest, until no group holds it any more."""
        self._places: dict[bytes, array[int]] = {}
        """The block of each group that holds this digest; -1 where there is none. Arrays, which the
        garbage collector does not track: with as many lists it would take milliseconds."""
        self._entries: dict[int, Entry] = {}
        self._known: dict[bytes, tuple[bytes, array[int]]] = {}
        """`_places` by what their digests are of: to look one up takes a third of the time that
        making a digest does."""
        self._runs: dict[bytes, Run] = {}
        """The run that was filed last behind a digest, until a block of it is forgotten."""
        self._run_begins: dict[bytes, bytes] = {}
        """The digest behind which a run was filed, by its last one, which is forgotten first."""
        self._children: list[dict[bytes, int] | None] = [
            {} if window is None else None for window in windows
        ]
        """The number of cached blocks that follow a digest in each group without a window; digests
        with none are left out."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block: int) -> bool:
        return block in self._entries

    def root(self, salt: str, adapter: str = "") -> bytes:
        """Parent digest of first blocks under a salt and an adapter."""
        return self.identity.root(self.key, salt, adapter)

    def digest(self, parent: bytes, content: bytes) -> bytes:
        """The digest of a block that follows `parent`."""
        return block_digest(parent, content)

    @property
    def digests(self) -> Iterable[bytes]:
        """The digests of all cached blocks."""
        return self._places.keys()

    def known(self, parent: bytes, content: bytes) -> tuple[bytes, Sequence[int]] | None:
        """Returns the results of `digest` and then `find`; None where nothing is found."""
        return self._known.get(parent + content)

    def entry(self, block: int) -> Entry | None:
        """The entry of a block that is cached. While it is the same object, the block was not
        forgotten, and without a window neither was any block before it in its chain."""
        return self._entries.get(block)

    def is_known(self, digest: bytes) -> bool:
        """True if a group may hold a block of this digest."""
        return digest in self._places

    def block_of(self, digest: bytes, group: int) -> int:
        """The block of a group that holds this digest; -1: none."""
        places = self._places.get(digest)
        return -1 if places is None else places[group]

    def group_of(self, block: int) -> int:
        """The cache group of a cached block."""
        return self._places[self._entries[block][0]].index(block)

    def find(self, digest: bytes, parent: bytes, content: bytes) -> Sequence[int] | None:
        """The block of each group (-1: none) that holds this content behind this parent."""
        places = self._places.get(digest)
        if places is None:
            return None
        return places if self._entries[max(places)] == (digest, parent, content) else None

    def insert(
        self, blocks: Sequence[int], digest: bytes, parent: bytes, content: bytes
    ) -> Sequence[int] | None:
        """Files the block of each group (-1: none). Returns the blocks that stand for this content
        from now on, which are others where the same was filed before, or None when the digest is
        taken by other content."""
        entry = (digest, parent, content)
        places = self._places.get(digest)
        if places is None:
            if max(blocks) < 0:
                return blocks
            places = self._places[digest] = _NOWHERE * len(blocks)
            self._known[parent + content] = digest, places
        elif self._entries[max(places)] != entry:
            return None
        for group, block in enumerate(blocks):
            if places[group] < 0 <= block:
                places[group] = block
                self._entries[block] = entry
                children = self._children[group]
                if children is not None:
                    children[parent] = children.get(parent, 0) + 1
                if self.watcher is not None:
                    self.watcher.filed(digest)
        return places

    def run(self, parent: bytes) -> Run | None:
        """A run behind a digest, all of which is cached; there may be others."""
        return self._runs.get(parent)

    def add_run(self, parent: bytes, run: Run) -> None:
        """Files a run of cached blocks, behind `parent`."""
        self._runs[parent] = run
        self._run_begins[run.digests[-1]] = parent

    def _drop_run(self, last: bytes) -> None:
        parent = self._run_begins.pop(last, None)
        if parent is not None:
            run = self._runs.get(parent)
            if run is not None and run.digests[-1] == last:
                del self._runs[parent]

    def remove(self, block: int) -> None:
        """Forgets a cached block."""
        digest, parent, content = self._entries.pop(block)
        if self.forgotten is not None:
            self.forgotten(digest)
        places = self._places[digest]
        group = places.index(block)
        places[group] = -1
        if max(places) < 0:
            del self._places[digest], self._known[parent + content]
            self.scores.pop(digest, None)
        children = self._children[group]
        if self.watcher is not None and (children is not None or digest not in self._places):
            self.watcher.evicted(digest)
        if children is not None:
            self._drop_run(digest)
            children[parent] -= 1
            if not children[parent]:
                del children[parent]

    def is_leaf(self, block: int) -> bool:
        """True if no cached block of its group depends on this one."""
        digest = self._entries[block][0]
        children = self._children[self._places[digest].index(block)]
        return children is None or digest not in children
