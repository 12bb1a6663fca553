"""A layout that nothing else knows: one class is enough to load it, whole and in ranks' shares."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

import numpy as np
import pytest
import vllmx_core
from vllmx_core.backend import LoadOptions
from vllmx_core.plan import F32
from vllmx_core.plugins.registry import load_registry
from vllmx_core.plugins.specs import BackendSpec
from vllmx_core.weights.part import Layout, StoredPart, WeightPart
from vllmx_core.weights.spec import RankShare
from vllmx_core.weights.tensor import RawTensor
from vllmx_core.weights.views import share_of
from vllmx_testing.plans import Row, make_plan
from vllmx_testing.step_checks import VOCAB, all_logprobs, decoder
from vllmx_testing.synthetic import ArraySource

REGISTRY = load_registry()
PAGE = 16
MOST_FILES = 6
"""Of a new layout: itself, its forms on the CPU, CUDA and Metal, and two tests."""


class Squares(Layout):
    """One signed byte a weight: the square of code / 64, with the code's sign."""

    kind = "squares"

    def decode(self, part: StoredPart, begin: int, end: int) -> F32:
        codes = part.buffers["weight"].rows(begin, end).to_f32()
        return codes * np.abs(codes) / np.float32(4096)


class SquaresSource:
    """Matrices of a source as squares."""

    def __init__(self, source: ArraySource) -> None:
        self._source = source

    def names(self) -> Collection[str]:
        return self._source.names()

    def part(self, name: str) -> WeightPart:
        part = self._source.part(name)
        if len(part.shape) == 1:
            return part
        values = part.dequantize()
        codes = np.rint(np.sign(values) * np.sqrt(np.abs(values)) * 64).clip(-127, 127)
        data = codes.astype(np.int8).reshape(-1).view(np.uint8)
        return StoredPart(
            name, part.shape, Squares(8), {"weight": RawTensor(name, "i8", part.shape, data)}
        )

    def close(self) -> None:
        self._source.close()


@pytest.mark.parametrize("name", ["numpy", "cpu"])
def test_a_new_layout_loads_by_its_decode(name: str) -> None:
    spec = REGISTRY.get(BackendSpec, name)
    if spec.unavailable_reason() is not None:
        pytest.skip(f"the backend {name} does not run here")
    model, source = decoder()
    squares = SquaresSource(source)
    twin = ArraySource({each: squares.part(each).dequantize() for each in source.names()})
    plan = make_plan([Row(list(range(18)), 0, [0, 1], "all")], PAGE)
    results = []
    for weights in (squares, twin):
        options = LoadOptions(dtype="f32", max_model_len=64, num_kv_blocks=8, max_num_seqs=2)
        loaded = spec.load()().load(model, weights, options)
        results.append(all_logprobs(loaded, plan, VOCAB))
        loaded.close()
    np.testing.assert_array_equal(*results)


def test_ranks_share_a_new_layout() -> None:
    codes = np.arange(48, dtype=np.uint8).reshape(6, 8)
    raw = RawTensor("w", "i8", codes.shape, codes.reshape(-1))
    part = StoredPart("w", codes.shape, Squares(8, 4), {"weight": raw})
    share = share_of(part, RankShare(6, 8, ((0, 2), (4, 5)), (4, 8)))
    np.testing.assert_array_equal(share.dequantize(), part.dequantize()[[0, 1, 4], 4:])
    assert share.layout == part.layout


def test_few_files_know_a_layout() -> None:
    packages = Path(vllmx_core.__file__).parents[3]
    files = [path.read_text() for path in packages.rglob("src/**/*.py")]
    kinds = {
        kind for text in files for kind in re.findall(r'kind: ClassVar\[str\] = "(\w+)"', text)
    }
    assert len(kinds) > 8
    for kind in kinds:
        asks = re.compile(rf'layout\.kind (?:==|!=|in \(.*) ?"{kind}"')
        knows = sum(
            bool(asks.search(text)) or f'kind: ClassVar[str] = "{kind}"' in text for text in files
        )
        assert knows + 2 <= MOST_FILES, kind
