"""Answers as models write them behind the prompts of their templates, and what they hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FIND = ("find", {"what": "a <b>", "n": 2})
NOW: tuple[str, dict[str, Any]] = ("now", {})
KIMI3_CALLS = (
    '<|open|>tools<|sep|><|open|>call tool="find" index="1"<|sep|><|open|>argument key="what"'
    ' type="string"<|sep|>a <b><|close|>argument<|sep|><|open|>argument key="n" type="number"'
    "<|sep|>2<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message"
    "<|sep|>"
)
MUSE_CALL = (
    ' to=find<|message|><atem:function_calls>\n<atem:invoke name="find">\n<atem:parameter'
    ' name="what">a <b></atem:parameter>\n<atem:parameter name="n">2</atem:parameter>\n'
    "</atem:invoke>\n</atem:function_calls>"
)
SOLAR_CALLS = (
    "<|tool_calls|><|tool_call:begin|>a1<|tool_call:name|>find<|tool_call:args|>"
    '{"what": "a <b>", "n": 2}<|tool_call:end|><|tool_call:begin|>a2<|tool_call:name|>now'
    "<|tool_call:args|>{}<|tool_call:end|><|calls|>"
)
ANSWERS: list[tuple[str, Mapping[str, Any], str, tuple[str, str, list[Any]]]] = [
    (
        "apertus",
        {},
        '<|inner_prefix|>so<|tools_prefix|>[{"find": {"what": "a <b>", "n": 2}}]<|tools_suffix|>',
        ("so", "", [FIND]),
    ),
    (
        "COMMAND_R7B",
        {},
        '<|START_THINKING|>so<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "now",'
        ' "parameters": {}}\n]<|END_ACTION|>',
        ("so", "", [NOW]),
    ),
    ("LLAMA32_PYTHONIC", {}, '[find(what="a <b>", n=2), now()]', ("", "", [FIND, NOW])),
    ("LLAMA4_PYTHONIC", {}, "[find(what='a <b>', n=2)]", ("", "", [FIND])),
    (
        "LLAMA4_PYTHONIC",
        {},
        "<|python_start|>[find(what='a <b>', n=2)]<|python_end|>",
        ("", "", [FIND]),
    ),
    ("LLAMA4_PYTHONIC", {}, "[1, 2] is a list", ("", "[1, 2] is a list", [])),
    (
        "TOOLACE",
        {},
        '[find(n=2, what="is [now()]")]',
        ("", "", [("find", {"n": 2, "what": "is [now()]"})]),
    ),
    ("GEMMA3_PYTHONIC", {}, '[now(), find(what="a <b>", n=2)]', ("", "", [NOW, FIND])),
    (
        "LLAMA4_JSON",
        {},
        '{"name": "find", "parameters": {"what": "a <b>", "n": 2}}'
        '{"name": "now", "parameters": {}}',
        ("", "", [FIND, NOW]),
    ),
    (
        "LFM25",
        {},
        "<think>so</think>Ok<|tool_call_start|>[find(what='a <b>', n=2), now()]<|tool_call_end|>",
        ("so", "Ok", [FIND, NOW]),
    ),
    (
        "FUNCTIONGEMMA",
        {},
        "<start_function_call>call:find{what:<escape>a <b><escape>,n:2}<end_function_call>"
        "<start_function_call>call:now{}<end_function_call>",
        ("", "", [FIND, NOW]),
    ),
    (
        "minicpm5",
        {},
        '<think>\nso\n</think>\n\nOk\n<function name="find"><param name="what"><![CDATA[a <b>]]>'
        '</param><param name="n">2</param></function>\n<function name="now"></function>',
        ("so", "Ok", [FIND, NOW]),
    ),
    (
        "minicpm5",
        {"enable_thinking": False},
        'Use <function name="x"> and\n<function name="find"><param name="what"><![CDATA[</param>]]>'
        "</param></function>",
        ("", 'Use <function name="x"> and', [("find", {"what": "</param>"})]),
    ),
    ("SOLAR_OPEN", {}, "<|content|>Hello<|end|>", ("", "Hello", [])),
    (
        "SOLAR_OPEN",
        {},
        f"<|think|>so<|end|><|begin|>assistant<|content|>Ok<|end|><|begin|>assistant{SOLAR_CALLS}",
        ("so", "Ok", [FIND, NOW]),
    ),
    ("SOLAR_OPEN", {}, SOLAR_CALLS, ("", "", [FIND, NOW])),
    ("functionary-3.2", {}, "all\nSay >>> or >>>all, then", ("", "Say >>> or >>>all, then", [])),
    (
        "functionary-3.2",
        {},
        'all\nOk>>>find\n{"what": "a <b>", "n": 2}>>>now\n{}',
        ("", "Ok", [FIND, NOW]),
    ),
    ("functionary-3.2", {}, 'find\n{"what": "a <b>", "n": 2}', ("", "", [FIND])),
    ("functionary-3.2", {}, '{"a": 1}', ("", '{"a": 1}', [])),
    (
        "kimi-k3",
        {},
        "so<|close|>think<|sep|><|open|>response<|sep|>Ok<|close|>response<|sep|>" + KIMI3_CALLS,
        ("so", "Ok", [FIND]),
    ),
    (
        "kimi-k3",
        {"thinking": False},
        "Hello<|close|>response<|sep|><|close|>message<|sep|>",
        ("", "Hello", []),
    ),
    ("kimi-k3", {"thinking": False}, "<|close|>response<|sep|>" + KIMI3_CALLS, ("", "", [FIND])),
    ("MUSE_GLIMMER", {}, " to=user<|message|>Hello", ("", "Hello", [])),
    (
        "MUSE_GLIMMER",
        {},
        " to=self<|message|>so<|eom|><|start|>assistant to=user<|message|>Ok<|eom|>"
        f"<|start|>assistant{MUSE_CALL}<|eom|><|start|>assistant to=self<|message|>again<|eom|>"
        f"<|start|>assistant{MUSE_CALL}",
        ("soagain", "Ok", [FIND, FIND]),
    ),
    ("HUNYUAN", {}, "<think>\nso\n</think>\n<answer>\nHello\n</answer>", ("so", "Hello", [])),
    (
        "HUNYUAN",
        {"enable_thinking": False},
        "<answer>\nIt ends with </answer> or <answer>.\n</answer>",
        ("", "It ends with </answer> or <answer>.", []),
    ),
    (
        "HUNYUAN_A13B",
        {},
        '<think>so</think><tool_calls>[{"name": "find", "arguments": {"what": "a <b>", "n": 2}}]'
        "</tool_calls>",
        ("so", "", [FIND]),
    ),
    ("HUNYUAN_A13B", {"enable_thinking": False}, "助手：你好", ("", "你好", [])),
    (
        "COMMAND_R7B",
        {},
        "<|START_RESPONSE|>Hello<|END_RESPONSE|>",
        ("", "Hello", []),
    ),
    (
        "COMMAND_R7B",
        {},
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "find", "parameters":'
        ' {"what": "a <b>", "n": 2}}\n]<|END_ACTION|>',
        ("", "", [FIND]),
    ),
    (
        "NEMOTRON_2",
        {},
        'so</think>Ok\n\n<TOOLCALL>[{"name": "find", "arguments": {"what": "a <b>", "n": 2}}]'
        "</TOOLCALL>",
        ("so", "Ok", [FIND]),
    ),
    ("NEMOTRON_2", {"enable_thinking": False}, "Hello", ("", "Hello", [])),
    (
        "MINIMAX_M3",
        {},
        '</mm:think>Write <tool_call>{"name": "find", "arguments": {}}</tool_call>.',
        ("", 'Write <tool_call>{"name": "find", "arguments": {}}</tool_call>.', []),
    ),
    ("MINIMAX_M3", {}, "<mm:think>so</mm:think>Ok", ("so", "Ok", [])),
    (
        "INDENTED",
        {},
        '<tool_call>\n{"name": "find", "arguments": {\n    "what": "a <b>",\n    "n": 2\n}}\n'
        "</tool_call>",
        ("", "", [FIND]),
    ),
    (
        "glm-4.7",
        {},
        "so</think>Between <tool_call> and </tool_call> stands the name.",
        ("so", "Between <tool_call> and </tool_call> stands the name.", []),
    ),
    (
        "devstral",
        {},
        "Behind [TOOL_CALLS] stands a name, and [ARGS] follows.",
        ("", "Behind [TOOL_CALLS] stands a name, and [ARGS] follows.", []),
    ),
    (
        "devstral",
        {},
        "First [TOOL_CALLS]name[ARGS], then arguments.",
        ("", "First [TOOL_CALLS]name[ARGS], then arguments.", []),
    ),
    (
        "mistral-v3",
        {},
        '[TOOL_CALLS] [{"name": "now", "arguments": {}, "id": "abcdef001"}]',
        ("", "", [NOW]),
    ),
]
