"""Messages between a frontend and the engine core.

The same records serve the inline engine (passed as objects) and the engine core process (msgpack on
a unix socket, see `vllmx_engine.wire.ipc`). Nothing else crosses, and never a pickle.
"""

from __future__ import annotations

import dataclasses
import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Literal

import msgspec
import numpy as np
from vllmx_core.config import MAX_DRAFT, Role
from vllmx_core.plan import I32
from vllmx_core.sampling import MAX_LOGPROBS, SamplingParams

from vllmx_engine.wire.grammars import Grammar
from vllmx_engine.wire.images import ImageRoom

PoolingTask = Literal["embed", "token_embed", "score", "classify"]
Activation = Literal["none", "sigmoid", "softmax", "yes", "log1p"]


class PoolingInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Filled in while the model is loaded."""

    tasks: list[PoolingTask]
    size: int
    """Numbers of a vector, or classes."""
    labels: list[str] = []
    """The names of the classes."""
    activation: Activation = "none"
    """The function from what the model gives to scores; yes: the share of the last of two;
    log1p: log(1 + relu), of sparse vectors."""
    normalize: bool = True
    """Vectors have length 1 unless a request says otherwise."""
    prompts: dict[str, str] = {}
    """Prefixes of texts, by their purpose."""
    default_prompt: str | None = None
    """Name of the prompt of texts without one."""
    pair: str = ""
    """A pair of texts with {query} and {document} in it; empty: as the tokenizer joins two."""


MAX_FRAME_BYTES = 256 << 20
"""The longest message between processes, encoded."""
FinishReason = Literal["stop", "length", "abort", "error"]
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Inclusive upper bounds of `CoreStats.step_sizes`; the last count is of larger steps."""

_PACKED_AT_A_TIME = 1 << 16


def pack_ids(ids: Iterable[int]) -> bytes:
    """Returns token ids in wire form: 32 bits each, in this machine's byte order. Raises
    OverflowError for ids that do not fit and TypeError for other values than integers."""
    packed, rest = array("i"), iter(ids)
    while piece := array("i", islice(rest, _PACKED_AT_A_TIME)):  # other threads run in between
        packed += piece
    return packed.tobytes()


class ImageInput(msgspec.Struct, frozen=True, array_like=True):
    """An image that stands for tokens of a prompt."""

    start: int
    num_tokens: int
    digest: bytes
    """The digest of all that its features depend on."""
    grid: tuple[int, int, int]
    """(frames, rows, columns) of patches."""
    patches: bytes
    """(N, D) levels of grey, a third of a row for each colour; without `levels` float32."""
    levels: bytes
    """(3, 256) float32 in this machine's order: what each level of each colour is to the tower;
    empty for an audio."""


class CoreRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence to continue. `n` and `best_of` are the frontend's business: it sends each choice
    as a request of its own."""

    request_id: str
    prompt: bytes
    """Token ids, see `pack_ids`. A list of 128k of them would hold up the step loop for 10 ms."""
    images: list[ImageInput] = []
    """The images by their places, ascending and apart."""
    params: SamplingParams
    """The parameters without their texts: `stop` is the frontend's, `bad_words_ids` below replaces
    `bad_words`."""
    stop_ids: list[int] = []
    """End-of-sequence ids of the model (empty when ignore_eos) and `params.stop_token_ids`."""
    bad_words_ids: list[list[int]] = []
    grammar: Grammar | None = None
    """The answer's grammar; replaces `params.structured_outputs`."""
    max_tokens: int
    """Resolved: never more than the context holds."""
    seed: int
    """Resolved: 0 <= seed < 2**64, drawn by the frontend when the user named none."""
    priority: int = 0
    """Smaller is served first."""
    client: str = ""
    """The client that sent the request, for fair share; the API key's digest on the server.
    """
    share: float = 1.0
    """The client's weight in the fair share of capacity."""
    queue_timeout_s: float = 0.0
    """It ends with QueueTimeoutError when it waited so long for its first row; 0: never."""
    cache_salt: str = ""
    """Part of the prefix-cache hash: only requests of one salt share blocks."""
    session_id: str = ""
    """The client's name of what this request goes on with; empty: none."""
    log_id: str = ""
    """The client's name for it, of letters, digits and `_.:-`; several requests may share one."""
    pools: bool = False
    """It wants the vector or the scores of its prompt, and no token."""
    token_types: bytes = b""
    """The text of a pair that each prompt token belongs to, as `pack_ids`; empty: there is one
    text."""
    prediction: bytes = b""
    """Token ids, as `pack_ids`, of a text that the answer is expected to repeat in parts; the
    engine drafts from it."""
    at_end: bool = False
    """The client reads the tokens only at the end: they are sent many at a time."""
    adapter: str = ""
    """The name of the LoRA adapter that changes the model for it; empty: none, or the base's."""
    leader: str | None = None
    """Request whose prompt is the same (another choice of one call): wait with the prefill until
    its blocks can be shared."""
    generated: bytes = b""
    """Token ids, as `pack_ids`, that another replica has generated already: the sequence goes on
    behind them and does not send them again."""
    digests: bytes = b""
    """The digests of its root and of its first full blocks, 16 bytes each, where the frontend has
    the core's key; see `vllmx_engine.core.prefix_cache`."""
    source: str = ""
    """The address of the core that computes the prompt: its blocks are fetched there."""
    source_id: str = ""
    """The id of the request that computes it there."""
    source_s: float = 0.0
    """The predicted seconds until it is computed."""

    @property
    def shown(self) -> str:
        """The name of the request in logs."""
        return f"{self.request_id} ({self.log_id})" if self.log_id else self.request_id

    @property
    def prompt_ids(self) -> I32:
        """(prompt tokens,) a view. Raises ValueError for bytes that are not whole ids."""
        return np.frombuffer(self.prompt, np.int32)

    def shares_all_with(self, other: CoreRequest) -> bool:
        """True if `choices_of` made both, so that checks of one hold for the other."""
        return (
            self.prompt is other.prompt
            and self.stop_ids is other.stop_ids
            and self.bad_words_ids is other.bad_words_ids
        )


class Follower(msgspec.Struct, frozen=True, array_like=True):
    """The fields in which a further choice of a call differs from the first."""

    request_id: str
    seed: int
    generated: bytes = b""


def choices_of(leader: CoreRequest, followers: Sequence[Follower]) -> list[CoreRequest]:
    """The leader and its followers as requests. They share the prompt, the parameters and all other
    objects: 128 choices of one call cost little more than one."""
    params = leader.params
    if followers and params.prompt_logprobs is not None:
        params = dataclasses.replace(params, prompt_logprobs=None)  # the leader's alone
    return [
        leader,
        *(
            msgspec.structs.replace(
                leader,
                request_id=follower.request_id,
                params=params,
                seed=follower.seed,
                leader=leader.request_id,
                generated=follower.generated,
            )
            for follower in followers
        ),
    ]


_UNPACKED = 1024
"""Entries that are made into Python's numbers at a time."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """Log-probabilities at one position."""

    token: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]
    packed: bytes = b""
    """The bytes in place of the two lists where they are long: the ids, then their
    log-probabilities, as numbers of 32 bits."""
    is_ranked: bool = True
    """True if the ids are the most likely, in order; False: the request named them."""

    def ranked(self) -> Iterator[tuple[int, float]]:
        """Ids with their log-probabilities, the most likely first; or those that were named."""
        if not self.packed:
            return zip(self.top_ids, self.top_logprobs, strict=True)
        half = len(self.packed) // 2
        ids = np.frombuffer(self.packed, "<i4", half // 4)
        values = np.frombuffer(self.packed, "<f4", half // 4, offset=half)
        starts = range(0, ids.size, _UNPACKED)
        return (
            pair
            for start in starts
            for pair in zip(
                ids[start : start + _UNPACKED].tolist(),
                values[start : start + _UNPACKED].tolist(),
                strict=True,
            )
        )


class CoreOutput(
    msgspec.Struct, frozen=True, kw_only=True, array_like=True, omit_defaults=True, gc=False
):
    """The update of one request after a step. Untracked by the garbage collector (so is
    TokenLogprobs): hundreds are made in each step, and what they hold cannot form a cycle."""

    request_id: str
    ids: list[int]
    """Newly generated token ids, the end-of-sequence id included."""
    finish_reason: FinishReason | None = None
    stop_id: int | None = None
    """The id of `stop_ids` that ended it."""
    logprobs: list[TokenLogprobs] | None = None
    """One for each of `ids`, when asked for."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """One for each prompt token but the first: in pieces as they are computed, without `ids`, whose
    end is an empty list or the last piece with the first token."""
    num_cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache; sent with the first token."""
    error: str | None = None
    """The text that a user may read, with finish_reason "error"."""
    error_code: str | None = None
    """`VllmxError.code` of it."""
    queue_s: float | None = None
    """The seconds from its arrival in the core to its first row; sent with the first token."""
    held_s: float = 0.0
    """The seconds for which the first token was held back, see `CoreRequest.at_end`."""
    vector: bytes = b""
    """The result of a pooling request: float32, in this machine's byte order."""
    num_accepted: int = 0
    """Draft tokens among `ids`, and those that were not kept."""
    num_rejected: int = 0


