"""One log format for all processes of a server, on standard error."""

from __future__ import annotations

import logging

from vllmx_core.config_values import nearest
from vllmx_core.errors import ConfigError

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
FORMAT = "%(asctime)s %(levelname).1s %(process)d %(name)s  %(message)s"
DATE_FORMAT = "%Y-%m-%d %H:%M:%S"


def check_log_level(level: str) -> None:
    """Raises ConfigError for a name that logging does not have."""
    if level.lower() not in LOG_LEVELS:
        raise ConfigError(
            f"--log-level must be one of {', '.join(LOG_LEVELS)}, got"
            f" {level!r}{nearest(level.lower(), LOG_LEVELS)}",
            param="log_level",
        )


def configure_logging(level: str | int = logging.INFO) -> None:
    """Everything of vllmx at `level`; libraries only from warnings on. For programs: the packages
    themselves never touch the configuration of logging. Raises ConfigError for an unknown name."""
    if isinstance(level, str):
        check_log_level(level)
    logging.basicConfig(level=logging.WARNING, format=FORMAT, datefmt=DATE_FORMAT)
    logging.getLogger("vllmx").setLevel(level.upper() if isinstance(level, str) else level)
