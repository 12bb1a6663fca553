"""vLLM.rs' flags that vllmx does not have itself; see `vllmx.cli.foreign_flags`."""

from __future__ import annotations

from vllmx.cli.flags_vllm import NO_DRAFT, NO_SPLIT, NO_SWAP
from vllmx.cli.foreign_flags import (
    ignored,
    means,
    refused,
    sampling,
    switch,
    switches,
    template_switch,
    variable,
)

MCP_FILE = "name the server in a file: --mcp-config FILE"
KV_TYPES = {"auto": None, "fp8": "fp8"}

VLLM_RS = (
    switches("--cpu", "backend", "cpu", "the CPU backend"),
    switches("--fp8-kvcache", "kv_cache_dtype", "fp8", "KV cache of 8 bits"),
    switches("--prefix-cache", "enable_prefix_caching", True, "it is on by default"),
    refused("--prefix-cache-max-tokens", "the prefix cache takes all free blocks: leave it out"),
    refused("--kv-fraction", "say --memory-fraction, the share of free memory for everything"),
    ignored("--cpu-mem-fold", NO_SWAP, "0", "0.0"),
    switch("--no-flash-attn --disable-flash-attn", "each backend has its own attention"),
    switch("--server", "`vllmx serve` is the server"),
    switch("--log", "there is always a log; --log-level says how much"),
    variable("--hf-token-path", "HF_TOKEN_PATH", "file with the token for the hub"),
    switches("--ui-server", "web", True, "there is a page at / unless --no-web says otherwise"),
    refused("--pd-server --pd-client", NO_SPLIT, bare=True),
    refused("--pd-url", NO_SPLIT),
    refused("--mcp-command --mcp-args", MCP_FILE),
    ignored("--mtp-num-tokens", NO_DRAFT, "0"),
    switches("--disable-prefix-cache", "enable_prefix_caching", False, "nothing is shared"),
    means("--kvcache-dtype", "kv_cache_dtype", "auto and fp8", KV_TYPES),
    means("--enforce-parser", "tool_parser", "a format of `vllmx parsers`", str),
    refused("--tool-prompt", "a chat template says how tools are shown: --chat-template FILE"),
    ignored("--mamba-fraction", "states have as many slots as sequences: see --num-state-slots"),
    refused("--yarn-scaling-factor", "set it in the model's config.json"),
    template_switch("--disable-reasoning", "enable_thinking", False, "of templates that know it"),
    switch("--disable-cuda-graph", "steps are recorded by the backend itself"),
    ignored("--prefill-chunk-size", "chunks follow --target-step-ms"),
    refused("--prompts --batch", "`vllmx complete` answers prompts of a command line"),
    refused("--i", "`vllmx chat` talks in the terminal", bare=True),
    sampling("--max-tokens", "max_new_tokens"),
    sampling("--temperature --temp", "temperature"),
    sampling("--top-p", "top_p"),
    sampling("--top-k", "top_k"),
    sampling("--min-p", "min_p"),
    sampling("--presence-penalty", "presence_penalty"),
    sampling("--frequency-penalty", "frequency_penalty"),
)
