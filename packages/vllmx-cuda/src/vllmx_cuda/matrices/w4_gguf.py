"""GGUF's blocks of 4-, 6- and 8-bit codes: the device puts them into the order of
`kernels/w4_codes.h` while weights are loaded.

Q4_0, Q4_1 and Q8_0 are already codes with factors for each 32 values. Of Q4_K and Q6_K the factors,
an f16 times 6 or 8 bits each, are rounded to f16: by a part in 2,048 at most, an eighth of what
bf16 activations are rounded by.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from vllmx_core.errors import WeightFormatError
from vllmx_core.weights.part import WeightPart

from vllmx_cuda.device.device import Device
from vllmx_cuda.device.memory import Bytes, Memory
from vllmx_cuda.kernel_specs import KERNELS, Variant
from vllmx_cuda.kernel_specs.gguf import BLOCKS, block_bytes, block_values
from vllmx_cuda.kernel_specs.w4 import BLOCK_FORMS, TILE_ROWS


def block_type(part: WeightPart) -> str | None:
    """A key of `BLOCK_FORMS`."""
    name = (part.layout.gguf_type or "").lower()
    return name if name in BLOCK_FORMS else None


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """`vllmx_cuda.matrices.w4.StoredRows`."""

    part: WeightPart
    block: int
    """Value of VX_BLOCK."""

    @property
    def tile_bytes(self) -> int:
        blocks = self.part.shape[1] // block_values(self.block)
        return TILE_ROWS * blocks * block_bytes(self.block)

    @property
    def kernel(self) -> Variant:
        return KERNELS["w4_repack_blocks"].variant(VX_BLOCK=self.block)

    def fill(self, begin: int, end: int, buffer: Bytes) -> None:
        rows = self.part.rows(begin, end)
        np.copyto(buffer, rows.buffers["weight"].data)

    def launch(
        self, tiles: Memory, rows: int, device: Device, stored: Memory, fault: Memory
    ) -> None:
        cols = self.part.shape[1]
        sizes = {"outputs": rows, "width": cols}
        device.launch(self.kernel, sizes, (stored, tiles, fault, cols))

    def refusal(self, fault: int) -> WeightFormatError:
        worst = np.uint32(fault).view(np.float32)
        return WeightFormatError(
            f"tensor {self.part.name!r} has a scale or minimum of {worst}, beyond the 65504 of"
            " float16: the file is damaged"
        )


def stored_blocks(part: WeightPart) -> StoredBlocks | None:
    """The storage of the blocks of a part with a `block_type`."""
    name = block_type(part)
    return None if name is None else StoredBlocks(part, BLOCKS[name])
