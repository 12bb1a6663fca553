"""The settings of `vllmx serve` that decide which latencies it keeps at which rate."""

from __future__ import annotations

from collections.abc import Sequence

from vllmx_core.config import EngineConfig

from vllmx.sizing.promise import Limit
from vllmx.sizing.tuning import Knob, Outcome, Value

_STEP_MS = 50.0, 200.0
_STEP_TOKENS = 512, 4096


def knobs(
    config: EngineConfig, limits: Sequence[Limit], threads: int, types: Sequence[str]
) -> list[Knob]:
    """Lists the settings to try, those with the widest effect first; given fields are not varied.

    Args:
        threads: that compute by default; 0 where they do not count, as on a GPU.
        types: quantisations that may be chosen.
    """
    # The API process and whoever asks need a core too, where there are few.
    fewer_threads = {threads - 1, threads // 2} if threads > 1 else set()
    found = [
        _fixed("num_threads", sorted(fewer_threads, reverse=True)),
        _fixed("target_step_ms", _step_targets(limits)),
        Knob("max_num_seqs", _fewer_rows),
        _fixed("max_num_batched_tokens", _STEP_TOKENS),
    ]
    defaults = EngineConfig()
    left = [knob for knob in found if getattr(config, knob.name) == getattr(defaults, knob.name)]
    return [_fixed("isq", types), *left]


def _fixed(name: str, values: Sequence[Value]) -> Knob:
    return Knob(name, lambda _: values)


def _step_targets(limits: Sequence[Limit]) -> Sequence[float]:
    """A step with a chunk of a prompt is a gap between two tokens of all others."""
    gaps = [limit.seconds * 1e3 for limit in limits if limit.measure in ("itl", "tpot")]
    return [round(min(gaps) * share, 1) for share in (0.9, 0.5)] if gaps else _STEP_MS


def _fewer_rows(best: Outcome) -> Sequence[int]:
    """More rows than were ever in flight change nothing; fewer make others wait, and steps
    short."""
    trial = best.missed or best.held
    if trial is None:
        return (16, 4)
    return sorted({max(1, round(trial.peak * share)) for share in (0.75, 0.5)}, reverse=True)
