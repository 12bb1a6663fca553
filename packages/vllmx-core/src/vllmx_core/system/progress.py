"""A progress bar on standard error."""

from __future__ import annotations

import sys


def show_progress(doing: str, done: int, total: int) -> None:
    """Draws it over the one before; ends the line with the last of `total`."""
    share = done / total
    end = "\n" if done == total else ""
    sys.stderr.write(f"\r{doing} [{'#' * int(share * 30):<30}] {share:4.0%}{end}")
    sys.stderr.flush()
