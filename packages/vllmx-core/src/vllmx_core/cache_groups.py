"""Which layers share a block table: groups of layers over one pool of pages.

A block is one page in each *place*; a place is memory for the keys and values of as many tokens as
a block has. A layer belongs to a group and has a place in it, so the layers of one group use a
block together, each in its own place, and a block id means the same bytes in every group: what one
group frees any other may take. Layers that forget alike (equal windows) form groups, because a page
that fell out of a window must not be held by a layer that still reads it.

Gemma 3 12B, 40 layers with a window and 8 without, has six groups of eight places. A model whose
layers are all of one kind has one group, whose places are its layers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from vllmx_core.errors import UnsupportedModelError
from vllmx_core.model import ModelShape, OwnedKV, SharedKV


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers with one block table."""

    window: int | None
    """Tokens whose pages the group keeps, the newest included; None: all of them."""
    layers: tuple[int, ...]
    """The layer in each place; the last places may be empty."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Where each layer keeps its keys and values."""

    groups: tuple[CacheGroup, ...]
    places: tuple[OwnedKV, ...]
    """What a page of each place holds; its window says nothing here."""
    group_of: tuple[int, ...]
    """By layer, as is `place_of`. A layer that shares has those of the layer that owns."""
    place_of: tuple[int, ...]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each group."""
        return tuple(group.window for group in self.groups)

    @property
    def layers(self) -> tuple[tuple[int, int], ...]:
        """(group, place) of each layer."""
        return tuple(zip(self.group_of, self.place_of, strict=True))


def cache_layout(shape: ModelShape, *, grouped: bool) -> CacheLayout:
    """The groups of a model. One group that keeps all tokens unless `grouped`, and where windows
    differ between layers whose pages differ in size, which cannot take each other's blocks.

    Raises UnsupportedModelError for a layer that shares the pages of one that owns none.
    """
    owners = {i: spec for i, spec in enumerate(shape.caches) if not isinstance(spec, SharedKV)}
    if not grouped or (len(_windows(owners)) > 1 and len(_sizes(owners)) > 1):
        groups = [CacheGroup(None, tuple(owners))]
    else:
        groups = _groups(owners)
    found = {
        layer: (number, place)
        for number, group in enumerate(groups)
        for place, layer in enumerate(group.layers)
    }
    for layer, spec in enumerate(shape.caches):
        if isinstance(spec, SharedKV):
            found[layer] = found[_owner(layer, spec, owners)]
    layers = range(len(shape.caches))
    return CacheLayout(
        tuple(groups),
        tuple(owners[layer] for layer in max((group.layers for group in groups), key=len)),
        tuple(found[layer][0] for layer in layers),
        tuple(found[layer][1] for layer in layers),
    )


def _groups(owners: dict[int, OwnedKV]) -> list[CacheGroup]:
    """Layers of one window after the other, in groups of equal size. Places that stay empty cost
    memory and groups cost time, so a group is as large as the smallest kind of layer, or as the
    largest where that leaves few places empty."""
    kinds = [
        (window, [layer for layer, kv in owners.items() if kv.window == window])
        for window in _windows(owners) or (None,)
    ]
    counts = [len(layers) for _, layers in kinds]
    size = max(1, max(counts) if max(counts) < 1.25 * min(counts) else min(counts))
    return [
        CacheGroup(window, tuple(layers[start : start + size]))
        for window, layers in kinds
        for start in range(0, max(1, len(layers)), size)
    ]


def _windows(owners: dict[int, OwnedKV]) -> tuple[int | None, ...]:
    """Each kind once, in the order of the layers."""
    return tuple(dict.fromkeys(kv.window for kv in owners.values()))


def _sizes(owners: dict[int, OwnedKV]) -> set[tuple[int, int, int]]:
    return {(kv.num_kv_heads, kv.head_size, kv.value_size) for kv in owners.values()}


def _owner(layer: int, spec: SharedKV, owners: dict[int, OwnedKV]) -> int:
    if spec.layer not in owners or spec.layer >= layer:
        raise UnsupportedModelError(
            f"layer {layer} shares the pages of layer {spec.layer}, which is no earlier layer with"
            " pages of its own"
        )
    return spec.layer


def blocks_of(windows: Sequence[int | None], tokens: int, block_size: int, step_tokens: int) -> int:
    """Most blocks that a sequence of `tokens` holds at any time, in all groups together, when a
    step adds at most `step_tokens` to it. A group with a window holds the pages that the first
    token of the step still sees, and those that the step writes."""
    whole, total = -(-tokens // block_size), 0
    for window in windows:
        held = whole
        if window is not None:
            span = window - 1 + min(step_tokens, tokens)
            held = min(whole, (span + block_size - 2) // block_size + 1)
        total += held
    return total


def longest_sequence(
    windows: Sequence[int | None], num_blocks: int, block_size: int, step_tokens: int, most: int
) -> int:
    """The greatest number of tokens, up to `most`, for which `blocks_of` needs no more than
    `num_blocks`."""
    lengths = range(most + 1)
    return (
        bisect_right(
            lengths, num_blocks, key=lambda n: blocks_of(windows, n, block_size, step_tokens)
        )
        - 1
    )
