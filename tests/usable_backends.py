"""Backends that the tests need, where they are installed and can run."""

import functools

import pytest
from vllmx_core.errors import BackendUnavailableError, PluginError
from vllmx_core.plugins.registry import load_registry
from vllmx_core.plugins.specs import BackendSpec

_installed = functools.cache(load_registry)
"""Thousands of tests ask, and loading all plugins takes a hundredth of a second."""


def backend_spec(name: str = "auto") -> BackendSpec:
    """Skips the test, with the reason, when it is not installed or cannot run here."""
    try:
        return _installed().choose_backend(name)[0]
    except (BackendUnavailableError, PluginError) as error:
        pytest.skip(str(error))