def is_piece(output: CoreOutput) -> bool:
    """True if it holds log-probabilities of a prompt and nothing else."""
    return output.prompt_logprobs is not None and not output.ids


class AdapterInfo(msgspec.Struct, frozen=True, array_like=True):
    """A LoRA adapter that requests may name."""

    name: str
    path: str
    rank: int
    digest: str = ""
    """Equal for equal adapters: sets prefixes apart in the cache."""


class CoreStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters and gauges of the core, for /metrics; counters only grow."""

    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    """The number of free blocks that hold a prefix which can be hit."""
    num_blocks: int = 0
    num_state_slots: int = 0
    """The slots for the states of recurrent layers; 0: the model has none."""
    num_used_slots: int = 0
    """Slots that running sequences use."""
    num_snapshots: int = 0
    """States behind prefixes that can be hit."""
    num_preemptions: int = 0
    num_steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    """Prompt tokens looked up."""
    prefix_cache_hits: int = 0
    """Prompt tokens found."""
    step_seconds: float = 0.0
    step_sizes: tuple[int, ...] = (0,) * (len(STEP_TOKENS) + 1)
    """Steps by the tokens that they finished, see `STEP_TOKENS`: a whole prompt with the step that
    reads its end, and new tokens. Steps that finished none are left out."""
    num_drafts: int = 0
    """Rows of steps that verified draft tokens."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Draft tokens that were kept."""
    num_sessions: int = 0
    """Sessions that pin blocks."""
    num_pinned_blocks: int = 0
    num_host_blocks: int = 0
    """KV blocks and states in the host's memory, below the device."""
    host_block_bytes: int = 0
    num_stored_blocks: int = -1
    """Blocks and states in a store such as a folder; -1: there are no tiers below the device."""
    stored_bytes: int = 0
    tier_tokens: int = 0
    """Prompt tokens whose blocks came from a tier below the device."""
    num_given_up_fetches: int = 0
    """Fetches that would have taken longer than computing the blocks."""
    num_store_failures: int = 0
    """Calls of a shared store that failed or took too long."""
    peer_tokens: int = 0
    """Prompt tokens whose blocks another replica has computed."""
    num_peer_failures: int = 0
    """Replicas that could not be asked for blocks, or whose blocks are of something else."""
    accepted_at: tuple[int, ...] = (0,) * MAX_DRAFT
    """Draft tokens that were kept, by their place in the draft."""
    adapters: list[AdapterInfo] | None = None
    """The adapters that are loaded; None: the model takes none."""
    replicas: dict[str, CoreStats] = {}
    """The counters of each replica by its number, where these are those of several together."""


