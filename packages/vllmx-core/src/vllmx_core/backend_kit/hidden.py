"""The memory that a drafter shares with its target, on one backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllmx_core.model import ModelShape
from vllmx_core.records import Record


class Hidden(Record):
    """A target's share; see `vllmx_core.backend.HasHidden`."""

    parts: Sequence[Any]
    """The parts of the feature store for hidden states, arrays of the backend's kind."""
    matrices: Mapping[Any, Any]
    """Loaded matrices by the backend's key of tied weights. A drafter loads none that is here."""
    pages: Any
    """The target's KV pages: `LoadOptions.pages` of a drafter with `DraftSpec.reads_pages`."""


def hidden_of(
    shape: ModelShape, features: Sequence[Any], matrices: Mapping[Any, Any], pages: Any
) -> Hidden | None:
    """Returns the share of a model for its drafter; None where no drafter reads it.

    Args:
        features: all parts of the feature store.
    """
    if shape.taps is None:
        return None
    return Hidden(features[len(features) - len(shape.taps.shapes(0)) :], matrices, pages)


def shared_matrices(hidden: Hidden | None) -> dict[Any, Any]:
    """The matrices that a model need not load."""
    return {} if hidden is None else dict(hidden.matrices)
