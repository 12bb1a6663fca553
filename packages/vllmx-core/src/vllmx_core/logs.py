"""One log format for all processes of a server, on standard error."""

from __future__ import annotations

import logging

FORMAT = "%(asctime)s %(levelname).1s %(process)d %(name)s  %(message)s"
DATE_FORMAT = "%Y-%m-%d %H:%M:%S"


def configure_logging(level: str | int = logging.INFO) -> None:
    """Everything of vllmx at `level`; libraries only from warnings on. For programs: the packages
    themselves never touch the configuration of logging."""
    logging.basicConfig(level=logging.WARNING, format=FORMAT, datefmt=DATE_FORMAT)
    logging.getLogger("vllmx").setLevel(level.upper() if isinstance(level, str) else level)
