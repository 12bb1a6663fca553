"""Ranges of the priorities that the holder of a key may give its requests: smaller is served first,
and a request may take the place of one that runs at a greater priority."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from vllmx_core.errors import ConfigError, InvalidRequestError

_LEAST, _GREATEST = -(1 << 31), (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class PriorityRange:
    """The allowed priorities, both ends included."""

    least: int = 0
    greatest: int = _GREATEST

    def checked(self, priority: int | None) -> int:
        """The priority of a request that names this one; of one that names none, the allowed one
        that is nearest to 0. Raises InvalidRequestError."""
        if priority is None:
            return max(self.least, min(0, self.greatest))
        if not self.least <= priority <= self.greatest:
            raise InvalidRequestError(
                f"priority must be between {self.least} and {self.greatest} here, got {priority}:"
                " smaller is served first, and the server's --priority-range says who may",
                param="priority",
            )
        return priority


def client_name(key_digest: bytes) -> str:
    """The name of a key's holder in fair share, salts and ranges."""
    return key_digest.hex()[:16]


def priority_ranges(texts: Sequence[str], keys: Sequence[str]) -> dict[str, PriorityRange]:
    """Parses `LEAST:GREATEST` and `KEY=LEAST:GREATEST` into ranges by client name, with "" for
    everybody else; an end that is left out is open. Raises ConfigError, which shows no key."""
    ranges = {"": PriorityRange()}
    for text in texts:
        key, named, ends = text.rpartition("=")
        if named and key not in keys:
            raise ConfigError(
                "--priority-range names a key that is none of --api-key: add it there",
                param="priority_range",
            )
        name = client_name(hashlib.sha256(key.encode()).digest()) if named else ""
        ranges[name] = parse_range(ends)
    return ranges


def parse_range(ends: str) -> PriorityRange:
    """`LEAST:GREATEST`, an end that is left out being open. Raises ConfigError."""
    least, colon, greatest = ends.partition(":")
    try:
        found = PriorityRange(int(least or _LEAST), int(greatest or _GREATEST))
        if colon and _LEAST <= found.least <= found.greatest <= _GREATEST:
            return found
    except ValueError:
        pass
    raise ConfigError(
        "--priority-range must be LEAST:GREATEST or KEY=LEAST:GREATEST with integers of 32 bits,"
        " such as 0:100 or -10:",
        param="priority_range",
    )
