"""`ModelSuite`: what every architecture must do, as pytest tests.

    class TestMyModel(ModelSuite):
        config = {"architectures": ["MyForCausalLM"], "vocab_size": 61, ...}   # tiny

        def make_model(self, config: dict[str, Any]) -> Model:
            return MyModel(config)

        def transformers_model(self) -> Any:                                  # optional
            return MyForCausalLM(MyConfig(...)).eval()

The model runs on the numpy reference in float32, so no other backend need be installed; those that
are must agree with it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import numpy as np
import pytest
from vllmx_core.backend import Backend, LoadedModel, LoadOptions
from vllmx_core.errors import UnsupportedModelError, UnsupportedOpError
from vllmx_core.model import KVSpec, LatentKV, Model, SharedKV, StateSpec
from vllmx_core.ops.attention import Attention
from vllmx_core.ops.compress import Compress
from vllmx_core.ops.compressed_attention import CompressedAttention
from vllmx_core.ops.hyper_connections import HyperWrite
from vllmx_core.ops.indexer import Indexer
from vllmx_core.ops.latent_attention import LatentAttention
from vllmx_core.ops.recurrence import Recurrence
from vllmx_core.ops.route import Route
from vllmx_core.ops.short_conv import ShortConv
from vllmx_core.plan import F32
from vllmx_core.plugins.registry import load_registry
from vllmx_core.plugins.specs import BackendSpec
from vllmx_core.recorded.recording import record
from vllmx_core.reference.backend import ReferenceBackend, ReferenceLoadedModel
from vllmx_core.reference.formulas import Floats
from vllmx_core.weights.map import name_in
from vllmx_core.weights.spec import PartSpec, WeightSpec

from vllmx_testing.plans import Driver, Row, make_plan, sampling_rows
from vllmx_testing.synthetic import ArraySource

Shape = tuple[int, ...]

MAX_MODEL_LEN = 192
PAGE = 16
NUM_GREEDY_IDS = 64
"""The number of ids that are compared with those of transformers."""
MOST_LOGPROBS = 64
"""The number of listed log-probabilities that every backend must serve."""


class ModelSuite:
    """Override `config` and `make_model`, and what the architecture adds."""

    config: ClassVar[dict[str, Any]]
    """A tiny config.json; leave the sizes odd enough that a swapped axis shows."""
    bad_configs: ClassVar[Sequence[Mapping[str, Any]]] = ()
    """Changes to `config` that the model must refuse with UnsupportedModelError."""
    unused_tensors: ClassVar[Collection[str]] = ()
    """Tensors of the checkpoint that the weight map leaves out on purpose."""
    tolerance = 2e-5
    """Greatest error of logits relative to transformers' greatest logit, float32."""

    def make_model(self, config: dict[str, Any]) -> Model:
        """The architecture under test."""
        raise NotImplementedError("override make_model in the subclass")

    def transformers_model(self) -> Any:
        """The same architecture and config by Hugging Face transformers, in float32 and eval mode,
        with random weights; None: there is none."""
        return None

    def test_shape_says_what_the_config_says(self) -> None:
        shape = self.make_model(dict(self.config)).shape
        assert shape.vocab_size == self.config["vocab_size"]
        assert shape.hidden_size > 0
        assert shape.max_model_len > 0

    def test_weight_map_is_consistent(self) -> None:
        specs = self.make_model(dict(self.config)).weights()
        names = [spec.name for spec in specs]
        assert len(set(names)) == len(names), "a logical name is there twice"
        for spec in specs:
            assert spec.parts, f"{spec.name} has no part"
            assert all(part.rows > 0 for part in spec.parts), f"{spec.name} has an empty part"
            assert (spec.cols > 0) == (spec.kind != "vector"), f"cols of {spec.name}"
            assert not spec.offset or spec.kind == "vector", f"{spec.name}: offset of a matrix"
        tensor_shapes(self.make_model(dict(self.config)))

    def test_forward_is_recorded_and_uses_every_weight(self) -> None:
        model = self.make_model(dict(self.config))
        unused = record(model, MAX_MODEL_LEN).unused_weights
        assert not unused, f"forward never uses {sorted(unused)}"

    def test_attention_layers_match_the_kv_cache(self) -> None:
        model = self.make_model(dict(self.config))
        kinds = (Attention, LatentAttention, CompressedAttention)
        ops = record(model, MAX_MODEL_LEN).steps.ops
        layers = [op for op in ops if isinstance(op, kinds) and op.spec.layer is not None]
        indexed = {op.spec.layer: op.spec.head_size for op in ops if isinstance(op, Indexer)}
        caches = model.shape.caches
        assert [op.spec.layer for op in layers] == list(range(len(caches)))
        for op, kept in zip(layers, caches, strict=True):
            kv = caches[kept.layer] if isinstance(kept, SharedKV) else kept
            if isinstance(op, LatentAttention):
                row = LatentKV(op.spec.rank, op.spec.rotary_dim, indexed.get(op.spec.layer, 0))
                assert kv == row, f"layer {op.spec.layer}"
                continue
            if isinstance(op, CompressedAttention):
                rotary, keys = op.spec.rotary_dim, indexed.get(op.spec.layer or 0, 0)
                row = LatentKV(op.spec.head_size - rotary, rotary, keys, op.spec.ratio)
                assert kv == row, f"layer {op.spec.layer}"
                continue
            spec = op.spec
            assert isinstance(kv, KVSpec), f"layer {spec.layer} shares pages of one that has none"
            mine = (spec.num_kv_heads, spec.head_size, spec.window)
            assert mine == (kv.num_kv_heads, kv.head_size, kv.window), f"layer {spec.layer}"
        for rope in (op.rope for op in layers if op.rope is not None):
            assert rope.rows >= MAX_MODEL_LEN, f"{rope.name} ends at position {rope.rows}"

    def test_recurrent_layers_match_their_states(self) -> None:
        """Each state has one op that reads it, of its sizes."""
        model, found = self.make_model(dict(self.config)), dict[int, StateSpec]()
        for op in record(model, MAX_MODEL_LEN).steps.ops:
            if isinstance(op, ShortConv):
                state = StateSpec(1, op.spec.kernel - 1, op.x.width)
            elif isinstance(op, Recurrence):
                state = StateSpec(op.spec.num_heads, op.spec.key_size, op.spec.value_size)
            elif isinstance(op, Compress):
                state = StateSpec(op.spec.series, 3, op.spec.size)
            elif isinstance(op, CompressedAttention):
                state = StateSpec(1, op.spec.window - 1, op.spec.head_size)
            else:
                continue
            assert op.spec.state not in found, f"two ops have the state {op.spec.state}"
            found[op.spec.state] = state
        assert found == dict(enumerate(model.shape.states))

    def test_constants_are_float32(self) -> None:
        for name, table in self.make_model(dict(self.config)).constants(MAX_MODEL_LEN).items():
            assert table.dtype == np.float32, f"{name} is {table.dtype}"
            assert np.isfinite(table).all(), f"{name} is not finite"

    def test_bad_configs_are_refused(self) -> None:
        for change in self.bad_configs:
            with pytest.raises(UnsupportedModelError):
                self.make_model({**self.config, **change})

    @pytest.mark.parametrize("chunk", [1, 7])
    def test_chunks_do_not_change_the_logits(self, chunk: int) -> None:
        model = self.make_model(dict(self.config))
        source = random_weights(model)
        text = _text(model, 45)
        whole, chunked = _logits(model, source, text, 45), _logits(model, source, text, chunk)
        np.testing.assert_allclose(chunked, whole, rtol=0, atol=1e-4 * np.abs(whole).max())

    def test_positions_and_order_matter(self) -> None:
        """The last logits see every earlier token (inside the window, where there is one)."""
        model = self.make_model(dict(self.config))
        source = random_weights(model)
        windows = [kv.window or 9 for kv in model.shape.kv_specs]
        text = _text(model, min([9, *windows]))
        last = _logits(model, source, text, len(text))[-1]
        for position in range(len(text) - 1):
            changed = [*text]
            changed[position] = (text[position] + 1) % model.shape.vocab_size
            other = _logits(model, source, changed, len(text))[-1]
            assert np.abs(other - last).max() > 1e-6, f"position {position} has no effect"

    def test_installed_backends_agree_with_the_reference(self) -> None:
        """The logits in float32 are the same, and so are greedy ids wherever no other id is as
        near."""
        specs = load_registry().all(BackendSpec)
        able = [spec for spec in specs if spec.unavailable_reason() is None]
        self.check_backends({spec.name: spec.load()() for spec in able})

    def check_backends(
        self, backends: Mapping[str, Backend], chunks: Sequence[int] = (1, 7, 1 << 20)
    ) -> None:
        """Each of these backends agrees with the reference, whatever a text is cut into. One that
        refuses the model for an op that it lacks is passed over."""
        model = self.make_model(dict(self.config))
        suite: Callable[[], ModelSuite] = type(self)
        source, text, expected = _answered(suite)
        for name, backend in backends.items():
            try:
                loaded = backend.load(model, source, _options(kv_cache_dtype="f32", num_threads=1))
            except UnsupportedOpError:  # refused by name, which `BackendSuite` looks after
                continue
            with closing(loaded):
                for chunk in chunks:
                    case = f"{name}, chunk {chunk}"
                    self._check_logits(case, model, loaded, text, min(chunk, len(text)), expected)

    def _check_logits(
        self,
        case: str,
        model: Model,
        loaded: LoadedModel,
        text: Sequence[int],
        chunk: int,
        expected: Floats,
    ) -> None:
        """Compares the greedy id after each token of the text, and the log-probabilities of the top
        ids."""
        peak = np.abs(expected).max()
        logprobs = expected - np.logaddexp.reduce(expected, axis=-1, keepdims=True)
        best = np.sort(expected, axis=-1)
        clear = best[:, -1] - best[:, -2] > 1e-4 * peak
        for at in range(0, len(text), chunk):
            row = _row(model, text, at, chunk)
            count = len(row.tokens)
            rows = sampling_rows(count, num_logprobs=min(MOST_LOGPROBS, expected.shape[1]))
            result = loaded.step(make_plan([row], PAGE), rows).result()
            wanted = expected[at : at + count].argmax(-1)
            wrong = (result.ids != wanted) & clear[at : at + count]
            assert not wrong.any(), f"{case}: {result.ids} in place of {wanted} at {at}"
            assert result.logprobs is not None
            found = np.take_along_axis(logprobs[at : at + count], result.logprobs.top_ids, axis=1)
            error = np.abs(result.logprobs.top - found).max() / peak
            assert error < self.tolerance, f"{case}: relative error {error:.1e} at {at}"

    def test_equals_transformers(self) -> None:
        twin = self.transformers_model()
        if twin is None:
            pytest.skip("transformers_model gives none")
        model = self.make_model(dict(self.config))
        source = _saved(twin)
        self._check_names(model, source)
        text = _text(model, 40)
        expected = _transformers_logits(twin, text)
        for chunk in (1, 7, 40):
            error = np.abs(_logits(model, source, text, chunk) - expected).max()
            relative = error / np.abs(expected).max()
            assert relative < self.tolerance, f"chunk {chunk}: relative error {relative:.1e}"
        with _loaded(model, source) as loaded:
            ids = Driver(loaded).generate([text[:11]], NUM_GREEDY_IDS)[0]
        assert ids == _transformers_greedy(twin, text[:11], ids)

    def _check_names(self, model: Model, source: ArraySource) -> None:
        """The map takes every tensor of the checkpoint that was not named as unused."""
        parts = [part for spec in model.weights() for part in spec.parts]
        taken = {name_in(source, part) for part in parts} | tensor_shapes(model).keys()
        left = set(source.names()) - taken - set(self.unused_tensors)
        tied = {name for name in left if name.endswith("lm_head.weight")}
        assert not left - tied, f"the weight map leaves out {sorted(left - tied)}"


