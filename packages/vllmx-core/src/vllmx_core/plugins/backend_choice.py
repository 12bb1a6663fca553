"""Which backend runs: the one that is named, or the best that can run here."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from vllmx_core.errors import BackendUnavailableError
from vllmx_core.plugins.specs import BackendSpec

if TYPE_CHECKING:
    from vllmx_core.plugins.registry import Registry

logger = logging.getLogger("vllmx.backend")

PACKAGED_BACKENDS = ("cpu", "cuda", "metal", "torch")
"""Backends of our own that are an extra of the distribution `vllmx`, under the same name."""


def choose_backend(registry: Registry, wanted: str = "auto") -> tuple[BackendSpec, str]:
    """A backend and the reason for it. A name is taken at its word; `auto` is the one of greatest
    priority that can run here. One of negative priority is for those who name it, and chosen by
    itself, with a warning, only where no other can run and no second has its priority. Raises
    BackendUnavailableError with every reason."""
    if wanted != "auto":
        return _named(registry, wanted)
    reasons: list[str] = []
    last: list[BackendSpec] = []
    for spec in sorted(registry.all(BackendSpec), key=lambda spec: -spec.priority):
        reason = unavailable_reason(spec)
        if reason is not None:
            reasons += [f"{spec.name}: {reason}"] if spec.priority >= 0 else []
        elif spec.priority >= 0:
            skipped = "; ".join(reasons)
            return spec, f"first that can run here{' (' + skipped + ')' if skipped else ''}"
        elif not last or spec.priority == last[0].priority:
            last.append(spec)
    if all(spec.name != "cpu" for _, spec in registry.provided(BackendSpec)):
        reasons.append("the one that runs anywhere is not installed: pip install 'vllmx[cpu]'")
    if len(last) == 1:
        why = f"the only one that can run here, and slow ({'; '.join(reasons)})"
        logger.warning("backend %s is %s", last[0].name, why)
        return last[0], why
    if last:
        names = " or ".join(sorted(spec.name for spec in last))
        reasons.append(f"or ask for one by its name: --backend {names}")
    raise BackendUnavailableError(f"no backend is chosen by itself here: {'; '.join(reasons)}")


def _named(registry: Registry, wanted: str) -> tuple[BackendSpec, str]:
    spec = registry.find(BackendSpec, wanted)
    if spec is None and wanted in PACKAGED_BACKENDS:
        raise BackendUnavailableError(
            f"backend {wanted!r} is not installed: pip install 'vllmx[{wanted}]'"
        )
    if spec is None:
        spec = registry.get(BackendSpec, wanted)  # raises with the names that are known
    reason = unavailable_reason(spec)
    if reason is not None:
        raise BackendUnavailableError(f"backend {wanted!r} cannot run here: {reason}")
    return spec, "asked for by name"


def unavailable_reason(spec: BackendSpec) -> str | None:
    """What the probe says; a probe that fails says no."""
    try:
        return spec.unavailable_reason()
    except Exception as error:  # a third party's probe may raise anything
        return f"its probe failed: {describe(error)}"


def describe(error: Exception) -> str:
    """The kind of an error and what it says."""
    return f"{type(error).__name__}: {error}"
