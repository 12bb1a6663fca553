"""Images of sequences: what they decide of blocks and rotations, and their features on the device.

Features of an image lie in rows of the backend's store, under the digest of its pixels. They are
made when a step computes tokens that they stand for and has none of them, and stay until others
need their rows: an image that is asked about again costs no tower.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import cast

import numpy as np
from vllmx_core.backend import LoadedModel, SeeingModel
from vllmx_core.errors import CapacityError, InvalidRequestError
from vllmx_core.image_plan import Turns, tower_plan, turns_of
from vllmx_core.model import Encoder, ImagePlaces
from vllmx_core.plan import F32, I32

from vllmx_engine.core.chunk import Chunk
from vllmx_engine.core.sequence import Sequence
from vllmx_engine.images.prepared import normalised
from vllmx_engine.wire.messages import CoreRequest, ImageInput

_LEVELS_BYTES = 4 * 3 * 256


@dataclass(frozen=True, slots=True)
class SequenceImages:
    """Those of one sequence, in order."""

    inputs: tuple[ImageInput, ...]
    places: tuple[ImagePlaces, ...]
    turns: Turns | None
    """What rotations turn its tokens by; None: their positions."""

    def within(self, start: int, end: int) -> Iterator[int]:
        """Numbers of the images with tokens in this part of the sequence."""
        for number, image in enumerate(self.inputs):
            if image.start < end and start < image.start + image.num_tokens:
                yield number

    def content(self, block_size: int) -> dict[int, bytes]:
        """By block what images it holds, and where they begin: see `Sequence.content`."""
        found: dict[int, bytes] = {}
        for image in self.inputs:
            last = (image.start + image.num_tokens - 1) // block_size
            for block in range(image.start // block_size, last + 1):
                offset = (image.start - block * block_size).to_bytes(8, "little", signed=True)
                found[block] = found.get(block, b"") + image.digest + offset
        return found


class FeatureStore:
    """Which rows of the backend's store hold the features of which image."""

    def __init__(self, num_rows: int) -> None:
        self._rows: OrderedDict[bytes, I32] = OrderedDict()
        """By digest, least recently used first."""
        self._free = np.arange(num_rows, dtype=np.int32)
        self._num_free = num_rows

    def find(self, digest: bytes) -> I32 | None:
        """(n,) rows of an image that is there."""
        rows = self._rows.get(digest)
        if rows is not None:
            self._rows.move_to_end(digest)
        return rows

    def take(self, digest: bytes, count: int) -> I32:
        """Rows for an image that is not there, if need be of those that were used least recently.
        Whoever asks has `find` called first for all images that it wants to keep, and asks for no
        more than there is."""
        while self._num_free < count:
            self._give_back(self._rows.popitem(last=False)[1])
        self._num_free -= count
        rows = self._free[self._num_free : self._num_free + count].copy()
        self._rows[digest] = rows
        return rows

    def forget(self, digest: bytes) -> None:
        """The image's features did not come about."""
        rows = self._rows.pop(digest, None)
        if rows is not None:
            self._give_back(rows)

    def _give_back(self, rows: I32) -> None:
        self._free[self._num_free : self._num_free + rows.size] = rows
        self._num_free += rows.size


@dataclass(slots=True)
class StepImages:
    """The images that a step under preparation reads, so that they fit into the store together."""

    num_rows: int
    """Of the store."""
    _digests: set[bytes] = field(default_factory=set)
    _taken: int = 0

    def admit(self, sequence: Sequence, start: int, size: int) -> bool:
        """Whether a chunk's images fit beside the others; if so they are counted. Those of one
        sequence always fit alone."""
        if sequence.images is None:
            return True
        inputs = sequence.images.inputs
        new = {
            inputs[number].digest: inputs[number].num_tokens
            for number in sequence.images.within(start, start + size)
            if inputs[number].digest not in self._digests
        }
        if self._taken + sum(new.values()) > self.num_rows:
            return False
        self._digests |= new.keys()
        self._taken += sum(new.values())
        return True


