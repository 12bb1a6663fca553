"""Searches for the setting that keeps a promise at the highest rate of requests.

A setting is measured by trials: requests arrive at a rate, and the promise is kept or not. The rate
is doubled until the promise is broken, then the interval is halved. The next setting differs in one
value from the best one so far, and is first tried at a slightly higher rate: most fail there, after
two trials.

Other processes disturb trials. So a trial that breaks the promise is repeated, and the majority of
three decides; the result is confirmed by most of three trials with new requests; and contradictions
between trials are reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

from vllmx_core.config import EngineConfig
from vllmx_core.errors import ConfigError
from vllmx_core.records import MutableRecord, Record, field

from vllmx.sizing.promise import Limit, as_ms, broken, hopeless

Value = int | float | str
Setting = Mapping[str, Value]
"""Values of EngineConfig's fields that differ from the defaults."""
_HALVINGS = 4
"""The number of lower rates to try before a setting counts as unable to keep the promise."""
_STEADY = 1.3
"""The factor by which times of the same requests differ on an idle machine."""
_STEP_MS = "50", "200"
_STEP_TOKENS = 512, 4096


class Trial(Record):
    """The results of requests that arrived at one rate."""

    rate: float
    """Requests a second."""
    requests: int
    failed: int
    keeps_up: bool
    """True if as many were answered as arrived: the backlog did not grow."""
    tokens_per_s: float
    peak: int
    """Greatest number of requests that were in flight together."""
    figures: Mapping[str, float]
    """Seconds by `Limit.name`, of all measures and percentiles."""
    error: str | None = None
    """The error of the first request that failed."""

    def faults(self, limits: Sequence[Limit]) -> list[str]:
        """The reasons why this trial breaks the promise; empty if it keeps it."""
        found = broken(limits, self.figures) if self.failed < self.requests else []
        if self.failed:
            found.append(f"{self.failed} of {self.requests} requests failed: {self.error}")
        if not self.keeps_up:
            found.append("fewer were answered than came")
        return found


Measure = Callable[[float, int], Trial]
"""A trial at a rate, with the requests of a seed."""


class Served(Record):
    """A server that runs with a setting."""

    alone: Trial
    """The results of sequential requests; the search begins with their rate."""
    alone_s: Sequence[float]
    """The whole time of each of them."""
    measure: Measure


Serve = Callable[[Setting], AbstractContextManager[Served]]
"""Runs a server with a setting."""


class Outcome(MutableRecord):
    """The results of one setting."""

    setting: Setting
    held: Trial | None = None
    """The trial with the highest rate that kept the promise."""
    missed: Trial | None = None
    """The one with the lowest rate that did not."""
    error: str | None = None
    """The reason why the server did not start with it."""

    @property
    def rate(self) -> float:
        return 0.0 if self.held is None else self.held.rate


class Knob(Record):
    """A setting to try with several values."""

    name: str
    values: Callable[[Outcome], Sequence[Value]]
    """Values worth a trial, given the best outcome so far."""


