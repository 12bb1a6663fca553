"""vLLM.rs' flags that vllmx does not have itself; see `vllmx.cli.foreign_flags`."""

from __future__ import annotations

from vllmx.cli.flags_vllm import NO_SWAP
from vllmx.cli.foreign_flags import ignored, refused, switch, switches, variable

NO_SPLIT = "vllmx does prefill and decode in one place: leave it out"
MCP_FILE = "name the server in a file: --mcp-config FILE"
DEFAULTS = "set defaults of requests with --override-generation-config, for example"

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
    refused("--ui-server", "there is no web page: `vllmx chat` is in the terminal", bare=True),
    refused("--pd-server --pd-client", NO_SPLIT, bare=True),
    refused("--pd-url", NO_SPLIT),
    refused("--mcp-command --mcp-args", MCP_FILE),
    refused("--max-tokens", f"{DEFAULTS} '{{\"max_new_tokens\": 512}}'"),
    refused("--temperature --temp", f"{DEFAULTS} '{{\"temperature\": 0.7}}'"),
    refused("--top-p", f"{DEFAULTS} '{{\"top_p\": 0.9}}'"),
    refused("--top-k", f"{DEFAULTS} '{{\"top_k\": 40}}'"),
    refused("--min-p", f"{DEFAULTS} '{{\"min_p\": 0.05}}'"),
    refused("--presence-penalty --frequency-penalty", "requests set it themselves: leave it out"),
)
