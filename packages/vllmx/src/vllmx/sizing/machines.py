"""Machines for planning, with published memory sizes, bandwidths and rates of arithmetic.

Rates are those of 16-bit products without sparsity, summed in 32 bits. Apple publishes none; the
table has the GPUs' 32-bit rates, cores times clock.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from vllmx_core.config_values import nearest
from vllmx_core.errors import ConfigError
from vllmx_core.system.memory import GIB

MEMORY_SHARE = 0.8
"""The fraction of the published bandwidth that is reached when reading weights."""
ARITHMETIC_SHARE = 0.5
"""The fraction of the published rate that products of prompts reach."""
STEP_S = 100e-6
"""Seconds of each step outside its layers: launch, sampler, and host work that is not hidden."""
LAYER_S = 10e-6
"""Seconds of a layer in addition to reading its weights: about five dependent kernels of 2 us."""
DEVICES_SHARE = 0.85
"""The fraction of n times one device's speed that n devices reach together."""


@dataclass(frozen=True, slots=True)
class Machine:
    """One device, or several alike that share a model."""

    title: str
    memory_bytes: float
    bandwidth: float
    """Bytes a second."""
    arithmetic: float
    """Operations a second; a product and a sum are two."""
    devices: int = 1

    def seconds_per_value(self, kind: str, bits: float, rows: float) -> float:
        """See `vllmx.sizing.forecast.Rates`."""
        read = bits / 8 * self.seconds_per_byte()
        return max(read, 2 * rows / (self.arithmetic * ARITHMETIC_SHARE * self._together))

    def seconds_per_byte(self) -> float:
        """See `vllmx.sizing.forecast.Rates`."""
        return 1 / (self.bandwidth * MEMORY_SHARE * self._together)

    def fixed_seconds(self, layers: int, rows: float) -> float:
        """See `vllmx.sizing.forecast.Rates`."""
        return STEP_S + layers * LAYER_S

    @property
    def _together(self) -> float:
        return self.devices * DEVICES_SHARE if self.devices > 1 else 1.0


MACHINES: Mapping[str, Machine] = {
    "h100": Machine("NVIDIA H100 SXM", 80e9, 3.35e12, 989e12),
    "h200": Machine("NVIDIA H200 SXM", 141e9, 4.8e12, 989e12),
    "b200": Machine("NVIDIA B200", 180e9, 8.0e12, 2250e12),
    "a100": Machine("NVIDIA A100 80GB SXM", 80e9, 2.04e12, 312e12),
    "a100-40gb": Machine("NVIDIA A100 40GB", 40e9, 1.56e12, 312e12),
    "l40s": Machine("NVIDIA L40S", 48e9, 0.864e12, 362e12),
    "l4": Machine("NVIDIA L4", 24e9, 0.3e12, 121e12),
    "rtx5090": Machine("NVIDIA GeForce RTX 5090", 32e9, 1.79e12, 210e12),
    "rtx4090": Machine("NVIDIA GeForce RTX 4090", 24e9, 1.01e12, 165e12),
    "rtx3090": Machine("NVIDIA GeForce RTX 3090", 24e9, 0.936e12, 71e12),
    "m4-max": Machine("Apple M4 Max, 128 GB", 0.75 * 128 * GIB, 546e9, 18e12),
    "m3-ultra": Machine("Apple M3 Ultra, 512 GB", 0.75 * 512 * GIB, 819e9, 28e12),
    "m2-max": Machine("Apple M2 Max, 96 GB", 0.75 * 96 * GIB, 400e9, 13e12),
}
"""The machines by name. macOS gives a GPU three quarters of the memory."""
MOST_DEVICES = 1024


def machine(name: str) -> Machine:
    """The machine of a name such as h100 or 8xh100. Raises ConfigError for an unknown one."""
    match = re.fullmatch(r"(?:(\d{1,4})x)?(.+)", name.lower())
    count, plain = (int(match[1] or 1), match[2]) if match else (1, name)
    if plain not in MACHINES or not 1 <= count <= MOST_DEVICES:
        known = ["this", *MACHINES]
        raise ConfigError(
            f"--on {name!r} is not known{nearest(plain, known)}; known: {', '.join(known)}; several"
            " devices are written as 8xh100",
            param="on",
        )
    one = MACHINES[plain]
    if count == 1:
        return one
    return Machine(
        f"{count} x {one.title}", count * one.memory_bytes, one.bandwidth, one.arithmetic, count
    )
