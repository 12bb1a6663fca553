"""The rule for `FakeBackend`'s ids: a pure function of a sequence's tokens and sampling parameters.

There are two implementations on purpose: numpy over whole steps for the backend, and
`expected_tokens` over plain Python integers, one token at a time, for the test that judges it.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from vllmx_core.plan import I32, U64, AnyArray, SamplingRows
from vllmx_core.sampling import SamplingParams

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_TOKEN, POSITION_FACTOR, _WEIGHT, EOS_SALT = (
    0xD1342543DE82EF95,
    0xAF251AF3B0F025B5,
    0x2545F491,
    0x5851F42D,
)
STATE_GROUP = 1 << 20
"""Sets what goes into a state apart from what any cache group keeps."""
FORCING_BIAS = 50.0
"""A logit bias of at least this much beats the fake logits."""


@dataclass(frozen=True, slots=True)
class FakeRules:
    """Options of the rule."""

    vocab_size: int = 1000
    eos_id: int | None = None
    eos_every: int | None = None
    """The token at every position that this divides is `eos_id`."""
    eos_rate: int | None = None
    """The mean distance of `eos_id`: about one token in this many is it, by the history's hash."""
    nan_token: int | None = None
    """A row that is fed this token "has NaN logits" and answers -1."""
    windows: tuple[int | None, ...] = (None,)
    """The windows of the cache groups: the history holds each group's last so many tokens; None:
    all."""
    has_states: bool = False
    """The history holds a recurrent state too, a hash of all tokens one after the other."""


# --- numpy, for whole steps ---------------------------------------------------------------------
def mix(values: U64) -> U64:
    """The finaliser of splitmix64, over an array."""
    values = values + np.uint64(_GOLDEN)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def entries(tokens: I32, positions: I32, group: int = 0) -> U64:
    """(T,) what a group of the fake KV cache keeps for each token."""
    product = tokens.astype(np.uint64) * np.uint64(_TOKEN) + np.uint64(group)
    return mix(product + positions.astype(np.uint64) * np.uint64(POSITION_FACTOR))


def advance(states: U64, fresh: U64, query_start: I32) -> U64:
    """Moves the state of each row on by its entries in `fresh` (T,), in place; returns (T,) what it
    was behind each of them."""
    passed, first, lengths = np.zeros_like(fresh), query_start[:-1], np.diff(query_start)
    for offset in range(int(lengths.max(initial=0))):
        rows = np.flatnonzero(lengths > offset)
        at = first[rows] + offset
        passed[at] = states[rows] = mix(states[rows] ^ fresh[at])
    return passed


def position_weights(length: int) -> U64:
    """(length,) odd factors: the history is the sum of entry * weight, so that neither a missing
    nor a misplaced page goes unseen."""
    return mix(np.arange(length, dtype=np.uint64) + np.uint64(_WEIGHT)) | np.uint64(1)


def draw_digests(rows: SamplingRows) -> U64:
    """`draw_digest` of every row."""
    digest = mix(rows.seed)
    columns: tuple[AnyArray, ...] = (rows.temperature, rows.top_k, rows.top_p, rows.min_p)
    for column in columns:
        digest = mix(digest ^ np.ascontiguousarray(column).view(np.uint32).astype(np.uint64))
    return np.where(rows.temperature == 0.0, np.uint64(0), digest | np.uint64(1))


def count_digests(rows: SamplingRows, fed: I32) -> U64:
    """`count_digest` of every row, the pending token counted in."""
    digests = np.zeros(rows.num_rows, np.uint64)
    penalised = (
        (rows.repetition_penalty != 1)
        | (rows.frequency_penalty != 0)
        | (rows.presence_penalty != 0)
    )
    for i in np.flatnonzero(penalised):
        seen: dict[int, int] = {}
        if rows.counts is not None:
            part = slice(int(rows.counts.start[i]), int(rows.counts.start[i + 1]))
            ids, counts = rows.counts.ids[part].tolist(), rows.counts.output_counts[part].tolist()
            seen = dict(zip(ids, counts, strict=True))
            assert len(seen) == len(ids), f"ids of counts row {i} are not unique"
            if rows.counts.pending[i]:
                seen[int(fed[i])] = seen.get(int(fed[i]), 0) + 1
        digests[i] = count_digest(
            list(seen),
            list(seen.values()),
            float(rows.repetition_penalty[i]),
            float(rows.frequency_penalty[i]),
            float(rows.presence_penalty[i]),
        )
    return digests


def allowed_ids(rows: SamplingRows, i: int) -> frozenset[int] | None:
    """The ids that a row may sample; None: all."""
    if rows.mask_index is None or rows.masks is None or rows.mask_index[i] < 0:
        return None
    bits = np.unpackbits(rows.masks[rows.mask_index[i]].view(np.uint8), bitorder="little")
    return frozenset(np.flatnonzero(bits).tolist())


def biases(rows: SamplingRows, i: int) -> list[tuple[int, float]]:
    """The edits of a row's logits: (id, value) pairs."""
    if rows.edits is None:
        return []
    part = slice(int(rows.edits.start[i]), int(rows.edits.start[i + 1]))
    return list(zip(rows.edits.ids[part].tolist(), rows.edits.values[part].tolist(), strict=True))


