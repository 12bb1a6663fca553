"""The digests of a prompt's blocks as cores make them, once for the router and the core."""

from __future__ import annotations

from collections.abc import Callable

from vllmx_engine.core.prefix_cache import DIGEST_BYTES, CacheIdentity, block_digest, image_content
from vllmx_engine.wire.messages import CoreInfo, CoreRequest

_MOST_BLOCKS = 2048
"""Blocks of a prompt that a router looks at: hashing them takes about 2 ms of the event loop."""
_ID_BYTES = 4


class PromptDigests:
    """Makes the digests of requests.

    Args:
        key: common to all replicas.
        model: the name that the cores' caches are identified by.
        adapter: gives the digest of an adapter by its name; empty: it has none.
    """

    def __init__(
        self, key: bytes, model: str, info: CoreInfo, adapter: Callable[[str], str]
    ) -> None:
        self._key, self._adapter = key, adapter
        self._identity = CacheIdentity.of(model, info)
        self._size = info.block_size

    def of(self, request: CoreRequest) -> list[bytes]:
        """The root, then the digests of the first full blocks."""
        adapter = self._adapter(request.adapter) if request.adapter else ""
        parent = self._identity.root(self._key, request.cache_salt, adapter)
        found, ids, step = [parent], request.prompt, _ID_BYTES * self._size
        images = image_content(request.images, self._size) if request.images else {}
        for index in range(min(len(ids) // step, _MOST_BLOCKS)):
            content = ids[step * index : step * (index + 1)]
            parent = block_digest(parent, content + images[index] if index in images else content)
            found.append(parent)
        return found


def split_digests(packed: bytes) -> list[bytes]:
    """The digests of a message."""
    size = DIGEST_BYTES
    return [packed[at : at + size] for at in range(0, len(packed), size)]
