"""Names, globs and regular expressions of modules."""

from __future__ import annotations

import time

import pytest
from vllmx_core.errors import UnsupportedModelError
from vllmx_models.quantization.modules import MAX_PATTERN_LENGTH, ModulePatterns


@pytest.mark.parametrize(
    ("pattern", "module", "expected"),
    [
        ("lm_head", "lm_head", True),
        ("lm_head", "model.lm_head", True),
        ("lm_head", "lm_head2", False),
        ("mlp.gate", "model.layers.3.mlp.gate", True),
        ("mlp.gate", "model.layers.3.mlp.gate_proj", False),
        ("gate", "model.layers.3.mlp.up_gate", False),
        ("model.layers.1", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1", "model.layers.10.mlp.up_proj", False),
        ("mlp.gate.", "a.mlp.gate", True),
        ("", "a", False),
        (".", "a", False),
        ("model.layers.*.self_attn", "model.layers.0.self_attn.q_proj", True),
        ("model.layers.*.self_attn", "model.layers.0.self_attn2", False),
        ("model.layers.0*", "model.layers.0.mlp.up", True),
        ("model.layers.1.*", "model.layers.1.mlp.up", True),
        ("model.layers.1.*", "model.layers.10.mlp.up", False),
        ("*.attn.*", "layers.3.attn.wq", True),
        ("x?", "a.xy.b", True),
        ("x?", "a.xyz.b", False),
        ("re:.*self_attn.*", "model.layers.0.self_attn.q_proj", True),
        ("re:self_attn.*", "model.layers.0.self_attn.q_proj", False),
        (r"re:.*mlp\.(gate|up|down)_proj", "model.layers.2.mlp.up_proj", True),
        (r"re:.*mlp\.(gate|up|down)_proj", "model.layers.2.mlp.experts.1.up_proj", False),
    ],
)
def test_what_a_pattern_means(pattern: str, module: str, expected: bool) -> None:
    assert ModulePatterns([pattern], "test").match(module) is expected


def test_a_list_means_all_of_its_patterns() -> None:
    patterns = ModulePatterns(["lm_head", "*.norm", "re:x"], "test")
    modules = ("lm_head", "a.norm", "x.y", "a.b")
    assert [patterns.match(m) for m in modules] == [True, True, True, False]
    assert not ModulePatterns([], "test").match("lm_head")


@pytest.mark.parametrize(
    "pattern",
    ["re:(a+)+$", "re:(a|a)*b", "re:(a*){9}", "re:" + "a*" * 7, "re:" + ".{1,}" * 7, "*" * 7,
     "re:" + "a" * (MAX_PATTERN_LENGTH + 1), "*" + "a" * MAX_PATTERN_LENGTH],
)  # fmt: skip
def test_patterns_that_could_hang_are_refused(pattern: str) -> None:
    with pytest.raises(UnsupportedModelError, match=r"quantization_config.*may take too long"):
        ModulePatterns([pattern], "quantization_config")


@pytest.mark.parametrize("pattern", ["re:(", "re:[", "re:*a", "re:a{2,1}", r"re:\8"])
def test_no_regular_expression(pattern: str) -> None:
    with pytest.raises(UnsupportedModelError, match="no regular expression"):
        ModulePatterns([pattern], "test")


def test_the_worst_allowed_pattern_ends_soon() -> None:
    patterns = ModulePatterns(["re:" + ".*a" * 6 + "$"], "test")
    start = time.perf_counter()
    assert not patterns.match("a" * 50 + "b")
    assert time.perf_counter() - start < 20
