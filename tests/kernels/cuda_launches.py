"""A pytest plugin that writes down what the CUDA kernels' tests launch, without launching it.

    LAUNCHES=out.json python -O -m pytest -p tests.kernels.cuda_launches --assert=plain FILES

Nothing is compiled or computed, so every result is wrong; `python -O` and the two patches below
keep the tests going to their last launch. One process: nothing has to be gathered from workers.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllmx_cuda.kernel_specs import Variant
from vllmx_testing.cuda.emulator import Emulator

Launches = dict[str, dict[str, Any]]
_found: Launches = {}


def _note(
    emulator: Emulator, variant: Variant, sizes: dict[str, int], arguments: Any, **how: Any
) -> None:
    kernel = variant.kernel
    values = dict(sizes)
    for argument, value in zip(kernel.arguments, arguments, strict=True):
        if argument.name == "k":
            values["k"] = int(value)
        if argument.optional:
            values[f"{argument.name}?"] = int(value is not None)
    options, grid = dict(variant.options), variant.launch(sizes).grid
    key = json.dumps([kernel.entry, options, values])
    _found[key] = {"entry": kernel.entry, "options": options, "values": values, "grid": grid}


def _agree(*arrays: Any, **how: Any) -> None:
    """Stands for numpy's comparisons, and finds nothing."""


def pytest_configure(config: pytest.Config) -> None:
    Emulator.launch = _note  # type: ignore[method-assign, assignment]
    np.testing.assert_allclose = np.testing.assert_array_equal = _agree


def pytest_sessionfinish(session: pytest.Session) -> None:
    Path(os.environ["LAUNCHES"]).write_text(json.dumps(list(_found.values())))
