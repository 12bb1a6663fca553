"""One log format on standard error for every command."""

from __future__ import annotations

import logging


def configure_logging(level: str) -> None:
    """Everything of vllmx at `level`; libraries only from warnings on."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        logging.Formatter("%(asctime)s %(levelname).1s %(name)s  %(message)s", "%H:%M:%S")
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("vllmx").setLevel(level.upper())
