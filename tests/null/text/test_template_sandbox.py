"""Hostile templates fail quickly, with a typed error, and reach nothing."""

from __future__ import annotations

import time
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllmx_core.errors import TemplateError
from vllmx_engine.text.chat_template import ChatTemplate
from vllmx_engine.text.template_budget import TemplateLimits

LIMITS = TemplateLimits(
    max_chars=100_000, max_steps=20_000, max_cpu_s=0.5, max_made_chars=5_000_000
)
BIG = "{% set b = 'x' * 50000 %}"
DOUBLING = "{% set ns = namespace(s=START) %}{% for i in range(60) %}STEP{% endfor %}{{ ns.s }}"


def doubling(start: str, step: str) -> str:
    return DOUBLING.replace("START", start).replace("STEP", step)


TOO_LARGE = {
    "range": "{% for i in range(10**9) %}{% endfor %}",
    "nested loops": "{% for i in range(9000) %}{% for j in range(9000) %}{% endfor %}{% endfor %}",
    "filtered loop": (
        "{% for i in range(9000) %}{% for j in range(9000) if 0 %}{% endfor %}{% endfor %}"
    ),
    "recursive loop": "{% for x in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "branching macro": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "filter steps": "{% for i in range(9000) %}{{ range(900) | map('string') | list }}{% endfor %}",
    "repeat": "{{ 'a' * 10**10 }}",
    "repeat mirrored": "{{ 10**10 * 'a' }}",
    "repeat list": "{{ [1] * 10**10 }}",
    "repeat product": "{{ [messages] * 90000 }}",
    "power": "{{ 10 ** 100000 ** 3 }}",
    "constant power": "{% if 9 ** 9999999 %}{% endif %}",
    "squares": doubling("3", "{% set ns.s = ns.s * ns.s %}"),
    "join": doubling("'ab'", "{% set ns.s = ns.s ~ ns.s %}"),
    "add": doubling("'ab'", "{% set ns.s = ns.s + ns.s %}"),
    "set block": doubling("'ab'", "{% set x %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = x %}"),
    "list of lists": doubling("[1]", "{% set ns.s = [ns.s, ns.s] %}"),
    "tuple of tuples": doubling("(1,)", "{% set ns.s = (ns.s, ns.s) %}"),
    "dict of dicts": doubling("{}", "{% set ns.s = {'a': ns.s, 'b': ns.s} %}"),
    "dict call": doubling("[1]", "{% set ns.s = dict(a=ns.s, b=ns.s) %}"),
    "views": "{% set d = {'a': 'x' * 9999} %}{{ [d.items()] * 90 }}",
    "deep list": doubling("[1]", "{% set ns.s = [[[ns.s]]] %}"),
    "center": "{{ 'a'.center(10**9) }}",
    "center filter": "{{ 'a' | center(10**9) }}",
    "ljust": "{{ 'a'.ljust(10**9) }}",
    "zfill": "{{ 'a'.zfill(10**9) }}",
    "format": "{{ '{:>1000000000}'.format(1) }}",
    "format nested": "{{ '{:{}}'.format(1, 10**9) }}",
    "format repeated": BIG + "{{ ('{0}' * 9000).format(b) }}",
    "format_map": "{{ '{a:>1000000000}'.format_map({'a': 1}) }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (10**9, 1) }}",
    "percent precision": "{{ '%.1000000000f' % 1.5 }}",
    "percent mapping": BIG + "{{ ('%(a)s' * 9000) % {'a': b} }}",
    "format filter": "{{ '%1000000000d' | format(1) }}",
    "replace": BIG + "{{ b.replace('x', b) }}",
    "replace empty": BIG + "{{ b | replace('', b) }}",
    "join method": BIG + "{{ b.join([b] * 2) }}",
    "join characters": BIG + "{{ b.join(b) }}",
    "join filter": BIG + "{{ [1, 2, 3, 4] | join(b) }}",
    "strip": BIG + "{{ b.strip(b) }}",
    "trim": BIG + "{{ b | trim(b) }}",
    "indent": "{{ ('\\n' * 9000) | indent(10**6) }}",
    "indent text": BIG + "{{ ('\\n' * 9000) | indent(b) }}",
    "tojson indent": "{{ [1] | tojson(indent=10**9) }}",
    "tojson separators": BIG + "{{ ([1] * 9000) | tojson(separators=(b, ':')) }}",
    "slice": "{{ [] | slice(10**9) | list }}",
    "batch": "{{ [1] | batch(10**9, 1) | list }}",
    "sum of lists": "{{ ([[1] * 10] * 900) | sum(start=[]) }}",
    "round": "{{ 1.5 | round(10**9, 'ceil') }}",
    "huge number": "{{ ('f' * 50000) | int(base=16) }}",
    "output": BIG + "{% for i in range(9000) %}{{ b }}{% endfor %}",
    "macro output": BIG + "{% set y %}{% for i in range(9000) %}{{ b }}{% endfor %}{% endset %}",
    "literal output": (
        "{% set y %}{% for i in range(9000) %}" + "y" * 9000 + "{% endfor %}{% endset %}"
    ),
    "variables": "".join(f"{{% set v{i} = 'x' * 90000 %}}" for i in range(100)),
    "filter block": BIG + "{% filter replace('x', b) %}{{ b }}{% endfilter %}",
    "date": "{{ strftime_now('%9999999999d') }}",
    "deep source": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep blocks": "{% for x in [1] %}" * 60 + "{% endfor %}" * 60,
}