@functools.lru_cache(maxsize=1)
def _answered(suite: Callable[[], ModelSuite]) -> tuple[ArraySource, list[int], Floats]:
    """Weights, a text that ends in a greedy answer, and its logits by the reference, which takes
    longer than backends to compare: several calls of `check_backends` share them."""
    made = suite()
    model = made.make_model(dict(made.config))
    source = random_weights(model)
    with _loaded(model, source) as reference:
        text = [*_text(model, 23), *Driver(reference).generate([_text(model, 23)], 40)[0]]
    return source, text, _logits(model, source, text, len(text))


def random_weights(model: Model, seed: int = 0) -> ArraySource:
    """A checkpoint with the tensors of the model's map: vectors near their neutral value, matrices
    scaled so that activations keep their size."""
    random = np.random.default_rng(seed)
    centres = _centres(model)
    vectors = {
        part.name: centres.get(spec.name, 1.0) - spec.offset
        for spec in model.weights()
        if spec.kind == "vector"
        for part in spec.parts
    }
    arrays: dict[str, F32] = {}
    for name, shape in tensor_shapes(model).items():
        scale = shape[-1] ** -0.5 if len(shape) > 1 else 0.2
        values = random.standard_normal(shape) * scale + vectors.get(name, 0.0)
        arrays[name] = values.astype(np.float32)
    for name, experts in _expert_tables(model).items():
        arrays[name] = random.integers(0, experts, arrays[name].shape)  # type: ignore[assignment]
    return ArraySource(arrays)


