"""Chooses the best backend that can run here."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

from vllmx_core.errors import BackendUnavailableError
from vllmx_core.plugins.specs import BackendSpec

logger = logging.getLogger("vllmx.backend")

PACKAGED_BACKENDS = ("cpu", "cuda", "metal", "torch")
"""Backends of our own that are an extra of the distribution `vllmx`, under the same name."""


def best_backend(
    specs: Iterable[BackendSpec], installed: Collection[str]
) -> tuple[BackendSpec, str]:
    """The backend of greatest priority that can run here, and the reason for it. A backend of
    negative priority is chosen, with a warning, only if no other can run and it is the only one of
    its priority. Raises BackendUnavailableError with every reason.

    Args:
        installed: names of all installed backends, also of those that serve nothing.
    """
    reasons: list[str] = []
    last: list[BackendSpec] = []
    for spec in sorted(specs, key=lambda spec: -spec.priority):
        reason = unavailable_reason(spec)
        if reason is not None:
            reasons += [f"{spec.name}: {reason}"] if spec.priority >= 0 else []
        elif spec.priority >= 0:
            skipped = "; ".join(reasons)
            return spec, f"first that can run here{' (' + skipped + ')' if skipped else ''}"
        elif not last or spec.priority == last[0].priority:
            last.append(spec)
    if "cpu" not in installed:
        reasons.append("the one that runs anywhere is not installed: pip install 'vllmx[cpu]'")
    if len(last) == 1:
        why = f"the only one that can run here, and slow ({'; '.join(reasons)})"
        logger.warning("backend %s is %s", last[0].name, why)
        return last[0], why
    if last:
        names = " or ".join(sorted(spec.name for spec in last))
        reasons.append(f"or ask for one by its name: --backend {names}")
    raise BackendUnavailableError(f"no backend is chosen by itself here: {'; '.join(reasons)}")


def check_available(spec: BackendSpec) -> None:
    """Raises BackendUnavailableError if the backend cannot run here."""
    reason = unavailable_reason(spec)
    if reason is not None:
        raise BackendUnavailableError(f"backend {spec.name!r} cannot run here: {reason}")


def unavailable_reason(spec: BackendSpec) -> str | None:
    """The probe's answer, or its failure; None if the backend can run here."""
    try:
        return spec.unavailable_reason()
    except Exception as error:  # a third party's probe may raise anything
        return f"its probe failed: {describe(error)}"


def describe(error: Exception) -> str:
    """The type and text of an error."""
    return f"{type(error).__name__}: {error}"
