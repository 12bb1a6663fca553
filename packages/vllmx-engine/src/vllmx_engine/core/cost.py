"""Predicts the time of a step from past steps, and sizes prefill chunks so that running decodes
keep their pace."""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

import numpy as np
from vllmx_core.plan import F32
from vllmx_core.records import Record

_REMEMBERED = 64
_FEATURES = 5
_LEAST_SEEN = 5
"""Steps of a kind before they are compared with what was predicted for them."""
_CHUNK_TOKENS, _CHUNK_WORK = 3, 4
_SEEN_BY_EACH = 6000.0
"""Patches whose attention to one costs a tower about as much as everything else of that one."""
_RATIOS = 256
_KEPT_SHARE = 0.99
"""The share of the steps with prefill that are to keep the target."""
_MAX_MARGIN = 2.0
_PACE_WEIGHT = 0.25
"""The weight of the newest step in how fast the machine is now."""
_GROWTH = 2.0
_LEAST_PROGRESS = 4
_NOISE = 1.25
"""Large chunks may exceed the fit by so much before it counts as wrong for them."""
_LEAST_STEP = 1.5
"""A step with prefill may always take so many times what its decodes take."""
AUTO_S = 0.0
"""A target of twice what decodes take alone, or of `_LEAST_AUTO_S`."""
_AUTO_PACE, _LEAST_AUTO_S = 2.0, 0.005
_MAX_STRETCH = 8.0
"""However many prompts wait, no step aims at more than so many targets."""
_LOWER_SHARE = 0.5
"""Work of lower priority may lengthen a step by this share."""
_FEW_DECODES = 16
"""The most running rows with which each prompt that waits stretches the target by a whole one."""


_FIRST_PATCHES = 64.0
"""The patches of a tower of which nothing is known yet."""
_IMAGE_PACE = 1.9
"""A step with images may take this many times as long as its decodes alone. Less than the 2 that
nearly all steps must keep to, because the margins come from past steps."""
_LEAST_TOWER = 0.25
"""A pass may always add so much of what the decodes take."""
_LEAST_SHARE = 1 / 256
"""A step does at least this share of a tower pass, so that a pass ends whatever the target says."""


class TowerLoad(Record):
    """The cost terms of a tower pass, or of a part of one."""

    patches: float
    work: float
    """Sum over images of the square of their patches, which all see each other."""

    @classmethod
    def of(cls, patches: int) -> TowerLoad:
        """A pass over one image."""
        return cls(float(patches), float(patches) ** 2)

    @property
    def units(self) -> float:
        """The pass's size in patches that attend to few others, which its time is proportional
        to."""
        return self.patches + self.work / _SEEN_BY_EACH

    def part(self, share: float) -> TowerLoad:
        """Passes have many layers, which cost alike."""
        return TowerLoad(self.patches * share, self.work * share)

    def __add__(self, other: TowerLoad) -> TowerLoad:
        return TowerLoad(self.patches + other.patches, self.work + other.work)


class StepLoad(NamedTuple):
    """The terms of a step's time, which is linear in them."""

    num_decodes: int
    decode_context: int
    """Tokens that the decode rows attend to, all together."""
    chunk_tokens: int = 0
    chunk_work: float = 0.0
    """Sum over chunks of tokens times the mean context that they attend to."""
    patches: float = 0.0
    """The patches of passes of the tower before the step, see `TowerLoad`."""
    patch_work: float = 0.0