class ReplicaLoad(msgspec.Struct, frozen=True, array_like=True):
    """A replica's work and its cost figures, in seconds of its own cost model."""

    num_taken: int = 0
    """Requests (calls with all their choices) that it has taken from this router since its start.
    Later ones are not part of the figures below."""
    num_running: int = 0
    num_waiting: int = 0
    """Sequences that wait for a row or for blocks."""
    queued_s: float = 0.0
    """Seconds of prefill that are begun or wait."""
    token_s: float = 0.0
    """Seconds of a prompt token; 0: not measured yet."""
    work_s: float = 0.0
    """Seconds that a prompt token takes longer for each token before it."""
    stretch: float = 1.0
    """Seconds that pass for a second of prefill, since decodes take their part of each step."""
    row_s: float = 0.0
    """Seconds that one more sequence adds to a step."""
    free_rows: int = 1
    free_blocks: int = 1 << 30
    turn_s: float = 0.0
    """Seconds between two ends of sequences. An end frees a row and its blocks."""
    turn_blocks: float = 0.0
    """Blocks that such a sequence leaves."""
    pull_byte_s: float = 0.0
    """Seconds in which a byte of blocks comes from another replica; 0: not measured of late."""


class CoreInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The loaded model and its limits, for clients of the core."""

    model: str
    """The name that clients use."""
    path: str
    """Folder or file that the model was read from."""
    architecture: str
    max_model_len: int
    """Greatest number of tokens, prompt and output together, of one sequence."""
    vocab_size: int
    backend: str
    device: str
    dtype: str
    kv_cache_dtype: str
    block_size: int
    num_kv_blocks: int
    num_state_slots: int = 0
    """The slots for the states of recurrent layers, and the memory of one."""
    state_slot_bytes: int = 0
    max_num_seqs: int
    max_num_batched_tokens: int
    weight_bytes: int
    kv_cache_bytes: int
    load_seconds: float
    free_bytes: int = 0
    """Memory that models could take where this one runs, before it was loaded; 0: unknown."""
    audio_rows: int = 0
    """Rows of 20 ms that the model hears at a time and writes down; 0: it answers prompts."""
    encoder_tokens: int = 0
    """Tokens that the encoder of an encoder-decoder of text reads: its prompts; 0: it is none."""
    decoder_start: int = 0
    """The id with which its decoder begins."""
    takes_images: bool = False
    """It has a tower for them."""
    takes_videos: bool = False
    """It was compared with videos, which its tower for images sees."""
    takes_audio: bool = False
    """It has a tower for audio in conversations."""
    image_room: ImageRoom | None = None
    """Bounds on the images or audio of one request."""
    image_processor: dict[str, Any] = {}
    """The preparation of images, in terms of preprocessor_config.json; empty: files in `path`."""
    generation_config: dict[str, Any] = {}
    """The checkpoint's generation_config: defaults of sampling parameters."""
    max_logprobs: int = MAX_LOGPROBS
    """`EngineConfig.max_logprobs`."""
    pooling: PoolingInfo | None = None
    """The pooling of a model with vectors or scores; None: it generates text."""
    cache_model: str = ""
    """The name that its cached blocks are identified by, if it is a replica."""
    role: Role = "both"
    """`EngineConfig.role`."""
    blocks_of: str = ""
    """The model, options, kernels and sizes of its KV blocks, in words, if it exchanges them: it
    does so only with replicas that have the same."""
    id_prefix: str = ""
    """The prefix of a client's request ids, so that two clients never choose the same."""
    adapters: list[AdapterInfo] | None = None
    """The adapters that it was started with; None: it takes none."""
    details: dict[str, str] = {}
    """The details of the backend: kernel variant, threads, ..."""


def inputs_of(info: CoreInfo, ids: list[int]) -> tuple[list[ImageInput], list[int]]:
    """The input of the tower and the prompt of the decoder for a prompt: in an encoder-decoder of
    text the tower reads the prompt, a patch for each id, which is exact in float32. It takes all
    the room of one, for the whole answer reads it."""
    if not info.encoder_tokens:
        return [], ids
    rows = np.array(ids, np.float32).tobytes()
    digest = hashlib.blake2b(rows, digest_size=32, person=b"text").digest()
    image = ImageInput(0, info.encoder_tokens, digest, (1, 1, len(ids)), rows, b"")
    return [image], [info.decoder_start]