# --- plain Python, one token at a time ----------------------------------------------------------
def mix_int(value: int) -> int:
    """`mix` of one integer."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def state_hash(tokens: Sequence[int]) -> int:
    """The recurrent state behind these tokens."""
    state = 0
    for position, token in enumerate(tokens):
        product = token * _TOKEN + STATE_GROUP
        state = mix_int(state ^ mix_int((product + position * POSITION_FACTOR) & _MASK))
    return state


def history_hash(
    tokens: Sequence[int], windows: Sequence[int | None] = (None,), *, has_states: bool = False
) -> int:
    """The sum of the pages of a sequence that holds `tokens`, over all cache groups, and of its
    state."""
    total = state_hash(tokens) if has_states else 0
    for group, window in enumerate(windows):
        first = 0 if window is None else max(0, len(tokens) - window)
        for position in range(first, len(tokens)):
            product = tokens[position] * _TOKEN + group
            entry = mix_int((product + position * POSITION_FACTOR) & _MASK)
            total += entry * (mix_int((position + _WEIGHT) & _MASK) | 1)
    return total & _MASK


def draw_digest(temperature: float, top_k: int, top_p: float, min_p: float, seed: int) -> int:
    """Digest of all that a draw depends on besides history and position; 0 for a greedy row."""
    if temperature == 0.0:
        return 0
    words = struct.unpack("<IiII", struct.pack("<fiff", temperature, top_k, top_p, min_p))
    digest = mix_int(seed & _MASK)
    for word in words:
        digest = mix_int((digest ^ word) & _MASK)
    return digest | 1


def count_digest(
    ids: Sequence[int], counts: Sequence[int], repetition: float, frequency: float, presence: float
) -> int:
    """Digest of the penalties and the counts that they see; 0 when no penalty is on."""
    if repetition == 1.0 and frequency == 0.0 and presence == 0.0:
        return 0
    digest = mix_int(
        int.from_bytes(struct.pack("<fff", repetition, frequency, presence), "little") & _MASK
    )
    for token, count in zip(ids, counts, strict=True):
        if count > 0 or repetition != 1.0:
            seen = count if frequency != 0.0 or presence != 0.0 else 0
            digest += mix_int((token << 32) ^ seen)
    return digest & _MASK


def choose(history: int, draw: int, counts: int, position: int, rules: FakeRules) -> int:
    """The id before masks and biases."""
    if rules.eos_id is not None:
        if rules.eos_every is not None and position % rules.eos_every == 0:
            return rules.eos_id
        if rules.eos_rate is not None and mix_int(history ^ EOS_SALT) % rules.eos_rate == 0:
            return rules.eos_id
    return likeliest(history, draw, counts, position, rules.vocab_size)


def likeliest(history: int, draw: int, counts: int, position: int, vocab_size: int) -> int:
    """`choose` without the end of sequence."""
    value = mix_int((history + counts) & _MASK)
    if draw:
        value = mix_int((value ^ draw) + position * POSITION_FACTOR & _MASK)
    return value % vocab_size


def restrict(
    token: int,
    vocab_size: int,
    allowed: Collection[int] | None,
    bias: Sequence[tuple[int, float]],
) -> int:
    """Bans move on to the next id that may be used (cyclically), a great bias wins; -1 when
    nothing is allowed."""
    banned = {i for i, value in bias if value == -np.inf}
    forced = [
        (value, -i)
        for i, value in bias
        if value >= FORCING_BIAS and (allowed is None or i in allowed)
    ]
    if forced:
        return -max(forced)[1]
    for step in range(vocab_size):
        candidate = (token + step) % vocab_size
        if candidate not in banned and (allowed is None or candidate in allowed):
            return candidate
    return -1


def expected_tokens(
    prompt_ids: Sequence[int],
    n: int,
    *,
    rules: FakeRules,
    params: SamplingParams | None = None,
    seed: int = 0,
    stop_ids: Collection[int] = (),
    bad_words_ids: Sequence[Sequence[int]] = (),
    shift: int = 0,
) -> list[int]:
    """The ids that any correct engine must generate over `FakeBackend`: `n`, or fewer when one of
    `stop_ids` comes (it is included; before `min_tokens` it is banned) or a row breaks (-1, not
    included). `params` default to greedy; `seed` is the resolved one; `shift` is that of the
    adapter, see `FakeLoadedModel.shifts`."""
    params = params or SamplingParams(temperature=0.0)
    draw = draw_digest(params.temperature, params.top_k, params.top_p, params.min_p, seed)
    tokens = list(prompt_ids)
    for _ in range(n):
        output = tokens[len(prompt_ids) :]
        if tokens[-1] == rules.nan_token:
            break
        seen = sorted(set(tokens))
        counts = count_digest(
            seen,
            [output.count(token) for token in seen],
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
        )
        bias = dict(params.logit_bias)
        if len(output) < params.min_tokens:
            bias |= dict.fromkeys(stop_ids, -np.inf)
        for word in bad_words_ids:
            if len(word) == 1 or output[-len(word) + 1 :] == list(word[:-1]):
                bias[word[-1]] = -np.inf
        shifted = [token + shift for token in tokens]
        history = history_hash(shifted, rules.windows, has_states=rules.has_states)
        token = choose(history, draw, counts, len(tokens), rules)
        token = restrict(token, rules.vocab_size, params.allowed_token_ids, list(bias.items()))
        if token < 0:
            break
        tokens.append(token)
        if token in stop_ids:
            break
    return tokens[len(prompt_ids) :]


def expected_rank(tokens: Sequence[int], token: int, rules: FakeRules, shift: int = 0) -> int:
    """Rank of `token` after `tokens`: the fake order of likelihood starts at the greedy id and
    goes on cyclically; the log-probability of rank r is -r / 4."""
    shifted = [one + shift for one in tokens]
    history = history_hash(shifted, rules.windows, has_states=rules.has_states)
    first = likeliest(history, 0, 0, len(tokens), rules.vocab_size)
    return (token - first) % rules.vocab_size + 1
