"""Other names and help texts of the flags that are fields of EngineConfig."""

from __future__ import annotations

from collections.abc import Mapping

ALIASES: Mapping[str, tuple[str, ...]] = {
    "lora": ("--lora-modules",),
    "model": ("-m", "--m", "--w"),
    "max_num_batched_tokens": ("--batch-size", "-b"),
    "num_threads": ("--threads", "-t"),
    "memory_fraction": ("--gpu-memory-utilization", "--device-memory-utilization"),
    "num_kv_blocks": ("--num-gpu-blocks-override",),
    "kv_cache_memory_bytes": ("--kv-cache-memory",),
    "enable_prefix_caching": ("--context-cache/--no-context-cache",),
    "backend": ("--device", "--d", "-dev"),
    "step_timeout_s": ("--step-timeout", "--watchdog-timeout"),
    "sse_ping_interval_s": ("--sse-ping-interval", "--sse-keep-alive-interval"),
    "quantization": ("-q",),
    "replicas": ("--max-replicas",),
    "mmproj": ("-mm",),
    "chat_template": ("--chat-template-file",),
    "default_chat_template_kwargs": ("--chat-template-kwargs",),
    "served_model_name": ("--alias", "-a"),
    "seed": ("-s",),
    "root_path": ("--api-prefix",),
    "api_workers": ("--api-server-count", "-asc"),
    "tool_parser": ("--tool-call-parser",),
    "web": ("--webui/--no-webui", "--ui/--no-ui"),
    "ssl_certfile": ("--ssl-cert-file",),
    "ssl_keyfile": ("--ssl-key-file",),
}
"""Other names of our flags, of vLLM, vLLM.rs and llama.cpp."""
HELP: Mapping[str, str] = {
    "model": "Folder, file or Hugging Face id; the same as the argument MODEL.",
    "revision": "Branch, tag or commit on the hub.",
    "tokenizer": "Folder with another tokenizer.",
    "mmproj": "GGUF file with the tower for images of a GGUF model; without it the mmproj*.gguf"
    " next to the model.",
    "chat_template": "File with another chat template.",
    "default_chat_template_kwargs": "Variables of the template as a JSON object, for chats that do"
    " not set them, such as '{\"enable_thinking\": false}'.",
    "special_tokens_in_text": "Special tokens that users, tools and documents of a chat spell out:"
    " escape (they stay text) or keep (they become the tokens).",
    "backend": "Backend by name, or auto: the best that can run here.",
    "task": "What the model is loaded for: generate, embed, score or classify; auto: as its files"
    " say.",
    "load_format": "Weight format by name, or auto.",
    "model_impl": "Whose code runs the model: vllmx (its own), transformers (any decoder it has, on"
    " backend torch, slowly) or auto: its own where there is one.",
    "quantization": "What the checkpoint must be quantised with; vllmx reads it from there.",
    "generation_config": "Sampling defaults: auto (the model's), vllm (none) or a folder.",
    "override_generation_config": "Sampling defaults as a JSON object, over the model's.",
    "dtype": "Weights and activations: bf16, f16, f32 or their long names; auto: the checkpoint's.",
    "isq": "Quantise while loading: q8_0, q6_k, q5_k, q4_k, q3_k, q2_k, q4_0, q4_1, q5_0, q5_1,"
    " int8, fp8, or a mix such as q4_k_m.",
    "kv_cache_dtype": "KV cache: auto, bf16, f16, f32, int8, fp8, q4, or q8,q4 (keys, values).",
    "max_model_len": "Longest prompt plus output; default: the model's, up to 1048576 and what"
    " fits.",
    "max_num_seqs": "Sequences that run together; default: 256, on Apple GPUs 8 to 32 by memory.",
    "max_num_batched_tokens": "Token budget of a step; default: 2048, with stages 256.",
    "block_size": "Tokens in a page of the KV cache.",
    "num_kv_blocks": "Pages in the KV cache; default: from free memory.",
    "kv_cache_memory_bytes": "Bytes for the KV cache; default: from free memory.",
    "num_state_slots": "Slots for the states of recurrent layers: one for each sequence that runs,"
    " others keep the states behind prefixes; default: two for each sequence, if they fit.",
    "state_snapshot_tokens": "Prompt tokens that a snapshot of such states must save to evict any"
    " other one; default: as many as take the memory of a slot in the KV cache.",
    "memory_bytes": "Most memory for weights, buffers and KV cache; default: what --memory-fraction"
    " says.",
    "memory_fraction": "Share of the memory that is free at the start (not of all, as in vLLM) for"
    " weights, buffers and KV cache.",
    "num_threads": "Compute threads; default: the cores that are really available.",
    "replicas": "Engine cores of the model, each with all weights and its part of the cores (or its"
    " own GPUs), among which requests are shared out.",
    "min_replicas": "Replicas that always run; the others start while requests wait, and end while"
    " there is little to do; default: all run.",
    "prefill_replicas": "Replicas that only compute long prompts for the others, which fetch the KV"
    " blocks.",
    "remote_prefill_tokens": "Prompts with at least so many uncached tokens are computed by such a"
    " replica if that is predicted to be sooner.",
    "role": "Work of a replica, for `vllmx core`: prefill: compute prompts for others; decode:"
    " generate, and fetch the KV blocks of such prompts; both: exchange no blocks.",
    "tensor_parallel_size": "Processes that compute each layer together, each with a part of the"
    " weights and its own cores; needs vllmx[tp].",
    "pipeline_parallel_size": "Processes that have some of the layers each, and compute as many"
    " steps at once; with the one above each is so many processes; needs vllmx[tp].",
    "pipeline_layers": "Layers of each stage, as 10,14; bytes: by bytes of weights; default: by"
    " what layers take, which is measured when the model is loaded.",
    "expert_parallel": "Give each of these processes some experts of a layer, whole, in place of a"
    " part of every one.",
    "rank_hosts": "host:port of each other host whose ranks compute with this one's, with commas"
    " between them; on each runs `vllmx rank`.",
    "rank_key_file": "File with the key that all these hosts have.",
    "replica_hosts": "host:port of each host whose `vllmx core` answers in place of a core here,"
    " with commas between them; @FILE: a file with one a line.",
    "ray_address": "HOST:PORT of the head of a Ray cluster that runs the replicas; auto: the one of"
    " this host; needs vllmx[ray].",
    "deterministic": "Equal answers to the last bit: on the CPU whatever --tensor-parallel-size is,"
    " some percent slower; elsewhere in any batch, each token computed alone, so much slower.",
    "enable_prefix_caching": "Share equal prompt prefixes.",
    "kv_host_memory": "Bytes of host memory for KV blocks that leave the device; 0: none. On the"
    " CPU the KV cache is there already: give it more with --kv-cache-memory-bytes.",
    "kv_disk": "Folder for KV blocks that leave the memory, which the next server finds there.",
    "kv_disk_size": "Most bytes in that folder.",
    "kv_connector": "Shared store for KV blocks, NAME or NAME:ADDRESS of a plugin, such as"
    " redis:localhost:6379.",
    "session_share": "Part of the KV cache that the sessions of one client may pin; 0: none.",
    "session_limit": "Sessions of one client that pin blocks.",
    "session_age_s": "Seconds for which a session pins its blocks after its last request.",
    "enable_chunked_prefill": "Split long prompts over steps.",
    "scheduling_policy": "priority (then fair share, then arrival) or fcfs.",
    "priority_reserve": "Part of the rows and KV blocks kept for requests with a priority below 0.",
    "target_itl": "Milliseconds between tokens of running sequences while a prompt comes in; each"
    " further prompt that waits raises it, up to 8 times; auto: twice what they take alone; none:"
    " no bound.",
    "async_scheduling": "Prepare the next step while one runs.",
    "speculate": "Draft tokens that a step verifies together, which changes no answer: heads (the"
    " checkpoint's layers of multi-token prediction), ngram (repeated text), suffix (that, with"
    " recent answers), model:PATH (a smaller model, EAGLE-3 or DFlash), twin (the model in 4 bits),"
    " layers:N (its first layers), auto (heads, else suffix) or off.",
    "speculate_tokens": "Draft tokens of a sequence in one step, up to 16; auto: as many as pay.",
    "enable_lora": "Make room for LoRA adapters that are loaded later.",
    "lora": "LoRA adapter, a PEFT folder or a GGUF file: NAME=PATH for requests with model NAME, or"
    " PATH for all others; may be repeated.",
    "lora_scaled": "PATH:SCALE, such an adapter with a factor for requests that name none; may be"
    " repeated.",
    "max_loras": "LoRA adapters in one step; requests for more wait.",
    "max_lora_rank": "Greatest rank of an adapter; default: that of those given, at least 16.",
    "max_cpu_loras": "LoRA adapters that are kept in host memory.",
    "step_timeout_s": "Seconds after which a step counts as hung and the engine core is started"
    " again; 0: never; default: 300, on CPUs 3600.",
    "enforce_eager": "Run op by op, for debugging.",
    "max_queue": "Requests that may wait; more get 429.",
    "max_logprobs": "Greatest logprobs of a request; -1: no limit.",
    "limit_images": "Images, videos or audio files of a request; 0 leaves out the tower for them.",
    "max_audio_bytes": "Bytes of one file of audio as it is sent.",
    "max_audio_seconds": "Seconds of one audio.",
    "max_video_bytes": "Bytes of one video as it is sent; --max-body-bytes bounds a data URL too.",
    "max_video_seconds": "Seconds of one video.",
    "max_image_bytes": "Bytes of one image as it is sent.",
    "max_image_pixels": "Pixels of one image, checked before it is decoded.",
    "encoder_cache_memory": "Bytes on the device for features of images and audio that may be"
    " asked about again.",
    "allowed_media_domains": "HOST or HOST:PORT to fetch images and audio from; may be repeated."
    " Without it requests bring them in data URLs.",
    "allowed_local_media_path": "Folder whose files requests may name as images or audio.",
    "seed": "Seed for requests that bring none.",
    "served_model_name": "Name that clients use.",
    "tool_parser": "How calls of tools are read: a format of `vllmx parsers`, auto or none.",
    "reasoning_parser": "The format by which thoughts are parted from content, auto or none.",
    "prefer": "Plugin that serves what another (or vllmx itself) provides too; may be repeated.",
}
