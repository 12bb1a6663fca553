"""vLLM.rs' flags that vllmx does not have itself; see `vllmx.cli.foreign_flags`."""

from __future__ import annotations

from vllmx.cli.flags_vllm import NO_SPLIT, NO_SWAP
from vllmx.cli.foreign_flags import ignored, refused, sampling, switch, switches, variable

MCP_FILE = "name the server in a file: --mcp-config FILE"

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
    sampling("--max-tokens", "max_new_tokens"),
    sampling("--temperature --temp", "temperature"),
    sampling("--top-p", "top_p"),
    sampling("--top-k", "top_k"),
    sampling("--min-p", "min_p"),
    sampling("--presence-penalty", "presence_penalty"),
    sampling("--frequency-penalty", "frequency_penalty"),
)
