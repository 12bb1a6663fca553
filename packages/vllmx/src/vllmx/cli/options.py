"""Flags that several commands share, generated from EngineConfig so that none is forgotten.

Precedence is flag > environment variable VLLMX_<NAME> > config file > default, for every option.
"""

from __future__ import annotations

import dataclasses
import os
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal, TypeVar

import click
from vllmx_core.config import EngineConfig, resolve_config
from vllmx_core.config_values import convert
from vllmx_core.errors import ConfigError
from vllmx_core.system.logs import LOG_LEVELS

from vllmx.cli.command import FOREIGN, SERVED_NAME, ModelCommand
from vllmx.cli.config_file import known_keys, read_yaml
from vllmx.cli.foreign_flags import ForeignFlag, apply

F = TypeVar("F", bound=Callable[..., Any])

ALIASES: Mapping[str, tuple[str, ...]] = {
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
    "kv_cache_dtype": "KV cache: auto, bf16, f16, f32, int8 or fp8.",
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
    "deterministic": "Equal answers to the last bit whatever --tensor-parallel-size is; some"
    " percent slower.",
    "enable_prefix_caching": "Share equal prompt prefixes.",
    "enable_chunked_prefill": "Split long prompts over steps.",
    "scheduling_policy": "priority (then fair share, then arrival) or fcfs.",
    "target_step_ms": "Bound on a step's time while others decode and a prompt comes in; each"
    " further prompt that waits raises it, up to 8 times; none: no bound.",
    "async_scheduling": "Prepare the next step while one runs.",
    "speculate": "Draft tokens that a step verifies together, which changes no answer: ngram"
    " (repeated text), suffix (that, with recent answers), model:PATH (a smaller model), twin (the"
    " model in 4 bits), layers:N (its first layers), auto (the best that the model has) or off.",
    "speculate_tokens": "Draft tokens of a sequence in one step, up to 16; auto: as many as pay.",
    "step_timeout_s": "Seconds after which a step counts as hung and the engine core is started"
    " again; 0: never; default: 300, on CPUs 3600.",
    "enforce_eager": "Run op by op, for debugging.",
    "max_queue": "Requests that may wait; more get 429.",
    "max_logprobs": "Greatest logprobs of a request; -1: no limit.",
    "limit_images": "Images in one request; 0 leaves out the part of the model that sees them.",
    "max_image_bytes": "Bytes of one image as it is sent.",
    "max_image_pixels": "Pixels of one image, checked before it is decoded.",
    "encoder_cache_memory": "Bytes on the device for features of images that may be asked about"
    " again.",
    "allowed_media_domains": "HOST or HOST:PORT that images may be fetched from; may be repeated."
    " Without it requests bring images in data URLs.",
    "allowed_local_media_path": "Folder whose files requests may name as images.",
    "seed": "Seed for requests that bring none.",
    "served_model_name": "Name that clients use.",
    "tool_parser": "How calls of tools are read: a format of `vllmx parsers`, auto or none.",
    "reasoning_parser": "How thoughts are told from content: a format, auto or none.",
    "prefer": "Plugin that serves what another (or vllmx itself) provides too; may be repeated.",
}


def options_of(cls: type[Any], help_texts: Mapping[str, str]) -> Callable[[F], F]:
    """A decorator that adds one option for each field of a config dataclass; values that were not
    given arrive as None."""
    hints = typing.get_type_hints(cls)

    def decorate(command: F) -> F:
        for field in reversed(dataclasses.fields(cls)):
            command = _option(field, hints[field.name], help_texts)(command)
        return command

    return decorate


