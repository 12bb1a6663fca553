"""vLLM's flags that vllmx does not have itself; see `vllmx.cli.foreign_flags`."""

from __future__ import annotations

from vllmx.cli.foreign_flags import ignored, means, refused, switch, switches, variable

ONE_COPY = "a server runs one copy of a model, put a proxy before several: leave it out or say 1"
NO_SWAP = "vllmx recomputes preempted sequences and swaps nothing: leave it out or say 0"
PARSER_PLUGIN = "a plugin brings parsers by the hook vllmx_parsers (docs/plugins.md)"
NO_LORA = "vllmx serves no adapters: merge them into the model"
NO_DRAFT = "vllmx does not speculate: leave it out"
NO_TEXT = "prompts stand in the log with --enable-log-requests alone"
IN_REQUESTS = "requests bring it themselves: leave it out"
NO_SPLIT = "vllmx does prefill and decode in one place: leave it out"
NO_HOOK = "a plugin of vllmx has other hooks (docs/plugins.md): leave it out"
ALONE = "there is one copy of the model"
OTHER_HOSTS = "name the other hosts by --rank-hosts, and run `vllmx rank` there (docs/scale.md)"
POOLING = "vectors are pooled as the model's files say: leave it out"
CONVERTED = {"auto": None, "none": None, "embed": "embed", "classify": "classify"}
IMAGE_CACHE = "see --encoder-cache-memory, which keeps what towers made"
TEXT_OR_IDS = "prompts are text or token ids: leave it out"
LOADING = "files are mapped and read once, by the cores at hand"
STATES = "states are float32: say auto"
GRAPHS = "steps are recorded by the backend itself; --enforce-eager runs op by op"

