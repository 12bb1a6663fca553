"""The towers of LLaVA (arXiv 2310.03744) and InternVL (arXiv 2404.16821): a token is one patch, or
neighbouring patches side by side, projected by two matrices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from vllmx_core.model import Array, Ops, StepInputs, Weight
from vllmx_core.weights.spec import WeightSpec

from vllmx_models.blocks.tower import activated, linear, norm, normed, prefixed
from vllmx_models.blocks.vit import ViT

_TOWER, _PROJECTOR = "vision_tower.", "multi_modal_projector."
_OTHER_TOWERS = (f"{_TOWER}vision_model.", f"model.{_TOWER}", f"model.{_TOWER}vision_model.")
_EPS = 1e-5


class ProjectedTower(ViT):
    """A `vllmx_core.model.Encoder`."""

    projector_activation: str = "gelu"
    projector_bias: bool = True
    projector_norm: bool = False
    """True if what is projected is normed first."""

    def weights(self) -> tuple[WeightSpec, ...]:
        """See `vllmx_core.model.Encoder`."""
        tower = (prefixed(spec, _TOWER, _OTHER_TOWERS) for spec in self.tower_weights(_TOWER))
        projector = (
            prefixed(spec, _PROJECTOR, (f"model.{_PROJECTOR}",)) for spec in self._projector()
        )
        return (*tower, *projector)

    def _projector(self) -> Iterator[WeightSpec]:
        width, out, bias = self.hidden_size * self.merge**2, self.out_size, self.projector_bias
        if self.projector_norm:
            yield from norm("visual.out_norm", f"{_PROJECTOR}layer_norm", width)
        yield linear("visual.out1", f"{_PROJECTOR}linear_1", out, width, bias=bias)
        yield linear("visual.out2", f"{_PROJECTOR}linear_2", out, out, bias=bias)

    def forward(self, ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> tuple[Array, ...]:
        """See `vllmx_core.model.Encoder`."""
        x = ops.merge(self.encoded(ops, w, step), self.patches_per_token)
        if self.projector_norm:
            x = normed(ops, x, w, "visual.out_norm", _EPS)
        up = activated(ops, ops.linear(x, w["visual.out1"]), self.projector_activation)
        return (ops.linear(up, w["visual.out2"]),)
