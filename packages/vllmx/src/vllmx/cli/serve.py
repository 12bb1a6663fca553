"""`vllmx serve`: the OpenAI HTTP API."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, TextIO

import click
from vllmx_core.config import EngineConfig
from vllmx_core.errors import ConfigError
from vllmx_core.system.files import warn_of_readers
from vllmx_core.system.logs import FORMAT_VARIABLE, configure_logging
from vllmx_core.system.standard_error import StandardError, hold_standard_streams
from vllmx_server.config import ServerConfig

from vllmx.cli.command import SERVED_NAME, ModelCommand, needs_unix_sockets
from vllmx.cli.config_file import read_yaml
from vllmx.cli.options import (
    config_path,
    engine_options,
    options_of,
    resolve,
    served_names,
    take_several,
)
from vllmx.cli.served_models import is_one_path, served_models

if TYPE_CHECKING:
    from vllmx_engine.wire.messages import CoreInfo
    from vllmx_server.host.models.config import ModelConfig

logger = logging.getLogger("vllmx.server")

HELP = {
    "lora_root": "Folder below which /v1/load_lora_adapter may read adapters.",
    "host": "Address to listen on; 0.0.0.0 for all (set --api-key then).",
    "port": "Port to listen on; 0 takes a free one.",
    "uds": "Path of a unix socket to listen on instead.",
    "root_path": "Path prefix when behind a proxy.",
    "api_workers": "Processes that answer requests over one engine; auto: one for each core but"
    " one, 8 at most.",
    "api_key": "Bearer token that clients must send; may be repeated.",
    "admin_key": "Bearer token for the routes of operators; may be repeated.",
    "admin_uds": "Path of a unix socket for the routes of operators, which the port has not then.",
    "api_keys_file": "JSON file of keys with rights and limits (`vllmx keys add`); read again at"
    " SIGHUP.",
    "priority_range": "What `priority` of a request may be: LEAST:GREATEST, or KEY=LEAST:GREATEST"
    " for one API key; may be repeated  [default: 0:].",
    "ssl_certfile": "TLS certificate.",
    "ssl_keyfile": "TLS key.",
    "hsts_max_age_s": "Seconds for which browsers reach this host by TLS alone, on every port;"
    " 0: not said.",
    "allowed_origins": "CORS origin; may be repeated.",
    "allowed_methods": "CORS method; may be repeated.",
    "allowed_headers": "CORS header; may be repeated.",
    "allow_credentials": "CORS credentials.",
    "allowed_hosts": "Host header to accept in addition to localhost on a loopback address; may be"
    " repeated; * for any.",
    "max_connections": "Open connections; default: what the limit of open files allows, up to"
    " 16384.",
    "max_connections_per_address": "Open connections from one address; default: half of all.",
    "max_body_bytes": "Largest request body.",
    "max_concurrent_requests": "Requests in flight; more get 503.",
    "header_timeout_s": "Seconds a client may take to send its headers.",
    "body_timeout_s": "Seconds a client may take to send its request.",
    "send_timeout_s": "Seconds a client may stop reading before it is disconnected.",
    "request_timeout_s": "Seconds that a request may take in all; then it ends with 504; 0: no"
    " limit.",
    "queue_timeout_s": "Seconds that a request may wait for its turn; then it ends with 503; 0: no"
    " limit.",
    "sse_ping_interval_s": "Seconds between comments in a stream that waits for its next token; 0:"
    " none.",
    "model_wait_s": "How long a request waits for its model to be loaded.",
    "idle_unload_s": "Seconds without a request after which a model is unloaded, until the next"
    " one; 0: never.",
    "drain_timeout_s": "How long SIGTERM waits for requests in flight.",
    "data_dir": "Folder where files, batches, responses and conversations are kept; without it they"
    " end with the server.",
    "max_file_bytes": "Largest file that may be uploaded.",
    "max_stored_bytes": "Bytes of all files of one API key, as many again of its responses, and"
    " of its conversations.",
    "max_stored_files": "Files of one API key, and batches that have ended.",
    "max_stored_days": "How long files, batches, responses and conversations are kept.",
    "trust_request_chat_template": "Take chat templates from requests (sandboxed).",
    "enable_force_include_usage": "Send the usage with every chunk of streams of chats and"
    " completions, asked or not.",
    "enable_per_request_metrics": "Say in answers of chats and completions how long they took.",
    "enable_tokenizer_info_endpoint": "Show the tokenizer's configuration and the chat template at"
    " GET /tokenizer_info.",
    "cached_models": "Without MODEL: list the models in the cache of the Hugging Face hub too, and"
    " load them on demand.",
    "mcp_config": "JSON file of MCP servers whose tools requests may ask for.",
    "mcp_max_rounds": "Answers of the model in one response, all but the last of which called such"
    " tools.",
    "apis": "APIs of other servers to serve as well, with commas between them: cohere,"
    " kserve, llamacpp, ollama, tei.",
    "web": "The web page at /.",
    "otlp_traces_endpoint": "URL of an OpenTelemetry collector (OTLP over HTTP); env: as its"
    " variables say.",
    "disable_access_log": "No line for each request.",
    "enable_log_requests": "Write prompts into the log, a line each; they are in no log otherwise.",
    "max_log_len": "Characters of a prompt in such a line.",
    "log_level": "debug, info, warning or error.",
    "log_format": "text, or json: an object a line.",
}


@click.command(cls=ModelCommand)
@take_several("model")
@engine_options
@options_of(ServerConfig, HELP)
def serve(**flags: Any) -> None:
    """Serve MODEL over the OpenAI HTTP API.

    MODEL is a folder with config.json and *.safetensors, a GGUF file or a Hugging Face id
    (org/repo, or org/repo:file.gguf); without it the demo model is served. Every option can also be
    set as VLLMX_<NAME> or in a YAML file (--config).
    """
    needs_unix_sockets("serve")
    hold_standard_streams()
    stream = StandardError()
    level = flags["log_level"] or os.environ.get("VLLMX_LOG_LEVEL") or "info"
    configure_logging(level, stream, flags["log_format"])
    models = _models(flags)
    engine, server = resolve((EngineConfig, ServerConfig), flags, ("models",))
    engine = models[0].engine if models else engine
    os.environ[FORMAT_VARIABLE] = server.log_format  # for child processes
    configure_logging(server.log_level, log_format=server.log_format)
    _warn_of_config(flags)
    if server.enable_log_requests:
        logger.warning("--enable-log-requests: this log will hold what clients ask")
    from vllmx_server.host.run import run_server

    on_ready = partial(_announce, server.log_format, stream)
    if engine.role != "both":
        raise ConfigError(
            f"--role {engine.role} is a replica's: give it to `vllmx core`, or leave it out and"
            " use --prefill-replicas",
            param="role",
        )
    try:
        if engine.ray_address is None:
            run_server(engine, server, models=models, on_ready=on_ready)
            return
        with _on_ray(engine, models) as (engine, models):
            run_server(engine, server, models=models, on_ready=on_ready)
    finally:
        stream.finish()  # the log comes before an error message


@contextmanager
def _on_ray(
    engine: EngineConfig, models: list[ModelConfig]
) -> Iterator[tuple[EngineConfig, list[ModelConfig]]]:
    """The configuration over replicas that Ray runs, and ends with this context."""
    if len(models) > 1:
        raise ConfigError(
            "--ray-address places replicas of one model: start a server for each model",
            param="ray_address",
        )
    try:
        placing: Any = import_module("vllmx_ray.placing")
    except ImportError as error:
        raise ConfigError(
            "--ray-address needs vllmx-ray: pip install 'vllmx[ray]'", param="ray_address"
        ) from error
    with placing.placed(engine) as placed:
        yield placed, [replace(model, engine=placed) for model in models]


def _warn_of_config(flags: dict[str, Any]) -> None:
    """Warns if the config file has API keys and other users may read it."""
    path = config_path(flags)
    if path and {"api_key", "admin_key"} & {key.replace("-", "_") for key in read_yaml(path)}:
        warn_of_readers(path, "--config")


def _models(flags: dict[str, Any]) -> list[ModelConfig]:
    """Several models, if flags or the file name them; `flags` then become those of the first."""
    texts = flags["model"] or ()
    file = read_yaml(config_path(flags))
    entries = file.get("models")
    if entries is None and (not texts or is_one_path(texts)):
        flags["model"] = texts[0] if texts else None
        if found := _cached_models(flags, file):
            return found
        names = _names(flags, file)
        if len(names) < 2:
            return []
        from vllmx_server.host.models.config import ModelConfig

        (engine,) = resolve((EngineConfig,), flags, None)
        return [ModelConfig(engine=engine, aliases=names[1:])]
    if flags["model_argument"] is not None:
        raise ConfigError(
            f"the model {flags['model_argument']!r} needs a name to be served with others: give it"
            " as --model NAME=PATH",
            param="model",
        )

    def configured(own: dict[str, Any]) -> EngineConfig:
        found: EngineConfig = resolve((EngineConfig,), own, None)[0]
        return found

    models = served_models(texts, entries, flags, configured)
    flags |= {"model": models[0].engine.model, "served_model_name": models[0].name}
    return models


def _cached_models(flags: dict[str, Any], file: dict[str, Any]) -> list[ModelConfig]:
    """The demo, and on demand the models in the hub's cache, if nothing names a model."""
    keys = {key.replace("-", "_") for key in file} & {"model", "served_model_name", "alias"}
    command = click.get_current_context().command
    assert isinstance(command, ModelCommand)
    foreign = [name for name, flag in command.foreign.items() if flag.field == "model"]
    named = (SERVED_NAME, "model", "model_argument", "file", *foreign)
    variables = ("VLLMX_MODEL", "VLLMX_SERVED_MODEL_NAME")
    if keys or any(flags.get(name) for name in named) or any(map(os.environ.get, variables)):
        return []
    from vllmx_models.hub_cache import cached_models

    whole = [model for model in cached_models() if model.is_current and not model.fault]
    if not whole:
        return []
    demo, server = resolve((EngineConfig, ServerConfig), dict(flags), None)
    if not server.cached_models:
        return []
    from vllmx_server.host.models.config import ModelConfig

    logger.info("models in the cache, loaded on demand: %s", ", ".join(m.name for m in whole))
    others = (replace(demo, model=str(m.path), served_model_name=m.name) for m in whole)
    return [
        ModelConfig(engine=demo),
        *(ModelConfig(engine=each, on_demand=True) for each in others),
    ]


