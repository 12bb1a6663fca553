"""The interface of a model architecture.

An architecture is one class that reads a Hugging Face `config.json`, lists its weights, and writes
its forward pass once against `Ops`. It knows no device, no file format, no quantisation and no
sharding. `forward` runs when a step is *recorded*, once a load, not when it is replayed: it must
not look at values, only pass them on, so that a backend can tape, capture or compile it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from vllmx_core.ops.activation import Activation
from vllmx_core.ops.attention import AttentionSpec
from vllmx_core.ops.compress import CompressSpec
from vllmx_core.ops.compressed_attention import CompressedAttentionSpec
from vllmx_core.ops.hyper_connections import HyperSpec
from vllmx_core.ops.indexer import IndexerSpec
from vllmx_core.ops.latent_attention import LatentSpec
from vllmx_core.ops.recorder import Ops
from vllmx_core.ops.recurrence import RecurrenceSpec
from vllmx_core.ops.short_conv import ShortConvSpec
from vllmx_core.ops.values import Output, StepInputs, Value, WeightRef
from vllmx_core.plan import F32, I32, AnyArray
from vllmx_core.records import Record
from vllmx_core.weights.spec import WeightSpec

__all__ = [
    "Activation", "Array", "AttentionSpec", "CacheGroup", "CacheSpec", "CompressSpec",
    "CompressedAttentionSpec", "Encoder", "FeatureSpec", "HyperSpec", "ImagePlaces", "IndexerSpec",
    "KVSpec", "LatentKV", "LatentSpec", "Model", "ModelShape", "Ops", "Output", "OwnedKV",
    "RecurrenceSpec", "SharedKV", "ShortConvSpec", "StateSpec", "StepInputs", "Weight",
]  # fmt: skip

Array = Value
"""An operand or result of an op; opaque to models."""
Weight = WeightRef
"""A model's reference to a `WeightSpec` or a constant."""


class KVSpec(Record):
    """Keys and values that one attention layer keeps for each token."""

    num_kv_heads: int
    head_size: int
    window: int | None = None
    """Tokens that stay visible, the newest included; None: all of them."""

    @property
    def value_size(self) -> int:
        """Numbers of a head's value; its key has `head_size`."""
        return self.head_size

    @property
    def ratio(self) -> int:
        """Tokens of an entry."""
        return 1


class SharedKV(Record):
    """An attention layer that keeps nothing: it reads the pages of an earlier one."""

    layer: int
    """The layer that owns them."""


class LatentKV(Record):
    """The row for all heads that a layer of multi-head latent attention keeps for each token, or
    that one with compressed attention keeps for each `ratio` tokens."""

    rank: int
    """Numbers of the latent."""
    rotary_dim: int
    """Numbers of the rotated part of the key, which follow the latent."""
    index_size: int = 0
    """Numbers of the key by which an indexer picks tokens, where the layer has one."""
    ratio: int = 1
    """Tokens of an entry, which lies in the page of the last of them, in the place of that token's
    offset // ratio."""

    @property
    def window(self) -> None:
        """All tokens stay visible."""
        return None

    @property
    def num_kv_heads(self) -> int:
        return 1

    @property
    def head_size(self) -> int:
        return self.rank + self.rotary_dim

    @property
    def value_size(self) -> int:
        """Values are part of the row: what an indexer reads takes their place."""
        return self.index_size


