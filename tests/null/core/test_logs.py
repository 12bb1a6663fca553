"""What log lines look like."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys

import pytest
from vllmx_core.errors import ConfigError
from vllmx_core.system.logs import JSONFormatter, configure_logging


def test_a_record_is_an_object() -> None:
    record = logging.LogRecord(
        "vllmx.x", logging.WARNING, "f.py", 1, 'a "%s"\n\ud800', ("b",), None
    )
    record.created, record.msecs, record.process = 1700000000.25, 250.0, 7
    line = JSONFormatter().format(record)
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "2023-11-14T22:13:20.250Z",
        "level": "warning",
        "process": 7,
        "logger": "vllmx.x",
        "message": 'a "b"\n\ud800',
    }


def test_a_traceback_stands_in_the_line() -> None:
    try:
        raise ValueError("wrong")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "f.py", 1, "failed", (), sys.exc_info())
    assert "ValueError: wrong" in json.loads(JSONFormatter().format(record))["traceback"]


def test_processes_that_are_started_write_alike() -> None:
    code = (
        "import logging; from vllmx_core.system.logs import configure_logging\n"
        "configure_logging('info'); logging.getLogger('vllmx.y').info('hello %d', 5)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "VLLMX_LOG_FORMAT": "json"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stderr)["message"] == "hello 5"


def test_unknown_formats_are_refused() -> None:
    with pytest.raises(ConfigError, match="text, json"):
        configure_logging("info", log_format="xml")
