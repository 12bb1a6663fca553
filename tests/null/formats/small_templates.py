"""Chat templates that write answers as those of models do whose own are not at hand, in few lines.

Each has what matters here: where the generation prompt ends, how contents, thoughts and calls are
written behind it, and how a turn ends.
"""

from __future__ import annotations


def template(user: str, answer: str, prompt: str, *, tools: str = "", behind: str = "") -> str:
    """A template out of what it writes of a user's message `m`, of an assistant's, and behind the
    conversation where an answer is asked for."""
    return (
        f"{{%- if tools %}}{tools}{{{{ tools | tojson }}}}{{% endif -%}}"
        "{%- for m in messages -%}"
        f"{{%- if m.role == 'user' -%}}{user}{{%- else -%}}{answer}{{%- endif -%}}"
        f"{{%- endfor -%}}{{%- if add_generation_prompt -%}}{prompt}{{%- endif -%}}{behind}"
    )


def text(value: str) -> str:
    """A text that the template writes as it is."""
    return "{{- " + repr(value) + " -}}"


def _header(role: str) -> str:
    return text(f"<|start_header_id|>{role}<|end_header_id|>\n\n")


def _python_calls(value: str, separator: str = ", ") -> str:
    return (
        "{{- '[' -}}{%- for c in m.tool_calls -%}{{- c.function.name + '(' -}}"
        "{%- for k, v in c.function.arguments.items() -%}"
        f"{{{{- k + '=' -}}}}{value}{{{{- '' if loop.last else '{separator}' -}}}}{{%- endfor -%}}"
        "{{- ')' + ('' if loop.last else ', ') -}}{%- endfor -%}{{- ']' -}}"
    )


_PYTHONIC = "Answer as in [func_name1(key=value), func_name2(key=value)]. "
_TURN = _header("user") + "{{- m.content + '<|eot_id|>' -}}"


def _pythonic(value: str, *, separator: str = ", ", behind: str = "") -> str:
    answer = (
        _header("assistant")
        + "{{- m.content -}}{%- if m.tool_calls -%}"
        + _python_calls(value, separator)
        + "{%- endif -%}{{- '<|eot_id|>' -}}"
    )
    prompt = "" if behind else _header("assistant")
    return template(_TURN, answer, prompt, tools=_PYTHONIC, behind=behind)


LLAMA32_PYTHONIC = _pythonic('{{- "%s" | format(v) -}}')
LLAMA4_PYTHONIC = _pythonic("{{- '\"%s\"' | format(v) -}}")
TOOLACE = _pythonic('{{- "%sr" | format(v) -}}', behind=_header("assistant"))
GEMMA3_PYTHONIC = _pythonic("{{- v | tojson -}}", separator="")
"""Neither writes what the models are asked for: values without quotes, with a letter behind them,
numbers as strings, no commas."""

