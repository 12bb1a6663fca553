"""Groups of layers that share a block table; all groups share one pool of blocks.

A block is one page in each *place*; a place is memory for the keys and values of a block's tokens.
Each layer has a place in its group. A block id means the same bytes in every group, so any group
can take the blocks that another one frees. Layers are grouped by window: a page that left the
window of one layer must not be needed by another layer of its group.

Gemma 3 12B, 40 layers with a window and 8 without, has six groups of eight places. A model whose
layers are all alike has one group, whose places are its layers.

Pages of different sizes have separate places, and a group uses those of its own size, so a block is
larger than any one group needs. Gemma 4 26B-A4B has 25 layers with a window of 1,024 and 8 heads of
256, and 5 without a window and 2 heads of 512: six groups over five places of each size. A token
takes 61 kB plus the windows, instead of 225 kB with one group for all layers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from vllmx_core.errors import UnsupportedModelError
from vllmx_core.model import CacheGroup, ModelShape, OwnedKV, SharedKV
from vllmx_core.records import Record


class CacheLayout(Record):
    """The group and the place in which each layer keeps its keys and values."""

    groups: tuple[CacheGroup, ...]
    places: tuple[OwnedKV, ...]
    """The contents of a page of each place; the window is meaningless here."""
    group_of: tuple[int, ...]
    """The group of each layer; `place_of` is its place there. A layer that shares has those of the
    layer that owns."""
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
    """The groups of a model: those of its shape, if it names some. Otherwise one group that keeps
    all tokens, if not `grouped` or if layers of one window have pages of different sizes.

    Raises UnsupportedModelError for a layer that shares the pages of one that owns none.
    """
    owners = {i: spec for i, spec in enumerate(shape.caches) if not isinstance(spec, SharedKV)}
    if shape.groups is not None:
        groups = list(shape.groups)
    elif not grouped or (len(_windows(owners)) > 1 and _has_mixed_windows(owners)):
        groups = [CacheGroup(None, tuple(owners))]
    else:
        groups = _groups(owners)
    places, begin = _places(groups, owners)
    found = {
        layer: (number, first + index)
        for number, (group, first) in enumerate(zip(groups, begin, strict=True))
        for index, layer in enumerate(group.layers)
    }
    for layer, spec in enumerate(shape.caches):
        if isinstance(spec, SharedKV):
            found[layer] = found[_owner(layer, spec, owners)]
    layers = range(len(shape.caches))
    return CacheLayout(
        tuple(groups),
        places,
        tuple(found[layer][0] for layer in layers),
        tuple(found[layer][1] for layer in layers),
    )


def _groups(owners: dict[int, OwnedKV]) -> list[CacheGroup]:
    """Groups of equal size, window by window. Empty places cost memory and groups cost time, so a
    group is as large as the smallest kind of layer, or as the largest if few places stay empty."""
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


Size = tuple[int, int, int, int]


def _size(kv: OwnedKV) -> Size:
    return kv.num_kv_heads, kv.head_size, kv.value_size, kv.ratio


def _has_mixed_windows(owners: dict[int, OwnedKV]) -> bool:
    """True if layers of one window have pages of different sizes."""
    kinds = {(kv.window, _size(kv)) for kv in owners.values()}
    return len(kinds) > len(_windows(owners))


def _places(
    groups: list[CacheGroup], owners: dict[int, OwnedKV]
) -> tuple[tuple[OwnedKV, ...], list[int]]:
    """All places, and the first one that each group uses. Groups of one size share theirs."""
    if len(groups) == 1:
        return tuple(owners[layer] for layer in groups[0].layers), [0]
    sizes = [_size(owners[group.layers[0]]) if group.layers else None for group in groups]
    places: list[OwnedKV] = []
    begin: dict[Size | None, int] = {None: 0}  # a stage may have none of a group
    for size in dict.fromkeys(filter(None, sizes)):
        alike = [group.layers for group, own in zip(groups, sizes, strict=True) if own == size]
        begin[size] = len(places)
        places += [owners[layer] for layer in max(alike, key=len)]
    return tuple(places), [begin[size] for size in sizes]


def _owner(layer: int, spec: SharedKV, owners: dict[int, OwnedKV]) -> int:
    if spec.layer not in owners or spec.layer >= layer:
        raise UnsupportedModelError(
            f"layer {layer} shares the pages of layer {spec.layer}, which is no earlier layer with"
            " pages of its own"
        )
    return spec.layer


def blocks_of(windows: Sequence[int | None], tokens: int, block_size: int, step_tokens: int) -> int:
    """The most blocks that a sequence of `tokens` holds at any time, in all groups together, if a
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


def fitting_step(
    windows: Sequence[int | None], num_blocks: int, block_size: int, step_tokens: int, tokens: int
) -> int:
    """Halves `step_tokens` until a sequence of `tokens` fits into `num_blocks`, since windows then
    hold fewer pages; 0: it never does."""
    while step_tokens > 1:
        step_tokens //= 2
        if blocks_of(windows, tokens, block_size, step_tokens) <= num_blocks:
            return step_tokens
    return 0


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