def page_rows(kv: KVSpec | LatentKV, block_size: int) -> int:
    """Rows of a page of `block_size` tokens."""
    return -(-block_size // kv.ratio)


OwnedKV = KVSpec | LatentKV
"""The cache of a layer with its own pages."""
CacheSpec = OwnedKV | SharedKV
"""The cache of an attention layer."""


class StateSpec(Record):
    """The state that one recurrent layer keeps of a sequence of any length: float32 (heads, rows,
    cols). A short convolution keeps (1, K - 1, C) taps, a recurrence (H, Dk, Dv)."""

    heads: int
    rows: int
    cols: int

    @property
    def num_bytes(self) -> int:
        return 4 * self.heads * self.rows * self.cols


class CacheGroup(Record):
    """Layers with one block table."""

    window: int | None
    """Tokens whose pages the group keeps, the newest included; None: all of them."""
    layers: tuple[int, ...]
    """The layer in each of the places that the group uses; the last ones may be empty."""


class FeatureSpec(Record):
    """Features that a tower computes for each token of an image or an audio."""

    parts: int
    """Rows for each token: one that replaces its embedding, and those added after layers."""
    width: int
    """Numbers of each."""
    spans: bool = False
    """True if the tokens of an image attend to each other in both directions: a step has all of
    them that are not computed yet, or none; see `StepPlan.visible_to`."""
    feeds: int | None = None
    """The id that layers look up for image tokens, if they look ids up again; None: their own."""

    crossed: int = 0
    """Rows of each input where cross-attention of all tokens reads them, and the input takes no
    places in the prompt; 0: features stand for tokens."""
    decoder_start: int | None = None
    """The id with which the decoder begins, if inputs of the tower are texts: the prompt, of at
    most `crossed` tokens; None: they are not."""
    is_audio: bool = False
    """True if inputs are audio that takes places in the prompt, not images."""

    @property
    def row_bytes(self) -> int:
        """Bytes that all parts of one token take, in float32."""
        return 4 * self.parts * self.width


LAST_NORM = -1
"""The point behind the last norm of a model, among those of `TapSpec`."""


class TapSpec(Record):
    """The store of hidden states that a target keeps and its drafter reads: float32 parts, one for
    each point, then those that the drafter alone writes."""

    points: tuple[int, ...]
    """Layers behind which the residual stream is kept, 0: the embeddings, or `LAST_NORM`."""
    own: tuple[int, ...]
    """Widths of the drafter's own parts."""
    num_rows: int
    """Rows of the parts of points."""
    own_rows: int
    """Rows of the drafter's own parts."""

    def shapes(self, hidden_size: int) -> list[tuple[int, int]]:
        """(rows, width) of each part; `hidden_size` is the target's."""
        points = [(self.num_rows, hidden_size)] * len(self.points)
        return points + [(self.own_rows, width) for width in self.own]


OWN_TENSOR = "own."
"""The prefix by which a drafter names a tensor of its file that its target's file has too."""


class DraftSpec(Record):
    """The inputs of a drafter that reads hidden states. It computes each token of its target's
    steps: row t of `StepPlan.feature_rows` names the hidden states of the token at `positions[t]`,
    and `tokens[t]` is the id that follows it."""

    points: tuple[int, ...]
    """See `TapSpec`; part i of the store has point i."""
    own: tuple[int, ...] = ()
    """Widths of parts that the drafter writes by `Ops.write`, behind those of the points. A drafted
    token reads the row of `StepPlan.own_rows`, which the draft step before wrote."""
    hidden_size: int = 0
    """The width of the target's hidden states that it needs."""
    block: int = 0
    """Above 0: the most tokens that it drafts in one pass, from the last id and mask tokens, which
    see each other in both directions where an attention has `AttentionSpec.spans`."""
    mask_token: int = 0
    """The id that stands for a token of a block."""
    from_last: bool = False
    """True if the first token of a block is drafted at the last id, not at the first mask."""
    reads_pages: bool = False
    """True if it has no keys and values: it reads its target's, `ModelShape.caches` are those, and
    it computes drafted tokens alone, each at the last position of the context before its id."""


class ModelShape(Record):
    """Properties of a model that the engine and the backends need before it is loaded."""

    vocab_size: int
    hidden_size: int
    max_model_len: int
    """Context length that the checkpoint claims."""
    caches: tuple[CacheSpec, ...]
    """One entry for each attention layer."""
    dtype: str = "bf16"
    """Checkpoint dtype by its config: bf16, f16 or f32."""
    states: tuple[StateSpec, ...] = ()
    """States of the recurrent layers; an op names its state by its index here. A slot holds all
    states of one sequence."""
    output: Output = "tokens"
    """A step's result: logits to sample from, a vector or scores for each text, or a vector for
    each token. A sparse vector comes as the greatest logit of each word of the vocabulary."""
    output_size: int = 0
    """Numbers of a vector or of a text's scores; 0 where tokens are sampled."""
    features: FeatureSpec | None = None
    """The features of images, where a model sees them: `Model.encoder` makes them."""
    groups: tuple[CacheGroup, ...] | None = None
    """Set for a stage: the groups of the whole model, with the stage's layers in them. None:
    `vllmx_core.cache.groups` makes them."""
    taps: TapSpec | None = None
    """Hidden states that a drafter reads; see `tapped`."""
    drafts: DraftSpec | None = None
    """Set for a model that drafts from the hidden states of another one."""
    whole_prompts: bool = False
    """A text must be computed in one step: its tokens see later ones, or all of them are pooled."""

    @property
    def result_size(self) -> int:
        """Numbers in each row of what `forward` returns."""
        return self.vocab_size if self.output == "tokens" else self.output_size

    @property
    def limited_row(self) -> int:
        """Numbers in each of the rows whose memory `backend_kit.limits` bounds."""
        return self.output_size if self.output == "token_vectors" else self.vocab_size

    @property
    def kv_specs(self) -> tuple[OwnedKV, ...]:
        """The specs of the layers that have pages of their own."""
        return tuple(spec for spec in self.caches if not isinstance(spec, SharedKV))

    @property
    def state_slot_bytes(self) -> int:
        """All states of one sequence."""
        return sum(spec.num_bytes for spec in self.states)


class ImagePlaces(Record):
    """Positions of the patches and features of one image, computed from its grid of patches. N may
    exceed the patches: rows that the tower adds behind them, such as one for a class token, have
    patches of zeros, and their features are dropped."""

    rope_positions: I32
    """(A, N) rotary positions of each row in the tower."""
    table_rows: I32
    """(N, k) see `PatchRows`."""
    table_weights: F32
    """(N, k)"""
    token_positions: I32 | None
    """(A, n) positions of the image's tokens relative to its first one; None: consecutive, as in
    text."""
    advance: int
    """The position of the token after the image, relative to the image's first one."""
    order: I32 | None = None
    """(n,) the image's tokens in the order of their patches in the tower, which the other arrays of
    patches follow; None: unchanged."""
    windows: I32 | None = None
    """(w,) patches of each window, in that order; see `PatchRows`."""
    featured: I32 | None = None
    """(n,) the image's tokens with a feature, ascending and the last one included, where others
    between them are text, such as the breaks of lines; None: all."""

    def num_tokens(self, num_features: int) -> int:
        """Tokens of an image with so many features, text between them included."""
        return num_features if self.featured is None else int(self.featured[-1]) + 1


class Encoder(Protocol):
    """The image tower of a model. Its weights and constants have names that the model's do not; it
    is recorded like a model."""

    @property
    def patch_width(self) -> int:
        """Numbers of a patch."""
        ...

    @property
    def colours_last(self) -> bool:
        """True if a patch is (frames, height, width, C); otherwise its colours come first."""
        ...

    @property
    def patches_per_token(self) -> int:
        """Neighbouring patches merged into one feature."""
        ...

    def weights(self) -> tuple[WeightSpec, ...]: ...

    def constants(self, max_model_len: int) -> Mapping[str, AnyArray]:
        """See `Model.constants`, for images of up to so many tokens."""
        ...

    def forward(self, ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> tuple[Array, ...]:
        """Writes the pass from patches to (L, width) features, one for each part."""
        ...

    def places(self, grid: tuple[int, int, int]) -> ImagePlaces:
        """The places of an image of (frames, rows, columns) patches. Raises InvalidRequestError for
        a grid that the tower cannot take."""
        ...


def encoder_of(model: Model) -> Encoder | None:
    """The tower of a model that has one: its attribute `encoder`."""
    found: Encoder | None = getattr(model, "encoder", None)
    return found


def heads_of(model: Model) -> Model | None:
    """The drafter in a model's own checkpoint, its layers of multi-token prediction: its attribute
    `heads`."""
    found: Model | None = getattr(model, "heads", None)
    return found


def text_alone(model: Model) -> Model | None:
    """A model that sees images without its tower, by its method `text_alone`; None: it has none, or
    cross-attention needs the tower."""
    made, features = getattr(model, "text_alone", None), model.shape.features
    needs = features is not None and features.crossed > 0
    if made is None or needs or encoder_of(model) is None:
        return None
    alone: Model = made()
    return alone


class Tapped:
    """A model whose step keeps hidden states for a drafter, as `TapSpec` says."""

    def __init__(self, model: Model, taps: TapSpec) -> None:
        self._model, self._taps = model, taps

    @property
    def shape(self) -> ModelShape:
        return replace(self._model.shape, taps=self._taps)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class Model(Protocol):
    """An architecture with its config read. Constructed as `Implementation(config)`, `config` being
    the parsed config.json; raises UnsupportedModelError for a config that it cannot honour."""

    @property
    def shape(self) -> ModelShape: ...

    def weights(self) -> tuple[WeightSpec, ...]:
        """The weight map, in the order of use."""
        ...

    def constants(self, max_model_len: int) -> Mapping[str, AnyArray]:
        """Float32 tables such as RoPE's, for positions below `max_model_len`; the backend stores
        them with the weights, under the same names."""
        ...

    def forward(self, ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> Array:
        """Writes the pass from token ids to (L, V) logits, or to the (L, output_size) of a model
        whose shape says that it gives vectors or scores."""
        ...
