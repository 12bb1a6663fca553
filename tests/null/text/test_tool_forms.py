"""Tools as OpenAI's schema allows them, and past calls, in every chat template at hand."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from vllmx_core.errors import TemplateError
from vllmx_engine.text.chat_template import ChatTemplate
from vllmx_engine.text.template_budget import TemplateLimits

from .test_chat_template import MARKS, SOURCES, assistant, user

STRING = {"type": "string", "description": "x"}
FULL = {"type": "object", "properties": {"a": STRING}, "required": ["a"]}


def one(schema: Any, **fields: Any) -> dict[str, Any]:
    """Parameters with one property."""
    return {
        "description": "d",
        "parameters": {"type": "object", "properties": {"a": schema}, **fields},
    }


FUNCTIONS: dict[str, dict[str, Any]] = {
    "nothing but a name": {},
    "no description": {"parameters": FULL},
    "no parameters": {"description": "d"},
    "nulls": {"description": None, "parameters": None, "strict": None},
    "empty parameters": {"description": "d", "parameters": {}},
    "no properties": {"description": "d", "parameters": {"type": "object"}},
    "no type": {"description": "d", "parameters": {"properties": {"a": STRING}}},
    "types at the top": {"description": "d", "parameters": {**FULL, "type": ["object", "null"]}},
    "alternatives at the top": {"description": "d", "parameters": {"anyOf": [FULL]}},
    "required null": one(STRING, required=None),
    "property without description": one({"type": "string"}),
    "property with a null description": one({"type": "string", "description": None}),
    "property without type": one({"description": "x"}),
    "empty property": one({}),
    "property that is true": one(True),
    "types": one({"type": ["string", "null"], "description": "x"}),
    "many types": one({"type": ["null", "integer", "array"], "items": {"type": ["string"]}}),
    "enum of integers": one({"type": "integer", "enum": [1, 2], "default": 1, "description": "x"}),
    "enum with null": one({"type": ["string", "null"], "enum": ["a", None], "default": None}),
    "enum without type": one({"enum": [1, "a", None, True]}),
    "enum of booleans": one({"type": "boolean", "enum": [True], "default": True}),
    "const": one({"const": 3}),
    "anyOf": one({"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}),
    "oneOf": one({"oneOf": [{"type": "string"}, {"type": "integer", "enum": [1]}]}),
    "reference": one({"$ref": "#/$defs/x"}, **{"$defs": {"x": {"type": "string"}}}),
    "array of anything": one({"type": "array"}),
    "array of what is empty": one({"type": "array", "items": {}}),
    "array of what is true": one({"type": "array", "items": True}),
    "tuple": one({"type": "array", "prefixItems": [{"type": "string"}], "items": False}),
    "array of objects": one(
        {"type": "array", "items": {"type": "object", "properties": {"x": {"enum": [1, 2]}}}}
    ),
    "object": one({"type": "object"}),
    "object in an object": one({"type": "object", "properties": {"x": {"type": ["integer"]}}}),
    "closed object": one({"type": "object", "additionalProperties": False, "properties": {}}),
    "map": one({"type": "object", "additionalProperties": {"type": "string"}}),
    "number": one({"type": "number", "default": 1.5, "minimum": 0}),
    "list by default": one({"type": "array", "items": {"type": "string"}, "default": ["a"]}),
    "object by default": one({"type": "object", "default": {"a": 1}}),
}
TOOLS = {
    name: {"type": "function", "function": {"name": "f1", **function}}
    for name, function in FUNCTIONS.items()
}
# Its macros read the variable of a loop around them, which no Jinja lets them do.
WITHOUT_TOOLS = "MiroThinker"


DIFFERENT = {path.read_text(): name for name, path in SOURCES.items()}.values()


@pytest.mark.parametrize("name", [name for name in DIFFERENT if not name.endswith(WITHOUT_TOOLS)])
def test_every_template_takes_every_tool(name: str) -> None:
    template = ChatTemplate(SOURCES[name].read_text(), MARKS)
    plain = {"type": "function", "function": {"name": "f1", "description": "d", "parameters": FULL}}
    tells = "f1" in template.render([user("hi")], [plain])
    for tool in TOOLS.values():
        assert ("f1" in template.render([user("hi")], [tool])) == tells


@pytest.mark.parametrize(
    ("source", "name", "shown"),
    [
        ("{{ tools[0].function.description + '!' }}", "no description", "!"),
        ("{{ 'is ' + tools[0].function.description }}", "nulls", "is "),
        ("{{ tools[0].function.parameters.properties | length + 1 }}", "no parameters", "1"),
        ("{{ 'n' + tools[0].function.parameters.properties.a.type }}", "types", "nstring"),
        ("{{ 'n' + tools[0].function.parameters.properties.a.type }}", "anyOf", "nstring"),
        (
            "{% for e in tools[0].function.parameters.properties.a.enum %}{{ '<' + e }}"
            "{% endfor %}{{ tools[0].function.parameters.properties.a.type }}",
            "enum of integers",
            "<1<2integer",
        ),
        (
            "{{ tools | map(attribute='function') | tojson }}",
            "nothing but a name",
            '[{"name": "f1"}]',
        ),
    ],
)
def test_a_tool_is_made_simpler_only_as_far_as_the_template_needs(
    source: str, name: str, shown: str
) -> None:
    assert ChatTemplate(source).render([user("hi")], [TOOLS[name]]) == shown


def test_what_renders_is_left_as_it_is() -> None:
    """But for fields that are null, which count as left out."""
    template = ChatTemplate("{{ tools | tojson }}")
    for name, tool in TOOLS.items():
        if name in ("nulls", "required null"):
            continue
        assert json.loads(template.render([user("hi")], [tool])) == [tool]
    nulls = {
        "description": None,
        "parameters": {"type": "object", "required": None},
        "strict": None,
    }
    tool = {"type": "function", "function": {"name": "f", **nulls}}
    bare = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    assert json.loads(template.render([user("hi")], [tool])) == [bare]


def test_the_first_error_is_told_and_tries_share_their_time() -> None:
    refusing = ChatTemplate("{{ raise_exception('no ' ~ tools[0].function.description) }}")
    with pytest.raises(TemplateError, match=r"refuses the conversation: no $"):
        refusing.render([user("hi")], [TOOLS["nothing but a name"]])
    slow = "{% for i in range(99999) %}{% for j in range(99999) %}{{ i }}{% endfor %}{% endfor %}"
    limits = TemplateLimits(max_cpu_s=0.2, max_steps=1 << 40)
    started = time.thread_time()
    with pytest.raises(TemplateError, match="CPU time"):
        ChatTemplate(slow, limits=limits).render([user("hi")], [TOOLS["nulls"]])
    assert time.thread_time() - started < 5


ARGUMENTS = {"city": 'Par"is <&> Köln', "n": [1, 2.5, None, True]}
CALL_ID = "abcdefgh1"


def call_round(arguments: Any) -> list[dict[str, Any]]:
    function = {"name": "get_weather", "arguments": arguments}
    calls = [{"id": CALL_ID, "type": "function", "function": function}]
    result = {"role": "tool", "tool_call_id": CALL_ID, "name": "get_weather", "content": "21"}
    return [user("Weather?"), assistant("", tool_calls=calls), result]


def whole_calls(prompt: str) -> list[Any]:
    """Every JSON object in a prompt that has the arguments, as an object, under a name."""
    decoder, found, at = json.JSONDecoder(), [], prompt.find("{")
    while at >= 0:
        try:
            value = decoder.raw_decode(prompt, at)[0]
        except ValueError:
            value = None
        if isinstance(value, dict) and ARGUMENTS in (*value.values(), value):
            found.append(value)
        at = prompt.find("{", at + 1)
    return found


@pytest.mark.parametrize("name", DIFFERENT)
def test_past_calls_are_written_as_json(name: str) -> None:
    """Also where a template spoils objects, or JSON text."""
    template = ChatTemplate(SOURCES[name].read_text(), MARKS)
    forms = (ARGUMENTS, json.dumps(ARGUMENTS, ensure_ascii=False))
    try:
        prompts = [template.render(call_round(form), [TOOLS["types"]]) for form in forms]
    except TemplateError:
        return
    assert prompts[0] == prompts[1]
    for escape in ("&#34;", "&lt;", str(ARGUMENTS), r"{\"city\""):
        assert escape not in prompts[0].rpartition("Weather?")[2]
    if "mistral" in name and "nemo" not in name.lower():
        (found,) = [each for each in whole_calls(prompts[0]) if each != ARGUMENTS] or whole_calls(
            prompts[0]
        )
        assert found == ARGUMENTS or found["name"] == "get_weather"


@pytest.mark.parametrize(
    ("source", "given", "shown"),
    [
        ("{{ args | tojson }}", '{"a":1}', '{"a": 1}'),
        ("{{ args | tojson }}", {"a": 1}, '{"a": 1}'),
        ("{{ '<' + args }}", '{"a":1}', '<{"a":1}'),
        ("{{ '<' + args }}", {"a": "é"}, '<{"a": "é"}'),
        ("{{ '<' + args }}", "", "<{}"),
        ("{{ '<' + args }}", None, "<{}"),
        ("{{ '<' + args }}", "{broken", "<{broken"),
        ("{{ args }}", {"a": 1}, '{"a": 1}'),
        ("{{ args | tojson | safe }}", {"a": 1}, '{"a": 1}'),
        ("{{ '<' + (args if args is string else args | tojson | safe) }}", {"a": 1}, '<{"a": 1}'),
        ("{% for k, v in args.items() %}{{ k }}={{ v }}{% endfor %}", '{"a": 1}', "a=1"),
    ],
)
def test_arguments_are_handed_over_in_the_form_that_becomes_json(
    source: str, given: Any, shown: str
) -> None:
    loop = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}"
        "{% set args = c.function.arguments %}" + source + "{% endfor %}{% endfor %}"
    )
    function = {"name": "f"} if given is None else {"name": "f", "arguments": given}
    turn = assistant(None, tool_calls=[{"type": "function", "function": function}])
    assert ChatTemplate(loop).render([turn]) == shown


@pytest.mark.parametrize("name", ["mistral-v2", "mistral-v3", "mistral-v7", "mistral-nemo"])
def test_calls_of_other_providers(name: str) -> None:
    """Ids of any form, or none, and results without the tool's name."""
    template = ChatTemplate(SOURCES[name].read_text(), MARKS)
    for given in ("call_0123456789abcdef", "toolu_1", None):
        turns = call_round(ARGUMENTS)
        del turns[2]["name"], turns[1]["tool_calls"][0]["id"], turns[2]["tool_call_id"]
        if given is not None:
            turns[1]["tool_calls"][0]["id"] = turns[2]["tool_call_id"] = given
        prompt = template.render(turns, [TOOLS["types"]])
        assert given is None or given not in prompt
        assert prompt.count("get_weather") == 2 - (name != "mistral-v2")
        ids = re.findall(r'(?:id": ?"|CALL_ID\]|RESULTS\])([a-z0-9]{9})\b', prompt)
        assert len(set(ids)) == (0 if name == "mistral-v2" else 1)


