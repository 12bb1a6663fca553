"""A promise of latencies, such as "ttft<500ms,itl.p95<50ms", and whether measured ones keep it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from vllmx_core.errors import ConfigError, excerpt
from vllmx_core.records import Record

MEASURES: Mapping[str, str] = {
    "ttft": "time to the first token",
    "itl": "time between tokens",
    "tpot": "mean time for each further token of a request",
    "e2e": "time to the last token",
}
SHARES: Mapping[str, float] = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
_LIMIT = re.compile(r"([a-z0-9]+?)(?:[._-]?(p[0-9.]+))?\s*<=?\s*([0-9]*\.?[0-9]+)\s*([a-z]*)")
_UNITS = {"ms": 1e-3, "s": 1.0}
MARGIN = 0.1
"""The fraction of a limit that is kept as a reserve for worse conditions."""
_FORM = 'a promise is written as "ttft<500ms,itl.p95<50ms"'


class Limit(Record):
    """An upper bound on one figure."""

    measure: str
    share: str
    """p50, p95 or p99: of requests, or of the gaps between tokens."""
    seconds: float

    @property
    def name(self) -> str:
        return f"{self.measure} {self.share}"

    def __str__(self) -> str:
        return f"{self.name} under {as_ms(self.seconds)}"


def as_ms(seconds: float) -> str:
    """Writes seconds as milliseconds for people, with three digits."""
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms"


def parse_promise(text: str) -> tuple[Limit, ...]:
    """Parses the limits of a promise. Raises ConfigError, which names the wrong part."""
    limits: list[Limit] = []
    for part in text.split(","):
        limit = _parse(part.strip().lower())
        if any(limit.name == other.name for other in limits):
            raise ConfigError(f"--slo limits {limit.name} twice: keep one", param="slo")
        limits.append(limit)
    return tuple(limits)


def _parse(part: str) -> Limit:
    found = _LIMIT.fullmatch(part)
    if found is None:
        raise ConfigError(f"--slo has {excerpt(part, 60)!r}: {_FORM}", param="slo")
    measure, share, number, unit = found.groups(default="")
    for value, known, what in (
        (measure, MEASURES, "measure"),
        (share or "p99", SHARES, "percentile"),
        (unit, _UNITS, "unit"),
    ):
        if value not in known:
            raise ConfigError(
                f"--slo has the {what} {value!r} in {excerpt(part, 60)!r}; known:"
                f" {', '.join(known)}: {_FORM}",
                param="slo",
            )
    seconds = float(number) * _UNITS[unit]
    if not 0 < seconds <= 86400:
        raise ConfigError(
            f"--slo has {excerpt(part, 60)!r}: a limit is above 0 and at most a day", param="slo"
        )
    return Limit(measure, share or "p99", seconds)


def broken(limits: Sequence[Limit], figures: Mapping[str, float]) -> list[str]:
    """Describes each limit that is broken, with `MARGIN`; `figures`: seconds by `Limit.name`. A
    missing figure (NaN) breaks its limit."""
    found = []
    for limit in limits:
        value = figures[limit.name]
        if not value < limit.seconds:
            found.append(f"{limit.name} is {as_ms(value)}, not under {as_ms(limit.seconds)}")
        elif not value < limit.seconds * (1 - MARGIN):
            near = f"too near to {as_ms(limit.seconds)} to be promised"
            found.append(f"{limit.name} is {as_ms(value)}, {near}")
    return found


def hopeless(limits: Sequence[Limit], figures: Mapping[str, float]) -> bool:
    """True if half of the requests break a limit without any load: more load only makes it
    worse."""
    return any(not figures[f"{limit.measure} p50"] < limit.seconds for limit in limits)
