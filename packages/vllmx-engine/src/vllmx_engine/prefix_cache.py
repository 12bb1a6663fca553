"""Full KV blocks by what they hold: a chain of BLAKE2b digests, so that equal prefixes meet.

A block's digest covers its parent's digest and its own token ids; the parent of a sequence's first
block is its root, the digest of its cache salt under a secret key, so that nobody can know a
parent, let alone look for collisions. Two sequences share a block only when salt and all
tokens up to the block's end agree; the tokens are compared as well, so that a colliding digest can
at most cost a miss.
"""

from __future__ import annotations

import secrets
from collections import Counter
from hashlib import blake2b

_DIGEST_BYTES = 16
Entry = tuple[bytes, bytes, bytes]
"""Digest, parent and tokens of a cached block. A new one is made whenever a block is filed."""


class PrefixCache:
    """Digest -> block and back. It owns no block: see `BlockPool`."""

    def __init__(self, key: bytes | None = None) -> None:
        self._key = secrets.token_bytes(32) if key is None else key
        self._blocks: dict[bytes, int] = {}
        self._entries: dict[int, Entry] = {}
        self._children: Counter[bytes] = Counter()
        """How many cached blocks follow a digest; those of none are left out."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block: int) -> bool:
        return block in self._entries

    def root(self, salt: str) -> bytes:
        """Parent digest of first blocks under a salt."""
        data = salt.encode(errors="surrogatepass")
        return blake2b(data, digest_size=_DIGEST_BYTES, key=self._key).digest()

    def digest(self, parent: bytes, tokens: bytes) -> bytes:
        """Of a block that follows `parent`."""
        return blake2b(parent + tokens, digest_size=_DIGEST_BYTES).digest()

    def entry(self, block: int) -> Entry | None:
        """Of a block that is cached. While it is the same object, the block was not forgotten, and
        neither was any block before it in its chain."""
        return self._entries.get(block)

    def find(self, digest: bytes, parent: bytes, tokens: bytes) -> int | None:
        """The block that holds these tokens behind this parent."""
        block = self._blocks.get(digest)
        if block is None:
            return None
        return block if self._entries[block] == (digest, parent, tokens) else None

    def insert(self, block: int, digest: bytes, parent: bytes, tokens: bytes) -> int | None:
        """Files a block; returns the one that stands for these tokens from now on, which is another
        when the same prefix was filed before, or None when the digest is taken by other tokens."""
        if digest in self._blocks:
            return self.find(digest, parent, tokens)
        self._blocks[digest] = block
        self._entries[block] = (digest, parent, tokens)
        self._children[parent] += 1
        return block

    def remove(self, block: int) -> None:
        """Forgets a cached block."""
        digest, parent, _ = self._entries.pop(block)
        del self._blocks[digest]
        self._children[parent] -= 1
        if not self._children[parent]:
            del self._children[parent]

    def is_leaf(self, block: int) -> bool:
        """Whether no cached block follows this one."""
        return self._entries[block][0] not in self._children