def _names(flags: dict[str, Any], file: dict[str, Any]) -> tuple[str, ...]:
    """Names of the one model: its own, and others that clients may use."""
    if flags[SERVED_NAME]:
        return served_names(flags[SERVED_NAME])
    if os.environ.get("VLLMX_SERVED_MODEL_NAME"):
        return ()
    keys = ("served_model_name", "served-model-name", "alias")
    return served_names(next((file[key] for key in keys if key in file), None))


_EXAMPLES = {
    "generate": ("/v1/chat/completions", '"messages": [{"role": "user", "content": "Hello!"}]'),
    "embed": ("/v1/embeddings", '"input": "Hello!"'),
    "score": ("/v1/rerank", '"query": "Hello!", "documents": ["Good morning!", "A red house."]'),
    "classify": ("/classify", '"input": "Hello!"'),
}
"""A request for each kind of model."""


def _announce(
    log_format: str, stream: StandardError | TextIO, name: str, info: CoreInfo, url: str
) -> None:
    """Prints the served models and an example request; in a JSON log, as a line of JSON."""
    served = (
        f"vllmx serves {name} ({info.architecture}, {info.dtype}) on {info.backend},"
        f" context {info.max_model_len}, {info.num_kv_blocks * info.block_size} tokens of KV cache,"
        f" up to {info.max_num_seqs} sequences together"
    )
    if log_format == "json":
        logger.info("%s: %s/v1", served, url)
        return
    stream.write(f"\n{served}\n  {url}/v1\n\n")
    if url.startswith("http") and info.audio_rows:
        stream.write(
            f"  curl {url}/v1/audio/transcriptions -F model={name} -F file=@speech.wav\n\n"
        )
    elif url.startswith("http"):
        path, fields = _EXAMPLES["generate" if info.pooling is None else info.pooling.tasks[0]]
        stream.write(
            f"  curl {url}{path} -H 'Content-Type: application/json' \\\n"
            f'    -d \'{{"model": "{name}", {fields}}}\'\n\n'
        )
