"""The data of one step: what the engine hands to a backend and what comes back.

All arrays are C-contiguous numpy arrays that the engine owns and reuses: a backend that needs them
after `LoadedModel.step` has returned must have copied them by then.

Alphabet of shapes: T tokens, R rows (sequences of this step), B blocks of the widest row, G cache
groups, L logit rows, V vocabulary, W = ceil(V / 32).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from vllmx_core.records import MutableRecord

U8 = npt.NDArray[np.uint8]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
F32 = npt.NDArray[np.float32]
AnyArray = npt.NDArray[Any]


class PatchRows(MutableRecord):
    """Inputs of a tower's pass besides positions and rows. A `StepPlan` with it has images as rows
    and patches as tokens: T patches, whose ids nobody reads, and M features."""

    values: F32
    """(T, D) normalised pixels of each patch."""
    table_rows: I32
    """(T, k) rows of the table of positions that each patch mixes; k may be 0."""
    table_weights: F32
    """(T, k) how much of each."""
    keep: I32
    """(M,) where the features go in the store that `StepPlan.feature_rows` reads."""
    windows: I32 | None = None
    """(W + 1,) first patch of each window, then T, for layers that see one window alone
    (`SegmentSpec.windowed`); None: the tower has no such layer."""


class StepPlan(MutableRecord):
    """One step, flattened and without padding: decode rows and prefill chunks side by side.

    Row r owns tokens `query_start[r] : query_start[r + 1]`. Its attention context is
    `context_len[r]` tokens long *including* the tokens of this step, and in the layers of group g
    its KV entry for position p lies in block `block_tables[g][r, p // P]` at offset `p % P`. No row
    reads what another row of the same step writes.
    """

    tokens: I32
    """(T,) token ids. A negative value -(i + 1) stands for the id that logit row i of the step
    before this one sampled, which the backend still holds (overlapped scheduling). Where that row
    was refused (-1), the backend feeds id 0; the engine throws the result away."""
    positions: I32
    """(T,) position of each token in its sequence."""
    slots: tuple[I32, ...]
    """The places (T,) in each cache group where the tokens' K/V go: block * P + offset."""
    query_start: I32
    """(R + 1,) first token of each row; the last entry is T."""
    context_len: I32
    """(R,) tokens in the KV cache after this step's writes."""
    block_tables: tuple[I32, ...]
    """The physical blocks of each row in each cache group (R, B), one B for all. Undefined are
    entries beyond the row's context and, in a group with a window, those of pages that the row's
    first token of this step no longer sees; nobody may read them. May be views whose rows are
    further apart than B (see `strides`)."""
    logit_rows: I32
    """(L,) indices into the T tokens whose next-token logits are wanted, ascending. For a model
    that gives vectors or scores: the last tokens of the rows whose prompts end in this step."""
    state_from: I32 | None = None
    """(R,) slot that row r reads its states from, or -1: zeros, for a sequence that begins here.
    None, as `state_to`, for a model without states."""
    state_to: I32 | None = None
    """(R,) slot that holds the states of row r after its last token of this step; `state_from` in
    the usual case. Another slot leaves the one that was read as it is, so that it can be kept. A
    slot that is written belongs to one row: no other one reads or writes it in this step."""
    state_after: I32 | None = None
    """(T,) slot that keeps the states after this token as well, -1: none, as for each row's last
    token. None: no row keeps any. A slot is named once, and neither in `state_from` nor in
    `state_to`; for a row that names some, these two differ. Only for backends with
    `LoadedInfo.keeps_states_after`."""
    token_types: I32 | None = None
    """(T,) which text of a pair each token belongs to, for models that have a table of them; None:
    all to the first, 0."""
    rope_positions: I32 | None = None
    """(A, T) what rotations with axes turn each token by (`AttentionSpec.rope_axes`), one line an
    axis, each at most the token's position; None: its position on all axes."""
    feature_rows: I32 | None = None
    """(T,) row of the store of features that stands for the token, -1: none does. None: all -1."""
    cross_rows: I32 | None = None
    """(R, 2) first row of the store of features that cross-attention of each row reads, and how
    many. None: no row reads any."""
    tap_rows: I32 | None = None
    """(T,) row of the feature store that each token's hidden states go to, -1: none. A row is named
    once. None: all -1."""
    own_rows: I32 | None = None
    """(T,) row of a drafter's own parts of the store that it reads for the token, -1: none. None:
    all -1."""
    visible_to: I32 | None = None
    """(T,) last position that each token sees where an attention has `AttentionSpec.spans`: its
    own, or of an image's token that of the image's last one, which is computed in this step. Never
    less than for the token before it in its row. None: each token's own."""
    adapters: I32 | None = None
    """(R,) slot of the adapter that changes the model for the row, -1: none does. None: all -1. See
    `HasAdapters`."""
    patches: PatchRows | None = None
    """The patches of a pass of the model's tower, see `SeeingModel.encode`; None: a step."""

    @property
    def state_slots(self) -> tuple[I32, I32]:
        """`state_from` and `state_to`. Raises ValueError where the plan names none, which it has to
        for a model with states: a backend cannot know which slots are free."""
        if self.state_from is None or self.state_to is None:
            raise ValueError(
                "the plan names no slots, but the model keeps states: give state_from and state_to"
            )
        return self.state_from, self.state_to

    @property
    def adapted(self) -> I32:
        """(T,) `adapters` of each token's row."""
        if self.adapters is None:
            return np.full(self.num_tokens, -1, np.int32)
        return np.repeat(self.adapters, np.diff(self.query_start)).astype(np.int32, copy=False)

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def num_rows(self) -> int:
        return int(self.context_len.shape[0])

    @property
    def num_logit_rows(self) -> int:
        return int(self.logit_rows.shape[0])