def _expert_tables(model: Model) -> dict[str, int]:
    """The tensors that name experts for token ids, and the number of experts."""
    tensors = {spec.name: spec.parts[0].name for spec in model.weights()}
    return {
        tensors[op.table.name]: op.logits.width
        for op in record(model, MAX_MODEL_LEN).steps.ops
        if isinstance(op, Route) and op.table is not None
    }


def _centres(model: Model) -> dict[str, float]:
    """Neutral values of vectors that are not around one: states forget slowly."""
    found: dict[str, float] = {}
    for op in record(model, MAX_MODEL_LEN).steps.ops:
        if isinstance(op, Recurrence):
            found |= {op.a_log.name: -2.0, op.dt_bias.name: 0.0}
        elif isinstance(op, ShortConv):
            found[op.w.name] = 0.0
        elif isinstance(op, Compress | HyperWrite):
            found[op.bias.name] = 0.0
    return found


def _options(**more: Any) -> LoadOptions:
    return LoadOptions(
        dtype="f32",
        max_model_len=MAX_MODEL_LEN,
        block_size=PAGE,
        max_num_seqs=2,
        num_kv_blocks=2 * MAX_MODEL_LEN // PAGE,
        **more,
    )


def _row(model: Model, text: Sequence[int], at: int, chunk: int) -> Row:
    """The chunk of a text from `at` on; all texts live in one slot, where there are any."""
    state = 1 if model.shape.states else None
    return Row(text[at : at + chunk], at, _blocks(text), "all", state)