FORBIDDEN = {
    "class": "{{ ''.__class__.__mro__ }}",
    "subclasses": "{{ messages.__class__.__base__.__subclasses__() }}",
    "attr filter": "{{ (messages | attr('__class__')).mro() }}",
    "globals": "{{ raise_exception.__globals__['__builtins__'] }}",
    "environment": "{{ self._TemplateReference__context.environment }}",
    "format attribute": "{{ '{0.__class__.__mro__}'.format(1) }}",
    "namespace": "{% set ns = namespace(__class__=1) %}",
    "append": "{{ messages.append(1) }}",
    "bytes": "{{ (5).to_bytes(9, 'big') }}",
    "encode": "{{ 'a'.encode() }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}",
    "extends": "{% extends 'x' %}",
    "lipsum": "{{ lipsum.__globals__ }}",
    "unknown function": "{{ open('x') }}",
    "unknown filter": "{{ 1 | nope }}",
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_bounds(name: str) -> None:
    tracemalloc.start()
    start = time.thread_time()
    try:
        with pytest.raises(TemplateError, match="chat template"):
            ChatTemplate(TOO_LARGE[name], limits=LIMITS).render([{"role": "user", "content": "x"}])
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert time.thread_time() - start < 5
    assert peak_bytes < 64 << 20


@pytest.mark.parametrize("name", FORBIDDEN)
def test_sandbox(name: str) -> None:
    with pytest.raises(TemplateError, match="chat template") as caught:
        ChatTemplate(FORBIDDEN[name], limits=LIMITS).render([{"role": "user", "content": "x"}])
    assert "object at 0x" not in str(caught.value)


def test_cpu_time_is_bounded() -> None:
    limits = TemplateLimits(max_cpu_s=0.2)
    source = "{% for i in range(99999) %}{{ (range(9999) | list | sort)[0] }}{% endfor %}"
    with pytest.raises(TemplateError, match=r"takes more than 0\.2 s of CPU time"):
        ChatTemplate(source, limits=limits).render([{"role": "user", "content": "x"}])


def test_errors_of_python_do_not_leak() -> None:
    template = ChatTemplate("{% set x = 1 %}\n{{ x + 'a' }}")
    with pytest.raises(TemplateError) as caught:
        template.render([{"role": "user", "content": "x"}])
    assert str(caught.value) == "the chat template fails on this conversation: TypeError (line 2)"


def test_syntax_error_names_the_line() -> None:
    with pytest.raises(TemplateError, match=r"cannot be compiled: .* \(line 2\)"):
        ChatTemplate("ok\n{% if %}")


def test_limits_hold_for_each_rendering_anew() -> None:
    template = ChatTemplate("{% for i in range(400) %}x{% endfor %}", limits=LIMITS)
    for _ in range(200):
        assert len(template.render([{"role": "user", "content": "x"}])) == 400


# fmt: off
TOKENS = st.sampled_from([
    "{{", "}}", "{%", "%}", "for", "if", "set", "in", "x", "messages", "[0]", ".content", "~",
    "+", "*", "9", "99999", "'a'", "|", "join", "list", "tojson", "(", ")", ",", "endfor",
    "endif", "macro", "f", "endmacro", "range", "namespace", "[", "]", "{", "}", ":", "**", "%",
    "replace", "center", "format", "not", "is",
])
# fmt: on


@given(st.lists(TOKENS, max_size=25).map(" ".join))
@settings(max_examples=150)
def test_any_source_renders_or_is_refused(source: str) -> None:
    try:
        prompt = ChatTemplate(source, limits=LIMITS).render([{"role": "user", "content": "x"}])
    except TemplateError:
        return
    assert len(prompt) <= LIMITS.max_chars
