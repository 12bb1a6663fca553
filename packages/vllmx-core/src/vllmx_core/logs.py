"""One log format for all processes of a server, on standard error."""

from __future__ import annotations

import logging

from vllmx_core.config_values import nearest
from vllmx_core.errors import ConfigError
from vllmx_core.standard_error import StandardError

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


class _Handler(logging.StreamHandler[StandardError]):
    def close(self) -> None:
        """At the end of the process, by `logging.shutdown`."""
        self.stream.finish()
        super().close()


def configure_logging(level: str | int = logging.INFO, stream: StandardError | None = None) -> None:
    """Everything of vllmx at `level`; libraries only from warnings on. For programs: the packages
    themselves never touch the configuration of logging. Servers bring a `stream` that never holds
    them up; then `logging.shutdown` must be called where a process ends without cleaning up. Raises
    ConfigError for an unknown name."""
    if isinstance(level, str):
        check_log_level(level)
    handlers = None if stream is None else [_Handler(stream)]
    logging.basicConfig(
        level=logging.WARNING, format=FORMAT, datefmt=DATE_FORMAT, handlers=handlers
    )
    logging.getLogger("vllmx").setLevel(level.upper() if isinstance(level, str) else level)
