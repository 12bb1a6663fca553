"""A pytest plugin for tests on a GPU, given with -p live.

Failures are told as they happen, for a run that is cut prints no summary. A kernel that fails takes
its process's CUDA context with it, and with that every later test there: the process ends behind
such a test, and pytest-xdist starts another; without it the run ends.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator

import pytest

IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ


def is_lost() -> bool:
    """Whether this process can use its GPU no more."""
    cupy = sys.modules.get("cupy")
    if cupy is None:
        return False
    try:
        cupy.cuda.runtime.deviceSynchronize()
    except Exception:
        return True
    return False


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed and not IS_WORKER:
        print(f"\n{report.nodeid} ({report.when})\n{report.longreprtext}", file=sys.__stderr__)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    result = yield
    if is_lost():
        if IS_WORKER:
            os._exit(70)
        item.session.shouldstop = "the GPU's context is lost, and the tests behind it with that"
    return result