class Search(MutableRecord):
    """A search under way.

    Args:
        precision: rates that differ by less than this fraction count as equal.
        max_rate: the highest rate to try.
        tell: called before each trial, with the fraction of the work that is done.
    """

    serve: Serve
    limits: Sequence[Limit]
    precision: float
    max_rate: float
    tell: Callable[[Setting, float, float], None]
    outcomes: list[Outcome] = field(default_factory=list)
    share: float = 0.0
    doubts: list[str] = field(default_factory=list)
    """Signs that the machine was unsteady, for people."""
    num_repeated: int = 0
    """Rates at which more than one trial was made."""
    num_disputed: int = 0
    """Rates at which one trial kept the promise and another did not."""

    def run(self, base: Setting, knobs: Sequence[Knob]) -> Outcome:
        """The best setting, `base` or one that differs from it in values of knobs. Its trial used
        requests that are new to the search; without `held`, no setting keeps the promise."""
        best = self._measure(base, 0.0)
        for knob in knobs:
            for value in knob.values(best):
                if best.rate >= self.max_rate or best.setting.get(knob.name) == value:
                    continue
                self.share = 1 - 0.9 ** len(self.outcomes)
                found = self._tried({**best.setting, knob.name: value}, best.rate)
                if found.rate > best.rate:
                    best = found
        if best.held is not None:
            best = self._confirmed(best)
        if self.num_disputed:
            count = f"{self.num_disputed} of {self.num_repeated}"
            self.doubts.append(
                f"at {count} rates that were tried again one trial kept the promise and another"
                " did not"
            )
        return best

    def _tried(self, setting: Setting, to_beat: float) -> Outcome:
        """Tries a setting. A setting with which the server does not start is skipped."""
        try:
            return self._measure(setting, to_beat)
        except ConfigError as error:
            self.outcomes[-1].error = error.message
            return self.outcomes[-1]

    def _measure(self, setting: Setting, to_beat: float) -> Outcome:
        outcome = Outcome(setting)
        self.outcomes.append(outcome)
        with self.serve(setting) as served:
            self._note_alone(served)
            if hopeless(self.limits, served.alone.figures):
                outcome.missed = served.alone
                return outcome

            def holds(rate: float) -> bool:
                self.tell(setting, rate, self.share)
                held, trial = self._judged(served.measure, rate, 0, enough=1)
                if held and rate > outcome.rate:
                    outcome.held = trial
                elif not held and (outcome.missed is None or rate < outcome.missed.rate):
                    outcome.missed = trial
                return held

            if to_beat:
                rate = min(self.max_rate, to_beat * (1 + self.precision))
                if holds(rate):
                    self._raise_rate(holds, rate, 1 + 2 * self.precision)
            else:
                self._from_nothing(holds, min(self.max_rate, served.alone.rate))
        return outcome

    def _judged(
        self, measure: Measure, rate: float, first: int, enough: int = 2
    ) -> tuple[bool, Trial]:
        """Returns whether two of three trials at a rate, with seeds from `first` on, keep the
        promise (with `enough` 1: one, as the final choice is tried again), and one of the
        majority."""
        found: dict[bool, list[Trial]] = {True: [], False: []}
        needed = {True: enough, False: 2}
        for seed in range(first, first + 3):
            trial = measure(rate, seed)
            held = not trial.faults(self.limits)
            found[held].append(trial)
            if len(found[held]) == needed[held]:
                break
        self.num_repeated += sum(map(len, found.values())) > 1
        self.num_disputed += all(found.values())
        return held, found[held][-1]

    def _note_alone(self, served: Served) -> None:
        """Compares the times of sequential requests, to detect an unsteady machine."""
        least, most = min(served.alone_s), max(served.alone_s)
        if most > _STEADY * least:
            self.doubts.append(f"one request alone took {as_ms(least)} to {as_ms(most)}")

    def _from_nothing(self, holds: Callable[[float], bool], rate: float) -> None:
        if holds(rate):
            self._raise_rate(holds, rate, 2.0)
            return
        for _ in range(_HALVINGS):
            rate /= 2
            if holds(rate):
                self._narrow(holds, rate, 2 * rate)
                return

    def _raise_rate(self, holds: Callable[[float], bool], rate: float, factor: float) -> None:
        """Raises the rate until the promise is broken, at most doubling each step."""
        while rate < self.max_rate:
            higher = min(self.max_rate, rate * factor)
            if not holds(higher):
                self._narrow(holds, rate, higher)
                return
            rate, factor = higher, min(2.0, factor**2)

    def _narrow(self, holds: Callable[[float], bool], low: float, high: float) -> None:
        while high > low * (1 + self.precision):
            middle = math.sqrt(low * high)
            if holds(middle):
                low = middle
            else:
                high = middle

    def _confirmed(self, best: Outcome) -> Outcome:
        """The best setting at the highest rate that it keeps with other requests too."""
        rate = best.rate
        with self.serve(best.setting) as served:
            self._note_alone(served)
            for attempt in range(_HALVINGS + 1):
                self.tell(best.setting, rate, 1.0)
                held, trial = self._judged(served.measure, rate, 3 + 3 * attempt)
                if held:
                    return Outcome(best.setting, trial, best.missed)
                best.missed = trial
                rate /= 1 + self.precision * 2**attempt
        best.held = None  # what it held was luck
        return best


# --- knobs ----------------------------------------------------------------------------------------
def knobs(
    config: EngineConfig, limits: Sequence[Limit], threads: int, types: Sequence[str]
) -> list[Knob]:
    """Lists the settings to try, those with the widest effect first; given fields are not varied.

    Args:
        threads: the default number of compute threads; 0 if it does not matter, as on a GPU.
        types: quantisations to try.
    """
    # With few cores, the API process and the clients need one too.
    fewer_threads = {threads - 1, threads // 2} if threads > 1 else set()
    found = [
        _fixed("num_threads", sorted(fewer_threads, reverse=True)),
        _fixed("target_itl", _step_targets(limits)),
        Knob("max_num_seqs", _fewer_rows),
        _fixed("max_num_batched_tokens", _STEP_TOKENS),
    ]
    defaults = EngineConfig()
    left = [knob for knob in found if getattr(config, knob.name) == getattr(defaults, knob.name)]
    return [_fixed("isq", types), *left]


def _fixed(name: str, values: Sequence[Value]) -> Knob:
    return Knob(name, lambda _: values)


def _step_targets(limits: Sequence[Limit]) -> Sequence[str]:
    """Targets below the limits: a step with a chunk of a prompt delays the tokens of all others."""
    gaps = [limit.seconds * 1e3 for limit in limits if limit.measure in ("itl", "tpot")]
    return [f"{min(gaps) * share:.1f}" for share in (0.9, 0.5)] if gaps else _STEP_MS


def _fewer_rows(best: Outcome) -> Sequence[int]:
    """Fewer rows than were in flight: steps get shorter, and requests wait. More would change
    nothing."""
    trial = best.missed or best.held
    if trial is None:
        return (16, 4)
    return sorted({max(1, round(trial.peak * share)) for share in (0.75, 0.5)}, reverse=True)
