"""Names, globs and regular expressions of modules."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllmx_core.errors import UnsupportedModelError
from vllmx_models.quantization.modules import ModulePatterns
from vllmx_models.quantization.patterns import MAX_PATTERN_LENGTH, Pattern


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
    "pattern", ["re:" + "a" * (MAX_PATTERN_LENGTH + 1), "*" + "a" * MAX_PATTERN_LENGTH]
)
def test_long_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(UnsupportedModelError, match=r"quantization_config.*at most 1000"):
        ModulePatterns([pattern], "quantization_config")


@pytest.mark.parametrize(
    "pattern",
    ["(", "[", "*a", "a{2,1}", r"\8", r"(a)\1", "(?>a)b", "a++", "(?m)^a", "(?i:a)", "(" * 400],
)
def test_no_regular_expression_that_is_known(pattern: str) -> None:
    with pytest.raises(UnsupportedModelError, match="not a regular expression"):
        ModulePatterns(["re:" + pattern], "test")


@pytest.mark.parametrize(
    "pattern",
    ["(a+)+b", "(a|a)*b", "(a|a)?" * 40 + "b", "(a|a)" * 40 + "b", "a?" * 60 + "a" * 61, "(a*){9}b",
     ".*a" * 12 + "b", ".{0,99}" * 9 + "b", "(((((a|b)*c)*d)*e)*f)*x", "(?=(a*)*b)a", "(" * 90 + "a"
     + "*)" * 90 + "b", "(a{1,4000000000}){4000000000}b"],
)  # fmt: skip
def test_no_pattern_takes_long(pattern: str) -> None:
    """Most of these keep `re` busy for years."""
    patterns = ModulePatterns(["re:" + pattern], "test")
    start = time.process_time()
    for _ in range(10):
        assert not patterns.match("a" * 60)
    assert time.process_time() - start < 5


def test_a_match_that_takes_too_long_is_an_error() -> None:
    many = ModulePatterns(["re:" + "(a?){900}" * 90 + "b"], "quantization_config")
    with pytest.raises(UnsupportedModelError, match="takes too long on 'aaa"):
        many.match("a" * 900)
    with pytest.raises(UnsupportedModelError, match="10000 characters of at most 1000"):
        ModulePatterns(["re:a"], "test").match("a" * 10000)


ATOMS = st.sampled_from(
    ["a", "b", ".", r"\.", "[ab]", "[^a]", r"\d", r"\W", "[a-c.]", "^", "$", r"\b", r"\B", r"\A"]
)
EXPRESSIONS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda ways: f"(?:{'|'.join(ways)})"),
        st.tuples(
            inner, st.sampled_from(["*", "+", "?", "*?", "{2}", "{1,2}", "{0,}", "{2,3}?"])
        ).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
        st.tuples(st.sampled_from("=!"), inner).map(lambda pair: f"(?{pair[0]}{pair[1]})"),
        st.sampled_from(["(?<=a)", "(?<!b)", "(?<=a.)", "(?<![ab]c)", "(a)", "(?P<x>b)"]),
    ),
    max_leaves=8,
)


@settings(max_examples=400)
@given(
    expression=EXPRESSIONS,
    flags=st.sampled_from(["", "", "(?i)", "(?s)"]),
    name=st.text("abcA.1\n", max_size=9),
)
def test_a_match_is_that_of_re(expression: str, flags: str, name: str) -> None:
    try:
        expected = re.compile(flags + expression)
    except re.error:  # a group's name twice
        return
    assert Pattern(flags + expression, "test").match(name) == bool(expected.match(name))
