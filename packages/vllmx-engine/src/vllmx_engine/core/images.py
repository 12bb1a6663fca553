"""Images of sequences: their part in blocks and rotations, and their features on the device.

Features of an image lie in rows of the backend's store, under the digest of its pixels. They are
computed before the step that reads them, in parts of several steps if the tower pass would delay
running decodes. They stay until others need their rows: an image that comes again skips the tower.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from math import prod
from typing import cast

import numpy as np
from vllmx_core.backend import LoadedModel, SeeingModel
from vllmx_core.errors import InvalidRequestError
from vllmx_core.image_plan import tower_plan, turns_of
from vllmx_core.model import Encoder, FeatureSpec, ImagePlaces
from vllmx_core.plan import F32, I32, StepPlan
from vllmx_core.records import MutableRecord

from vllmx_engine.core.cost import StepCost, TowerLoad
from vllmx_engine.core.limits import Limits
from vllmx_engine.core.sequence import Sequence, SequenceImages
from vllmx_engine.core.step_budget import Chunk, StepBudget
from vllmx_engine.wire.images import ImageRoom, normalised
from vllmx_engine.wire.messages import CoreRequest, ImageInput


class Pass(MutableRecord):
    """An image on its way through the tower."""

    image: ImageInput
    places: ImagePlaces
    plan: StepPlan | None = None
    """The pass's plan, once it has begun."""
    done: float = 0.0
    """Share of its work that steps before did."""

    @property
    def load(self) -> TowerLoad:
        """The cost terms of the whole image."""
        return TowerLoad.of(math.prod(self.image.grid))


class StepTowers:
    """The tower passes of a step under preparation, in this order: the rest of a begun pass, whole
    passes together, and the first part of another.

    Args:
        begun: a pass that earlier steps did a part of. It ends before another one begins.
        in_parts: the backend takes passes in parts; others run a long pass in its own step.
    """

    def __init__(self, cost: StepCost, begun: Pass | None, *, in_parts: bool) -> None:
        self._cost, self._in_parts = cost, in_parts
        self._is_advanced = False
        self.begun = begun
        self.begun_end = 0.0 if begun is None else begun.done
        self.whole: dict[bytes, Pass] = {}
        self.started: Pass | None = None
        self.started_end = 0.0
        self.load = TowerLoad(0.0, 0.0)
        """The cost terms of all passes of the step."""

    @property
    def is_busy(self) -> bool:
        """A pass will not have ended with this step."""
        return self.started is not None or (self.begun is not None and self.begun_end < 1.0)

    def work_for(self, images: Iterable[ImageInput]) -> bool:
        """True if the step computes a part of a pass for any of these."""
        digests = {*self.whole}
        digests |= {one.image.digest for one in (self.begun, self.started) if one is not None}
        return not digests.isdisjoint(image.digest for image in images)

    def advance(self, budget: StepBudget) -> None:
        """The pass that has begun goes on, once a step."""
        if self.begun is None or self._is_advanced:
            return
        self._is_advanced = True
        share = self._cost.tower_share(budget.tower_seconds, self.begun.load)
        self.begun_end = min(1.0, self.begun.done + share)
        self._take(self.begun.load.part(self.begun_end - self.begun.done), budget)

    def finishes(self, wanted: Pass, budget: StepBudget) -> bool:
        """True if a pass ends with this step. If it has not begun, it begins if it can."""
        digest = wanted.image.digest
        if digest in self.whole:
            return True
        if self.is_busy:
            return False
        if self.begun is not None and self.begun.image.digest == digest:
            return True
        seconds = budget.tower_seconds
        share = self._cost.tower_share(seconds, wanted.load)
        if self.load.patches and seconds < math.inf and not self._cost.knows_towers:
            return False  # its cost is unknown
        if share < 1.0 and self._in_parts:
            if seconds > 0.0 or not self.load.patches:
                self.started, self.started_end = wanted, share
                self._take(wanted.load.part(share), budget)
            return False
        if share < 1.0 and self.load.patches:
            return False
        self.whole[digest] = wanted
        self._take(wanted.load, budget)
        return True

    def _take(self, load: TowerLoad, budget: StepBudget) -> None:
        self.load = self.load + load
        budget.take_tower(self._cost.tower_seconds(load))


