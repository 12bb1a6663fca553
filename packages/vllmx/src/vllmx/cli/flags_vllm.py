"""vLLM's flags that vllmx does not have itself; see `vllmx.cli.foreign_flags`."""

from __future__ import annotations

from vllmx_core.config_values import json_object, nearest
from vllmx_core.errors import ConfigError, shown

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
KERNELS = "each backend has its own kernels"
BY_RANKS = "ranks share their work as they find it best"
PINNED = "threads are pinned by --num-threads and taskset"
AS_PUBLISHED = "a model is what its folder says, --isq quantises it: leave it out"
NOT_OFFERED = "not offered: leave it out"
ONE_DEVICE = "weights stay on one device: leave it out or say 0"
NO_OFFLOAD = "nothing is offloaded"
SNAPSHOTS = "see --state-snapshot-tokens"
TOWERS = "towers run where the model runs, on images that this host made ready"
SLEEP = "/sleep and /wake are there with --admin-key"
GRAPHS = "steps are recorded by the backend itself; --enforce-eager runs op by op"


def structured_outputs(text: str) -> str | None:
    """The reasoning parser of vLLM's JSON object. Raises ConfigError for what requests say
    themselves and for what vllmx does not do; which library holds a structure changes nothing."""
    config = json_object(text, "structured_outputs_config", '{"reasoning_parser": "qwen3"}')
    for key, value in config.items():
        if key not in STRUCTURED_OUTPUTS:
            raise ConfigError(
                f"it has the unknown key {shown(key)}{nearest(key, STRUCTURED_OUTPUTS)}"
            )
        reason = STRUCTURED_OUTPUTS[key]
        if reason is not None and value:
            raise ConfigError(f"{key}: {reason}")
    parser = config.get("reasoning_parser") or None
    if not isinstance(parser, str | None):
        raise ConfigError(f"reasoning_parser must be the name of a format, got {shown(parser)}")
    return parser


ANY_WHITESPACE = "requests say structured_outputs.disable_any_whitespace"
ADDITIONAL_PROPERTIES = "schemas say additionalProperties"
STRUCTURED_OUTPUTS = {
    "backend": None,
    "disable_fallback": None,
    "disable_any_whitespace": ANY_WHITESPACE,
    "disable_additional_properties": ADDITIONAL_PROPERTIES,
    "reasoning_parser": None,
    "reasoning_parser_plugin": PARSER_PLUGIN,
    "enable_in_reasoning": "thoughts are free, the answer has the form",
}
"""Keys of vLLM's JSON object; with a reason, a value that says something is refused."""