class StepCost:
    """Predicts seconds: c0 + c1 decodes + c2 context + c3 chunk tokens + c4 chunk work, c >= 0.

    Keeps the last 64 steps with and the last 64 without prefill (a ring buffer each, so that a long
    run of decoding does not displace prefill costs) and fits relative errors by least squares, but
    only when a chunk is to be sized next to running decodes; a step of decodes costs one write.

    Tower passes before a step are not part of the fit. Their cost is the time of all steps beyond
    the fit over the size of all their passes, since a small part may be nearly free and the next
    one expensive.

    It also keeps the ratios of measured to predicted times of steps with prefill: the current pace,
    which follows a machine under changing load faster than the fit does, and the last 256 ratios,
    whose upper end is the margin.
    """

    def __init__(self, target_s: float | None, min_chunk: int) -> None:
        self.target_s = target_s
        self.min_chunk = min_chunk
        """The least chunk until one was measured, and of a step's second."""
        self._rings: tuple[F32, ...] = tuple(
            np.zeros((_REMEMBERED, _FEATURES + 1), np.float32) for _ in range(2)
        )
        self._seen = [0, 0]
        self._passes: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)
        """Units of a tower, and the seconds that they added to a step."""
        self._pass_ratios: deque[float] = deque(maxlen=_RATIOS)
        """Measured over predicted times of steps with passes. They vary as those of decodes do,
        which take most of a step with a small pass."""
        self._is_timed = True
        self._fit: tuple[float, ...] | None = None
        self._rates: tuple[float, ...] = ()
        self._rates_due = 0
        """The number of steps seen at which `rates` are renewed."""
        self._ratios = np.ones(_RATIOS, np.float32)
        self._num_ratios = 0
        self._pace = 1.0

    def observe(self, load: StepLoad, elapsed_s: float) -> None:
        """Learns from a finished step. A backend that gives no time (0) is held to no target."""
        self._is_timed = elapsed_s > 0.0
        if not self._is_timed:
            return
        if load.patches:
            tower = TowerLoad(load.patches, load.patch_work)
            decodes, context = load.num_decodes, load.decode_context
            known_s = self.predict(load) - self.predict(StepLoad(decodes, context))
            known_s += self._alone(decodes, context)
            added_s, meant_s = max(0.0, elapsed_s - known_s), self.tower_seconds(tower)
            if len(self._passes) >= _LEAST_SEEN and meant_s > 0.0:
                self._pass_ratios.append(elapsed_s / (known_s + meant_s))
            self._passes.append((tower.units, added_s))
            return
        kind = 1 if load.chunk_tokens else 0
        if kind and self._seen[kind] >= _LEAST_SEEN:  # a fit of fewer steps predicts nothing
            coefficients = self._coefficients()
            chunk_s = coefficients[_CHUNK_TOKENS] * load.chunk_tokens
            chunk_s += coefficients[_CHUNK_WORK] * load.chunk_work
            over_s = (self._bias(load.chunk_tokens) - 1.0) * chunk_s
            self._compare(self.predict(load) + over_s, elapsed_s)
        self._rings[kind][self._seen[kind] % _REMEMBERED] = (1.0, *load[: _FEATURES - 1], elapsed_s)
        self._seen[kind] += 1
        self._fit = None

    def _compare(self, fitted_s: float, elapsed_s: float) -> None:
        """Learns how far a step was from what the steps before it let expect."""
        if fitted_s <= 0.0:
            return
        ratio = elapsed_s / (fitted_s * self._pace)
        self._ratios[self._num_ratios % _RATIOS] = ratio
        self._num_ratios += 1
        pace = self._pace * ratio**_PACE_WEIGHT
        self._pace = min(max(pace, 1 / _MAX_MARGIN), _MAX_MARGIN)

    def predict(self, load: StepLoad) -> float:
        """Seconds without a tower, 0 before anything was seen."""
        known = (1.0, *load[: _FEATURES - 1])
        return sum(c * x for c, x in zip(self._coefficients(), known, strict=True))

    def chunk_seconds(
        self, num_decodes: int, decode_context: int, num_prompts: float = 1.0
    ) -> float:
        """Returns the seconds left of the target for prefill in a step with these decodes; infinite
        without decodes or a target. The aim is below the target by as much as steps exceeded their
        prediction. Where decodes alone nearly reach the target, prefill still gets a share of their
        time.

        The target is meant for one prompt that arrives while others decode. When `num_prompts` wait
        for their first tokens, a step may take that many times as long: with small chunks each
        prompt would wait for all before it, few rows would decode meanwhile, and throughput would
        drop. With many decodes, which a long step delays, the factor grows less.
        """
        if self.target_s is None or num_decodes == 0 or not self._is_timed:
            return math.inf
        decodes_s = self.predict(StepLoad(num_decodes, decode_context))
        weight = min(1.0, _FEW_DECODES / num_decodes)
        stretch = min(1.0 + weight * (num_prompts - 1), _MAX_STRETCH)
        target_s = self.target_s
        if target_s == AUTO_S:
            alone_s = self._alone(num_decodes, decode_context)
            target_s = max(_AUTO_PACE * alone_s, _LEAST_AUTO_S)
        aim_s = max(target_s / self._overrun(), _LEAST_STEP * decodes_s)
        return max(0.0, stretch * aim_s - decodes_s)

    def share_seconds(self, num_decodes: int, decode_context: int) -> float:
        """Returns the seconds that work of lower priority may add to a step of these decodes;
        infinite without a target."""
        if self.target_s is None or not self._is_timed:
            return math.inf
        return _LOWER_SHARE * self.predict(StepLoad(num_decodes, decode_context))

    def decode_seconds(self, num_decodes: int, decode_context: int) -> float:
        """Seconds that so many rows add to a step of others."""
        _, each, context, *_ = self._coefficients()
        return each * num_decodes + context * decode_context

    @property
    def rates(self) -> tuple[float, ...]:
        """Milliseconds of a step as such, of a decode, of a token that it attends to, of a prompt's
        token, and of one that this attends to. A token of a kind that was never measured counts
        like one of the other kind, or as one millisecond. Up to 64 steps old: a fit takes longer
        than a step of decodes can wait."""
        num_seen = sum(self._seen)
        if num_seen >= self._rates_due:
            self._rates_due = num_seen + min(max(1, num_seen), _REMEMBERED)
            fixed, each, context, token, work = (1e3 * one for one in self._coefficients())
            each = each if self._seen[0] else token or 1.0
            self._rates = fixed, each, context, token if self._seen[1] else each, work
        return self._rates

    def row_share(self, load: StepLoad) -> float | None:
        """The time of one more decoded token, as a share of a step's; None while only steps of one
        size were measured."""
        sizes = self._rings[0][: min(self._seen[0], _REMEMBERED), 1]
        seconds = self.predict(load)
        if not seconds or sizes.min(initial=0) == sizes.max(initial=0):
            return None
        return self.decode_seconds(1, 0) / seconds

    @property
    def token_seconds(self) -> tuple[float, float]:
        """Seconds that a prompt token adds to a step, and those that it adds for each token before
        it; 0 before any was seen."""
        coefficients = self._coefficients()
        return coefficients[_CHUNK_TOKENS], coefficients[_CHUNK_WORK]

    @property
    def knows_chunks(self) -> bool:
        """True once a step with part of a prompt was measured."""
        return self._seen[1] > 0

    @property
    def first_chunk(self) -> int:
        """Tokens of the first chunk of a step whatever the target says. Once their cost is known
        they are few: on processors without tile units 16 tokens take longer than many decodes."""
        return min(self.min_chunk, _LEAST_PROGRESS) if self.knows_chunks else self.min_chunk

    @property
    def knows_towers(self) -> bool:
        """True once a step with a tower pass was measured."""
        return len(self._passes) > 0

    def tower_budget(self, num_decodes: int, decode_context: int) -> float:
        """Returns the seconds of tower passes in a step with these decodes; infinite without
        decodes or a target. They are nearly as many as the decodes take, so that decodes keep at
        least half of their pace in nearly all steps, whatever the prediction error. An image waits
        longer than a prompt of as much work: at the target's pace it would take hundreds of
        steps."""
        if self.target_s is None or num_decodes == 0 or not self._is_timed:
            return math.inf
        decodes_s = self._alone(num_decodes, decode_context)
        return decodes_s * max(_IMAGE_PACE / self._pass_margin() - 1.0, _LEAST_TOWER)

    def image_chunk_seconds(self, num_decodes: int, decode_context: int) -> float:
        """Returns the seconds that a chunk of a prompt with images may add to these decodes, so
        that nearly all such steps keep the pace of steps with tower passes, even if the target is
        longer; infinite without decodes or a target."""
        if self.target_s is None or num_decodes == 0 or not self._is_timed:
            return math.inf
        decodes_s = self._alone(num_decodes, decode_context)
        fitted_s = self.predict(StepLoad(num_decodes, decode_context))
        aim_s = _IMAGE_PACE * decodes_s / max(self._overrun(), self._pass_margin())
        return max(aim_s - fitted_s, _LEAST_TOWER * decodes_s)

    def _pass_margin(self) -> float:
        """The ratio of measured to predicted time that nearly all steps with passes keep to."""
        if not self._pass_ratios:
            return 1.0
        return max(1.0, float(np.quantile(self._pass_ratios, _KEPT_SHARE)))

    def _alone(self, num_decodes: int, decode_context: int) -> float:
        """Seconds of such decodes without a tower: what those before it took, since steps with a
        tower teach the fit nothing, however long the pass, and its slopes are no more than guesses
        beyond what it has seen; as predicted where there were none."""
        ring = self._rings[0][: min(self._seen[0], _REMEMBERED)]
        alike = ring[(ring[:, 1] == num_decodes) & (ring[:, 2] <= 2 * decode_context)]
        if len(alike) < _LEAST_SEEN:
            return self.predict(StepLoad(num_decodes, decode_context))
        return float(np.median(alike[:, -1]))

    def tower_seconds(self, load: TowerLoad) -> float:
        """Seconds that a pass adds to a step, 0 before one was seen."""
        units = sum(units for units, _ in self._passes)
        return load.units * sum(added_s for _, added_s in self._passes) / units if units else 0.0

    def tower_share(self, seconds: float, load: TowerLoad) -> float:
        """Returns the share of a pass that `seconds` suffice for: above 0, and at most twice as
        much work as a remembered step had."""
        if seconds == math.inf:
            return 1.0
        if not self.knows_towers:
            return min(1.0, _FIRST_PATCHES / load.patches)
        known = _GROWTH * max(units for units, _ in self._passes) / load.units
        needed = self.tower_seconds(load)
        share = min(known, seconds / needed) if needed > 0.0 else known
        return min(1.0, max(share, _LEAST_SHARE))

    def chunk_tokens(self, seconds: float, start: int) -> float:
        """Tokens of a prompt, from position `start` on, that `seconds` suffice for; at most twice
        as many as a remembered step had, since the fit knows nothing beyond."""
        if seconds == math.inf:
            return math.inf
        if seconds <= 0.0 or not self._seen[1]:
            return 0.0
        known = float(self._rings[1][:, _CHUNK_TOKENS].max())
        fitting = min(self._fitting(seconds, start), _GROWTH * known)
        return min(fitting, self._fitting(seconds / self._bias(fitting), start))

    def _bias(self, tokens: float) -> float:
        """Measured over fitted seconds of remembered chunks of at least half this size, at least 1:
        time is not linear in tokens, and the many small chunks hide what the few large ones took.
        """
        steps = self._rings[1][: min(self._seen[1], _REMEMBERED)]
        large = steps[2 * steps[:, _CHUNK_TOKENS] >= tokens]
        coefficients = np.array(self._coefficients())
        fitted = large[:, :_FEATURES] @ coefficients
        of_chunk = large[:, _CHUNK_TOKENS:_FEATURES] @ coefficients[_CHUNK_TOKENS:]
        if not of_chunk.all() or not len(large):
            return 1.0
        bias = float(np.median(1.0 + (large[:, -1] - fitted) / of_chunk))
        return max(1.0, bias / _NOISE)

    def _fitting(self, seconds: float, start: int) -> float:
        per_token, per_work = self._coefficients()[_CHUNK_TOKENS], self._coefficients()[_CHUNK_WORK]
        linear = per_token + per_work * start  # of n tokens: linear * n + per_work / 2 * n^2
        if per_work * seconds < 1e-9 * linear * linear:
            return seconds / linear
        if per_work == 0.0:
            return math.inf
        return (math.sqrt(linear * linear + 2 * per_work * seconds) - linear) / per_work

    def chunk_cost(self, tokens: int, start: int) -> float:
        """Seconds that a chunk adds to a step."""
        coefficients = self._coefficients()
        work = tokens * (start + tokens / 2)
        return coefficients[_CHUNK_TOKENS] * tokens + coefficients[_CHUNK_WORK] * work

    def _overrun(self) -> float:
        """The ratio of measured to fitted time that nearly all steps with prefill keep to now."""
        if not self._num_ratios:
            return 1.0
        ratios = self._ratios[: min(self._num_ratios, _RATIOS)]
        margin = self._pace * float(np.quantile(ratios, _KEPT_SHARE))
        return min(max(margin, 1.0), _MAX_MARGIN)

    def _coefficients(self) -> tuple[float, ...]:
        if self._fit is None:
            parts = [
                ring[: min(n, _REMEMBERED)] for ring, n in zip(self._rings, self._seen, strict=True)
            ]
            self._fit = fit_nonnegative(np.concatenate(parts).astype(np.float64))
        return self._fit


def fit_nonnegative(steps: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> tuple[float, ...]:
    """steps (n, features + 1), the last column the seconds: coefficients of least relative error.
    A negative one is set to zero and the others are fitted again."""
    width = steps.shape[1] - 1
    fit = np.zeros(width)
    active = [i for i in range(width) if steps[:, i].any()]
    relative = steps[:, :width] / steps[:, width:]
    scale = np.sqrt((relative * relative).mean(axis=0)) if len(steps) else np.ones(width)
    while active:
        x = relative[:, active] / scale[active]
        normal = x.T @ x + 1e-6 * len(steps) * np.eye(len(active))
        solved = np.linalg.solve(normal, x.sum(axis=0))
        worst = int(solved.argmin())
        if solved[worst] >= 0.0:
            fit[active] = solved / scale[active]
            break
        del active[worst]
    return tuple(fit.tolist())