def test_results_find_their_calls() -> None:
    source = (
        "{% for m in messages %}{% for c in m.tool_calls %}"
        "{{ raise_exception('id') if c.id | length != 9 }}{{ c.id }},{% endfor %}"
        "{% if m.role == 'tool' %}{{ m.tool_call_id }}={{ m.name }};{% endif %}{% endfor %}"
    )
    calls = [
        {"id": each, "type": "function", "function": {"name": name}}
        for each, name in (("a", "f"), ("b", "g"))
    ]
    results = [{"role": "tool", "tool_call_id": each, "content": "x"} for each in ("b", "a")]
    turns = [user("x"), assistant(None, tool_calls=calls), *results]
    first, second, rest = ChatTemplate(source).render(turns).split(",")
    assert rest == f"{second}=g;{first}=f;"


# --- histories as other providers write them ------------------------------------------------------
def told(call_id: str | None, content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def calling(*calls: dict[str, Any], content: Any = None) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def past_call(name: str, call_id: str | None, arguments: Any = "{}") -> dict[str, Any]:
    return {"id": call_id, "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize("name", SOURCES)
def test_results_in_parts_and_without_content_are_no_python(name: str) -> None:
    """Some templates take parts from users alone, and content that is none from the model alone."""
    template = ChatTemplate(SOURCES[name].read_text(), MARKS)
    turns = [user("Hi"), calling(past_call("f1", CALL_ID))]
    try:
        template.render([*turns, told(CALL_ID, "")], [TOOLS["no parameters"]])
    except TemplateError:
        pytest.skip("it takes no calls")
    for content in ([{"type": "text", "text": "zqa"}, {"type": "text", "text": "zqb"}], None, []):
        prompt = template.render([*turns, told(CALL_ID, content)], [TOOLS["no parameters"]])
        behind = prompt.rpartition("Hi")[2]
        assert "'type'" not in behind
        assert "None" not in behind
        assert not content or "zqa" not in behind or "zqb" in behind


ONE_CALL = (
    "{% for m in messages %}[{{ m.role }}]{% if m.tool_calls %}"
    "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
    "{% set c = m.tool_calls[0] %}{{ m.content or '' }}{{ c.type }}:{{ c.function.name }}"
    "{% elif m.role == 'system' and not loop.first %}{{ raise_exception('one system') }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("ids", [("a", "b"), (None, None)])
def test_parallel_calls_for_templates_that_take_one(ids: tuple[str | None, str | None]) -> None:
    results = [told(ids[1], "rg"), told(ids[0], "rf")]
    if ids[0] is None:
        results.reverse()
    turn = calling(past_call("f", ids[0]), past_call("g", ids[1]), content="so")
    prompt = ChatTemplate(ONE_CALL).render([user("Hi"), turn, *results, user("Go")])
    assert prompt == (
        "[user]Hi[assistant]sofunction:f[tool]rf[assistant]function:g[tool]rg[user]Go"
    )


def test_several_system_messages_for_templates_that_take_one() -> None:
    turns = [{"role": role, "content": role} for role in ("system", "developer")]
    prompt = ChatTemplate(ONE_CALL).render([*turns, user("Hi")])
    assert prompt == "[system]system\n\ndeveloper[user]Hi"
    with pytest.raises(TemplateError, match="one system"):
        ChatTemplate(ONE_CALL).render([user("Hi"), *turns])


@pytest.mark.parametrize("arguments", [None, "", "  ", "null", "{}", {}])
def test_calls_without_arguments(arguments: Any) -> None:
    source = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{% for key, value in"
        " c.function.arguments.items() %}{{ key }}{% endfor %}<{{ c.id }}>{% endfor %}{% endfor %}"
    )
    turns = [user("Hi"), calling(past_call("f", None, arguments))]
    assert ChatTemplate(source).render(turns) == "<>"