class LogitEdits(MutableRecord):
    """Sparse additions to the logits before everything else (logit_bias, bans by -inf).

    Logit row i is edited by entries `start[i] : start[i + 1]`; ids are unique within a row.
    """

    start: I32  # (L + 1,)
    ids: I32  # (N,)
    values: F32  # (N,)


class TokenCounts(MutableRecord):
    """Token occurrences for the penalties, sparse.

    Row i: entries `start[i] : start[i + 1]`, ids unique within a row. `output_counts` counts
    generated tokens only (presence and frequency penalty); an entry with count 0 appeared in the
    prompt only. The repetition penalty covers every listed id. When `pending[i]` is set, the token
    that row i feeds at its logit row is a generated one that the host has not seen yet; the backend
    adds it to the counts.
    """

    start: I32  # (L + 1,)
    ids: I32  # (N,)
    output_counts: I32  # (N,)
    pending: npt.NDArray[np.bool_]  # (L,)


MAX_LISTED_LOGPROBS = 64
"""Greatest `SamplingRows.num_logprobs` that a backend must serve."""


class SamplingRows(MutableRecord):
    """Sampling parameters, one entry for each logit row. Order of work, on the device:

    1. logits as computed -> `logprobs` (log-softmax, when asked for);
    2. allowed-token mask, edits, then penalties (repetition, frequency, presence);
    3. temperature 0: argmax (lowest id wins a tie). Otherwise divide by the temperature, then keep
       min_p, top_k, top_p in this order, then draw by Gumbel-max with Philox noise
       (`vllmx_core.sampling.gumbel_noise`), keyed by (`seed`, `position`), so that a draw depends
       on nothing but the row.

    A row with `target >= 0` is scored, not sampled: its result id is `target` itself.
    """

    temperature: F32  # (L,) 0 = greedy
    top_k: I32  # (L,) 0 = off
    top_p: F32  # (L,) 1 = off
    min_p: F32  # (L,) 0 = off
    repetition_penalty: F32  # (L,) 1 = off
    frequency_penalty: F32  # (L,) 0 = off
    presence_penalty: F32  # (L,) 0 = off
    seed: U64  # (L,)
    position: I32  # (L,) position in the sequence of the token that is drawn
    target: I32  # (L,) -1 = sample
    num_logprobs: I32  # (L,) -1 = none, 0 = the chosen token only, k = and the k likeliest
    max_logprobs: int = -1
    """Greatest entry of `num_logprobs`."""
    all_greedy: bool = True
    """Every sampled row has temperature 0 (penalties, edits and masks may still apply)."""
    edits: LogitEdits | None = None
    counts: TokenCounts | None = None
    mask_index: I32 | None = None  # (L,) row of `masks`, -1 = everything is allowed
    masks: U32 | None = None  # (N, W) bit (id & 31) of word id >> 5 set = allowed
    group_from: I32 | None = None
    """(L,) after step 2, the ids from here on take all the others out if together they are likelier
    than each of these; -1: never. Whisper's timestamps begin there."""
    whole: I32 | None = None
    """(A,) rows whose logits come back as computed, ascending; their `num_logprobs` is at least 0.
    For those that want more of the likeliest than `MAX_LISTED_LOGPROBS`."""

    @property
    def num_rows(self) -> int:
        return int(self.temperature.shape[0])

    @classmethod
    def greedy(cls, count: int) -> SamplingRows:
        """Makes `count` rows that take the likeliest id, without log-probabilities."""
        return cls(
            temperature=np.zeros(count, np.float32),
            top_k=np.zeros(count, np.int32),
            top_p=np.ones(count, np.float32),
            min_p=np.zeros(count, np.float32),
            repetition_penalty=np.ones(count, np.float32),
            frequency_penalty=np.zeros(count, np.float32),
            presence_penalty=np.zeros(count, np.float32),
            seed=np.zeros(count, np.uint64),
            position=np.zeros(count, np.int32),
            target=np.full(count, -1, np.int32),
            num_logprobs=np.full(count, -1, np.int32),
        )


class LogprobRows(MutableRecord):
    """Log-probabilities of a step, filled for rows that asked; natural logarithm."""

    chosen: F32  # (L,) of the sampled or target id
    rank: I32  # (L,) 1 = the likeliest; ties count ids with a strictly greater logit
    top_ids: I32  # (L, K) likeliest first, K = SamplingRows.max_logprobs; -1 beyond a row's own k
    top: F32  # (L, K)


class StepResult(MutableRecord):
    """Arrays of a finished step; owned by the caller."""

    ids: I32  # (L,) sampled or target id; -1 = the row's logits held NaN or nothing was allowed
    logprobs: LogprobRows | None = None
    logits: F32 | None = None  # (A, V) of the rows in `SamplingRows.whole`
    elapsed_s: float = 0.0
    """Device time of the step, for the scheduler's cost model."""
    vectors: F32 | None = None
    """(L, output_size) of a model that gives vectors or scores; `ids` is empty then."""
