"""What holds for all tests."""

import logging
from collections.abc import Iterator

import pytest
from hypothesis import settings

# A busy machine is no failure: nothing here is timed.
settings.register_profile("vllmx", deadline=None)
settings.load_profile("vllmx")


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    """Programs set vllmx's level for their process; a test that runs one leaves none behind."""
    logger = logging.getLogger("vllmx")
    level = logger.level
    yield
    logger.setLevel(level)
