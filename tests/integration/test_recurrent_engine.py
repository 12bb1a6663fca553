"""Models with recurrent layers behind the whole engine core: answers do not depend on what was
found, on chunks, on preemption or on who else was there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from vllmx_core.backend import Backend, LoadOptions
from vllmx_core.config import EngineConfig
from vllmx_core.errors import UnsupportedOpError
from vllmx_core.model import Array, AttentionSpec, Ops, ShortConvSpec, StepInputs, Weight
from vllmx_core.sampling import SamplingParams
from vllmx_engine.core.drafters import NgramDrafter
from vllmx_engine.core.engine_core import EngineCore
from vllmx_engine.core.speculation import Drafting
from vllmx_engine.wire.messages import CoreRequest, pack_ids
from vllmx_testing.state_checks import recurrent_model
from vllmx_testing.synthetic import ArraySource, Builder, SyntheticModel

from tests.partly_wrong import PartlyWrong
from tests.usable_backends import backend_spec

VOCAB, SIZE, HIDDEN = 19, 16, 24
MakeModel = Callable[[], tuple[SyntheticModel, ArraySource]]


def text(length: int, seed: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(0, VOCAB, length).tolist()
    return found


SYSTEM = text(45, 0)
PROMPTS = [[*SYSTEM, *text(length, length)] for length in (9, 20, 3)]


def hybrid_model() -> tuple[SyntheticModel, ArraySource]:
    """Convolutions and attention in turn, one attention layer of them with a window."""
    builder = Builder(VOCAB, seed=3)
    builder.embedding("embed", HIDDEN)
    layers = []
    for layer, window in enumerate((None, 21)):
        spec = AttentionSpec(layer, 2, 1, 8, 8**-0.5, window=window)
        builder.attention(spec)
        conv = ShortConvSpec(builder.state(1, 3, HIDDEN), 4, None)
        layers.append((conv, spec))
        builder.vector(f"{layer}.taps", HIDDEN * conv.kernel, centre=0.3, spread=0.5)
        builder.linear(f"{layer}.qkv", 32, HIDDEN)
        builder.linear(f"{layer}.out", HIDDEN, 16)
    builder.linear("head", VOCAB, HIDDEN)

    def body(ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> Array:
        x = ops.embedding(step.tokens, w["embed"])
        for layer, (conv, spec) in enumerate(layers):
            x = ops.short_conv(x, w[f"{layer}.taps"], conv, step)
            y = ops.attention(ops.linear(x, w[f"{layer}.qkv"]), spec, step)
            x = ops.add(x, ops.linear(y, w[f"{layer}.out"]))
        return ops.logits(x, step.logit_rows, w["head"])

    return builder.build(HIDDEN, body), ArraySource(builder.arrays)


MODELS: dict[str, tuple[MakeModel, int]] = {
    "recurrent": (recurrent_model, 9),
    "hybrid": (hybrid_model, 16),
}
"""How each is made, and so few blocks that four sequences do not fit into them."""


class Engine:
    """A core over a backend, and what it answered."""

    def __init__(self, backend: Backend, make_model: MakeModel, **config: Any) -> None:
        wanted: dict[str, Any] = {
            "block_size": SIZE,
            "max_num_batched_tokens": 64,
            "max_num_seqs": 4,
            "num_kv_blocks": 400,
            "num_state_slots": 10,
            "state_snapshot_tokens": 1,
        }
        wanted |= config
        model, source = make_model()
        names = LoadOptions.__slots__
        options = {name: value for name, value in wanted.items() if name in names}
        dtype = "f64" if backend.name == "numpy" else "f32"
        loaded = backend.load(
            model, source, LoadOptions(dtype, max_model_len=128, group_caches=True, **options)
        )
        self.core = EngineCore(loaded, EngineConfig(**wanted), max_model_len=128, vocab_size=VOCAB)
        self.ids: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}

    def add(self, prompt: Sequence[int], max_tokens: int = 12, **fields: Any) -> str:
        name = f"r{len(self.ids)}"
        self.ids[name] = []
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        self.core.add(
            CoreRequest(
                request_id=name,
                prompt=pack_ids(prompt),
                params=params,
                max_tokens=max_tokens,
                seed=0,
                **fields,
            )
        )
        return name

    def step(self) -> None:
        for output in self.core.step():
            assert output.error is None, output.error
            self.ids[output.request_id] += output.ids
            if output.num_cached_tokens:
                self.cached[output.request_id] = output.num_cached_tokens

    def run(self) -> None:
        while self.core.has_work:
            self.step()
        states = self.core._scheduler.states
        assert states is not None
        states.check()
        assert self.core.stats().num_used_slots == 0

    def answer(self, prompt: Sequence[int], max_tokens: int = 12) -> tuple[list[int], int]:
        """The ids of an answer, and how many tokens of the prompt came from the cache."""
        name = self.add(prompt, max_tokens)
        self.run()
        return self.ids[name], self.cached.get(name, 0)


Make = Callable[..., Engine]


@pytest.fixture(scope="module", params=["numpy", "cpu", "torch", "metal"])
def backend(request: pytest.FixtureRequest) -> Backend:
    spec = backend_spec(request.param)
    found: Backend = spec.load()()
    return found


@pytest.fixture(scope="module", params=MODELS)
def make(request: pytest.FixtureRequest, backend: Backend) -> Iterator[Make]:
    engines: list[Engine] = []

    if backend.name == "torch" and request.param == "hybrid":
        pytest.skip("slow, and the backends before show it")
    make_model, few_blocks = MODELS[request.param]

    def make_engine(*, short_of_blocks: bool = False, **config: Any) -> Engine:
        if short_of_blocks:
            config["num_kv_blocks"] = few_blocks
        try:
            engines.append(Engine(backend, make_model, **config))
        except UnsupportedOpError as error:
            pytest.skip(str(error))
        return engines[-1]

    yield make_engine
    for engine in engines:
        engine.core.close()


@pytest.fixture(scope="module")
def expected(make: Make) -> list[list[int]]:
    """What the prompts are answered with where nothing is ever found."""
    engine = make(enable_prefix_caching=False, async_scheduling=False)
    return [engine.answer(prompt)[0] for prompt in PROMPTS]


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_answers_do_not_depend_on_what_is_found(
    make: Make, expected: list[list[int]], chunk: int
) -> None:
    """The first request leaves nothing behind the system prompt, the second finds blocks without
    states and leaves some there, the third begins with them; then each finds its own."""
    engine = make(max_num_batched_tokens=chunk)
    found = [engine.answer(prompt) for prompt in PROMPTS]
    assert [ids for ids, _ in found] == expected
    shared = len(SYSTEM) // SIZE * SIZE
    if chunk == 64:  # smaller chunks leave states at their ends too, until the next one's are there
        assert [cached for _, cached in found] == [0, 0, shared]
    again = [engine.answer(prompt) for prompt in PROMPTS]
    assert [ids for ids, _ in again] == expected
    assert [cached for _, cached in again] == [
        (len(prompt) - 1) // SIZE * SIZE for prompt in PROMPTS
    ]


def test_a_second_turn_goes_on_behind_the_first(make: Make) -> None:
    engine, plain = make(), make(enable_prefix_caching=False)
    prompt = PROMPTS[0]
    for turn, cached in enumerate([0, 64, 80]):
        ids, hit = engine.answer(prompt, 14)
        assert (ids, hit) == (plain.answer(prompt, 14)[0], cached), turn
        prompt = [*prompt, *ids, turn, 5]


def test_rows_side_by_side_preempted_and_aborted(make: Make, expected: list[list[int]]) -> None:
    """Blocks are so few that rows give theirs up in the middle."""
    engine = make(short_of_blocks=True)
    names = [engine.add(prompt, 50, client=str(i)) for i, prompt in enumerate(PROMPTS)]
    gone = engine.add(text(60, 9), 30)
    for _ in range(4):
        engine.step()
    engine.core.abort([gone])
    engine.run()
    assert [engine.ids[name][:12] for name in names] == expected
    assert engine.core.stats().num_preemptions > 0


@pytest.mark.parametrize("drafter", ["ngram", "partly wrong"])
@pytest.mark.parametrize("count", [2, 7])
def test_drafts_change_no_answer(
    make: Make, expected: list[list[int]], drafter: str, count: int
) -> None:
    """Rows side by side, then each again behind what the first ones left."""
    engine = make(num_state_slots=40)
    source = NgramDrafter() if drafter == "ngram" else PartlyWrong(PROMPTS, expected)
    engine.core.draft_with(Drafting(source, count))
    for _ in range(2):
        names = [engine.add(prompt) for prompt in PROMPTS]
        engine.run()
        assert [engine.ids[name] for name in names] == expected
    assert [engine.cached[name] for name in names] == [
        (len(prompt) - 1) // SIZE * SIZE for prompt in PROMPTS
    ]
    stats = engine.core.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


def test_choices_share_the_states_of_their_prompt(make: Make, expected: list[list[int]]) -> None:
    engine = make()
    leader = engine.add(PROMPTS[1])
    others = [engine.add(PROMPTS[1], leader=leader) for _ in range(2)]
    engine.run()
    assert [engine.ids[name] for name in (leader, *others)] == [expected[1]] * 3
    assert [engine.cached[name] for name in others] == [64, 64]
