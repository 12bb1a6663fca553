"""The audio encoders of Qwen2.5-Omni (arXiv 2503.20215), and of Qwen3-Omni and Qwen3-ASR (arXiv
2509.17765): Whisper's layers over pieces of an audio, with sinusoids as positions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import numpy as np
from vllmx_core.model import Array, ImagePlaces, Ops, StepInputs, Weight
from vllmx_core.ops.downsample import FRAMES
from vllmx_core.plan import F32, AnyArray
from vllmx_core.weights.spec import WeightSpec

from vllmx_models.blocks.layer import part
from vllmx_models.towers.whisper import ChatTower

_LONGEST_WAVE = 10000.0


def sinusoids(rows: int, size: int) -> F32:
    """(rows, size) sines of a row's number, then cosines, from 1 to 1 / 10000 a row."""
    half = size // 2
    rates = np.exp(-np.log(_LONGEST_WAVE) / (half - 1) * np.arange(half, dtype=np.float32))
    angles = np.arange(rows, dtype=np.float32)[:, None] * rates.astype(np.float32)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)


class PieceTower(ChatTower):
    """A `vllmx_core.model.Encoder` over pieces of two seconds, which do not see each other."""

    last_norm: ClassVar[str] = "ln_post"

    def constants(self, max_model_len: int) -> Mapping[str, AnyArray]:
        """See `vllmx_core.model.Encoder`."""
        return {"audio.positions": sinusoids(self.positions, self.hidden_size)}

    def _stem_weights(self) -> Iterator[WeightSpec]:
        return (one for one in super()._stem_weights() if one.name != "audio.positions")


class DownsampledTower(PieceTower):
    """A `vllmx_core.model.Encoder` whose rows hold eight frames. Convolutions and positions begin
    anew with each chunk, attention with each piece of several chunks."""

    k_bias: ClassVar[bool] = True
    channels: int = 480
    """Channels of the convolutions."""
    frames: int = 100
    """Frames of a chunk."""

    @property
    def patch_width(self) -> int:
        """See `vllmx_core.model.Encoder`."""
        return FRAMES * self.mels

    @property
    def _rows(self) -> int:
        """Rows of a chunk."""
        return -(-self.frames // FRAMES)

    def constants(self, max_model_len: int) -> Mapping[str, AnyArray]:
        """See `vllmx_core.model.Encoder`."""
        return {"audio.positions": sinusoids(self._rows, self.hidden_size)}

    def _stem_weights(self) -> Iterator[WeightSpec]:
        before, channels, bins = 1, self.channels, self.mels
        for index in range(3):
            conv = (part(f"{self.module}.conv2d{index + 1}", channels, bias=True),)
            yield WeightSpec(
                f"audio.conv.{index}",
                "linear",
                conv,
                9 * before,
                shape=(channels, before, 3, 3),  # bins, then times
                axes=(0, 3, 2, 1),
            )
            before, bins = channels, -(-bins // 2)
        size = self.hidden_size
        joined = (part(f"{self.module}.conv_out", size, bias=False),)
        yield WeightSpec(
            "audio.joined",
            "linear",
            joined,
            channels * bins,
            shape=(size, channels, bins),
            axes=(0, 2, 1),
        )

    def _stem(self, ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> Array:
        matrices = (w["audio.conv.0"], w["audio.conv.1"], w["audio.conv.2"])
        frames = ops.patches(step, self.patch_width)
        x = ops.linear(ops.downsample(frames, matrices, self.frames, step), w["audio.joined"])
        return ops.add(x, ops.mix(step, w["audio.positions"]))

    def places(self, grid: tuple[int, int, int]) -> ImagePlaces:
        """See `vllmx_core.model.Encoder`."""
        found = super().places(grid)
        np.remainder(found.table_rows, self._rows, out=found.table_rows)
        return found
