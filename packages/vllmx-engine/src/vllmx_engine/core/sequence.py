"""The engine core's state of one request."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator

import numpy as np
from vllmx_core.errors import CapacityError, ContextLengthError, InvalidRequestError
from vllmx_core.image_plan import Turns
from vllmx_core.model import ImagePlaces
from vllmx_core.records import MutableRecord, Record, field

from vllmx_engine.core.adapters import HeldAdapter
from vllmx_engine.core.grammar_rows import GrammarRow
from vllmx_engine.core.limits import Limits
from vllmx_engine.core.logit_rules import LogitRules, make_rules
from vllmx_engine.core.prefix_cache import Entry
from vllmx_engine.core.speech_rules import SpeechRow
from vllmx_engine.core.thought_budget import ThoughtBudget
from vllmx_engine.core.tiers import Fetch
from vllmx_engine.wire.messages import CoreRequest, FinishReason, ImageInput, TokenLogprobs


class SequenceImages(Record):
    """Images of one sequence, in order."""

    inputs: tuple[ImageInput, ...]
    places: tuple[ImagePlaces, ...]
    turns: Turns | None
    """The rotations of its tokens; None: those of their positions."""
    spans: bool = False
    """`FeatureSpec.spans`."""

    @property
    def end(self) -> int:
        """The position behind the last of them."""
        return self.inputs[-1].start + self.inputs[-1].num_tokens

    def within(self, start: int, end: int) -> Iterator[int]:
        """Numbers of the images with tokens in this part of the sequence."""
        for number, image in enumerate(self.inputs):
            if image.start < end and start < image.start + image.num_tokens:
                yield number

    def least(self, start: int) -> int:
        """Tokens that a chunk from there on has at the least: it cuts no image whose tokens see
        each other both ways."""
        for number in self.within(start, start + 1) if self.spans else ():
            return self.inputs[number].start + self.inputs[number].num_tokens - start
        return 1

    def whole(self, start: int, size: int) -> int:
        """Returns the size of a chunk of at most `size` tokens that cuts no image; 0: `size` is
        below `least`."""
        if self.least(start) > size:
            return 0
        for number in self.within(start + size - 1, start + size) if self.spans else ():
            image = self.inputs[number]
            if image.start + image.num_tokens > start + size and image.start > start:
                return image.start - start
        return size


_ID_BYTES = 4
_MOST_HELD = 256
"""Tokens that are sent at once when the client reads the answer only at its end: decoding them
takes microseconds."""


class Found(MutableRecord):
    """The result of a prefix cache look-up in the groups without a window."""

    num_groups: int
    """The number of groups without a window."""
    num_blocks: int = 0
    """All of those groups hold so many first blocks."""
    blocks: array[int] = field(default_factory=lambda: array("i"))
    """The blocks of all those groups, one after the other for each block of the sequence."""
    entries: list[Entry] = field(default_factory=list)

    def cut(self, num_blocks: int) -> None:
        """Keeps so many first blocks."""
        self.num_blocks = num_blocks
        del self.blocks[self.num_groups * num_blocks :]
        del self.entries[self.num_groups * num_blocks :]


class Sequence:
    """A request with its tokens. `row` is its place in the `RowTable` while it runs, else -1.

    Args:
        leader: another choice of the same call, with which it can share what does not change.
    """

    __slots__ = (
        "adapter",
        "arrival",
        "arrival_s",
        "awaited_step",
        "content",
        "digests",
        "fetch",
        "finished",
        "found",
        "found_scores",
        "grammar",
        "held_since_s",
        "images",
        "is_plain",
        "limit",
        "new_scores",
        "num_accepted",
        "num_cached_tokens",
        "num_charged",
        "num_given",
        "num_held",
        "num_passed",
        "num_prompt",
        "num_rejected",
        "num_scored",
        "queue_s",
        "rank",
        "request",
        "request_id",
        "root",
        "row",
        "rules",
        "skipped_step",
        "stop_ids",
        "tokens",
        "was_preempted",
    )

    def __init__(
        self,
        request: CoreRequest,
        arrival: int,
        limits: Limits,
        leader: Sequence | None = None,
    ) -> None:
        params = request.params
        self.request = request
        self.request_id = request.request_id
        self.arrival = arrival
        self.arrival_s = time.monotonic()
        self.queue_s = 0.0
        """The seconds from then to its first row."""
        self.rank = request.priority
        """The rank in the queue: its priority, and a smaller one once it had to wait for long (see
        `WaitingQueue`)."""
        self.tokens = array("i", request.prompt)
        """Prompt and generated ids that the host has seen."""
        self.num_prompt = len(self.tokens)
        self.tokens.frombytes(request.generated)
        self.num_given = len(self.tokens)
        """The number of its tokens at first: the prompt, and those generated by another replica."""
        self.limit = min(self.num_prompt + request.max_tokens, limits.max_tokens)
        """Length at which it ends with reason "length"."""
        self.stop_ids = frozenset(request.stop_ids)
        self.row = -1
        self.adapter: HeldAdapter | None = None
        """The adapter that changes the model for it; set before it is scheduled."""
        self.finished = False
        self.was_preempted = self.num_given > self.num_prompt
        """It had a row before, here or elsewhere."""
        self.root = b""
        """Digest of what sets its prefixes apart, the parent of its first block."""
        self.content: dict[int, bytes] = {}
        """Content of blocks by number, other than token ids."""
        self.images: SequenceImages | None = None
        """Set with `content` before it is scheduled."""
        self.digests: list[bytes] = []
        """The digests of its full blocks, as far as they were asked for."""
        self.found: Found | None = None
        """The result of its last prefix look-up while it waits."""
        self.fetch: Fetch | None = None
        """Blocks that were read for it, until it is admitted."""
        self.num_cached_tokens = 0
        self.num_held = 0
        """The number of its last tokens that are not sent yet, see `CoreRequest.at_end`."""
        self.held_since_s = 0.0
        """The time at which its first token came, while that is held back; else 0."""
        self.num_charged = self.num_given if self.was_preempted else 0
        """The first so many tokens were charged to its client: its prompt as it was admitted, or
        what was computed before it was preempted."""
        self.num_passed = 0
        """The number of later sequences that were admitted before it because it did not fit."""
        self.num_scored = 0 if params.prompt_logprobs is not None else self.num_prompt
        """Prompt tokens whose logits were scheduled or not needed, for prompt_logprobs."""
        self.found_scores: list[TokenLogprobs] = []
        """Log-probabilities of its cached prefix, until they are sent."""
        self.new_scores: list[TokenLogprobs] = []
        """Log-probabilities of a block whose other logits are still to come."""
        self.rules: LogitRules | None = (
            make_rules(request, limits.vocab_size)
            if leader is None or leader.rules is None
            else leader.rules.of_another_choice()
        )
        if self.was_preempted and self.rules is not None and self.rules.counts is not None:
            for token in self.tokens[self.num_prompt :]:
                self.rules.counts.add(token)
        self.grammar: GrammarRow | ThoughtBudget | SpeechRow | None = None
        """The row's grammar or budget, once it is compiled."""
        self.awaited_step = -1
        """Number of the step that still brings a token of it, where it was preempted meanwhile."""
        self.skipped_step = -1
        """Number of a step under way that computes a token of it that is known by now."""
        self.num_accepted = self.num_rejected = 0
        """Draft tokens that were kept, and those that were not, since the last output."""
        self.is_plain = False
        """Committing a token needs no more than appending it; never so for the first one."""

    def begin_at(self, root: bytes) -> None:
        """Sets its root, and takes the digests that came with it if they are of that root."""
        self.root, given = root, self.request.digests
        if given.startswith(root):
            size = len(root)
            self.digests = [given[at : at + size] for at in range(size, len(given), size)]

    def follow(self, grammar: GrammarRow | ThoughtBudget) -> None:
        """Begins to follow a grammar, with which what is generated so far agrees. Raises
        GrammarError."""
        for token in self.tokens[self.num_prompt :]:
            grammar.accept(token)
        self.grammar = grammar

    @property
    def adapter_digest(self) -> str:
        """Sets its prefixes apart from those of other adapters; empty: it has none."""
        return "" if self.adapter is None else self.adapter.digest

    def content_of(self, index: int, block_size: int) -> bytes:
        """All that decides what a full block holds behind its parent. Token ids come first and are
        equally many in each block, so that nothing else can be taken for them."""
        ids = self.tokens[block_size * index : block_size * (index + 1)].tobytes()
        return ids + self.content[index] if index in self.content else ids

    def entry_of(self, index: int, block_size: int) -> Entry:
        """The entry of a full block whose digest is known."""
        parent = self.digests[index - 1] if index else self.root
        return self.digests[index], parent, self.content_of(index, block_size)

    def least_chunk(self, start: int) -> int:
        """Tokens that a chunk from there on has at the least: images may not be cut."""
        return 1 if self.images is None else self.images.least(start)

    def has_images_from(self, start: int) -> bool:
        """True if an image has tokens at `start` or later."""
        return self.images is not None and start < self.images.end

    @property
    def all_scored(self) -> bool:
        """No prompt token waits for its logits any more."""
        return self.num_scored >= self.num_prompt

    @property
    def needs_last_token(self) -> bool:
        """The host must see each token before it can prepare the next step."""
        if self.request.grammar is not None:
            return True
        return self.rules is not None and bool(self.rules.phrases)

    def mark_started(self) -> None:
        """The first token is out: decides `is_plain` for the others."""
        self.is_plain = self.request.params.logprobs is None and self.grammar is None

    def hold(self, count: int) -> bool:
        """Holds back its newest tokens; False if they must be sent now."""
        if not self.request.at_end or self.num_held + count >= _MOST_HELD:
            return False
        self.num_held += count
        return True

    def untold(self, count: int) -> list[int]:
        """Returns the tokens to send when the last `count` are new, including those held back."""
        told, self.num_held = self.num_held + count, 0
        return self.tokens[len(self.tokens) - told :].tolist()

    def accept(self, token: int) -> FinishReason | None:
        """Appends a sampled id and says whether the sequence ends with it. Raises GrammarError for
        one that its grammar does not allow."""
        self.tokens.append(token)
        if self.rules is not None and (counts := self.rules.counts) is not None:
            counts.add(token)
        if token in self.stop_ids:  # before min_tokens they are banned, see LogitRules
            return "stop"
        if self.grammar is not None and self.grammar.accept(token):
            return "stop"
        return "length" if len(self.tokens) >= self.limit else None

    def accept_all(self, ids: list[int]) -> FinishReason | None:
        """`accept` for several ids; removes those behind the end from `ids`."""
        is_counted = self.rules is not None and self.rules.counts is not None
        if self.grammar is None and not is_counted and self.stop_ids.isdisjoint(ids):
            self.tokens.fromlist(ids)
            return "length" if len(self.tokens) >= self.limit else None
        for place, token in enumerate(ids, 1):
            reason = self.accept(token)
            if reason is not None:
                del ids[place:]
                return reason
        return None


