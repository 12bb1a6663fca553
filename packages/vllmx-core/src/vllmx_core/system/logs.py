"""One log format for all processes of a server, on standard error."""

from __future__ import annotations

import json
import logging
import os
import time

from vllmx_core.config_values import nearest
from vllmx_core.errors import ConfigError
from vllmx_core.system.standard_error import StandardError

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
FORMAT = "%(asctime)s %(levelname).1s %(process)d %(name)s  %(message)s"
DATE_FORMAT = "%Y-%m-%d %H:%M:%S"
LOG_FORMATS = ("text", "json")
FORMAT_VARIABLE = "VLLMX_LOG_FORMAT"
"""The variable that processes of a server inherit, so that all of them write alike."""


def check_log_level(level: str) -> None:
    """Raises ConfigError for a name that logging does not have."""
    if level.lower() not in LOG_LEVELS:
        raise ConfigError(
            f"--log-level must be one of {', '.join(LOG_LEVELS)}, got"
            f" {level!r}{nearest(level.lower(), LOG_LEVELS)}",
            param="log_level",
        )


def check_log_format(name: str) -> None:
    """Raises ConfigError for another one than text and json."""
    if name not in LOG_FORMATS:
        raise ConfigError(
            f"--log-format must be one of {', '.join(LOG_FORMATS)}, got {name!r}",
            param="log_format",
        )


class JSONFormatter(logging.Formatter):
    """A line of JSON for each record: time (UTC), level, process, logger, message, and the
    traceback where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, in ASCII: a lone half of a character would break who reads it."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": record.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


class _Handler(logging.StreamHandler[StandardError]):
    def close(self) -> None:
        """Writes what is left; `logging.shutdown` calls it at the end of the process."""
        self.stream.finish()
        super().close()


def configure_logging(
    level: str | int = logging.INFO,
    stream: StandardError | None = None,
    log_format: str | None = None,
) -> None:
    """Logs vllmx at `level` and libraries from warnings on. For programs: the packages themselves
    never configure logging. Servers pass a `stream` that never blocks; then `logging.shutdown` must
    be called if a process ends without cleaning up. `log_format` is text or json; None: the value
    of `FORMAT_VARIABLE`. Raises ConfigError for an unknown name."""
    if isinstance(level, str):
        check_log_level(level)
    log_format = log_format or os.environ.get(FORMAT_VARIABLE) or "text"
    check_log_format(log_format)
    handlers = None if stream is None else [_Handler(stream)]
    logging.basicConfig(
        level=logging.WARNING, format=FORMAT, datefmt=DATE_FORMAT, handlers=handlers
    )
    if log_format == "json":
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JSONFormatter())
    logging.getLogger("vllmx").setLevel(level.upper() if isinstance(level, str) else level)
