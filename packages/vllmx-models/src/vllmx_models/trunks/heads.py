"""Layers of multi-token prediction: a drafter that comes with the checkpoint of a decoder.

One more layer of the decoder's kind reads, side by side, the normalised hidden states of a token,
as the decoder's head reads them, and the normalised embedding of the token that follows; it
predicts the one behind that (DeepSeek V3, arXiv:2412.19437, section 2.2). Fed with its own output
it goes on. E hidden size, T tokens of a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from vllmx_core.model import (
    LAST_NORM,
    Array,
    DraftSpec,
    Model,
    ModelShape,
    Ops,
    StepInputs,
    Weight,
)
from vllmx_core.records import Record
from vllmx_core.weights.part import WeightSource
from vllmx_core.weights.spec import PartSpec, WeightSpec

from vllmx_models.blocks.layer import linear, renamed_part
from vllmx_models.trunks.decoder import Decoder, DecoderSpec, LayerSpec


class HeadNames(Record):
    """The modules of the first layer of multi-token prediction in a checkpoint. It is used again
    for every further token, as later layers of a checkpoint are trained alike."""

    layers: str
    """The module that holds the layer."""
    module: str
    """The module of its own norms and projection."""
    first_layer: int = 0
    """The number in `layers`."""
    embedding_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    projection: str = "eh_proj"
    norm: str = "shared_head.norm"
    hidden_first: bool = False
    """True if the projection reads the hidden states before the embedding."""
    embedding: str | None = None
    """The copy of the embedding, in checkpoints that have one."""
    head: str | None = None
    """The copy of the head, in checkpoints that have one."""
    also: tuple[tuple[str, str], ...] = ()
    """(prefix, alternative prefix in other checkpoints)."""
    blocks: tuple[LayerSpec, ...] = ()
    """The layers of the drafter; none: one like the decoder's last layer with attention."""

    def model(self, spec: DecoderSpec) -> Model:
        alike = [one for one in spec.layers if one.mixer is not None and one.mixer.cache]
        names = replace(
            spec.names,
            layers=self.layers,
            first_layer=self.first_layer,
            norm=f"{self.module}.{self.norm}",
        )
        own = replace(
            spec, layers=self.blocks or (alike[-1],), names=names, features=None, prediction=None
        )
        return Heads(own, self)


class Heads(Decoder):
    """A decoder of a layer or two that reads hidden states of its target."""

    def __init__(self, spec: DecoderSpec, names: HeadNames) -> None:
        super().__init__(spec)
        self._modules = names

    @property
    def shape(self) -> ModelShape:
        size = self.spec.hidden_size
        return replace(super().shape, drafts=DraftSpec((LAST_NORM,), (size,), size))

    def with_stored_head(self, source: WeightSource) -> Heads:
        """The heads with embedding and head of their target, where the checkpoint has no copies of
        them: the target's are shared then."""
        names, modules = source.names(), self._modules
        embedding, head = (
            module if f"{module}.weight" in names else None
            for module in (modules.embedding, modules.head)
        )
        return Heads(self.spec, replace(modules, embedding=embedding, head=head))

    def weights(self) -> tuple[WeightSpec, ...]:
        modules, found = self._modules, super().weights()
        own = {"embed": modules.embedding, "lm_head": modules.head}
        found = tuple(_or_own(one, own.get(one.name)) for one in found)
        return tuple(replace(one, parts=tuple(map(self.renamed, one.parts))) for one in found)

    def renamed(self, part: PartSpec) -> PartSpec:
        """Adds the names that other checkpoints have as alternatives."""
        for prefix, other in self._modules.also:
            part = renamed_part(part, prefix, other)
        return part

    def spellings(self, name: str) -> list[str]:
        """All names of a tensor that has this one in some checkpoints."""
        found = [name]
        for prefix, other in reversed(self._modules.also):
            found += [prefix + one.removeprefix(other) for one in found if one.startswith(other)]
            found += [other + one.removeprefix(prefix) for one in found if one.startswith(prefix)]
        return found

    def trunk_weights(self) -> tuple[WeightSpec, ...]:
        spec, modules, size = self.spec, self._modules, self.spec.hidden_size
        table, *others = super().trunk_weights()
        name = f"{modules.module}.{modules.projection}.weight"
        halves = (size, 0) if modules.hidden_first else (0, size)
        embedded, hidden = (PartSpec(name, size, first_col=begin) for begin in halves)
        return (
            table,
            *spec.norm.weights("enorm", f"{modules.module}.{modules.embedding_norm}", size),
            *spec.norm.weights("hnorm", f"{modules.module}.{modules.hidden_norm}", size),
            linear("fc.embedded", (embedded,), size),
            linear("fc.hidden", (hidden,), size),
            *others,
        )

    def first_input(self, ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> Array:
        embedded = super().first_input(ops, w, step)  # (T, E)
        hidden = ops.place(ops.place(embedded, step, 0), step, 1, own=True)  # (T, E)
        norm = self.spec.norm
        embedded = ops.linear(norm.record(ops, embedded, w, "enorm"), w["fc.embedded"])
        return ops.add(embedded, ops.linear(norm.record(ops, hidden, w, "hnorm"), w["fc.hidden"]))

    def hidden(self, ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> Array:
        """See `Decoder.hidden`; the next draft step reads it."""
        x = super().hidden(ops, w, step)
        ops.write(x, 1)
        return x


def _or_own(spec: WeightSpec, module: str | None) -> WeightSpec:
    """The weight, read from `module` where the checkpoint has it."""
    if module is None:
        return spec
    (part,) = spec.parts
    own = replace(part, name=f"{module}.weight", alternatives=(part,))
    return replace(spec, parts=(own,))