def check_request(request: CoreRequest, limits: Limits) -> None:
    """Raises InvalidRequestError, ContextLengthError or CapacityError for what can never run."""
    if len(request.prompt) % _ID_BYTES:
        raise InvalidRequestError(
            f"{len(request.prompt)} bytes are not token ids of {_ID_BYTES}: send pack_ids(ids)",
            param="prompt",
        )
    ids = request.prompt_ids
    if request.generated:
        ids = np.frombuffer(request.prompt + request.generated, np.int32)
    length = ids.size
    if not request.prompt:
        raise InvalidRequestError("the prompt has no tokens: send at least one", param="prompt")
    if ids.view(np.uint32).max() >= limits.vocab_size:  # a negative one is greater than any
        wrong = ids[(ids < 0) | (ids >= limits.vocab_size)][0]
        raise InvalidRequestError(
            f"prompt token ids must be integers from 0 to {limits.vocab_size - 1}, got {wrong}",
            param="prompt",
        )
    if request.max_tokens < 1:
        raise InvalidRequestError(
            f"max_tokens must be at least 1, got {request.max_tokens}", param="max_tokens"
        )
    if not 0 <= request.seed < 1 << 64:
        raise InvalidRequestError(
            f"seed must be from 0 to 2**64 - 1, got {request.seed}", param="seed"
        )
    _check_kind(request, limits)
    if limits.pools:
        _check_pooled_length(length, limits)
        return
    if length >= limits.max_model_len:
        raise ContextLengthError(
            f"the prompt has {length} tokens, but with room for one more the context of"
            f" {limits.max_model_len} holds {limits.max_model_len - 1}: shorten the prompt or raise"
            " --max-model-len",
            param="prompt",
        )
    if length >= limits.max_tokens:
        raise CapacityError(
            f"the prompt has {length} tokens, but of one sequence the {limits.num_blocks} KV blocks"
            f" of {limits.block_size} tokens hold {limits.max_tokens - 1} and one more: shorten the"
            " prompt or raise --num-kv-blocks or --memory-fraction",
            param="prompt",
        )
    request.params.check_vocab(limits.vocab_size)


