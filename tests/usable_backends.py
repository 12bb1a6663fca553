"""Backends that the tests need, where they are installed and can run."""

import pytest
from vllmx_core.errors import BackendUnavailableError, PluginError
from vllmx_core.plugins.registry import load_registry
from vllmx_core.plugins.specs import BackendSpec


def backend_spec(name: str = "auto") -> BackendSpec:
    """Skips the test, with the reason, when it is not installed or cannot run here."""
    try:
        return load_registry().choose_backend(name)[0]
    except (BackendUnavailableError, PluginError) as error:
        pytest.skip(str(error))
