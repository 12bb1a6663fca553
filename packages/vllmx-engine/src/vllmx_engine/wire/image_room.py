"""Bounds on the images of one request, checked by the sizes in their headers."""

from __future__ import annotations

from collections.abc import Sequence

from vllmx_core.errors import CapacityError, ContextLengthError, InvalidRequestError
from vllmx_core.records import Record


class ImageRoom(Record):
    """Bounds on the images of one request; None: unbounded."""

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
                f"{where} is an image of {sizes[-1]} tokens, with which the request's images take"
                f" {wanted}, but the context has room for {self.prompt_tokens}: send fewer or"
                " smaller ones, or raise --max-model-len",
                param=where,
            )
        if num_bytes > self.num_bytes:
            raise InvalidRequestError(
                f"the request's images take {num_bytes} bytes of patches, at most {self.num_bytes}"
                " are taken: send fewer or smaller ones",
                param=where,
            )
        self.check_features(sizes)

    def check_features(self, sizes: Sequence[int]) -> None:
        """Checks what the device can hold. Raises CapacityError."""
        wanted, longest = sum(sizes), max(sizes, default=0)
        if self.step_tokens is not None and longest > self.step_tokens:
            others = self.num_sequences - 1
            raise CapacityError(
                f"an image of {longest} tokens, which this model sees in one step, does not fit"
                f" beside {others} sequences: raise --max-num-batched-tokens to"
                f" {longest + others} or lower --max-num-seqs",
                param="messages",
            )
        if self.feature_tokens is not None and wanted > self.feature_tokens:
            raise CapacityError(
                f"the request has images of {wanted} tokens, the features of"
                f" {self.feature_tokens} can be held: send fewer or smaller ones, or"
                " raise --encoder-cache-memory",
                param="messages",
            )