_LEVELS_BYTES = 4 * 3 * 256
_FLOAT_BYTES = 4


class FeatureStore:
    """The rows of the backend's store by the image that they hold features of."""

    def __init__(self, num_rows: int) -> None:
        self._rows: OrderedDict[bytes, I32] = OrderedDict()
        """The rows by digest, least recently used first."""
        self._free = np.arange(num_rows, dtype=np.int32)
        self._num_free = num_rows

    def clear(self) -> None:
        """Forgets all images."""
        while self._rows:
            self._give_back(self._rows.popitem()[1])

    def find(self, digest: bytes) -> I32 | None:
        """(n,) rows of an image that is there."""
        rows = self._rows.get(digest)
        if rows is not None:
            self._rows.move_to_end(digest)
        return rows

    def take(self, digest: bytes, count: int) -> I32:
        """Rows for an image that is not there, if need be of those that were used least recently.
        The caller must call `find` first for all images that it wants to keep, and ask for no
        more than there is."""
        while self._num_free < count:
            self._give_back(self._rows.popitem(last=False)[1])
        self._num_free -= count
        rows = self._free[self._num_free : self._num_free + count].copy()
        self._rows[digest] = rows
        return rows

    def _give_back(self, rows: I32) -> None:
        self._free[self._num_free : self._num_free + rows.size] = rows
        self._num_free += rows.size


class StepImages:
    """The images that a step under preparation reads, so that they fit into the store together,
    and what it does of passes of the tower.

    Args:
        store: what is there.
        num_rows: of the store.
        held: images whose features must stay, made or not.
    """

    def __init__(
        self,
        store: FeatureStore,
        num_rows: int,
        towers: StepTowers,
        held: Iterable[ImageInput] = (),
    ) -> None:
        self.towers = towers
        self._store, self._num_rows = store, num_rows
        self._digests: set[bytes] = set()
        self._taken = 0
        for image in held:
            if store.find(image.digest) is not None:
                self._fits(image)

    def reach(self, sequence: Sequence, start: int, size: int, budget: StepBudget) -> int:
        """Returns the number of a chunk's tokens that can be computed: up to the first image whose
        features are missing or do not fit next to those of others. The images of one sequence
        always fit alone."""
        towers, begun = self.towers, self.towers.begun
        towers.advance(budget)
        if begun is not None and towers.is_busy:
            self._fits(begun.image)
        if sequence.images is None:
            return size
        size = self._up_to_missing(sequence.images, start, size, budget)
        if size and towers.work_for(sequence.images.inputs):
            return budget.fit_with_tower(sequence, start, size)
        return size

    def _up_to_missing(
        self, images: SequenceImages, start: int, size: int, budget: StepBudget
    ) -> int:
        """Returns the number of a chunk's tokens before the first image whose features are
        missing."""
        for number in images.within(start, start + size):
            image, places = images.inputs[number], images.places[number]
            is_there = self._fits(image) and (
                self._is_made(image.digest) or self.towers.finishes(Pass(image, places), budget)
            )
            if not is_there:
                return max(0, image.start - start)
        return size

    def _fits(self, image: ImageInput) -> bool:
        """True if an image's features fit next to the others'; counts them if so."""
        if image.digest in self._digests:
            return True
        if self._taken + image.num_tokens > self._num_rows:
            return False
        self._digests.add(image.digest)
        self._taken += image.num_tokens
        return True

    def _is_made(self, digest: bytes) -> bool:
        begun = self.towers.begun
        if begun is not None and begun.image.digest == digest:
            return False
        return self._store.find(digest) is not None


