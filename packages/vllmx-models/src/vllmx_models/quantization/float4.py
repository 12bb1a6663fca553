"""Matrices of e2m1 values with a scale for each group: MXFP4 and NVFP4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import numpy as np
from vllmx_core.plan import F32
from vllmx_core.weights.part import Layout, StoredPart
from vllmx_core.weights.tensor import RawTensor

from vllmx_models.quantization.scaled import Options, apply_scales, e2m1_to_f32, scales_to_f32


class Fp4(Layout):
    """Buffers weight and scale. Options: scale, its dtype; global_scale: none, multiply or divide,
    with a buffer of this name."""

    kind: ClassVar[str] = "fp4"

    @property
    def is_mxfp4(self) -> bool:
        whole = self.options["global_scale"] == "none"
        return whole and self.group_size == 32 and self.options["scale"] in ("u8", "f8e8m0")

    def decode(self, part: StoredPart, begin: int, end: int) -> F32:
        """See `Layout.decode`. The group's scale is rounded when it is combined with the global
        one, the product once more."""
        cols = part.shape[-1]
        packed = np.asarray(part.buffers["weight"].rows(begin, end).view()).reshape(-1, cols // 2)
        scales = scales_to_f32(part.buffers["scale"].rows(begin, end)).reshape(len(packed), -1)
        if self.options["global_scale"] != "none":
            whole = part.buffers["global_scale"].to_f32().reshape(())
            scales = (
                scales * whole if self.options["global_scale"] == "multiply" else scales / whole
            )
        found = apply_scales(e2m1_to_f32(packed), scales, (1, self.group_size or 1))
        return found.reshape(end - begin, *part.shape[1:])


def fp4_part(
    name: str,
    weight: RawTensor,
    scale: RawTensor,
    shape: tuple[int, ...],
    *,
    global_scale: RawTensor | None = None,
    combine: Literal["none", "multiply", "divide"] = "none",
    extra: Mapping[str, RawTensor] | None = None,
    activations: Options | None = None,
) -> StoredPart:
    """Returns matrices of e2m1 values, two to a byte along the last axis of `shape`, times a scale
    for each group, which is `combine`d with the global one first. The caller has checked sizes."""
    groups = scale.shape[-1]
    group_size = shape[-1] // groups if groups else None
    buffers = {"weight": weight, "scale": scale, **(extra or {})}
    if global_scale is not None:
        buffers["global_scale"] = global_scale
    options = {**(activations or {}), "global_scale": combine, "scale": scale.dtype}
    return StoredPart(name, shape, Fp4(4, group_size, options), buffers)
