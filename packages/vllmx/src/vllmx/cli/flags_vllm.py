"""vLLM's flags that vllmx does not have itself; see `vllmx.cli.foreign_flags`."""

from __future__ import annotations

from vllmx.cli.foreign_flags import ignored, means, refused, switch, switches, variable

ONE_DEVICE = "vllmx runs a model on one device: leave it out or say 1"
NO_SWAP = "vllmx recomputes preempted sequences and swaps nothing: leave it out or say 0"
PARSER_PLUGIN = "a plugin brings parsers by the hook vllmx_parsers (docs/plugins.md)"
NO_LORA = "vllmx serves no adapters: merge them into the model"
NO_DRAFT = "vllmx does not speculate: leave it out"
NO_TEXT = "prompts stand in the log with --enable-log-requests alone"
GRAPHS = "steps are recorded by the backend itself; --enforce-eager runs op by op"

VLLM = (
    switch("--trust-remote-code", "it is never needed, nothing of a model's folder is executed"),
    ignored("--code-revision", "nothing of a model's folder is executed"),
    means("-tp", "tensor_parallel_size", "processes that compute each layer together", str),
    means("-pp", "pipeline_parallel_size", "processes that have some of the layers each", str),
    ignored("--data-parallel-size -dp", ONE_DEVICE, "1"),
    ignored("--decode-context-parallel-size -dcp", ONE_DEVICE, "1"),
    ignored("--nnodes", ONE_DEVICE, "1"),
    ignored("--distributed-executor-backend", "there is one device: leave it out", "mp", "uni"),
    switches("--enable-expert-parallel -ep", "expert_parallel", True, "whole experts on each rank"),
    switch("--disable-custom-all-reduce", "there is one device"),
    ignored("--max-parallel-loading-workers", "loading uses the cores at hand"),
    switches("--disable-log-requests", "enable_log_requests", False, NO_TEXT),
    switch("--disable-log-stats", "statistics are at /metrics, not in the log"),
    switches(
        "--disable-uvicorn-access-log", "disable_access_log", True, "no line for each request"
    ),
    means("--uvicorn-log-level", "log_level", "one level for the whole log", str),
    switch("--disable-fastapi-docs", "/docs stays: it holds no secret"),
    switch("--disable-frontend-multiprocessing", "the engine core always has its own process"),
    switch("--enable-server-load-tracking", "/metrics has the load"),
    switch("--enable-request-id-headers", "every answer has X-Request-Id"),
    ignored("--h11-max-incomplete-event-size --h11-max-header-count", "limits are vllmx's own"),
    variable("--download-dir", "HF_HUB_CACHE", "where files of the hub are kept"),
    variable("--hf-token -hft", "HF_TOKEN", "token for the Hugging Face hub; ps shows a flag"),
    ignored("--config-format", "vllmx reads config.json and GGUF: leave it out", "auto", "hf"),
    ignored("--hf-overrides", "edit config.json instead", "{}"),
    refused("--hf-config-path", "put config.json beside the weights"),
    ignored("--tokenizer-mode", "vllmx has one tokenizer for each model: say auto", "auto", "hf"),
    refused("--tokenizer-revision", "name a folder with --tokenizer"),
    refused("--skip-tokenizer-init", "a tokenizer is always loaded: leave it out", bare=True),
    ignored("--runner", "vllmx generates text: leave it out", "auto", "generate"),
    ignored("--convert", "vllmx generates text: leave it out", "auto", "none"),
    ignored("--attention-backend", "each backend has its own attention"),
    ignored("--swap-space", NO_SWAP, "0"),
    ignored("--cpu-offload-gb", "weights stay on one device: leave it out or say 0", "0"),
    ignored("--kv-offloading-size", NO_SWAP, "0"),
    switch("--calculate-kv-scales", "8-bit KV caches always have a scale for each vector"),
    ignored("--prefix-caching-hash-algo", "blocks are known by digests and compared"),
    ignored(
        "--max-num-partial-prefills --max-long-partial-prefills",
        "chunks follow --target-step-ms: leave it out or say 1",
        "1",
    ),
    ignored("--long-prefill-token-threshold", "chunks follow --target-step-ms: say 0", "0"),
    ignored("--scheduler-delay-factor", "nothing is delayed: leave it out or say 0", "0", "0.0"),
    ignored("--num-scheduler-steps", "a step is one token: leave it out or say 1", "1"),
    ignored("--num-lookahead-slots", NO_DRAFT, "0"),
    ignored("--stream-interval", "each step is streamed: leave it out or say 1", "1"),
    switch("--use-v2-block-manager", "there is one block manager"),
    switch("--disable-async-output-proc", "see --async-scheduling"),
    switch("--disable-cascade-attn", "there is none"),
    switch("--disable-sliding-window --no-disable-sliding-window", "windows follow the model"),
    ignored("--max-seq-len-to-capture", GRAPHS),
    ignored("--cuda-graph-sizes --cudagraph-capture-sizes", GRAPHS),
    ignored("--compilation-config -O", GRAPHS),
    ignored("--response-role", "answers have the role assistant", "assistant"),
    ignored("--chat-template-content-format", "content is given as the template reads it"),
    ignored("--guided-decoding-backend", "there is no structured output yet", "auto"),
    ignored("--limit-mm-per-prompt", "see --limit-images"),
    ignored("--mm-processor-kwargs", "set them in the model's preprocessor_config.json"),
    ignored("--ssl-cert-reqs", "clients' certificates are not asked for: say 0", "0"),
    refused("--ssl-ca-certs", "clients' certificates are not asked for: put a proxy in front"),
    switch("--enable-auto-tool-choice", "a model calls tools wherever a request brings some"),
    refused("--tool-parser-plugin --reasoning-parser-plugin", PARSER_PLUGIN),
    refused("--enable-lora", NO_LORA, bare=True),
    refused("--lora-modules", NO_LORA),
    refused("--speculative-config", NO_DRAFT),
    refused("--rope-theta", "set it in the model's config.json"),
    refused("--middleware", "put a proxy in front"),
    ignored("--collect-detailed-traces", "spans say where the time of a request went anyway"),
    refused("--enable-sleep-mode", "stop and start the server, it takes a second", bare=True),
)
