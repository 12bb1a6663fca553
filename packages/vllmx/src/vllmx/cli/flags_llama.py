"""llama-server's flags that vllmx does not have itself; see `vllmx.cli.foreign_flags`."""

from __future__ import annotations

from pathlib import Path

from vllmx_core.errors import ConfigError

from vllmx.cli.flags_vllm import IN_REQUESTS, NO_DRAFT, NO_LORA, PINNED, POOLING
from vllmx.cli.foreign_flags import (
    ignored,
    means,
    number,
    refused,
    sampling,
    switch,
    switches,
    template,
    variable,
)

ONE_CACHE = "keys and values have one type: say --kv-cache-dtype int8 for 8 bits"
REASONING = {"none": "none", "auto": "auto", "deepseek": "auto"}
THINKING = {"on": True, "off": False, "auto": None}
KV_TYPES = {"f32": "f32", "f16": "f16", "bf16": "bf16", "q8_0": "int8"}
IN_MEMORY = "weights are packed into memory when they are loaded"
WHOLE_MODEL = "the whole model is on one device; --backend names it"
ON_RANKS = "--tensor-parallel-size divides a model (docs/scale.md): leave it out"
ROPE = "set it in the model's config.json"
NO_SHIFT = "nothing is ever shifted"
OTHER_SAMPLING = "vllmx does not sample so: leave it out"
BY_SERVER = "the server decides by its memory: leave it out"
SEVERAL = "name each model: --model NAME=PATH (docs/serving.md)"
MCP_FILE = "name servers of tools in a file: --mcp-config FILE"
OWN_PAGE = "vllmx has a page of its own: --no-web leaves it out"
NO_PRESET = "name the model itself"
SHARED_PAGES = "pages are shared by all sequences"
TIMED = "each line has its time"


def context(text: str) -> str:
    """0 is the model's own length."""
    return "auto" if text == "0" else text


def layers(text: str) -> str:
    """The backend that holds this number of layers. Raises ConfigError for a part of a model: 99 is
    what people write for all."""
    if text == "0":
        return "cpu"
    if text in ("all", "auto", "-1") or (text.isdecimal() and float(text) >= 99):
        return "auto"
    raise ConfigError(f"{WHOLE_MODEL}, 0 is cpu, 99 auto")


def answer_tokens(text: str) -> int | float | None:
    """-1 and -2 are as many as the context holds."""
    value = number(text)
    return None if value in (-1, -2) else value


def thinking_budget(text: str) -> bool | None:
    """-1 is none, 0 no thoughts at all. Raises ConfigError for others, which requests set."""
    if text in ("-1", "0"):
        return None if text == "-1" else False
    raise ConfigError("requests set it: thinking_token_budget; -1 and 0 are taken")


def keys_of(text: str) -> tuple[str, ...]:
    """API keys of a file, one a line. Raises ConfigError."""
    try:
        lines = Path(text).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the file of keys cannot be read: {error}") from None
    keys = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise ConfigError("the file holds no key")
    return keys


