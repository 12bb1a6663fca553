"""Per-layer embeddings (Gemma 3n and 4): each layer gets its own small embedding of each token.

P features a layer, E hidden size, T tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

from vllmx_core.model import Activation, Array
from vllmx_core.records import Record
from vllmx_core.weights.spec import PartSpec, RowRuns, WeightSpec

from vllmx_models.blocks.layer import LayerNames, LayerScope, part, vector
from vllmx_models.blocks.norms import Norm


class PerLayerInput(Record):
    """norm(project(act(gate(x)) * inputs)) of one layer. Its inputs are the mean, times sqrt(2), of
    a row of a table and of a norm of the projected embedding; the file has the tables of all layers
    side by side."""

    layer: int
    size: int  # P
    vocab_size: int  # V
    activation: Activation
    norm: Norm
    model: str = "model"
    """The module that the tables are in."""
    ids: int = 0
    """Ids of the model, where they are more than V: those from V on have the first row."""

    def weights(self, names: LayerNames) -> tuple[WeightSpec, ...]:
        ours, theirs, hidden, size = names.ours, names.theirs, names.hidden_size, self.size
        first = self.layer * size
        table = PartSpec(
            f"{self.model}.embed_tokens_per_layer.weight", self.vocab_size, first_col=first
        )
        tables: tuple[PartSpec, ...] = (table,)
        if self.ids > self.vocab_size:
            repeated = RowRuns(0, 1, 0)
            tables = (table, replace(table, rows=self.ids - self.vocab_size, runs=repeated))
        rows = RowRuns(first, size, size)
        context = PartSpec(f"{self.model}.per_layer_model_projection.weight", size, runs=rows)
        gate = part(f"{theirs}.per_layer_input_gate", size, False)
        out = part(f"{theirs}.per_layer_projection", hidden, False)
        return (
            WeightSpec(f"{ours}.token_input", "embedding", tables, size, role="vocabulary"),
            WeightSpec(f"{ours}.context_input", "linear", (context,), hidden),
            vector(f"{ours}.context_norm", f"{self.model}.per_layer_projection_norm.weight", size),
            WeightSpec(f"{ours}.input_gate", "linear", (gate,), hidden),
            WeightSpec(f"{ours}.input_projection", "linear", (out,), size),
            *self.norm.weights(f"{ours}.input_norm", f"{theirs}.post_per_layer_input_norm", hidden),
        )

    def record(self, x: Array, scope: LayerScope) -> Array:
        ops, w = scope.ops, scope.weight
        hidden = w("context_input").cols
        context = ops.linear(scope.embedded, w("context_input"))  # (T, P)
        # divided by sqrt(E) before its norm in the original, which eps alone can tell
        context = ops.rms_norm(context, w("context_norm"), self.norm.eps * hidden)
        token = ops.embedding(scope.step.tokens, w("token_input"))  # (T, P)
        inputs = ops.add(context, ops.scale(token, self.size**0.5))
        gate = ops.linear(x, w("input_gate"))  # (T, P)
        inputs = ops.gate(ops.scale(inputs, 0.5**0.5), gate, self.activation)
        out = ops.linear(inputs, w("input_projection"))  # (T, E)
        return self.norm.record(ops, out, scope.weights, f"layers.{scope.layer}.input_norm")