VLLM = (
    switch("--trust-remote-code", "it is never needed, nothing of a model's folder is executed"),
    ignored("--code-revision", "nothing of a model's folder is executed"),
    means("-tp", "tensor_parallel_size", "processes that compute each layer together", str),
    means("-pp", "pipeline_parallel_size", "processes that have some of the layers each", str),
    ignored("--data-parallel-size -dp --data-parallel-size-local -dpl", ONE_COPY, "1"),
    ignored("--data-parallel-rank -dpn --data-parallel-start-rank -dpr", ONE_COPY, "0"),
    ignored("--data-parallel-address -dpa --data-parallel-rpc-port -dpp", ALONE),
    ignored("--data-parallel-backend -dpb", ALONE),
    switch("--data-parallel-hybrid-lb -dph --data-parallel-external-lb -dpe", ALONE),
    switch("--disable-nccl-for-dp-synchronization", ALONE),
    switch("--data-parallel-multi-port-external-lb -dpm", ALONE),
    ignored("--data-parallel-supervisor-port --dp-supervisor-probe-interval-s", ALONE),
    ignored("--dp-supervisor-probe-timeout-s --dp-supervisor-probe-failure-threshold", ALONE),
    ignored("--dp-sync-interval --elastic-ep-max-dp-size --fault-tolerance-config", ALONE),
    switch("--enable-elastic-ep --enable-fault-tolerance", ALONE),
    ignored("--decode-context-parallel-size -dcp", "contexts are not divided: say 1", "1"),
    ignored("--prefill-context-parallel-size -pcp", "contexts are not divided: say 1", "1"),
    ignored("--dcp-comm-backend", "contexts are not divided"),
    switch("--dcp-q-replicate", "contexts are not divided"),
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
    switch("--enable-batch-sharded-sampling --enable-hc-sp --enable-ep-weight-filter", BY_RANKS),
    switch("--enable-nccl-comm-suspend --enable-shm-tensor-arena", BY_RANKS),
    ignored("--all2all-backend", BY_RANKS),
    ignored(
        "--distributed-timeout-seconds --cpu-distributed-timeout-seconds",
        "--step-timeout-s bounds a step on all ranks",
    ),
    ignored("--device-ids", "VLLMX_CUDA_DEVICE is the number of the GPU", "0"),
    ignored("--numa-bind-nodes --numa-bind-cpus", PINNED),
    switch("--numa-bind", PINNED),
    ignored("--max-parallel-loading-workers", "loading uses the cores at hand"),
    switches("--disable-log-requests", "enable_log_requests", False, NO_TEXT),
    ignored("--disable-access-log-for-endpoints", "--disable-access-log is for all routes"),
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
    ignored("--additional-config --quantization-config", AS_PUBLISHED, "{}"),
    ignored("--hf-overrides", "edit config.json instead", "{}"),
    refused("--hf-config-path", "put config.json beside the weights"),
    ignored("--tokenizer-mode", "vllmx has one tokenizer for each model: say auto", "auto", "hf"),
    refused("--tokenizer-revision", "name a folder with --tokenizer"),
    refused("--skip-tokenizer-init", "a tokenizer is always loaded: leave it out", bare=True),
    ignored("--runner", "say --task embed, score or classify", "auto", "generate"),
    means("--convert", "task", "embed and classify; --task says it too", CONVERTED),
    ignored("--pooler-config --override-pooler-config", POOLING, "{}"),
    ignored("--attention-config -ac --kernel-config --ir-op-priority", KERNELS),
    ignored("--moe-backend --linear-backend --sparse-indexer-topk-backend", KERNELS),
    ignored("--gdn-prefill-backend --kda-prefill-backend --kda-decode-backend", KERNELS),
    ignored("--mamba-backend --mamba-ssu-algorithm --replayssm-buffer-len", KERNELS),
    switch("--use-replayssm --monokernel --enable-flashinfer-autotune", KERNELS),
    switch("--jit-monitor-verbose --use-fp64-gumbel --enable-cumem-allocator", KERNELS),
    ignored("--jit-monitor-mode", KERNELS),
    refused("--model-class-overrides --engram-config --diffusion-config -dc", NO_HOOK),
    refused("--aux-output-config --watermark-config --profiler-config", NOT_OFFERED),
    refused("--enable-return-routed-experts --return-sampling-mask", NOT_OFFERED, bare=True),
    refused("--enable-trace-replay", NOT_OFFERED, bare=True),
    ignored("--override-neuron-config --model-loader-extra-config", "leave it out", "{}"),
    refused("--override-attention-dtype", "attention has the dtype of the KV cache"),
    ignored("--safetensors-prefetch-num-threads --safetensors-prefetch-block-size", LOADING),
    ignored("--safetensors-load-strategy --ignore-patterns --pt-load-map-location", LOADING),
    switch("--use-tqdm-on-load --allow-deprecated-quantization", LOADING),
    ignored("--tokenizer-pool-size", "threads tokenise: say 0", "0"),
    ignored("--renderer-num-workers", "threads tokenise, as many as there are cores"),
    ignored("--attention-backend", "each backend has its own attention"),
    ignored("--swap-space", NO_SWAP, "0"),
    ignored("--cpu-offload-gb --offload-group-size", ONE_DEVICE, "0"),
    ignored("--offload-backend --offload-num-in-group --offload-prefetch-step", NO_OFFLOAD),
    ignored("--offload-params --cpu-offload-params", NO_OFFLOAD),
    ignored("--kv-offloading-size", NO_SWAP, "0"),
    switch("--calculate-kv-scales", "8-bit KV caches always have a scale for each vector"),
    ignored("--kv-offloading-backend", NO_OFFLOAD),
    refused("--kv-cache-dtype-skip-layers", "all layers keep one type: leave it out"),
    switch("--kv-sharing-fast-prefill", "layers without pages of their own skip nothing"),
    switch(
        "--disable-hybrid-kv-cache-manager",
        "windows and states always have caches of their own",
    ),
    ignored("--mamba-cache-dtype --mamba-ssm-cache-dtype", STATES, "auto", "float32"),
    ignored("--mamba-cache-mode --mamba-block-size", SNAPSHOTS),
    ignored("--prefix-cache-retention-interval --prefix-match-unit", SNAPSHOTS),
    switch("--enable-mamba-shared-prefix-checkpoint --swa-bounded-replay", SNAPSHOTS),
    switch("--enable-mamba-cache-stochastic-rounding", "states are float32"),
    ignored("--mamba-cache-philox-rounds", "states are float32"),
    switches("--disable-prefix-caching", "enable_prefix_caching", False, "nothing is shared"),
    switches("--disable-chunked-prefill", "enable_chunked_prefill", False, "prompts in one step"),
    ignored("--prefix-caching-hash-algo", "blocks are known by digests and compared"),
    ignored(
        "--max-num-partial-prefills --max-long-partial-prefills",
        "chunks follow --target-step-ms: leave it out or say 1",
        "1",
    ),
    switch("--long-prefill-token-threshold-adaptive", "chunks follow --target-step-ms"),
    ignored("--prefill-schedule-interval", "chunks follow --target-step-ms: say 1", "1"),
    ignored("--performance-mode", "chunks follow --target-step-ms"),
    ignored("--watermark", "sequences are preempted as they need: say 0", "0", "0.0"),
    means("--max-num-active-seqs", "max_num_seqs", "sequences that run together", str),
    means("--max-num-scheduled-tokens", "max_num_batched_tokens", "tokens of a step", str),
    means("--max-num-queued-reqs", "max_concurrent_requests", "more get 503, as there", str),
    refused("--max-num-queued-tokens", "say --max-queue, the requests that may wait"),
    ignored("--long-prefill-token-threshold", "chunks follow --target-step-ms: say 0", "0"),
    ignored("--scheduler-delay-factor", "nothing is delayed: leave it out or say 0", "0", "0.0"),
    ignored("--num-scheduler-steps", "a step is one token: leave it out or say 1", "1"),
    ignored("--num-lookahead-slots", NO_DRAFT, "0"),
    switch("--scheduler-reserve-full-isl --multi-step-stream-outputs", "a step is one token"),
    ignored("--stream-interval", "each step is streamed: leave it out or say 1", "1"),
    switch("--use-v2-block-manager", "there is one block manager"),
    switch("--disable-async-output-proc", "see --async-scheduling"),
    switch("--disable-cascade-attn", "there is none"),
    switch("--disable-sliding-window", "windows follow the model"),
    ignored("--max-seq-len-to-capture", GRAPHS),
    ignored("--cuda-graph-sizes --cudagraph-capture-sizes", GRAPHS),
    ignored("--max-cudagraph-capture-size", GRAPHS),
    ignored("--compilation-config -cc -O --optimization-level", GRAPHS),
    ignored("--response-role", "answers have the role assistant", "assistant"),
    refused("--reasoning-effort-map --reasoning-config", "set them in the chat template"),
    ignored(
        "--anthropic-disabled-thinking-effort", "enable_thinking is false then", "auto", "none"
    ),
    ignored("--tool-strict-level", "tools say `strict`: leave it out or say auto", "auto"),
    ignored("--cohere-format", "the format is found by the chat template"),
    switch("--cohere-is-reasoning-model", "the format is found by the chat template"),
    ignored("--logprobs-mode", "they are of the model itself", "raw_logprobs"),
    ignored("--fingerprint-mode", "it tells one configuration from another", "full", "hash"),
    refused("--fingerprint-value", "it tells one configuration from another: leave it out"),
    ignored("--chat-template-content-format", "content is given as the template reads it"),
    ignored("--guided-decoding-backend", "llguidance holds every structure"),
    switch("--guided-decoding-disable-fallback", "there is one library, llguidance"),
    means(
        "--structured-outputs-config",
        "reasoning_parser",
        "its `reasoning_parser`; one library, llguidance, holds every structure",
        structured_outputs,
    ),
    refused(
        "--guided-decoding-disable-any-whitespace",
        ANY_WHITESPACE,
        bare=True,
    ),
    refused(
        "--guided-decoding-disable-additional-properties",
        ADDITIONAL_PROPERTIES,
        bare=True,
    ),
    ignored("--limit-mm-per-prompt", "see --limit-images"),
    switches("--language-model-only", "limit_images", 0, "text alone"),
    ignored("--mm-encoder-attn-dtype --mm-encoder-fp8-scale-path", TOWERS),
    ignored("--mm-encoder-fp8-scale-save-path --mm-encoder-fp8-scale-save-margin", TOWERS),
    ignored("--mm-processor-device --mm-tensor-ipc --mm-ipc-gpu-memory-gb", TOWERS),
    switch("--mm-device-do-normalize", TOWERS),
    ignored("--mm-hasher-algorithm", IMAGE_CACHE),
    refused("--trust-request-mm-kwargs", "set them in preprocessor_config.json", bare=True),
    ignored("--mm-processor-cache-gb --mm-processor-cache-type", IMAGE_CACHE),
    ignored("--mm-shm-cache-max-object-size-mb --mm-encoder-attn-backend", IMAGE_CACHE),
    switch("--disable-mm-preprocessor-cache --skip-mm-profiling", IMAGE_CACHE),
    switch(
        "--disable-chunked-mm-input --interleave-mm-strings", "images stand where they are sent"
    ),
    ignored("--video-pruning-method", "there are no videos"),
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
    switch("--enable-lora-bias --fully-sharded-loras --specialize-active-lora", NO_LORA),
    switch("--enable-tower-connector-lora --enable-mixed-moe-lora-format", NO_LORA),
    switch("--enable-moe-shared-loras", NO_LORA),
    ignored("--lora-target-modules --max-lora-cls-labels", NO_LORA),
    refused("--spec-method --spec-model --spec-tokens", NO_DRAFT),
    ignored("--per-request-spec-decode-metrics", NO_DRAFT),
    refused("--speculative-config -sc --speculative-model --num-speculative-tokens", NO_DRAFT),
    refused("--ec-manager-config", NO_SPLIT),
    refused("--enable-scale-out", NO_SPLIT, bare=True),
    refused("--kv-transfer-config --ec-transfer-config --kv-events-config", NO_SPLIT),
    refused("--weight-transfer-config --io-processor-plugin --worker-extension-cls", NO_HOOK),
    refused("--scheduler-cls --logits-processors --logits-processor-pattern", NO_HOOK),
    ignored("--worker-cls", NO_HOOK, "auto"),
    refused("--grpc", "vllmx speaks HTTP alone: leave it out", bare=True),
    refused("--grpc-port", "vllmx speaks HTTP alone: leave it out"),
    refused("--tool-server", "name servers of tools in a file: --mcp-config FILE"),
    refused("--rope-theta", "set it in the model's config.json"),
    refused("--middleware", "put a proxy in front"),
    ignored("--collect-detailed-traces", "spans say where the time of a request went anyway"),
    refused("--enable-layerwise-nvtx-tracing --ray-workers-use-nsight", NOT_OFFERED, bare=True),
    switch("--enable-sleep-mode --sleep-mode-offload-cudagraph", SLEEP),
    ignored("--sleep-mode-backend --sleep-preserve-parameter-names", SLEEP),
    means("--shutdown-timeout", "drain_timeout_s", "how long requests may take to end", str),
    ignored("--watchdog-config", "see --step-timeout-s"),
    switch("--fail-on-environ-validation", "variables that vllmx does not know are told"),
    switch("--enable-flash-late-interaction", "scores are computed on the model's device"),
    refused("--custom-histogram-buckets", "buckets are fixed: leave it out"),
    ignored("--kv-cache-metrics-sample", "see /metrics"),
    switch("--enable-logging-iteration-details", "see /metrics"),
    switch("--cudagraph-metrics --kv-cache-metrics --enable-mfu-metrics", "see /metrics"),
    ignored("--show-hidden-metrics-for-version", "no metric is hidden"),
    switch("--aggregate-engine-logging --enable-log-deltas --log-error-stack", "it is one log"),
    refused("--enable-log-outputs", "answers stand in no log", bare=True),
    refused("--log-config-file --logging-config", "say --log-level and --log-format"),
    switch("--enable-prompt-tokens-details", "usage always says how many were cached"),
    switches(
        "--disable-force-include-usage",
        "enable_force_include_usage",
        False,
        "usage where a stream asks for it",
    ),
    switches(
        "--disable-per-request-metrics",
        "enable_per_request_metrics",
        False,
        "answers without the times of their requests",
    ),
    switches(
        "--disable-tokenizer-info-endpoint",
        "enable_tokenizer_info_endpoint",
        False,
        "no GET /tokenizer_info",
    ),
    refused("--return-tokens-as-token-ids", "requests say it", bare=True),
    switch("--exclude-tools-when-tool-choice-none", "tools are left out then"),
    switch("--enable-offline-docs", "the page at /docs needs no other host"),
    refused("--enable-ssl-refresh", "send SIGHUP: certificates are read anew", bare=True),
    refused("--ssl-ciphers", "ciphers are Python's own choice: leave it out"),
)