_JSON_CALLS = (
    "{%- for c in m.tool_calls -%}{{- '{\"name\": \"' + c.function.name + '\", ' -}}"
    "{{- '\"parameters\": ' -}}{{- c.function.arguments | tojson -}}{{- '}' -}}{%- endfor -%}"
)
LLAMA4_JSON = template(
    text("<|header_start|>user<|header_end|>\n\n") + "{{- m.content + '<|eot|>' -}}",
    text("<|header_start|>assistant<|header_end|>\n\n")
    + "{{- m.content -}}{%- if m.tool_calls -%}"
    + _JSON_CALLS
    + "{%- endif -%}{{- '<|eot|>' -}}",
    text("<|header_start|>assistant<|header_end|>\n\n"),
)
_COHERE = "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
COMMAND_R7B = template(
    "{{- '<|USER_TOKEN|>' + m.content + '<|END_OF_TURN_TOKEN|>' -}}",
    text(_COHERE) + "{%- if m.tool_calls -%}"
    "{{- '<|START_THINKING|>' + (m.reasoning_content or '') + '<|END_THINKING|>' -}}"
    "{{- '<|START_ACTION|>[\\n' -}}{%- for c in m.tool_calls -%}"
    '{{- \'    {"tool_call_id": "\' ~ loop.index0 ~ \'", "tool_name": "\' -}}'
    '{{- c.function.name + \'", "parameters": \' -}}{{- c.function.arguments | tojson + "}" -}}'
    "{{- '' if loop.last else ',\\n' -}}{%- endfor -%}{{- '\\n]<|END_ACTION|>' -}}"
    "{%- else -%}{{- '<|START_RESPONSE|>' + m.content + '<|END_RESPONSE|>' -}}{%- endif -%}"
    + text("<|END_OF_TURN_TOKEN|>"),
    "",
    behind=text(_COHERE + "<|START_THINKING|><|END_THINKING|>"),
)
"""The generation prompt stands behind every conversation, asked for or not."""
NEMOTRON_2 = template(
    "{{- '<SPECIAL_11>User\\n' + m.content + '\\n' -}}",
    text("<SPECIAL_11>Assistant\n")
    + "{{- m.content -}}{%- if m.tool_calls -%}{{- '\\n\\n' if m.content else '' -}}"
    "{{- '<TOOLCALL>[' -}}{%- for c in m.tool_calls -%}"
    '{{- \'{"name": "\' + c.function.name + \'", "arguments": \' -}}'
    "{{- c.function.arguments | tojson -}}{{- '}' + ('' if loop.last else ', ') -}}"
    "{%- endfor -%}{{- ']</TOOLCALL>' -}}{%- endif -%}{{- '\\n<SPECIAL_12>\\n' -}}",
    text("<SPECIAL_11>Assistant\n<think>\n\n")
    + "{%- if enable_thinking is false -%}{{- '</think>' -}}{%- endif -%}",
    tools="In <TOOLCALL>[...]</TOOLCALL>, behind </think>: ",
)
_M3 = "]<]minimax[>["
MINIMAX_M3 = template(
    "{{- ']~b]user\\n' + m.content + '[e~[\\n' -}}",
    text("]~b]ai\n") + "{{- ('<mm:think>' + m.reasoning_content) if m.reasoning_content else '' -}}"
    "{{- '</mm:think>' + m.content -}}{%- if m.tool_calls -%}"
    + text(f"{_M3}<tool_call>\n")
    + "{%- for c in m.tool_calls -%}"
    + text(f"{_M3}<invoke name=")
    + "{{- '\"' + c.function.name + '\">' -}}{%- for k, v in c.function.arguments.items() -%}"
    + text(_M3)
    + "{{- '<' + k + '>' ~ v ~ '</' + k + '>' -}}{%- endfor -%}"
    + text(f"{_M3}</invoke>\n")
    + "{%- endfor -%}"
    + text(f"{_M3}</tool_call>")
    + "{%- endif -%}{{- '[e~[\\n' -}}",
    text("]~b]ai\n"),
    tools="Write <tool_call> with the arguments of: ",
)
SOLAR_OPEN = template(
    "{{- '<|begin|>user<|content|>' + m.content + '<|end|>' -}}",
    "{%- if m.reasoning -%}{{- '<|begin|>assistant<|think|>' + m.reasoning + '<|end|>' -}}"
    "{%- endif -%}{%- if m.tool_calls -%}{{- '<|begin|>assistant<|tool_calls|>' -}}"
    "{%- for c in m.tool_calls -%}{{- '<|tool_call:begin|>' + c.id + '<|tool_call:name|>' -}}"
    "{{- c.function.name + '<|tool_call:args|>' -}}{{- c.function.arguments | tojson -}}"
    "{{- '<|tool_call:end|>' -}}{%- endfor -%}{{- '<|calls|>' -}}"
    "{%- else -%}{{- '<|begin|>assistant<|content|>' + m.content + '<|end|>' -}}{%- endif -%}",
    text("<|begin|>assistant"),
)
MUSE_GLIMMER = template(
    "{{- '<|start|>user<|message|>' + m.content + '<|eot|>' -}}",
    "{%- if m.reasoning_content -%}"
    "{{- '<|start|>assistant to=self<|message|>' + m.reasoning_content + '<|eom|>' -}}"
    "{%- endif -%}{%- for c in m.tool_calls or [] -%}"
    "{{- '<|start|>assistant to=' + c.function.name + '<|message|><atem:function_calls>' -}}"
    "{{- '\\n<atem:invoke name=\"' + c.function.name + '\">\\n' -}}"
    "{%- for k, v in c.function.arguments.items() -%}"
    "{{- '<atem:parameter name=\"' + k + '\">' -}}{{- v if v is string else v | tojson -}}"
    "{{- '</atem:parameter>\\n' -}}{%- endfor -%}"
    "{{- '</atem:invoke>\\n</atem:function_calls>' + ('<|eot|>' if loop.last else '<|eom|>') -}}"
    "{%- endfor -%}{%- if not m.tool_calls -%}"
    "{{- '<|start|>assistant to=user<|message|>' + m.content + '<|eot|>' -}}{%- endif -%}",
    text("<|start|>assistant"),
)
LFM25 = template(
    "{{- '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' -}}",
    text("<|im_start|>assistant\n")
    + "{%- if m.thinking -%}{{- '<think>' + m.thinking + '</think>' -}}{%- endif -%}"
    "{{- m.content -}}{%- if m.tool_calls -%}{{- '<|tool_call_start|>' -}}"
    + _python_calls(
        '{{- "\'" + v + "\'" if v is string else (v | tojson if v is mapping else v | string) -}}'
    )
    + "{{- '<|tool_call_end|>' -}}{%- endif -%}{{- '<|im_end|>\\n' -}}",
    text("<|im_start|>assistant\n"),
    tools="List of tools: ",
)
_ESCAPED = (
    "{%- macro escaped(v) -%}{%- if v is string -%}{{- '<escape>' + v + '<escape>' -}}"
    "{%- elif v is mapping -%}{{- '{' -}}{%- for k, each in v.items() -%}{{- k + ':' -}}"
    "{{- escaped(each) + ('' if loop.last else ',') -}}{%- endfor -%}{{- '}' -}}"
    "{%- elif v is sequence -%}{{- '[' -}}{%- for each in v -%}"
    "{{- escaped(each) + ('' if loop.last else ',') -}}{%- endfor -%}{{- ']' -}}"
    "{%- else -%}{{- v | tojson -}}{%- endif -%}{%- endmacro -%}"
)
FUNCTIONGEMMA = _ESCAPED + template(
    "{{- '<start_of_turn>user\\n' + m.content + '<end_of_turn>\\n' -}}",
    text("<start_of_turn>model\n") + "{{- m.content -}}{%- for c in m.tool_calls or [] -%}"
    "{{- '<start_function_call>call:' + c.function.name + '{' -}}"
    "{%- for k, v in c.function.arguments.items() -%}"
    "{{- k + ':' + escaped(v) + ('' if loop.last else ',') -}}{%- endfor -%}"
    "{{- '}<end_function_call>' -}}{%- endfor -%}"
    "{{- '<start_function_response>' if m.tool_calls else '<end_of_turn>\\n' -}}",
    text("<start_of_turn>model\n"),
)
HUNYUAN_A13B = template(
    "{{- m.content + '<|extra_0|>' -}}",
    "{{- m.content -}}{%- if m.tool_calls -%}{{- '<tool_calls>[' -}}"
    "{%- for c in m.tool_calls -%}"
    '{{- \'{"name": "\' + c.function.name + \'", "arguments": \' -}}'
    "{{- c.function.arguments | tojson -}}{{- '}' + ('' if loop.last else ', ') -}}"
    "{%- endfor -%}{{- ']</tool_calls>' -}}{%- endif -%}{{- '<|eos|>' -}}",
    "",
    behind="{%- if enable_thinking is false -%}{{- '<think>\\n\\n</think>\\n' -}}{%- endif -%}",
)
HUNYUAN = template(
    "{{- '<|hy_User|>' + m.content -}}",
    "{%- set said = m.content.split('<answer>')[-1].split('</answer>')[0] -%}"
    "{{- '<|hy_Assistant|>' + said + '<|hy_end|>' -}}",
    text("<|hy_Assistant|>")
    + "{%- if enable_thinking is false -%}{{- '<think>\\n\\n</think>\\n' -}}{%- endif -%}",
)
INDENTED = template(
    "{{- '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' -}}",
    text("<|im_start|>assistant\n") + "{{- m.content -}}{%- for c in m.tool_calls or [] -%}"
    '{{- \'<tool_call>\\n{"name": "\' + c.function.name + \'", "arguments": \' -}}'
    "{{- c.function.arguments | tojson(indent=4) -}}{{- '}\\n</tool_call>\\n' -}}"
    "{%- endfor -%}{{- '<|im_end|>\\n' -}}",
    text("<|im_start|>assistant\n"),
)