def _check_kind(request: CoreRequest, limits: Limits) -> None:
    """The model must answer with what the request wants. Raises InvalidRequestError."""
    if request.pools and not limits.pools:
        raise InvalidRequestError(
            "the model generates text and makes no vectors: load it with --task embed, or another"
            " model",
            param="model",
        )
    if limits.pools and not request.pools:
        raise InvalidRequestError(
            "the model makes vectors or scores and generates no text: load a generating model",
            param="model",
        )
    types = request.token_types
    if types and len(types) != len(request.prompt):
        raise InvalidRequestError(
            f"{len(types) // _ID_BYTES} token types for {len(request.prompt) // _ID_BYTES} tokens",
            param="prompt",
        )


def _check_pooled_length(length: int, limits: Limits) -> None:
    if length > limits.max_model_len:
        raise ContextLengthError(
            f"the text has {length} tokens, the model takes {limits.max_model_len}: shorten it, or"
            " set truncate_prompt_tokens",
            param="prompt",
        )
    if length > limits.max_tokens:
        raise CapacityError(
            f"the text has {length} tokens, but the {limits.num_blocks} KV blocks of"
            f" {limits.block_size} tokens hold {limits.max_tokens}: shorten it or raise"
            " --num-kv-blocks or --memory-fraction",
            param="prompt",
        )