class Images:
    """The images of an engine core.

    Args:
        encoder: of the model; None: it sees no images.
    """

    def __init__(self, model: LoadedModel, encoder: Encoder | None) -> None:
        self._model = model
        self._encoder = encoder
        self._store = FeatureStore(model.info.num_feature_rows)

    def take(self, request: CoreRequest) -> SequenceImages | None:
        """The images of a request, checked. Raises InvalidRequestError, CapacityError."""
        if not request.images:
            return None
        encoder, end = self._encoder, 0
        if encoder is None:
            raise InvalidRequestError("this model sees no images: leave them out", param="messages")
        for image in request.images:
            count = int(np.prod(image.grid, dtype=np.int64))
            sound = end <= image.start and image.num_tokens > 0
            sound = sound and count == image.num_tokens * encoder.patches_per_token
            sound = sound and len(image.patches) == count * encoder.patch_width
            sound = sound and len(image.levels) == _LEVELS_BYTES
            end = image.start + image.num_tokens
            if not sound or end > len(request.prompt) // 4:
                raise InvalidRequestError("an image does not fit its prompt", param="messages")
        wanted = sum(image.num_tokens for image in request.images)
        if wanted > self._model.info.num_feature_rows:
            raise CapacityError(
                f"the request has images of {wanted} tokens, the features of"
                f" {self._model.info.num_feature_rows} can be held: send fewer or smaller ones, or"
                " raise --encoder-cache-memory",
                param="messages",
            )
        places = tuple(encoder.places(image.grid) for image in request.images)
        starts = [image.start for image in request.images]
        turns = turns_of(list(zip(starts, places, strict=True)))
        return SequenceImages(tuple(request.images), places, turns)

    def for_step(self) -> StepImages:
        """For the chunks of the next step."""
        return StepImages(self._model.info.num_feature_rows)

    def encode(self, chunks: tuple[Chunk, ...]) -> None:
        """Has the features made that the chunks read and nobody made yet."""
        missing: dict[bytes, tuple[ImageInput, ImagePlaces]] = {}
        for chunk in chunks:
            images = chunk.sequence.images
            if images is None:
                continue
            for number in images.within(chunk.start, chunk.start + chunk.num_tokens):
                image = images.inputs[number]
                if self._store.find(image.digest) is None:
                    missing[image.digest] = image, images.places[number]
        if not missing:
            return
        assert self._encoder is not None, "images were checked"
        keep = [self._store.take(digest, one.num_tokens) for digest, (one, _) in missing.items()]
        patches = [_values(image) for image, _ in missing.values()]
        places = [each for _, each in missing.values()]
        try:
            cast(SeeingModel, self._model).encode(
                tower_plan(self._encoder, patches, places, np.concatenate(keep))
            )
        except BaseException:
            for digest in missing:
                self._store.forget(digest)
            raise

    def feature_rows(self, chunks: tuple[Chunk, ...], starts: list[int], total: int) -> I32 | None:
        """(T,) for `StepPlan.feature_rows`; each chunk's tokens begin at its start in the step."""
        found: I32 | None = None
        for chunk, begin in zip(chunks, starts, strict=True):
            images = chunk.sequence.images
            if images is None:
                continue
            end = chunk.start + chunk.num_tokens
            for number in images.within(chunk.start, end):
                image = images.inputs[number]
                rows = self._store.find(image.digest)
                assert rows is not None, "`encode` came first"
                first, last = max(chunk.start, image.start), min(end, image.start + rows.size)
                if found is None:
                    found = np.full(total, -1, np.int32)
                at = begin - chunk.start
                found[at + first : at + last] = rows[first - image.start : last - image.start]
        return found


def _values(image: ImageInput) -> F32:
    """(N, D) normalised patches."""
    rows = np.frombuffer(image.patches, np.uint8).reshape(prod(image.grid), -1)
    return normalised(rows, np.frombuffer(image.levels, np.float32).reshape(3, 256))