DRAFTS = (
    refused("-md --model-draft --spec-draft-model --spec-type", NO_DRAFT),
    refused("--draft --draft-n --draft-max --draft-min --draft-n-min", NO_DRAFT),
    refused("--spec-draft-n-max --spec-draft-n-min --spec-draft-p-min --draft-p-min", NO_DRAFT),
    refused("--spec-draft-p-split --draft-p-split --spec-draft-sampling", NO_DRAFT),
    refused("--spec-synth-len --spec-synth-rates", NO_DRAFT),
    refused("-ngld --gpu-layers-draft --n-gpu-layers-draft --spec-draft-ngl", NO_DRAFT),
    refused("-hfd -hfrd --hf-repo-draft --spec-draft-hf", NO_DRAFT),
    refused("-ctkd --cache-type-k-draft --spec-draft-type-k", NO_DRAFT),
    refused("-ctvd --cache-type-v-draft --spec-draft-type-v", NO_DRAFT),
    refused("-devd --device-draft --spec-draft-device", NO_DRAFT),
    refused("-otd --override-tensor-draft --spec-draft-override-tensor", NO_DRAFT),
    refused("-cmoed --cpu-moe-draft --spec-draft-cpu-moe", NO_DRAFT, bare=True),
    refused("-ncmoed --n-cpu-moe-draft --spec-draft-n-cpu-moe --spec-draft-ncmoe", NO_DRAFT),
    refused("--spec-default", NO_DRAFT, bare=True),
    refused("-lcs --lookup-cache-static -lcd --lookup-cache-dynamic", NO_DRAFT),
    refused("--spec-ngram-mod-n-min --spec-ngram-mod-n-max --spec-ngram-mod-n-match", NO_DRAFT),
    refused("--spec-ngram-simple-size-n --spec-ngram-simple-size-m", NO_DRAFT),
    refused("--spec-ngram-simple-min-hits --spec-ngram-map-k-min-hits", NO_DRAFT),
    refused("--spec-ngram-map-k-size-n --spec-ngram-map-k-size-m", NO_DRAFT),
    refused("--spec-ngram-map-k4v-size-n --spec-ngram-map-k4v-size-m", NO_DRAFT),
    refused("--spec-ngram-map-k4v-min-hits --spec-ngram-min-hits", NO_DRAFT),
    refused("--spec-ngram-size-n --spec-ngram-size-m", NO_DRAFT),
    ignored("-td --threads-draft --spec-draft-threads", NO_DRAFT),
    ignored("-tbd --threads-batch-draft --spec-draft-threads-batch", NO_DRAFT),
    ignored("-Cd --cpu-mask-draft --spec-draft-cpu-mask", NO_DRAFT),
    ignored("-Crd --cpu-range-draft --spec-draft-cpu-range", NO_DRAFT),
    ignored("-Cbd --cpu-mask-batch-draft --spec-draft-cpu-mask-batch", NO_DRAFT),
    ignored("--cpu-strict-draft --spec-draft-cpu-strict", NO_DRAFT),
    ignored("--cpu-strict-batch-draft --spec-draft-cpu-strict-batch", NO_DRAFT),
    ignored("--prio-draft --spec-draft-prio --poll-draft --spec-draft-poll", NO_DRAFT),
    ignored("--prio-batch-draft --spec-draft-prio-batch", NO_DRAFT),
    ignored("--poll-batch-draft --spec-draft-poll-batch", NO_DRAFT),
    switch("--spec-draft-backend-sampling --no-spec-draft-backend-sampling", NO_DRAFT),
)
"""Flags of speculation; what has no effect without a draft model is taken."""
LLAMA = (
    # --- size and place -------------------------------------------------------------------------
    means("-c --ctx-size", "max_model_len", "of each sequence, not divided among them", context),
    means("-np --parallel", "max_num_seqs", "sequences that run together", context),
    means("-ngl --gpu-layers --n-gpu-layers", "backend", "0 is cpu, 99 and all are auto", layers),
    means("-ctk --cache-type-k", "kv_cache_dtype", ONE_CACHE, KV_TYPES),
    means("-ctv --cache-type-v", "kv_cache_dtype", ONE_CACHE, KV_TYPES),
    ignored("-fa --flash-attn", "each backend has its own attention", optional=True),
    ignored("-ub --ubatch-size", "chunks follow --target-step-ms"),
    ignored("-tb --threads-batch", "--num-threads is for all steps"),
    ignored("--threads-http", "HTTP has one event loop"),
    ignored("--numa --poll --poll-batch --prio --prio-batch", PINNED),
    ignored("--cpu-strict --cpu-strict-batch", PINNED),
    refused("-C --cpu-mask -Cr --cpu-range -Cb --cpu-mask-batch -Crb --cpu-range-batch", PINNED),
    switch("-cb --cont-batching", "it is always on"),
    refused("-nocb --no-cont-batching", "batching is continuous: say --max-num-seqs 1", bare=True),
    switch("-kvu --kv-unified -no-kvu --no-kv-unified --swa-full", SHARED_PAGES),
    ignored("-dt --defrag-thold", SHARED_PAGES),
    refused("--kv-unified-per-slot", "say --max-model-len, the context of each sequence"),
    switch("--no-context-shift", NO_SHIFT),
    refused("--context-shift", "what is longer than the context is refused", bare=True),
    ignored("--keep", NO_SHIFT),
    switch("--mlock --no-mmap --mmap --repack -nr --no-repack", IN_MEMORY),
    ignored("-lm --load-mode -lzm --lazy-mode", IN_MEMORY),
    switch("--check-tensors", "files are checked as they are read"),
    switch("-kvo --kv-offload -nkvo --no-kv-offload --op-offload --no-op-offload", WHOLE_MODEL),
    switch("--no-host", WHOLE_MODEL),
    ignored("--moe-cache-mib", WHOLE_MODEL, "0"),
    ignored("-mmdev --mmproj-device", "towers run where the model runs"),
    switch("--mmproj-offload --no-mmproj-offload", "towers run where the model runs"),
    ignored("-sm --split-mode", ON_RANKS, "none"),
    ignored("-mg --main-gpu", "VLLMX_CUDA_DEVICE is the number of the GPU", "0"),
    refused("-ts --tensor-split --rpc", ON_RANKS),
    refused("-ot --override-tensor -ncmoe --n-cpu-moe -ncffn --n-cpu-ffn", WHOLE_MODEL),
    refused("-cmoe --cpu-moe", WHOLE_MODEL, bare=True),
    ignored("-fit --fit", "sizes fit the memory; give them to fix them", "on"),
    ignored("-fitt --fit-target -fitc --fit-ctx", BY_SERVER),
    # --- the prefix cache -----------------------------------------------------------------------
    ignored("--cache-reuse", "equal beginnings are shared always"),
    switch("--cache-prompt", "it is on by default"),
    switches("--no-cache-prompt", "enable_prefix_caching", False, "nothing is shared"),
    ignored("-cram --cache-ram -sps --slot-prompt-similarity", BY_SERVER),
    ignored("-ctxcp --ctx-checkpoints --swa-checkpoints -cms --checkpoint-min-step", BY_SERVER),
    switch("--cache-idle-slots --no-cache-idle-slots", BY_SERVER),
    refused("--slot-save-path", "the prefix cache is in memory alone"),
    # --- the model ------------------------------------------------------------------------------
    means("-hf -hfr --hf-repo", "model", "a model of the hub", str),
    means("-hff --hf-file", "file", "a file of it", str),
    refused("-mu --model-url -dr --docker-repo", "download the file and name it"),
    variable("--offline", "HF_HUB_OFFLINE", "only what the cache holds", bare=True),
    refused("--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale", ROPE),
    refused("--yarn-orig-ctx --yarn-ext-factor --yarn-attn-factor --yarn-beta-slow", ROPE),
    refused("--yarn-beta-fast --override-kv", ROPE),
    refused("--lora --lora-scaled", NO_LORA),
    refused("--lora-init-without-apply", NO_LORA, bare=True),
    refused("--control-vector --control-vector-scaled --control-vector-layer-range", NO_LORA),
    *DRAFTS,
    switches("--no-mmproj --no-mmproj-auto", "limit_images", 0, "text alone"),
    refused("-mmu --mmproj-url", "download the file and name it by --mmproj"),
    refused("--image-min-tokens --image-max-tokens", "set it in preprocessor_config.json"),
    ignored("--mtmd-batch-max-tokens", "each image is one piece"),
    ignored("--video-fps --video-timestamp-interval --video-ffmpeg-dir", "there are no videos"),
    means("--media-path", "allowed_local_media_path", "images that requests may name", str),
    refused(
        "--gpt-oss-20b-default --gpt-oss-120b-default --embd-gemma-default", NO_PRESET, bare=True
    ),
    refused(
        "--fim-qwen-3b-default --fim-qwen-7b-default --fim-qwen-30b-default", NO_PRESET, bare=True
    ),
    refused("--fim-qwen-1.5b-default --fim-qwen-7b-spec --fim-qwen-14b-spec", NO_PRESET, bare=True),
    refused("--vision-gemma-4b-default --vision-gemma-12b-default", NO_PRESET, bare=True),
    # --- several models -------------------------------------------------------------------------
    refused("--models-dir --models-preset --models-max", SEVERAL),
    refused("--models-autoload --no-models-autoload", SEVERAL, bare=True),
    means("--sleep-idle-seconds", "idle_unload_s", "models without requests leave memory", str),
    # --- vectors and scores ---------------------------------------------------------------------
    switches("--embedding --embeddings", "task", "embed", "the model makes vectors"),
    switches("--reranking --rerank", "task", "score", "the model scores pairs of texts"),
    refused("--pooling", POOLING),
    ignored("--embd-normalize", "vectors have length one unless a request says otherwise", "2"),
    # --- sampling -------------------------------------------------------------------------------
    sampling("-n --n-predict --predict", "max_new_tokens", translation=answer_tokens),
    sampling("--repeat-penalty", "repetition_penalty"),
    ignored("--repeat-last-n", "penalties look at all tokens: leave it out or say -1", "-1"),
    ignored("--dry-multiplier --xtc-probability --dynatemp-range", OTHER_SAMPLING, "0", "0.0"),
    ignored("--mirostat", OTHER_SAMPLING, "0"),
    ignored("--adaptive-target", OTHER_SAMPLING, "-1", "-1.0"),
    ignored("--adaptive-decay", "--adaptive-target is -1"),
    ignored("--typical --typical-p", OTHER_SAMPLING, "1", "1.0"),
    ignored("--top-nsigma --top-n-sigma", OTHER_SAMPLING, "-1", "-1.0"),
    ignored("--dry-base --dry-allowed-length --dry-penalty-last-n", "--dry-multiplier is 0"),
    ignored("--dry-sequence-breaker --xtc-threshold --dynatemp-exp", "it has no effect alone"),
    ignored("--mirostat-lr --mirostat-ent", "--mirostat is 0"),
    refused("--samplers --sampler-seq --sampling-seq", "the order of samplers is fixed"),
    switch("-bs --backend-sampling", "it is always on"),
    refused("--ignore-eos", IN_REQUESTS, bare=True),
    refused("-l --logit-bias -r --reverse-prompt --grammar --grammar-file", IN_REQUESTS),
    refused("-j --json-schema -jf --json-schema-file -p --prompt", IN_REQUESTS),
    switch("-e --escape --no-escape", "prompts come by requests, as they are"),
    refused("-sp --special", "requests say skip_special_tokens = false", bare=True),
    # --- chats ----------------------------------------------------------------------------------
    switch("--jinja", "templates are always Jinja"),
    refused("--no-jinja", "templates are always Jinja: leave it out", bare=True),
    means("--reasoning-format", "reasoning_parser", "deepseek is auto", REASONING),
    template("-rea --reasoning", "enable_thinking", "of templates that know it", THINKING),
    template("--reasoning-budget", "enable_thinking", "0 is false, -1 nothing", thinking_budget),
    refused("--reasoning-budget-message", "thoughts end with the model's own mark"),
    template("--reasoning-effort", "reasoning_effort", "of templates that know it", str),
    switch("--reasoning-preserve --no-reasoning-preserve", "the chat template says what it keeps"),
    switches("--skip-chat-parsing", "tool_parser", "none", "calls stay text"),
    switch("--no-skip-chat-parsing", "calls are read from answers"),
    refused("--prefill-assistant", "requests say continue_final_message = true", bare=True),
    switch("--no-prefill-assistant", "requests say continue_final_message"),
    # --- the server -----------------------------------------------------------------------------
    means("--api-key-file", "api_key", "the keys of a file, one a line", keys_of),
    ignored("-to --timeout", "--send-timeout-s and its like bound each part of a request"),
    means("--cors-origins", "allowed_origins", "as there", str),
    means("--cors-methods", "allowed_methods", "as there", str),
    means("--cors-headers", "allowed_headers", "as there", str),
    switches("--cors-credentials", "allow_credentials", True, "as there"),
    switches("--no-cors-credentials", "allow_credentials", False, "as there"),
    switch("--reuse-port", "all API processes share one socket"),
    refused("--path", OWN_PAGE),
    refused("--ui-config --webui-config --ui-config-file --webui-config-file", OWN_PAGE),
    switch("--no-ui-mcp-proxy --no-webui-mcp-proxy -no-ag --no-agent", "it is off"),
    refused("--ui-mcp-proxy --webui-mcp-proxy -ag --agent", MCP_FILE, bare=True),
    refused("--tools --tools-runtime --mcp-servers-config --mcp-servers-json", MCP_FILE),
    ignored("--tags", "/v1/models says what a model can do"),
    switch(
        "--metrics --no-slots --no-warmup --warmup --mmproj-auto --perf --no-perf",
        "vllmx does it so anyway",
    ),
    switch("--slots", "/metrics and `vllmx top` show what runs"),
    refused("--props", "settings are changed by a new start", bare=True),
    refused("--list-devices", "`vllmx env` lists them", bare=True),
    refused("-cl --cache-list", "`vllmx models` says what can be loaded", bare=True),
    refused("--completion-bash", "`vllmx --help` says how to get it", bare=True),
    switch("--spm-infill", "`suffix` of completions follows the model's files"),
    # --- the log --------------------------------------------------------------------------------
    switches("-v --verbose --log-verbose", "log_level", "debug", "all messages"),
    switches("--log-disable", "log_level", "error", "errors alone"),
    switches("--log-jsonl", "log_format", "json", "an object a line"),
    switches("--no-log-jsonl", "log_format", "text", "a line each"),
    ignored("-lv --verbosity --log-verbosity", "--log-level says how much is logged"),
    ignored("--log-colors", "the log has no colours"),
    switch("--log-prefix --log-timestamps --no-log-prefix --no-log-timestamps", TIMED),
    refused("--log-file", "the log is standard error: redirect it"),
    refused("--log-prompts-dir", "--enable-log-requests writes prompts into the log"),
)