VLLM = (
    switch("--trust-remote-code", "it is never needed, nothing of a model's folder is executed"),
    ignored("--code-revision", "nothing of a model's folder is executed"),
    means("-tp", "tensor_parallel_size", "processes that compute each layer together", str),
    means("-pp", "pipeline_parallel_size", "processes that have some of the layers each", str),
    ignored("--data-parallel-size -dp --data-parallel-size-local -dpl", ONE_COPY, "1"),
    ignored("--data-parallel-rank -dpn --data-parallel-start-rank -dpr", ONE_COPY, "0"),
    ignored("--data-parallel-address -dpa --data-parallel-rpc-port -dpp", ALONE),
    ignored("--data-parallel-backend -dpb", ALONE),
    switch("--data-parallel-hybrid-lb --data-parallel-external-lb", ALONE),
    switch("--disable-nccl-for-dp-synchronization", ALONE),
    ignored("--decode-context-parallel-size -dcp", "contexts are not divided: say 1", "1"),
    ignored("--dcp-kv-cache-interleave-size --cp-kv-cache-interleave-size", ALONE),
    ignored("--nnodes", OTHER_HOSTS, "1"),
    ignored("--node-rank", OTHER_HOSTS, "0"),
    refused("--master-addr --master-port", OTHER_HOSTS),
    refused("--headless", OTHER_HOSTS, bare=True),
    ignored(
        "--distributed-executor-backend",
        "ranks are vllmx's own processes: leave it out",
        "mp",
        "uni",
    ),
    switches("--enable-expert-parallel -ep", "expert_parallel", True, "whole experts on each rank"),
    switch("--enable-eplb --eplb-log-balancedness", "experts stay on their ranks"),
    ignored("--eplb-config --eplb-window-size --eplb-step-interval", "experts stay on their ranks"),
    ignored("--num-redundant-experts", "experts stay on their ranks: say 0", "0"),
    ignored(
        "--expert-placement-strategy", "each rank has experts that follow each other", "linear"
    ),
    switch("--enable-dbo", "a step is one batch"),
    ignored("--dbo-decode-token-threshold --dbo-prefill-token-threshold", "a step is one batch"),
    switch("--enable-multimodal-encoder-data-parallel", "each rank has the whole tower"),
    ignored("--mm-encoder-tp-mode", "each rank has the whole tower"),
    switch("--disable-custom-all-reduce", "ranks find out by themselves how they add"),
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
    ignored("--runner", "say --task embed, score or classify", "auto", "generate"),
    means("--convert", "task", "embed and classify; --task says it too", CONVERTED),
    ignored("--pooler-config --override-pooler-config", POOLING, "{}"),
    ignored("--attention-config --kernel-config", "each backend has its own kernels"),
    ignored("--override-neuron-config --model-loader-extra-config", "leave it out", "{}"),
    refused("--override-attention-dtype", "attention has the dtype of the KV cache"),
    ignored("--safetensors-load-strategy --ignore-patterns --pt-load-map-location", LOADING),
    switch("--use-tqdm-on-load --no-use-tqdm-on-load --allow-deprecated-quantization", LOADING),
    ignored("--tokenizer-pool-size", "threads tokenise: say 0", "0"),
    ignored("--attention-backend", "each backend has its own attention"),
    ignored("--swap-space", NO_SWAP, "0"),
    ignored("--cpu-offload-gb", "weights stay on one device: leave it out or say 0", "0"),
    ignored("--kv-offloading-size", NO_SWAP, "0"),
    switch("--calculate-kv-scales", "8-bit KV caches always have a scale for each vector"),
    ignored("--kv-offloading-backend", "nothing is offloaded"),
    switch("--kv-sharing-fast-prefill", "layers without pages of their own skip nothing"),
    switch(
        "--disable-hybrid-kv-cache-manager --no-disable-hybrid-kv-cache-manager",
        "windows and states always have caches of their own",
    ),
    ignored("--mamba-cache-dtype --mamba-ssm-cache-dtype", STATES, "auto", "float32"),
    ignored("--mamba-cache-mode --mamba-block-size", "see --state-snapshot-tokens"),
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
    switch("--scheduler-reserve-full-isl --multi-step-stream-outputs", "a step is one token"),
    ignored("--stream-interval", "each step is streamed: leave it out or say 1", "1"),
    switch("--use-v2-block-manager", "there is one block manager"),
    switch("--disable-async-output-proc", "see --async-scheduling"),
    switch("--disable-cascade-attn", "there is none"),
    switch("--disable-sliding-window --no-disable-sliding-window", "windows follow the model"),
    ignored("--max-seq-len-to-capture", GRAPHS),
    ignored("--cuda-graph-sizes --cudagraph-capture-sizes", GRAPHS),
    ignored("--max-cudagraph-capture-size", GRAPHS),
    ignored("--compilation-config -cc -O --optimization-level", GRAPHS),
    ignored("--response-role", "answers have the role assistant", "assistant"),
    ignored("--chat-template-content-format", "content is given as the template reads it"),
    ignored("--guided-decoding-backend", "llguidance holds every structure"),
    switch("--guided-decoding-disable-fallback", "there is one library, llguidance"),
    refused("--structured-outputs-config", "llguidance holds every structure: leave it out"),
    refused(
        "--guided-decoding-disable-any-whitespace",
        "requests say structured_outputs.disable_any_whitespace",
        bare=True,
    ),
    refused(
        "--guided-decoding-disable-additional-properties",
        "schemas say additionalProperties",
        bare=True,
    ),
    ignored("--limit-mm-per-prompt", "see --limit-images"),
    ignored("--mm-processor-cache-gb --mm-processor-cache-type", IMAGE_CACHE),
    ignored("--mm-shm-cache-max-object-size-mb --mm-encoder-attn-backend", IMAGE_CACHE),
    switch("--disable-mm-preprocessor-cache --skip-mm-profiling", IMAGE_CACHE),
    switch(
        "--disable-chunked-mm-input --interleave-mm-strings", "images stand where they are sent"
    ),
    refused("--media-io-kwargs --video-pruning-rate", "set it in preprocessor_config.json"),
    refused("--enable-mm-embeds --enable-prompt-embeds --tokens-only", TEXT_OR_IDS, bare=True),
    refused("--mm-encoder-only", "a server has the whole model", bare=True),
    ignored("--mm-processor-kwargs", "set them in the model's preprocessor_config.json"),
    ignored("--ssl-cert-reqs", "clients' certificates are not asked for: say 0", "0"),
    refused("--ssl-ca-certs", "clients' certificates are not asked for: put a proxy in front"),
    switch("--enable-auto-tool-choice", "a model calls tools wherever a request brings some"),
    refused("--tool-parser-plugin --reasoning-parser-plugin", PARSER_PLUGIN),
    refused("--enable-lora", NO_LORA, bare=True),
    refused("--lora-modules --default-mm-loras", NO_LORA),
    ignored("--max-loras --max-lora-rank --max-cpu-loras --lora-dtype", NO_LORA),
    ignored("--lora-extra-vocab-size", NO_LORA),
    switch("--enable-lora-bias --fully-sharded-loras", NO_LORA),
    refused("--speculative-config -sc --speculative-model --num-speculative-tokens", NO_DRAFT),
    refused("--kv-transfer-config --ec-transfer-config --kv-events-config", NO_SPLIT),
    refused("--weight-transfer-config --io-processor-plugin --worker-extension-cls", NO_HOOK),
    refused("--scheduler-cls --logits-processors --logits-processor-pattern", NO_HOOK),
    ignored("--worker-cls", NO_HOOK, "auto"),
    refused("--grpc", "vllmx speaks HTTP alone: leave it out", bare=True),
    refused("--tool-server", "name servers of tools in a file: --mcp-config FILE"),
    refused("--rope-theta", "set it in the model's config.json"),
    refused("--middleware", "put a proxy in front"),
    ignored("--collect-detailed-traces", "spans say where the time of a request went anyway"),
    refused("--enable-layerwise-nvtx-tracing --ray-workers-use-nsight", "not offered", bare=True),
    switch("--enable-sleep-mode", "/sleep and /wake are there with --admin-key"),
    switch("--cudagraph-metrics --kv-cache-metrics --enable-mfu-metrics", "see /metrics"),
    ignored("--show-hidden-metrics-for-version", "no metric is hidden"),
    switch("--aggregate-engine-logging --enable-log-deltas --log-error-stack", "it is one log"),
    refused("--enable-log-outputs", "answers stand in no log", bare=True),
    refused("--log-config-file", "say --log-level and --log-format"),
    switch("--enable-prompt-tokens-details", "usage always says how many were cached"),
    refused("--enable-force-include-usage", "requests say stream_options.include_usage", bare=True),
    refused("--return-tokens-as-token-ids", "requests say it", bare=True),
    switch("--exclude-tools-when-tool-choice-none", "tools are left out then"),
    switch("--enable-offline-docs", "the page at /docs needs no other host"),
    refused("--enable-tokenizer-info-endpoint", "there is no such route", bare=True),
    refused("--enable-ssl-refresh", "send SIGHUP: certificates are read anew", bare=True),
    refused("--ssl-ciphers", "ciphers are Python's own choice: leave it out"),
)
