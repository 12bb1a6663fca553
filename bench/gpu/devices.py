"""The device that everything here runs on."""

from __future__ import annotations

import os
from collections.abc import Callable

from vllmx_cuda.device import Device

REHEARSED = bool(os.environ.get("REHEARSE"))
"""Whether run.sh runs without a GPU."""


def opener(rehearse: bool = REHEARSED) -> Callable[[], Device]:
    """What opens the GPU, or the emulator in its place."""
    if rehearse:
        from vllmx_cuda.emulated_device import EmulatedDevice

        return EmulatedDevice
    from vllmx_cuda.cupy_device import CupyDevice

    return CupyDevice.open
