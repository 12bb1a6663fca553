"""What holds for all tests."""

import gc
import logging
import os
import sys
from collections.abc import Iterator

# Read as numpy is imported. The other cores run other tests: threads of BLAS, which wait by
# turning, would take them half a second for each second of products.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Servers of tests list no models of whoever runs them.
os.environ.setdefault("VLLMX_CACHED_MODELS", "no")

import pytest
from hypothesis import HealthCheck, settings

# A busy machine is no failure: nothing here is timed. And a change is tested by the examples that
# the one before it passed: VLLMX_RANDOM_EXAMPLES=1 looks for others.
settings.register_profile(
    "vllmx",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=not os.environ.get("VLLMX_RANDOM_EXAMPLES"),
)
settings.load_profile("vllmx")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--updates all|none|SEED`, several times: see tests/merging.py."""
    parser.addoption("--updates", action="append", default=[], metavar="all|none|SEED")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test once for each `--updates`, which its name shows."""
    modes = metafunc.config.getoption("updates")
    if modes:
        metafunc.parametrize("updates", [f"updates-{mode}" for mode in modes], indirect=True)


@pytest.fixture(autouse=True)
def updates(request: pytest.FixtureRequest) -> Iterator[None]:
    """How the updates of cores on threads are merged, where `--updates` says so."""
    how = getattr(request, "param", None)
    if how is None or "paced_steps" in request.fixturenames:  # which merges nothing, by itself
        yield
        return
    from tests.merging import merge_updates

    with pytest.MonkeyPatch.context() as patch:
        merge_updates(patch, how.removeprefix("updates-"))
        yield


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end: the garbage collector need not look. And
    torch keeps to one thread, whatever a backend asks for: several wait as those of BLAS do."""
    gc.freeze()
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
        torch.set_num_threads = lambda _: None


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    """Programs set vllmx's level for their process; a test that runs one leaves none behind."""
    logger = logging.getLogger("vllmx")
    level = logger.level
    yield
    logger.setLevel(level)
