"""Registers the formats of `vllmx_models.output_formats`: names, aliases, and texts that identify
them in a chat template. The formats themselves are imported when one is used."""

from __future__ import annotations

from vllmx_core.plugins.specs import ParserSpec

Texts = tuple[str, ...]


def _parser(name: str, names: str = "", *, tools: Texts = (), reasoning: Texts = ()) -> ParserSpec:
    """`names`: aliases, including those of vLLM and SGLang, separated by spaces."""
    place = f"vllmx_models.output_formats:{name.upper().replace('-', '_')}"
    return ParserSpec(name, place, tools, reasoning, tuple(names.split()))


_CODER = ("<tool_call>", "<function=", "<parameter=")
_COMMAND = ("<|START_ACTION|>", "<|END_ACTION|>", "tool_name", "parameters")
_A13B = ("<tool_calls>", "<|extra_0|>")
_TEXT = "<|START_TEXT|>"
_GLM = ("<tool_call>", "<arg_key>", "<arg_value>")
_LLAMA = ('{"name": ', '"parameters": ', "ipython")
_DEEPSEEK = "<｜tool▁calls▁begin｜>"

PARSERS = (
    # calls alone
    _parser("apriel", tools=("<tool_calls>[", "]</tool_calls>")),
    _parser("function-tag", "functionary llama-function", tools=("<function=", "</function>")),
    _parser("functionary-v32", "functionary_v3.2", tools=(">>>all", "recipient")),
    _parser("functiongemma", "function-gemma", tools=("<start_function_call>call:",)),
    _parser("functools", "phi4_mini_json firefunction", tools=("functools[",)),
    _parser("gigachat", "gigachat3", tools=("<|function_call|>",)),
    _parser("hermes", "qwen qwen25 granite4", tools=("<tool_call>", "arguments")),
    _parser("lfm2", tools=("List of tools: ",)),
    _parser("llama3-json", "llama3_json llama4_json", tools=_LLAMA),
    _parser("minimax-m1", "minimax_m1", tools=("<tool_calls>\\n", "arguments")),
    _parser("mistral-ids", "mistral-v11", tools=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")),
    _parser("mistral-list", "mistral-v3 mistral-v7", tools=("[TOOL_CALLS]",)),
    _parser("phi4", "phi4-mini", tools=("<|tool_call|>", "<|/tool_call|>")),
    _parser("pythonic", "llama4_pythonic olmo3", tools=("func_name1(",)),
    _parser("qwen3-coder", "qwen3_coder qwen3_xml step3p5", tools=_CODER),
    # calls and thoughts
    _parser("apertus", tools=("<|tools_prefix|>",), reasoning=("<|inner_prefix|>",)),
    _parser("command", "cohere2", tools=_COMMAND, reasoning=("<|START_THINKING|>",)),
    _parser("command4", tools=(*_COMMAND, _TEXT), reasoning=("<|START_THINKING|>", _TEXT)),
    _parser("deepseek-v3", "deepseek_v3", tools=(_DEEPSEEK, "<｜tool▁sep｜>", "```json")),
    _parser("deepseek-v31", "deepseek_v31", tools=(_DEEPSEEK, "<｜tool▁sep｜>")),
    _parser("deepseek-v32", "deepseek_v32", tools=("｜DSML｜", "function_calls", 'string="')),
    _parser("deepseek-v4", "deepseek_v4", tools=("｜DSML｜", "tool_calls>", 'string="')),
    _parser("gemma4", tools=("<|tool_call>call:",), reasoning=("<|channel>thought",)),
    _parser("glm", "glm45", tools=_GLM),
    _parser("glm47", "glm47_moe", tools=_GLM),
    _parser(
        "granite",
        tools=("<|tool_call|>",),
        reasoning=("<think>", "<response>", "<|start_of_role|>"),
    ),
    _parser("hunyuan", tools=("<tool_calls>", "<answer>"), reasoning=("<think>", "<answer>")),
    _parser("hunyuan-a13b", "hunyuan_a13b", tools=_A13B, reasoning=("<think>", "<|extra_0|>")),
    _parser("kimi", "kimi_k2", tools=("<|tool_calls_section_begin|>",)),
    _parser("kimi3", "kimi_k3", tools=("<|open|>", "argument"), reasoning=("<|open|>", "think")),
    _parser("minicpm5", tools=("<function name=", "<param name=")),
    _parser("minimax", "minimax_m2", tools=("<minimax:tool_call>", "<invoke name=")),
    _parser("mistral", "mistral-v13", tools=("[TOOL_CALLS]", "[ARGS]"), reasoning=("[THINK]",)),
    _parser("muse-glimmer", "muse_glimmer", tools=("<atem:invoke",), reasoning=("to=self",)),
    _parser("nemotron", "nemotron_json", tools=("<TOOLCALL>[",)),
    _parser("seed", "seed_oss", tools=("<seed:tool_call>",), reasoning=("<seed:think>",)),
    _parser(
        "solar-open",
        "solar_open",
        tools=("<|tool_call:begin|>",),
        reasoning=("<|begin|>assistant<|think|>",),
    ),
    _parser(
        "harmony",
        "openai gpt-oss openai_gptoss",
        tools=("<|channel|>commentary",),
        reasoning=("<|channel|>analysis",),
    ),
    # thoughts alone
    _parser("think", "qwen3 deepseek_r1 deepseek-r1", reasoning=("<think>", "</think>")),
)
