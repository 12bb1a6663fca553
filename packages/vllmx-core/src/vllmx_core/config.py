"""Engine configuration: one frozen record, filled with flag > environment > YAML > default."""

from __future__ import annotations

import dataclasses
import math
import os
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vllmx_core.config_values import convert, nearest
from vllmx_core.errors import ConfigError

DEMO_MODEL = "demo"
DRAFTERS = ("off", "auto", "heads", "ngram", "suffix", "twin")
MAX_DRAFT = 16
"""The most draft tokens of a sequence in one step."""
KV_TIERS = ("kv_disk", "kv_connector", "kv_host_memory")
"""The settings that keep KV blocks below the device."""
Dtype = Literal["auto", "bfloat16", "float16", "float32", "half", "float"]


Role = Literal["both", "prefill", "decode"]
Task = Literal["auto", "generate", "embed", "score", "classify"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything that decides how a model is loaded and scheduled. Names are vLLM's where it has
    one; None: chosen from the model and the memory."""

    model: str = DEMO_MODEL
    """A folder, a file, a Hugging Face id, or "demo" for the built-in model."""
    revision: str | None = None
    tokenizer: str | None = None
    """A folder with another tokenizer; None: the model's own."""
    mmproj: str | None = None
    """The GGUF file with the image tower of a model in a GGUF file: a path, or
    "org/repo:file.gguf"; None: the one next to the model."""
    chat_template: str | None = None
    """A template file that replaces the model's own."""
    default_chat_template_kwargs: str | None = None
    """Variables of the template as a JSON object, for chats that do not set them themselves."""
    special_tokens_in_text: Literal["escape", "keep"] = "escape"
    """Special tokens that users, tools and documents of a chat spell out: escape: they stay text;
    keep: they become the tokens."""
    backend: str = "auto"
    load_format: str = "auto"
    model_impl: str = "auto"
    """The code that runs the model: vllmx (its own file of the architecture), transformers, or
    auto: the own file where there is one."""
    quantization: str | None = None
    """The required quantisation of the checkpoint, in vLLM's names; None: any."""
    generation_config: str = "auto"
    """Source of sampling defaults: auto: the model; vllm: none; or a folder."""
    override_generation_config: str | None = None
    """Sampling defaults as a JSON object, over those of `generation_config`."""
    task: Task = "auto"
    """The task to load the model for; auto: pooling if its files say so, otherwise generation."""
    dtype: Dtype = "auto"
    isq: str | None = None
    """Quantise the checkpoint to this type while it loads: q4_k_m, q8_0, int8, ..."""
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    """Sequences that run together; None: by the backend, 256 or what suits the device."""
    max_num_batched_tokens: int | None = None
    """Token budget of a step; None: 2048, or less on slow backends."""
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    num_state_slots: int | None = None
    """Slots for the states of recurrent layers; None: two for each sequence that runs and two more,
    or what half of the cache's memory holds."""
    state_snapshot_tokens: int | None = None
    """A snapshot that saves at least so many prompt tokens may replace any other one; one that
    saves fewer only takes a free slot, or replaces another such snapshot. None: the tokens whose
    keys and values take as much memory as one slot."""
    memory_fraction: float = 0.9
    """Fraction of the device's (or host's) free memory at the start of loading, for weights,
    buffers and KV cache together. Unlike in vLLM and SGLang, it is not a fraction of all memory:
    other processes may hold some of it."""
    memory_bytes: int | None = None
    """An absolute limit on that memory; None: no limit."""
    num_threads: int | None = None
    replicas: int = 1
    """Engine cores, each with the whole model, among which requests are shared out."""
    min_replicas: int | None = None
    """Replicas that always run, while the others come and go with the load; None: all of them."""
    prefill_replicas: int = 0
    """Replicas that only compute prompts for the others."""
    remote_prefill_tokens: int = 512
    """Uncached tokens from which on another replica may compute a prompt."""
    role: Role = "both"
    """The work of a replica: prefill: it computes prompts for others; decode: it generates, and
    fetches the blocks of such prompts; both: it exchanges no blocks."""
    tensor_parallel_size: int = 1
    """Processes that compute each layer together, each with a part of its weights."""
    pipeline_parallel_size: int = 1
    """Processes that have some of the layers each and pass each step on."""
    pipeline_layers: str | None = None
    """Layers of each stage, separated by commas; "bytes": balanced by bytes of weights; None:
    balanced by measured time."""
    expert_parallel: bool = False
    """Each rank has some whole experts of a layer instead of a part of every expert."""
    rank_hosts: str | None = None
    """host:port of other hosts with ranks, with commas between them; on each runs `vllmx rank`."""
    rank_key_file: str | None = None
    """A file with the key that all hosts of ranks, or of replicas, have."""
    replica_hosts: str | None = None
    """host:port of cores that `vllmx core` runs, with commas between them, in place of a core of
    this process; @FILE: a file with one a line, read again when a core is looked for."""
    ray_address: str | None = None
    """Have a Ray cluster run the replicas: HOST:PORT of its head, or auto: the one of this host."""
    deterministic: bool = False
    """Equal bits for every `tensor_parallel_size`; in any batch where sums depend on shapes."""
    enable_prefix_caching: bool = True
    kv_host_memory: int = 0
    """Bytes in the host's memory for KV blocks that leave the device."""
    kv_disk: str | None = None
    """A folder for KV blocks that leave the memory; the next process with it finds them."""
    kv_disk_size: int = 16 << 30
    """The most bytes in that folder."""
    kv_connector: str | None = None
    """NAME or NAME:ADDRESS of a shared store for KV blocks, such as redis:localhost:6379; a
    plugin provides it."""
    session_share: float = 0.25
    """The part of the KV cache that the sessions of one client may pin (`session_id`); 0: none."""
    session_limit: int = 64
    """Sessions of one client that pin blocks."""
    session_age_s: float = 3600.0
    """Seconds for which a session pins its blocks after its last request."""
    enable_chunked_prefill: bool = True
    scheduling_policy: Literal["priority", "fcfs"] = "priority"
    priority_reserve: float = 0.0
    """The part of the rows and KV blocks that priorities below 0 alone may take while others
    run."""
    target_itl: str = "auto"
    """The milliseconds between tokens of running sequences while a prompt comes in, to which its
    chunks are sized; auto: twice what they take alone; none: the token budget alone decides."""
    async_scheduling: bool = True
    """Prepare step n + 1 while step n runs."""
    speculate: str = "off"
    """Drafter of tokens that a step verifies, which changes no answer: heads: the checkpoint's
    layers of multi-token prediction; ngram: what followed the same tokens before; suffix: votes of
    all such places, with recent answers of the same key; model:PATH: a smaller model of the same
    vocabulary, by path or Hugging Face id; twin: the model itself in 4 bits; layers:N: its first N
    layers and its head; auto: heads where there are some, else suffix; off: none."""
    speculate_tokens: str = "auto"
    """Draft tokens of a row in a step, at most 16; auto: as many as pay."""
    enforce_eager: bool = False
    enable_lora: bool = False
    """Make room for LoRA adapters that are loaded later."""
    lora: tuple[str, ...] = ()
    """LoRA adapters: NAME=PATH for requests whose model is NAME, or PATH for all others, as in
    llama.cpp; a PEFT folder or a GGUF file."""
    lora_scaled: tuple[str, ...] = ()
    """PATH:SCALE, an adapter with a factor for requests that name none."""
    max_loras: int = 4
    """Adapters that rows of one step may use."""
    max_lora_rank: int | None = None
    """The greatest rank of an adapter; None: that of those named at the start, at least 16."""
    max_cpu_loras: int = 64
    """Adapters that are kept in host memory."""
    step_timeout_s: float | None = None
    """A step that takes longer counts as hung, and the engine core as lost; 0: never. None: by the
    backend, see `LoadedInfo.step_timeout_s`."""
    max_queue: int = 1024
    """Requests that may wait; more are refused with 429."""
    max_logprobs: int = 20
    """Greatest `logprobs` and `prompt_logprobs` of a request; -1: the whole vocabulary, which a
    request asks for by -1."""
    limit_images: int = 16
    """Images of one request."""
    max_audio_bytes: int = 25 << 20
    max_audio_seconds: int = 3600
    max_video_bytes: int = 64 << 20
    max_video_seconds: int = 600
    max_image_bytes: int = 20 << 20
    """The largest image that a request may send, in bytes as it is sent."""
    max_image_pixels: int = 32 << 20
    """Pixels of one image, checked before it is decoded."""
    encoder_cache_memory: int = 256 << 20
    """Bytes on the device for image features, so that repeated images need not be encoded again."""
    allowed_media_domains: tuple[str, ...] = ()
    """Hosts that images may be fetched from, HOST or HOST:PORT; without a port 80 and 443. None:
    requests bring them in data URLs."""
    allowed_local_media_path: str | None = None
    """A folder whose files requests may name as images."""
    seed: int | None = None
    """Seeds requests that bring none, so that a whole run repeats."""
    served_model_name: str | None = None
    tool_parser: str = "auto"
    """The format of tool calls; auto: the model's own; none: they are not parsed."""
    reasoning_parser: str = "auto"
    """The format of reasoning, with the same special values."""
    prefer: tuple[str, ...] = ()
    """Plugins ("distribution" or "distribution:name") that serve what another provides too."""

    def __post_init__(self) -> None:
        self._check_dtype()
        self._check_layers()
        self._check_speculation()
        for name, low, high in (
            ("max_model_len", 1, 1 << 31),
            ("max_num_seqs", 1, 4096),
            ("max_num_batched_tokens", 1, 1 << 20),
            ("num_kv_blocks", 1, 1 << 31),
            ("memory_bytes", 1, 1 << 50),
            ("num_state_slots", 1, 1 << 31),
            ("state_snapshot_tokens", 1, 1 << 31),
            ("num_threads", 1, 1024),
            ("replicas", 1, 1024),
            ("min_replicas", 1, 1024),
            ("prefill_replicas", 0, 1023),
            ("remote_prefill_tokens", 1, 1 << 31),
            ("tensor_parallel_size", 1, 64),
            ("pipeline_parallel_size", 1, 64),
            ("max_loras", 1, 256),
            ("max_lora_rank", 1, 512),
            ("max_cpu_loras", 1, 1 << 16),
            ("max_queue", 1, 1 << 20),
            ("max_logprobs", -1, 1 << 24),
            ("limit_images", 0, 1024),
            ("max_audio_bytes", 1, 1 << 30),
            ("max_audio_seconds", 1, 1 << 20),
            ("max_video_bytes", 1, 1 << 30),
            ("max_video_seconds", 1, 1 << 20),
            ("max_image_bytes", 1, 1 << 30),
            ("encoder_cache_memory", 0, 1 << 40),
            ("max_image_pixels", 1, 80_000_000),
            ("session_share", 0, 1),
            ("priority_reserve", 0, 0.9),
            ("session_limit", 0, 1 << 20),
            ("session_age_s", 0, 1 << 31),
            ("kv_host_memory", 0, 1 << 50),
            ("kv_disk_size", 1, 1 << 60),
        ):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ConfigError(
                    f"{_flag(name)} must be between {low} and {high}, got {value}", param=name
                )
        if self.block_size not in (8, 16, 32, 64, 128):
            raise ConfigError(
                f"--block-size must be 8, 16, 32, 64 or 128, got {self.block_size}",
                param="block_size",
            )
        if not 0.0 < self.memory_fraction <= 1.0:
            raise ConfigError(
                f"--memory-fraction must be above 0 and at most 1, got {self.memory_fraction}",
                param="memory_fraction",
            )
        timeout = self.step_timeout_s
        if timeout is not None and not 0 <= timeout <= 1e6:
            raise ConfigError(
                f"--step-timeout-s must be between 0 (off) and 1000000, got {timeout}",
                param="step_timeout_s",
            )
        self._check_target()

    @property
    def drafts_by_model(self) -> bool:
        """True if a model drafts."""
        return self.speculate.partition(":")[0] in ("model", "twin", "layers", "heads")

    @property
    def has_kv_tiers(self) -> bool:
        """True if KV blocks are kept below the device, or go from one replica to another."""
        return self.role != "both" or any(getattr(self, name) for name in KV_TIERS)

    def of_replica(self, number: int) -> EngineConfig:
        """The configuration of one of its replicas: the first ones compute prompts for others, and
        each has a folder of its own."""
        role: Role = "both"
        if self.prefill_replicas:
            role = "prefill" if number < self.prefill_replicas else "decode"
        found = dataclasses.replace(self, prefill_replicas=0, role=role)
        if self.kv_disk is None or self.replicas == 1:
            return found
        return dataclasses.replace(
            found,
            kv_disk=os.path.join(self.kv_disk, str(number)),
            kv_disk_size=max(1, self.kv_disk_size // self.replicas),
        )

    @property
    def takes_adapters(self) -> bool:
        """True if the model is loaded with room for LoRA adapters."""
        return self.enable_lora or bool(self.lora or self.lora_scaled)

    @property
    def num_ranks(self) -> int:
        """Processes that compute the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def _check_layers(self) -> None:
        text = self.pipeline_layers
        if text in (None, "bytes"):
            return
        numbers = [one.strip() for one in str(text).split(",")]
        if not all(one.isascii() and one.isdecimal() and int(one) > 0 for one in numbers):
            raise ConfigError(
                "--pipeline-layers is numbers of layers with commas between them, one for each"
                f" stage, or bytes, got {text}",
                param="pipeline_layers",
            )
        if len(numbers) != self.pipeline_parallel_size:
            raise ConfigError(
                f"--pipeline-layers {text} is of {len(numbers)} stages, and there are"
                f" {self.pipeline_parallel_size}: set --pipeline-parallel-size {len(numbers)}",
                param="pipeline_layers",
            )

    def _check_speculation(self) -> None:
        kind, _, rest = self.speculate.partition(":")
        is_layers = kind == "layers" and rest.isdecimal() and len(rest) < 5 and int(rest) > 0
        if self.speculate not in DRAFTERS and not is_layers and not (kind == "model" and rest):
            raise ConfigError(
                f"--speculate must be one of {', '.join(DRAFTERS)}, model:PATH or layers:N, got"
                f" {self.speculate!r}{nearest(self.speculate, DRAFTERS)}",
                param="speculate",
            )
        tokens = self.speculate_tokens
        if tokens != "auto" and not (
            tokens.isdecimal() and len(tokens) < 3 and 1 <= int(tokens) <= MAX_DRAFT
        ):
            raise ConfigError(
                f"--speculate-tokens must be auto or from 1 to {MAX_DRAFT}, got {tokens!r}",
                param="speculate_tokens",
            )

    def _check_target(self) -> None:
        try:
            target = float(self.target_itl) if self.target_itl not in ("auto", "none") else 1.0
        except ValueError:
            target = math.nan
        if not (math.isfinite(target) and target > 0):
            raise ConfigError(
                "--target-itl must be auto, none or a number of milliseconds above 0, got"
                f" {self.target_itl}",
                param="target_itl",
            )

    def _check_dtype(self) -> None:
        object.__setattr__(self, "dtype", convert(self.dtype, Dtype, "dtype", "--dtype"))

    @property
    def name(self) -> str:
        """The model's name for clients."""
        return self.served_model_name or self.model


def resolve_config(
    cls: type[Any],
    *,
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    file: Mapping[str, Any],
) -> Any:
    """Fills the dataclass `cls`: flags that are not None, then `VLLMX_<NAME>` variables, then keys
    of the config file (dashes or underscores), then defaults. A file that serves several records
    is split by the caller. Raises ConfigError that names the source for an unknown or doubled key
    of the file and for a value of the wrong type; flags of other records are passed over."""
    hints = typing.get_type_hints(cls)
    fields = {field.name for field in dataclasses.fields(cls)}
    values: dict[str, Any] = {}
    for key, value in file.items():
        name = _file_key(key, fields)
        if name in values:
            raise ConfigError(
                f"config file key {key!r} is there twice, with - and with _: keep one"
            )
        values[name] = convert(value, hints[name], name, f"config file key {key!r}")
    for name in fields:
        variable = f"VLLMX_{name.upper()}"
        if variable in environment:
            source = f"environment variable {variable}"
            values[name] = convert(environment[variable], hints[name], name, source)
    for name, value in flags.items():
        if name in fields and value is not None:
            values[name] = convert(value, hints[name], name, _flag(name))
    return cls(**values)


def _file_key(key: Any, fields: Collection[str]) -> str:
    """The field that a key of the config file means."""
    name = str(key).replace("-", "_")
    if name not in fields:
        hint = nearest(name, fields) or f"; known: {', '.join(sorted(fields))}"
        raise ConfigError(f"unknown config file key {key!r}{hint}")
    return name


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
