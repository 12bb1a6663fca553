"""The formats in which models write reasoning and tool calls; `vllmx_models.parsers` names them."""

from __future__ import annotations

from dataclasses import replace

from vllmx_core.output_format import (
    Calls,
    Channels,
    JsonArguments,
    JsonCall,
    NamedCall,
    OutputFormat,
    TaggedArguments,
    Thinking,
    ValueArguments,
)

_THINK = Thinking("<think>\n", "\n</think>\n\n")
THINK = OutputFormat("think", _THINK)
"""DeepSeek R1, Qwen 3, QwQ, GLM, Kimi, MiniMax and most others that think."""
HERMES = OutputFormat(
    "hermes",
    calls=Calls(
        JsonCall(), begin="<tool_call>\n", end="\n</tool_call>", separator="\n", after_content="\n"
    ),
)
"""Hermes 2 Pro and 3, Qwen 2.5 and 3, SmolLM3, Granite 4."""
QWEN3_CODER = OutputFormat(
    "qwen3-coder",
    calls=Calls(
        NamedCall(TaggedArguments("<parameter=", ">\n", "\n</parameter>\n"), header_end=">\n"),
        begin="<tool_call>\n<function=",
        end="</function>\n</tool_call>",
        separator="\n",
        after_content="\n\n",
    ),
)
"""Qwen3-Coder, Qwen 3.5, Nemotron 3, Step 3.5."""
SEED = OutputFormat(
    "seed",
    Thinking("<seed:think>", "</seed:think>"),
    Calls(
        NamedCall(TaggedArguments("<parameter=", ">", "</parameter>\n"), header_end=">\n"),
        begin="<seed:tool_call>\n<function=",
        end="</function>\n</seed:tool_call>",
        separator="\n",
        after_content="\n",
    ),
)
"""Seed-OSS of ByteDance."""
LLAMA3_JSON = OutputFormat(
    "llama3-json",
    calls=Calls(
        JsonCall(arguments="parameters", spelling='{"name": "{name}", "parameters": {arguments}}'),
        separator="; ",
        is_bare=True,
    ),
    skipped=("<|python_tag|>", "<|python_start|>", "<|python_end|>"),
)
"""Llama 3.1, 3.2 and 3.3, and Llama 4 where it is asked for JSON."""
PYTHONIC = OutputFormat(
    "pythonic",
    calls=Calls(
        NamedCall(ValueArguments("(", "=", ", ", ")")),
        section_begin="[",
        section_end="]",
        separator=", ",
        is_bare=True,
    ),
    skipped=("<|python_start|>", "<|python_end|>"),
)
"""Llama 3.2 and 4, ToolACE, Gemma 3, Olmo 3: a list of calls in Python."""
LFM2 = OutputFormat(
    "lfm2",
    calls=Calls(
        NamedCall(ValueArguments("(", "=", ", ", ")")),
        section_begin="<|tool_call_start|>[",
        section_end="]<|tool_call_end|>",
        separator=", ",
    ),
)
"""The same between markers: LFM2 and LFM2.5 of Liquid AI."""
FUNCTION_TAG = OutputFormat(
    "function-tag",
    calls=Calls(NamedCall(JsonArguments(), header_end=">"), begin="<function=", end="</function>"),
)
"""Functionary 3.1."""
FUNCTIONARY_V32 = OutputFormat(
    "functionary-v32",
    calls=Calls(NamedCall(JsonArguments(), header_end="\n"), begin=">>>", known_only=True),
    content_begin=">>>all\n",
    opened=">>>",
)
"""Functionary 3.2: each message begins with its recipient."""

_MISTRAL_JSON = '{"name": "{name}", "arguments": {arguments}, "id": "{id}"}'
MISTRAL_LIST = OutputFormat(
    "mistral-list",
    calls=Calls(
        JsonCall(id="id", spelling=_MISTRAL_JSON),
        section_begin="[TOOL_CALLS][",
        section_end="]",
        separator=", ",
        ids="short",
    ),
)
"""Mistral 7B v0.3, Nemo, Small and Large up to 2411."""
MISTRAL = OutputFormat(
    "mistral",
    Thinking("[THINK]", "[/THINK]"),
    Calls(NamedCall(JsonArguments(), header_end="[ARGS]"), begin="[TOOL_CALLS]", ids="short"),
)
"""Devstral, Magistral, Ministral: from tokenizer version 13 on."""
MISTRAL_IDS = OutputFormat(
    "mistral-ids",
    calls=Calls(
        NamedCall(JsonArguments(), "{name}[CALL_ID]{id}", "[ARGS]"),
        begin="[TOOL_CALLS]",
        ids="short",
    ),
)
"""Mistral Small 3.1 and 3.2: tokenizer version 11."""

