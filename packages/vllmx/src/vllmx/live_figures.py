"""Live figures of a running server, from two readings of its /metrics: `vllmx top`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_LINE = re.compile(r"^vllmx:(\w+?)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_BOUND = re.compile(r'(?:^|,)le="([^"]+)"')
_REPLICA = re.compile(r'(?:^|,)replica="([^"]+)"')
_SPARKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Scrape:
    """One reading of the metrics: sums over all labels except bounds of histograms, and for shares
    such as the KV cache in use the greatest, that of the model nearest to its limit."""

    at_s: float
    values: Mapping[str, float]
    buckets: Mapping[str, Mapping[float, float]]
    """The number of observations up to each bound, by name of the histogram."""
    replicas: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Values of each replica by its number, where there are several."""


def scrape(text: str, at_s: float) -> Scrape:
    """Parses the exposition format of Prometheus; ignores lines that are not vllmx's."""
    values: dict[str, float] = {}
    buckets: dict[str, dict[float, float]] = {}
    replicas: dict[str, dict[str, float]] = {}
    for name, labels, number in _LINE.findall(text):
        bound = _BOUND.search(labels)
        if replica := _REPLICA.search(labels):
            replicas.setdefault(replica[1], {})[name] = float(number)
        if bound is None and name.endswith("_perc"):
            values[name] = max(values.get(name, 0.0), float(number))
        elif bound is None:
            values[name] = values.get(name, 0.0) + float(number)
        else:
            found = buckets.setdefault(name.removesuffix("_bucket"), {})
            limit = float(bound[1])
            found[limit] = found.get(limit, 0.0) + float(number)
    return Scrape(at_s, values, buckets, replicas)


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of the time between two readings; None if there is nothing to measure."""

    running: float
    waiting: float
    kv_share: float
    generated_s: float
    """Tokens a second."""
    prompt_s: float
    requests_s: float
    """Choices that ended, a second."""
    first_token_s: tuple[float | None, float | None]
    """Median and 99th percentile of the time to the first token."""
    between_tokens_s: tuple[float | None, float | None]
    prefix_share: float | None
    """The fraction of prompt tokens that were found in the cache."""
    preemptions_s: float
    sessions: float
    """Sessions that pin KV blocks."""
    tier_share: float | None
    """The fraction of prompt tokens whose blocks came from a tier below the device."""
    replicas: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """`running`, `waiting`, `kv_share` and `generated_s` of each replica."""


def figures(old: Scrape, new: Scrape) -> Figures | None:
    """The figures between two readings; None if the server was restarted."""
    seconds = new.at_s - old.at_s
    if seconds <= 0 or new.values.get("engine_steps_total", 0) < old.values.get(
        "engine_steps_total", 0
    ):
        return None

    def more(name: str) -> float:
        return new.values.get(name, 0.0) - old.values.get(name, 0.0)

    looked_up = more("prefix_cache_queries_total")
    return Figures(
        new.values.get("num_requests_running", 0.0),
        new.values.get("num_requests_waiting", 0.0),
        new.values.get("kv_cache_usage_perc", 0.0),
        more("generation_tokens_total") / seconds,
        more("prompt_tokens_total") / seconds,
        more("request_success_total") / seconds,
        _spread(old, new, "time_to_first_token_seconds"),
        _spread(old, new, "inter_token_latency_seconds"),
        more("prefix_cache_hits_total") / looked_up if looked_up > 0 else None,
        more("num_preemptions_total") / seconds,
        new.values.get("sessions", 0.0),
        more("kv_tier_tokens_total") / looked_up if looked_up > 0 else None,
        {name: _of_replica(old, new, name) for name in sorted(new.replicas, key=_number)},
    )


def _number(name: str) -> tuple[int, str]:
    return len(name), name


def _of_replica(old: Scrape, new: Scrape, name: str) -> dict[str, float]:
    before, now = old.replicas.get(name, {}), new.replicas[name]
    tokens = now.get("generation_tokens_total", 0.0)
    more = tokens - before.get("generation_tokens_total", 0.0)
    return {
        "running": now.get("num_requests_running", 0.0),
        "waiting": now.get("num_requests_waiting", 0.0),
        "kv_share": now.get("kv_cache_usage_perc", 0.0),
        "generated_s": (tokens if more < 0 else more) / (new.at_s - old.at_s),
    }


def _spread(old: Scrape, new: Scrape, name: str) -> tuple[float | None, float | None]:
    before, after = old.buckets.get(name, {}), new.buckets.get(name, {})
    counts = {bound: count - before.get(bound, 0.0) for bound, count in sorted(after.items())}
    return quantile(counts, 0.5), quantile(counts, 0.99)


def quantile(counts: Mapping[float, float], share: float) -> float | None:
    """The quantile of a histogram with cumulative counts by rising bound: interpolated within a
    bucket, as in Prometheus; beyond the last bound it is that bound."""
    total = max(counts.values(), default=0.0)
    if total <= 0:
        return None
    wanted, low, below = share * total, 0.0, 0.0
    for bound, count in counts.items():
        if count >= wanted:
            if math.isinf(bound):
                return low
            inside = count - below
            return low + (bound - low) * ((wanted - below) / inside if inside else 1.0)
        low, below = bound, count
    return low


def sparkline(values: Sequence[float], width: int) -> str:
    """The last `width` values, the greatest as a full block."""
    last = list(values)[-width:]
    top = max(last, default=0.0)
    if top <= 0:
        return _SPARKS[0] * len(last)
    return "".join(_SPARKS[round((len(_SPARKS) - 1) * max(0.0, v) / top)] for v in last)
