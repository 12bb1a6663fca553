"""SigLIP's tower (arXiv 2303.15343) in front of Gemma 3 and Idefics3: a transformer over the
patches of a square image, whose answers are averaged or joined over smaller squares and projected.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from vllmx_core.model import Array, Ops, StepInputs, Weight
from vllmx_core.weights.spec import PartSpec, WeightSpec

from vllmx_models.blocks.tower import linear, prefixed
from vllmx_models.blocks.vit import ViT

_TOWER = "vision_tower.vision_model."
_OTHER_TOWERS = ("vision_tower.", "model.vision_tower.vision_model.", "model.vision_tower.")
_PROJECTOR = "multi_modal_projector."
_IDEFICS_TOWER = "model.vision_model."


class GemmaTower(ViT):
    """The tower of Gemma 3: a token is the mean of its patches, normed and projected."""

    def weights(self) -> tuple[WeightSpec, ...]:
        """See `vllmx_core.model.Encoder`."""
        tower = (prefixed(spec, _TOWER, _OTHER_TOWERS) for spec in self.tower_weights(_TOWER))
        projector = (
            prefixed(spec, _PROJECTOR, (f"model.{_PROJECTOR}",)) for spec in self._projector()
        )
        return (*tower, *projector)

    def _projector(self) -> Iterator[WeightSpec]:
        size = self.hidden_size
        scale = PartSpec(f"{_PROJECTOR}mm_soft_emb_norm.weight", size)
        yield WeightSpec("visual.out_norm", "vector", (scale,), offset=1.0)
        name = f"{_PROJECTOR}mm_input_projection_weight"
        out = PartSpec(name, self.out_size, transposed=True)
        yield WeightSpec("visual.out", "linear", (out,), size)

    def forward(self, ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> tuple[Array, ...]:
        """See `vllmx_core.model.Encoder`."""
        x = ops.merge(self.encoded(ops, w, step), self.patches_per_token, "mean")
        return (ops.linear(ops.rms_norm(x, w["visual.out_norm"], self.eps), w["visual.out"]),)


class IdeficsTower(ViT):
    """The tower of Idefics3 and SmolVLM: a token is its patches side by side, projected."""

    def weights(self) -> tuple[WeightSpec, ...]:
        """See `vllmx_core.model.Encoder`."""
        width = self.hidden_size * self.patches_per_token
        out = "model.connector.modality_projection.proj"
        projection = linear("visual.out", out, self.out_size, width, bias=False)
        return (*self.tower_weights(_IDEFICS_TOWER), projection)

    def forward(self, ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> tuple[Array, ...]:
        """See `vllmx_core.model.Encoder`."""
        x = ops.merge(self.encoded(ops, w, step), self.patches_per_token)
        return (ops.linear(x, w["visual.out"]),)