GLM = OutputFormat(
    "glm",
    Thinking("<think>", "</think>\n"),
    Calls(
        NamedCall(
            TaggedArguments("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
            header_end="\n",
        ),
        begin="<tool_call>",
        end="</tool_call>",
        separator="\n",
        after_content="\n",
    ),
)
"""GLM 4.5 and 4.6; later ones, which write no line breaks, are read by it too."""
GLM47 = OutputFormat(
    "glm47",
    Thinking("<think>", "</think>"),
    Calls(
        NamedCall(TaggedArguments("<arg_key>", "</arg_key><arg_value>", "</arg_value>")),
        begin="<tool_call>",
        end="</tool_call>",
    ),
)
DEEPSEEK_V3 = OutputFormat(
    "deepseek-v3",
    _THINK,
    Calls(
        NamedCall(JsonArguments(), header="function<｜tool▁sep｜>{name}", header_end="\n```json\n"),
        begin="<｜tool▁call▁begin｜>",
        end="\n```<｜tool▁call▁end｜>",
        section_begin="<｜tool▁calls▁begin｜>",
        section_end="<｜tool▁calls▁end｜>",
        separator="\n",
    ),
)
"""DeepSeek V3 and R1, and what was distilled from it."""
DEEPSEEK_V31 = OutputFormat(
    "deepseek-v31",
    _THINK,
    Calls(
        NamedCall(JsonArguments(), header_end="<｜tool▁sep｜>"),
        begin="<｜tool▁call▁begin｜>",
        end="<｜tool▁call▁end｜>",
        section_begin="<｜tool▁calls▁begin｜>",
        section_end="<｜tool▁calls▁end｜>",
    ),
)


def _dsml(name: str, section: str) -> OutputFormat:
    return OutputFormat(
        name,
        _THINK,
        Calls(
            NamedCall(
                TaggedArguments(
                    '<｜DSML｜parameter name="',
                    '" string="false">',
                    "</｜DSML｜parameter>\n",
                    string_key_end='" string="true">',
                ),
                header_end='">\n',
            ),
            begin='<｜DSML｜invoke name="',
            end="</｜DSML｜invoke>\n",
            section_begin=f"<｜DSML｜{section}>\n",
            section_end=f"</｜DSML｜{section}>",
            after_content="\n\n",
        ),
    )


DEEPSEEK_V32 = _dsml("deepseek-v32", "function_calls")
DEEPSEEK_V4 = _dsml("deepseek-v4", "tool_calls")
GEMMA4 = OutputFormat(
    "gemma4",
    Thinking("<|channel>thought\n", "<channel|>"),
    Calls(
        NamedCall(ValueArguments("{", ":", ",", "}", quote='<|"|>', escapes=False, python=False)),
        begin="<|tool_call>call:",
        end="<tool_call|>",
    ),
)
FUNCTIONGEMMA = OutputFormat(
    "functiongemma",
    calls=Calls(
        NamedCall(
            ValueArguments("{", ":", ",", "}", quote="<escape>", escapes=False, python=False)
        ),
        begin="<start_function_call>call:",
        end="<end_function_call>",
    ),
)
GRANITE = OutputFormat(
    "granite",
    Thinking("<think>", "</think>"),
    Calls(JsonCall(), section_begin="<|tool_call|>[", section_end="]", separator=", "),
    content_begin="<response>",
    content_end="</response>",
)
"""Granite 3."""
PHI4 = OutputFormat(
    "phi4",
    calls=Calls(
        JsonCall(), section_begin="<|tool_call|>[", section_end="]<|/tool_call|>", separator=", "
    ),
)
"""Phi-4-mini."""
FUNCTOOLS = OutputFormat(
    "functools",
    calls=Calls(JsonCall(), section_begin="functools[", section_end="]", separator=", "),
)
"""Firefunction 2, and Phi-4-mini without its markers."""
KIMI = OutputFormat(
    "kimi",
    _THINK,
    Calls(
        NamedCall(JsonArguments(), "functions.{name}:{index}", "<|tool_call_argument_begin|>"),
        begin="<|tool_call_begin|>",
        end="<|tool_call_end|>",
        section_begin="<|tool_calls_section_begin|>",
        section_end="<|tool_calls_section_end|>",
        end_thoughts=True,
    ),
)
"""Kimi K2."""
KIMI3 = OutputFormat(
    "kimi3",
    Thinking("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    Calls(
        NamedCall(
            TaggedArguments(
                '<|open|>argument key="', '" type="{type}"<|sep|>', "<|close|>argument<|sep|>"
            ),
            '{name}" index="{index}',
            '"<|sep|>',
        ),
        begin='<|open|>call tool="',
        end="<|close|>call<|sep|>",
        section_begin="<|open|>tools<|sep|>",
        section_end="<|close|>tools<|sep|>",
    ),
    content_begin="<|open|>response<|sep|>",
    content_end="<|close|>response<|sep|>",
    always_content=True,
    skipped=("<|close|>message<|sep|>",),
)
"""Kimi K3."""
MINIMAX = OutputFormat(
    "minimax",
    _THINK,
    Calls(
        NamedCall(TaggedArguments('<parameter name="', '">', "</parameter>\n"), header_end='">\n'),
        begin='<invoke name="',
        end="</invoke>\n",
        section_begin="<minimax:tool_call>\n",
        section_end="</minimax:tool_call>",
        after_content="\n",
    ),
)
"""MiniMax M2."""
MINIMAX_M1 = OutputFormat(
    "minimax-m1",
    calls=Calls(
        JsonCall(), section_begin="<tool_calls>\n", section_end="\n</tool_calls>", separator="\n"
    ),
)
MINICPM5 = OutputFormat(
    "minicpm5",
    _THINK,
    Calls(
        NamedCall(
            TaggedArguments('<param name="', '">', "</param>", quotes=("<![CDATA[", "]]>")),
            header_end='">',
        ),
        begin='<function name="',
        end="</function>",
        separator="\n",
        after_content="\n",
    ),
)
SOLAR_OPEN = OutputFormat(
    "solar-open",
    Thinking("<|begin|>assistant<|think|>", "<|end|>"),
    Calls(
        NamedCall(JsonArguments(), "{id}<|tool_call:name|>{name}", "<|tool_call:args|>"),
        begin="<|tool_call:begin|>",
        end="<|tool_call:end|>",
        section_begin="<|begin|>assistant<|tool_calls|>",
        section_end="<|calls|>",
    ),
    content_begin="<|begin|>assistant<|content|>",
    content_end="<|end|>",
    opened="<|begin|>assistant",
)
"""Solar Open of Upstage."""
MUSE_GLIMMER = OutputFormat(
    "muse-glimmer",
    Thinking("<|start|>assistant to=self<|message|>", "<|eom|>"),
    Calls(
        NamedCall(
            TaggedArguments('<atem:parameter name="', '">', "</atem:parameter>\n"),
            '{name}<|message|><atem:function_calls>\n<atem:invoke name="{name}',
            '">\n',
        ),
        begin="<|start|>assistant to=",
        end="</atem:invoke>\n</atem:function_calls>",
        separator="<|eom|>",
    ),
    content_begin="<|start|>assistant to=user<|message|>",
    content_end="<|eom|>",
    opened="<|start|>assistant",
)
NEMOTRON = OutputFormat(
    "nemotron",
    _THINK,
    Calls(
        JsonCall(),
        section_begin="<TOOLCALL>[",
        section_end="]</TOOLCALL>",
        separator=", ",
        after_content="\n\n",
    ),
)
"""Nemotron Nano 2 and Super 1.5."""


def _hunyuan(name: str) -> OutputFormat:
    return OutputFormat(
        name,
        Thinking("<think>\n", "\n</think>\n"),
        Calls(
            JsonCall(), section_begin="<tool_calls>[", section_end="]</tool_calls>", separator=", "
        ),
        content_begin="<answer>\n",
        content_end="\n</answer>",
        skipped=("助手：",),
    )


HUNYUAN = _hunyuan("hunyuan")
HUNYUAN_A13B = _hunyuan("hunyuan-a13b")
APRIEL = OutputFormat(
    "apriel",
    calls=Calls(
        JsonCall(id="id", spelling=_MISTRAL_JSON),
        section_begin="<tool_calls>[",
        section_end="]</tool_calls>",
        separator=", ",
        after_content="\n",
    ),
)
APERTUS = OutputFormat(
    "apertus",
    Thinking("<|inner_prefix|>", "<|inner_suffix|>"),
    Calls(
        JsonCall(name=None, spelling='{"{name}": {arguments}}'),
        section_begin="<|tools_prefix|>[",
        section_end="]<|tools_suffix|>",
        separator=", ",
        end_thoughts=True,
    ),
)
COMMAND = OutputFormat(
    "command",
    Thinking("<|START_THINKING|>", "<|END_THINKING|>"),
    Calls(
        JsonCall(
            "tool_name",
            "parameters",
            "tool_call_id",
            spelling='{"tool_call_id": "{index}", "tool_name": "{name}", "parameters":'
            " {arguments}}",
        ),
        section_begin="<|START_ACTION|>[\n    ",
        section_end="\n]<|END_ACTION|>",
        separator=",\n    ",
        end_thoughts=True,
    ),
    content_begin="<|START_RESPONSE|>",
    content_end="<|END_RESPONSE|>",
)
"""Command R7B and A of Cohere."""
COMMAND4 = replace(
    COMMAND, name="command4", content_begin="<|START_TEXT|>", content_end="<|END_TEXT|>"
)
"""Later ones of Cohere."""
GIGACHAT = OutputFormat("gigachat", calls=Calls(JsonCall(), begin="<|function_call|>"))
HARMONY = OutputFormat("harmony", channels=Channels())
"""gpt-oss."""