class Images:
    """The images of an engine core.

    Args:
        encoder: of the model; None: it sees no images.
        features: what that makes.
    """

    def __init__(
        self,
        model: LoadedModel,
        encoder: Encoder | None,
        limits: Limits,
        features: FeatureSpec | None,
    ) -> None:
        self.model = model
        self._limits = limits
        self._spans = features is not None and features.spans
        self.feeds = None if features is None else features.feeds
        """`FeatureSpec.feeds`."""
        self.room = ImageRoom(
            limits.max_model_len - 1,
            model.info.num_feature_rows,
            limits.token_budget - limits.max_rows + 1 if self._spans else None,
            limits.max_rows,
            kind="audio" if features is not None and features.is_audio else "image",
        )
        """Bounds on a request's images, whatever else runs."""
        self.crossed = 0 if features is None else features.crossed
        """`FeatureSpec.crossed`."""
        self._reads_text = features is not None and features.decoder_start is not None
        self._encoder = encoder
        self._store = FeatureStore(model.info.num_feature_rows)
        self._begun: Pass | None = None
        """The pass of the tower of which steps have done a part."""

    def take(self, request: CoreRequest) -> SequenceImages | None:
        """The images of a request, checked. Raises InvalidRequestError, CapacityError."""
        if self.crossed and len(request.images) != 1:
            raise InvalidRequestError(
                "this model writes down what an audio says: send one to /v1/audio/transcriptions",
                param="model",
            )
        if not request.images:
            return None
        encoder, end, places = self._encoder, 0, []
        if encoder is None:
            raise InvalidRequestError("this model sees no images: leave them out", param="messages")
        for image in request.images:
            count = int(np.prod(image.grid, dtype=np.int64))
            num_features, rest = divmod(count, encoder.patches_per_token)
            sound = end <= image.start and image.num_tokens > 0 and not rest
            size = 1 if image.levels else _FLOAT_BYTES
            sound = sound and len(image.patches) == size * count * encoder.patch_width
            sound = sound and len(image.levels) in (0, _LEVELS_BYTES)
            if sound:
                places.append(self._places(encoder, image))
                fewest = places[-1].num_tokens(num_features)
                sound = image.num_tokens == fewest or (
                    self._reads_text and image.num_tokens > fewest
                )
            end = image.start + image.num_tokens
            room = self.crossed or len(request.prompt) // 4
            if not sound or end > room or (self.crossed and image.num_tokens != self.crossed):
                raise InvalidRequestError("an image does not fit its prompt", param="messages")
        if self._spans:
            self._check_spans(request)
        self.room.check_features([image.num_tokens for image in request.images])
        starts = [image.start for image in request.images]
        turns = turns_of(list(zip(starts, places, strict=True)))
        return SequenceImages(tuple(request.images), tuple(places), turns, self._spans)

    def _places(self, encoder: Encoder, image: ImageInput) -> ImagePlaces:
        places = encoder.places(image.grid)
        if not self._reads_text:
            return places
        ids = np.frombuffer(image.patches, np.float32).astype(np.int32)
        return replace(places, table_rows=ids[:, None])

    def _check_spans(self, request: CoreRequest) -> None:
        """Checks that a step has room for each image, however many rows decode in it."""
        limits, longest = self._limits, max(image.num_tokens for image in request.images)
        if request.params.prompt_logprobs is not None and (
            longest > limits.max_logit_rows - limits.max_rows + 1
        ):
            raise InvalidRequestError(
                f"prompt_logprobs of an image of {longest} tokens, which this model sees in one"
                " step, are more than a step gives: leave prompt_logprobs out",
                param="prompt_logprobs",
            )

    def visible_to(
        self, chunks: tuple[Chunk, ...], starts: list[int], positions: I32
    ) -> I32 | None:
        """(T,) for `StepPlan.visible_to`."""
        found: I32 | None = None
        for chunk, begin in zip(chunks, starts, strict=True) if self._spans else ():
            images, end = chunk.sequence.images, chunk.start + chunk.num_tokens
            for number in images.within(chunk.start, end) if images is not None else ():
                assert images is not None
                image = images.inputs[number]
                found = positions.copy() if found is None else found
                last = image.start + image.num_tokens
                first = begin + max(image.start - chunk.start, 0)
                found[first : begin + last - chunk.start] = last - 1
        return found

    def for_step(self, cost: StepCost, running: Iterable[Sequence] = ()) -> StepImages:
        """Plans the image work of the next step, next to its chunks. `running`: sequences whose
        features stay where cross-attention goes on reading them."""
        if self._begun is not None:
            self._store.find(self._begun.image.digest)  # stays
        info = self.model.info
        towers = StepTowers(cost, self._begun, in_parts=info.encodes_in_parts)
        held = (one.images.inputs[0] for one in running if one.images) if self.crossed else ()
        return StepImages(self._store, info.num_feature_rows, towers, held)

    def encode(self, step: StepImages | None) -> None:
        """Runs the tower passes of a step. Call `forget` if it raises."""
        if step is None or not step.towers.load.patches:
            return
        towers = step.towers
        passes = [*towers.whole.values()]
        if towers.begun is not None:
            self._go_on(towers.begun, towers.begun_end)
        if passes:
            self._model_that_sees.encode(self._plan(passes))
        if towers.started is not None:
            towers.started.plan = self._plan([towers.started])
            self._begun = towers.started
            self._go_on(towers.started, towers.started_end)

    def forget(self) -> None:
        """Drops all features, so that they are made again: some backends report a failed pass only
        through a later step."""
        self._store.clear()
        self._begun = None

    @property
    def _model_that_sees(self) -> SeeingModel:
        return cast(SeeingModel, self.model)

    def _go_on(self, one: Pass, end: float) -> None:
        assert one.plan is not None, "it has begun"
        self._model_that_sees.encode(one.plan, one.done, end)
        one.done = end
        if end >= 1.0:
            self._begun = None

    def _plan(self, passes: list[Pass]) -> StepPlan:
        """The plan of a pass over some images, with rows of the store for their features."""
        assert self._encoder is not None, "images were checked"
        keep = []
        for one in passes:
            rows = self._store.take(one.image.digest, one.image.num_tokens)
            num_features = prod(one.image.grid) // self._encoder.patches_per_token
            keep.append(rows[: one.places.num_tokens(num_features)])
        last, places = self._encoder.colours_last, [one.places for one in passes]
        patches = [_values(one.image, colours_last=last) for one in passes]
        spare = self.model.info.num_feature_rows
        return tower_plan(self._encoder, patches, places, np.concatenate(keep), spare)

    def cross_rows(self, sequence: Sequence) -> tuple[int, int]:
        """The row of `StepPlan.cross_rows` for a sequence. All inputs take equally many rows of the
        store, so the rows of one follow each other."""
        assert sequence.images is not None, "inputs were checked"
        image = sequence.images.inputs[0]
        rows = self._store.find(image.digest)
        assert rows is not None, "`encode` came first"
        return int(rows[0]), prod(image.grid)

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
                rows = _featured(rows, images.places[number])
                first, last = max(chunk.start, image.start), min(end, image.start + rows.size)
                if found is None:
                    found = np.full(total, -1, np.int32)
                at = begin - chunk.start
                found[at + first : at + last] = rows[first - image.start : last - image.start]
        return found


def _featured(rows: I32, places: ImagePlaces) -> I32:
    """The rows of an image's tokens, -1 for those of text."""
    if places.featured is None:
        return rows
    found = np.full(rows.size, -1, np.int32)
    found[places.featured] = rows[places.featured]
    return found


def _values(image: ImageInput, *, colours_last: bool) -> F32:
    """(N, D) normalised patches."""
    if not image.levels:
        return np.frombuffer(image.patches, np.float32).reshape(prod(image.grid), -1)
    rows = np.frombuffer(image.patches, np.uint8).reshape(prod(image.grid), -1)
    found = normalised(rows, np.frombuffer(image.levels, np.float32).reshape(3, 256))
    if not colours_last:
        return found
    return found.reshape(len(rows), 3, -1).transpose(0, 2, 1).reshape(len(rows), -1)