def _blocks(text: Sequence[int]) -> list[int]:
    return list(range(-(-len(text) // PAGE)))[::-1]


@contextmanager
def _loaded(model: Model, source: ArraySource) -> Iterator[ReferenceLoadedModel]:
    loaded = ReferenceBackend().load(model, source, _options())
    yield loaded
    loaded.close()


def _logits(model: Model, source: ArraySource, text: Sequence[int], chunk: int) -> Floats:
    """(T, V) logits of the text, fed in chunks."""
    with _loaded(model, source) as loaded:
        parts = [
            loaded.logits(make_plan([_row(model, text, at, chunk)], PAGE))
            for at in range(0, len(text), chunk)
        ]
    return np.concatenate(parts)


def _text(model: Model, length: int) -> list[int]:
    ids = np.random.default_rng(1).integers(0, model.shape.vocab_size, length)
    return [int(token) for token in ids]


def _saved(twin: Any) -> ArraySource:
    """Reads the weights from saved files, where experts have other names than in `state_dict`."""
    from safetensors.numpy import load_file

    with TemporaryDirectory() as folder:
        twin.save_pretrained(folder)
        return ArraySource(load_file(Path(folder) / "model.safetensors"))


def _transformers_logits(twin: Any, text: Sequence[int]) -> F32:
    import torch

    with torch.no_grad():
        logits: F32 = twin(torch.tensor([list(text)])).logits[0].float().numpy()
    return logits


def _transformers_greedy(twin: Any, prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
    """The id that transformers takes at each place of an answer, after the prompt and the answer up
    to there. It is the answer exactly where generating id by id gives the same, for that is so of
    the first id, hence of the second: one pass in place of one a token, and independent of any
    cache."""
    logits = _transformers_logits(twin, [*prompt, *answer[:-1]])
    ids: list[int] = logits[len(prompt) - 1 :].argmax(-1).tolist()
    return ids


def tensor_shapes(model: Model) -> dict[str, Shape]:
    """Checkpoint name -> shape; of a tensor that the map picks from, the smallest that has all that
    is picked. Raises AssertionError when two lines of the map disagree."""
    shapes: dict[str, Shape] = {}
    whole: dict[str, Shape] = {}
    for spec in model.weights():
        for part in spec.parts:
            for name, shape in _needed(spec, part):
                known = shapes.setdefault(name, shape)
                assert len(known) == len(shape), f"{name}: {shape}, {known}"
                shapes[name] = tuple(map(max, known, shape))
                if not _picks(part):
                    whole.setdefault(name, shape)
    for name, shape in whole.items():
        assert shapes[name] == shape, f"{name}: {shape}, {shapes[name]}"
    return shapes


def _picks(part: PartSpec) -> bool:
    return part.entry is not None or part.runs is not None or part.first_col is not None


def _needed(spec: WeightSpec, part: PartSpec) -> Iterator[tuple[str, Shape]]:
    if (shape := spec.shape_of(part)) is not None:
        yield part.name, shape
        return
    picked, cols = (spec.cols, part.rows) if part.turned else (part.rows, spec.cols)
    rows = picked if part.runs is None else int(part.runs.index(picked).max()) + 1
    lead = () if part.entry is None else (part.entry + 1,)
    cols += part.first_col or 0
    matrix = (cols, rows) if part.transposed else (rows, cols)
    yield part.name, (*lead, *((rows,) if spec.kind == "vector" else matrix))
    if part.bias is not None:
        yield part.bias, (*lead, rows)
