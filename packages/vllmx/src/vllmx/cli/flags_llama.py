"""llama-server's flags that vllmx does not have itself; see `vllmx.cli.foreign_flags`."""

from __future__ import annotations

from vllmx_core.errors import ConfigError

from vllmx.cli.flags_vllm import NO_DRAFT, NO_LORA, ONE_DEVICE
from vllmx.cli.foreign_flags import ignored, means, refused, switch, switches, variable

ONE_CACHE = "keys and values have one type: say --kv-cache-dtype int8 for 8 bits"
REASONING = {"none": "none", "auto": "auto", "deepseek": "auto"}
KV_TYPES = {"f32": "f32", "f16": "f16", "bf16": "bf16", "q8_0": "int8"}
IN_MEMORY = "weights are packed into memory when they are loaded"
WHOLE_MODEL = "the whole model is on one device; --backend names it"
ROPE = "set it in the model's config.json"
OTHER_TASK = "vllmx generates text: leave it out"


def context(text: str) -> str:
    """0 is the model's own length."""
    return "auto" if text == "0" else text


def layers(text: str) -> str:
    """The backend that holds this number of layers. Raises ConfigError for a part of a model: 99 is
    what people write for all."""
    if text == "0":
        return "cpu"
    if text in ("all", "auto", "-1") or (text.isdigit() and int(text) >= 99):
        return "auto"
    raise ConfigError(f"--n-gpu-layers {text} is refused: {WHOLE_MODEL}, 0 is cpu, 99 auto")


LLAMA = (
    means("-c --ctx-size", "max_model_len", "of each sequence, not divided among them", context),
    means("-np --parallel", "max_num_seqs", "sequences that run together", context),
    means("-ngl --gpu-layers --n-gpu-layers", "backend", "0 is cpu, 99 and all are auto", layers),
    means("-ctk --cache-type-k", "kv_cache_dtype", ONE_CACHE, KV_TYPES),
    means("-ctv --cache-type-v", "kv_cache_dtype", ONE_CACHE, KV_TYPES),
    ignored("-fa --flash-attn", "each backend has its own attention", optional=True),
    ignored("-ub --ubatch-size", "chunks follow --target-step-ms"),
    ignored("-tb --threads-batch", "--num-threads is for all steps"),
    ignored("--threads-http", "HTTP has one event loop"),
    ignored("--numa --poll --prio", "threads are pinned by --num-threads and taskset"),
    switch("-cb --cont-batching", "it is always on"),
    refused("-nocb --no-cont-batching", "batching is continuous: say --max-num-seqs 1", bare=True),
    switch("-kvu --kv-unified --swa-full", "pages are shared by all sequences"),
    switch("--no-context-shift", "nothing is ever shifted"),
    refused("--context-shift", "what is longer than the context is refused", bare=True),
    ignored("--cache-reuse", "equal beginnings are shared always"),
    switch("--mlock --no-mmap --mmap --repack --no-repack", IN_MEMORY),
    switch("-kvo --kv-offload --op-offload --no-op-offload --no-host", WHOLE_MODEL),
    switch("--mmproj-offload --no-mmproj-offload", "towers run where the model runs"),
    ignored("-sm --split-mode", ONE_DEVICE, "none"),
    ignored("-mg --main-gpu", "VLLMX_CUDA_DEVICE is the number of the GPU", "0"),
    refused("-ts --tensor-split --rpc -ot --override-tensor", ONE_DEVICE),
    ignored("-fit --fit", "sizes fit the memory; give them to fix them", "on"),
    means("-hf -hfr --hf-repo", "model", "a model of the hub", str),
    means("-hff --hf-file", "file", "a file of it", str),
    refused("-mu --model-url", "download the file and name it"),
    variable("--offline", "HF_HUB_OFFLINE", "only what the cache holds", bare=True),
    switch("--jinja", "templates are always Jinja"),
    refused("--no-jinja", "templates are always Jinja: leave it out", bare=True),
    means("--reasoning-format", "reasoning_parser", "deepseek is auto", REASONING),
    switch(
        "--metrics --no-slots --no-warmup --warmup --mmproj-auto --perf --no-perf",
        "vllmx does it so anyway",
    ),
    switches("-v --verbose --log-verbose", "log_level", "debug", "all messages"),
    switches("--log-disable", "log_level", "error", "errors alone"),
    ignored("-lv --verbosity --log-verbosity", "--log-level says how much is logged"),
    ignored("--log-colors", "the log has no colours"),
    switch("--log-prefix --log-timestamps", "each line has its time"),
    refused("--log-file", "the log is standard error: redirect it"),
    refused("--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale", ROPE),
    refused("--lora --lora-scaled", NO_LORA),
    refused("-md --model-draft", NO_DRAFT),
    switches("--no-mmproj --no-mmproj-auto", "limit_images", 0, "text alone"),
    refused("-mmu --mmproj-url", "download the file and name it by --mmproj"),
    refused("--embedding --embeddings --reranking --rerank", OTHER_TASK, bare=True),
)
