"""Log-probabilities of a step's tokens, and of the most likely tokens of a row of logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from vllmx_core.plan import F32, I32, U32, StepResult

from vllmx_engine.wire.messages import TokenLogprobs

_SIGN = np.uint32(1 << 31)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def top_logprobs(logits: F32, token: int, logprob: float, count: int) -> bytes:
    """`TokenLogprobs.packed` of the `count` most likely ids, the lowest id first at a tie.

    Args:
        logits: (V,), as computed.
        token: one whose log-probability is known, `logprob`: all others follow from it.
    """
    keys = (_descending(logits).astype(np.uint64) << _SHIFT) | np.arange(
        logits.size, dtype=np.uint64
    )
    if count < keys.size:
        keys = np.partition(keys, count)[:count]
    keys.sort()
    ids = (keys & _LOW).astype("<i4")
    shift = float(logits[token]) - logprob
    values = (logits[ids].astype(np.float64) - shift).astype("<f4")
    return b"".join((ids.tobytes(), values.tobytes()))


def logprobs_of(logits: F32, token: int, logprob: float, ids: Sequence[int]) -> list[float]:
    """The log-probabilities of these ids; arguments as for `top_logprobs`."""
    shift = float(logits[token]) - logprob
    values = logits[np.array(ids, np.int64)].astype(np.float64) - shift
    found: list[float] = values.astype(np.float32).tolist()
    return found


def _descending(logits: F32) -> U32:
    """(V,) integers in the reverse order of the logits; of equal ones, -0 and 0 among them, too."""
    bits = (logits + np.float32(0)).view(np.uint32)
    ascending = np.where(bits & _SIGN, ~bits, bits | _SIGN)
    found: U32 = ~ascending
    return found


class StepLogprobs:
    """Log-probabilities of a step as lists, made when the first row asks."""

    def __init__(self, result: StepResult, whole: I32 | None) -> None:
        self._result = result
        self.ids = result.ids
        self._places: dict[int, int] = {}
        """The places where the logits of rows lie that came back whole."""
        if whole is not None:
            self._places = {logit: place for place, logit in enumerate(whole.tolist())}
        self._lists: tuple[list[float], list[int], list[list[int]], list[list[float]]] | None = None

    def of(self, logit: int, token: int, count: int, named: tuple[int, ...] = ()) -> TokenLogprobs:
        """Log-probabilities of the chosen token of a logit row, with the `count` most likely, or
        with those of the ids that are `named`."""
        if self._lists is None:
            rows = self._result.logprobs
            assert rows is not None, "the backend left out log-probabilities that were asked for"
            self._lists = (
                rows.chosen.tolist(),
                rows.rank.tolist(),
                rows.top_ids.tolist(),
                rows.top.tolist(),
            )
        chosen, rank, top_ids, top = self._lists
        place = self._places.get(logit)
        if place is not None:
            assert self._result.logits is not None, "the backend left out logits"
            logits = self._result.logits[place]
            if named:
                values = logprobs_of(logits, token, chosen[logit], named)
                ids = list(named)
                return TokenLogprobs(token, chosen[logit], rank[logit], ids, values, b"", False)
            packed = top_logprobs(logits, token, chosen[logit], count)
            return TokenLogprobs(token, chosen[logit], rank[logit], [], [], packed)
        ids, values = top_ids[logit], top[logit]
        if len(ids) > count:
            ids, values = ids[:count], values[:count]
        return TokenLogprobs(token, chosen[logit], rank[logit], ids, values)
