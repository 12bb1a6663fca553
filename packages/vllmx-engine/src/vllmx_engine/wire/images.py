"""Images of a request: patches as the core receives them, and bounds on their number and size."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
from vllmx_core.errors import CapacityError, ContextLengthError, InvalidRequestError
from vllmx_core.plan import F32
from vllmx_core.records import Record

Kind = Literal["image", "audio", "video"]
SINGULAR = {"image": "an image", "audio": "an audio", "video": "a video"}
PLURAL = {"image": "images", "audio": "audio files", "video": "videos"}
Pixels = npt.NDArray[np.uint8]
"""Levels of grey: images are (height, width, 3) in RGB."""


class PreparedImage(Record):
    """An image as rows of patches."""

    digest: bytes
    """The digest of the patches, their levels and their grid: equal ones have equal features."""
    patches: Pixels
    """(N, D) levels of grey; a row is (C, frames, height, width) of one patch, flattened. Rows that
    the tower merges into one token lie one after the other."""
    levels: F32
    """(3, 256) what each level of each colour is to the tower."""
    grid: tuple[int, int, int]
    """(frames, rows, columns) of patches; their product is N."""
    num_tokens: int
    """Places that it takes in the prompt."""

    @classmethod
    def of(
        cls, patches: Pixels, levels: F32, grid: tuple[int, int, int], num_tokens: int
    ) -> PreparedImage:
        """Makes an image with its digest."""
        digest = hashlib.blake2b(np.array(grid, np.int32).tobytes(), digest_size=32)
        digest.update(np.ascontiguousarray(levels).data)
        digest.update(np.ascontiguousarray(patches).data)
        return cls(digest.digest(), patches, levels, grid, num_tokens)


def normalised(patches: Pixels, levels: F32) -> F32:
    """(N, D) what the tower is given, of levels (N, D) and what each of them is."""
    rows = patches.reshape(len(patches), 3, -1)
    found: F32 = np.stack([levels[colour][rows[:, colour]] for colour in range(3)], axis=1)
    return found.reshape(len(rows), -1)


class ImageRoom(Record):
    """Bounds on the images or audio of one request; None: unbounded."""

    prompt_tokens: int | None = None
    """Tokens of a prompt: images and text together."""
    feature_tokens: int | None = None
    """Tokens whose features the device can hold."""
    step_tokens: int | None = None
    """Tokens of one image, if a step must compute them all."""
    num_sequences: int = 1
    """Sequences of a step."""
    num_bytes: int = 224 << 20
    """Bytes of patches, which reach the core in one message."""
    kind: Kind = "image"

    def check(self, sizes: Sequence[int], num_bytes: int, where: str) -> None:
        """Refuses what can never be served.

        Args:
            sizes: tokens of the images.
            num_bytes: of their patches.
            where: the image that was read last.

        Raises InvalidRequestError, ContextLengthError, CapacityError.
        """
        wanted = sum(sizes)
        if self.prompt_tokens is not None and wanted > self.prompt_tokens:
            raise ContextLengthError(
                f"{where} is {SINGULAR[self.kind]} of {sizes[-1]} tokens, with which the request's"
                f" {PLURAL[self.kind]} take {wanted}, but the context has room for"
                f" {self.prompt_tokens}: send fewer or smaller ones, or raise --max-model-len",
                param=where,
            )
        if num_bytes > self.num_bytes:
            raise InvalidRequestError(
                f"the request's {PLURAL[self.kind]} take {num_bytes} bytes once they are prepared,"
                f" at most {self.num_bytes} are taken: send fewer or smaller ones",
                param=where,
            )
        self.check_features(sizes)

    def check_features(self, sizes: Sequence[int]) -> None:
        """Checks what the device can hold. Raises CapacityError."""
        wanted, longest = sum(sizes), max(sizes, default=0)
        if self.step_tokens is not None and longest > self.step_tokens:
            others = self.num_sequences - 1
            raise CapacityError(
                f"{SINGULAR[self.kind]} of {longest} tokens, which this model reads in one step,"
                f" does not fit next to {others} sequences: raise --max-num-batched-tokens to"
                f" {longest + others} or lower --max-num-seqs",
                param="messages",
            )
        if self.feature_tokens is not None and wanted > self.feature_tokens:
            raise CapacityError(
                f"the request has {PLURAL[self.kind]} of {wanted} tokens, the features of"
                f" {self.feature_tokens} can be held: send fewer or smaller ones, or"
                " raise --encoder-cache-memory",
                param="messages",
            )