def _option(
    field: dataclasses.Field[Any], hint: Any, help_texts: Mapping[str, str]
) -> Callable[[F], F]:
    flag = "--" + field.name.replace("_", "-")
    text = help_texts[field.name]
    if hint is bool:
        aliases = ALIASES.get(field.name, ())
        names = [f"{flag}/--no-{flag[2:]}", *aliases]
        text += f"  [default: {'yes' if field.default else 'no'}]"
        return click.option(*names, field.name, default=None, help=text)
    if field.default not in (None, (), ""):
        default: Any = field.default
        shown = ", ".join(default) if isinstance(default, tuple) else default
        text += f"  [default: {shown}]"
    names = [flag, *ALIASES.get(field.name, ())]
    multiple = typing.get_origin(hint) is tuple or field.name == SERVED_NAME
    return click.option(
        *names, field.name, type=_click_type(hint), default=None, multiple=multiple, help=text
    )


class Shown(click.ParamType[Any]):
    """A type that click only shows by name: `vllmx_core.config_values` converts values of flags,
    environment and config file alike."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str | None:
        return f"[{self.name}]" if "|" in self.name else None


def _click_type(hint: Any) -> Shown:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return _click_type(next(arg for arg in typing.get_args(hint) if arg is not type(None)))
    if origin is Literal:
        return Shown("|".join(typing.get_args(hint)))
    if origin is tuple:
        return _click_type(typing.get_args(hint)[0])
    return Shown({int: "integer", float: "number"}.get(hint, "text"))


def engine_options(command: F) -> F:
    """Every field of EngineConfig as a flag, the argument MODEL, --file and --config."""
    decorated = options_of(EngineConfig, HELP)(command)
    for names, text in ((("--config", "config_file"), "YAML file with flags."), FILE):
        decorated = click.option(*names, type=Shown("path"), help=text)(decorated)
    wrapped: F = click.argument("model_argument", metavar="[MODEL]", required=False)(decorated)
    return wrapped


FILE = (("--file", "-f", "--f", "file"), "A GGUF file: of MODEL, or by its path alone.")


def take_several(parameter: str) -> Callable[[F], F]:
    """A decorator that makes an option of a command repeatable; applied after the options."""

    def decorate(command: F) -> F:
        for option in command.__click_params__:  # type: ignore[attr-defined]
            if option.name == parameter:
                option.multiple, option.nargs = True, 1
        return command

    return decorate


def log_level_option(default: str) -> Callable[[F], F]:
    """--log-level, for commands that have no configuration record with one."""
    return click.option(
        "--log-level",
        type=Shown("|".join(LOG_LEVELS)),
        default=default,
        show_default=True,
        help="How much is logged.",
    )


def resolve(
    classes: tuple[type[Any], ...], flags: dict[str, Any], extra: Collection[str] | None = ()
) -> tuple[Any, ...]:
    """Builds the config records from flags, environment and `--config` file. Raises ConfigError for
    a key of the file that is neither in a record nor in `extra`; None allows any key."""
    flags = {name: value for name, value in flags.items() if value not in (None, ())}
    if served := served_names(flags.get(SERVED_NAME)):
        flags[SERVED_NAME] = served[0]
    command = click.get_current_context().command
    path = config_path(flags)
    flags.pop("config_file", None)
    _one_model(flags)
    for name in [name for name in flags if name.startswith(FOREIGN)]:
        assert isinstance(command, ModelCommand)
        apply(command.foreign[name], flags.pop(name), flags)
    names = {field.name for cls in classes for field in dataclasses.fields(cls)}
    content = read_yaml(path)
    others: Iterable[ForeignFlag] = ()
    if content and isinstance(command, ModelCommand):
        others = command.foreign.values()
    if extra is None:
        others = [flag for flag in others if flag.field in names]
    else:
        content = {key: content[key] for key in content if key not in extra}
    file = known_keys(content, names, others, ALIASES, takes_all=extra is None)
    if SERVED_NAME in file:
        file[SERVED_NAME] = next(iter(served_names(file[SERVED_NAME])), None)
    _file_of_model(flags)
    if "backend" in flags:
        flags["backend"] = device(flags["backend"])
    return tuple(
        resolve_config(cls, flags=flags, environment=os.environ, file=_of(cls, file))
        for cls in classes
    )


def config_path(flags: Mapping[str, Any]) -> str | None:
    """The file of `--config` or VLLMX_CONFIG."""
    return flags.get("config_file") or os.environ.get("VLLMX_CONFIG")


def served_names(given: Any) -> tuple[str, ...]:
    """All names of a model, from a flag that may be repeated or a list in the config file. Raises
    ConfigError for a value that is not a name."""
    if given is None:
        return ()
    names = [*given] if isinstance(given, list | tuple) else [given]
    return tuple(
        dict.fromkeys(convert(name, str, SERVED_NAME, "--served-model-name") for name in names)
    )


def _one_model(flags: dict[str, Any]) -> None:
    positional = flags.pop("model_argument", None)
    if positional is not None and flags.get("model") is not None:
        raise ConfigError(
            f"the model is named twice, {positional!r} and --model {flags['model']!r}: give one"
        )
    if positional is not None:
        flags["model"] = positional


def _file_of_model(flags: dict[str, Any]) -> None:
    """`--m REPO --f FILE` is a file of the repository, or of a folder."""
    file, model = flags.pop("file", None), flags.get("model")
    if file is None:
        return
    if model is None:
        flags["model"] = file
    elif os.path.isdir(os.path.expanduser(model)):
        flags["model"] = os.path.join(model, file)
    elif os.path.exists(model) or ":" in model:
        raise ConfigError(
            f"--file {file!r} names a file of a model, but {model!r} is a file itself: give one"
        )
    else:
        flags["model"] = f"{model}:{file}"


def device(text: str) -> str:
    """The backend for a PyTorch device or its number. Raises ConfigError for devices other than the
    first: a variable selects the GPU."""
    name, _, number = text.partition(":")
    if name.isdigit() and not number:
        name, number = "auto", name
    if not number.isdigit():
        if "," in text:
            raise ConfigError(
                f"--backend {text!r}: vllmx runs a model on one device", param="backend"
            )
        return {"none": "cpu", "gpu": "auto", "mps": "metal"}.get(text, text)
    if int(number):
        raise ConfigError(
            f"--backend {text!r}: the number of the GPU is given by a variable: set"
            f" VLLMX_CUDA_DEVICE={number}",
            param="backend",
        )
    return device(name)


def _of(cls: type[Any], file: Mapping[str, Any]) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(cls)}
    return {key: value for key, value in file.items() if key.replace("-", "_") in names}


# --- sampling -------------------------------------------------------------------------------------
_SAMPLING = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "sampling_seed",
    "stop",
    "min_tokens",
    "ignore_eos",
)


def sampling_options(command: F) -> F:
    """One option for each sampling parameter; None, if it is not given, means the model's own."""
    options = (
        click.option("--max-tokens", "-n", type=int, help="Longest output, in tokens."),
        click.option("--temperature", type=float, help="0 = greedy."),
        click.option("--top-p", type=float, help="Nucleus sampling."),
        click.option("--top-k", type=int, help="Keep the k likeliest; 0 = all."),
        click.option("--min-p", type=float, help="Keep what is this likely relative to the best."),
        click.option("--repetition-penalty", type=float, help="Above 1 discourages repetition."),
        click.option("--presence-penalty", type=float, help="-2 to 2."),
        click.option("--frequency-penalty", type=float, help="-2 to 2."),
        click.option("--sampling-seed", type=int, help="Makes the draws repeat."),
        click.option("--stop", multiple=True, help="Text that ends the output; may be repeated."),
        click.option("--min-tokens", type=int, help="Shortest output, in tokens."),
        click.option("--ignore-eos", is_flag=True, default=None, help="Go on after the end."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def take_sampling(flags: dict[str, Any]) -> dict[str, Any]:
    """Moves the sampling parameters out of a command's flags, for `SamplingParams`."""
    given = {name: flags.pop(name) for name in _SAMPLING}
    given["seed"] = given.pop("sampling_seed")
    return {name: value for name, value in given.items() if value not in (None, ())}
