"""Checks of flags before a model is loaded, which may take minutes. A check is imported only if its
flag is given, so that a server is ready sooner."""

from __future__ import annotations

from pathlib import Path

from vllmx_core.config import EngineConfig
from vllmx_core.errors import ConfigError, ModelNotFoundError, TemplateError
from vllmx_core.plugins.registry import Registry, load_registry


def check_flags(
    config: EngineConfig, registry: Registry | None = None, *, in_process: bool = False
) -> None:
    """Raises ConfigError for a value that works with no model, and ModelNotFoundError for a missing
    tokenizer."""
    if config.replicas > 1 or config.prefill_replicas or config.min_replicas:
        from vllmx_engine.replicas.start import check_replicas

        check_replicas(config, in_process=in_process)
    if (config.tool_parser, config.reasoning_parser) != ("auto", "auto"):
        from vllmx_engine.formats.named import check_name

        registry = registry or load_registry()
        for flag in ("tool_parser", "reasoning_parser"):
            check_name(registry, flag, getattr(config, flag))
    if config.generation_config not in ("auto", "vllm") or config.override_generation_config:
        from vllmx_engine.core.generation_config import generation_config

        generation_config(config, {})
    if config.default_chat_template_kwargs is not None:
        from vllmx_engine.client.chat_options import default_variables

        default_variables(config.default_chat_template_kwargs)
    if config.tokenizer is not None and not Path(config.tokenizer).exists():
        raise ModelNotFoundError(
            f"--tokenizer {config.tokenizer} does not exist: give a folder with tokenizer.json",
            param="tokenizer",
        )
    if config.chat_template is not None:
        from vllmx_engine.text.chat_template import ChatTemplate
        from vllmx_engine.text.model_files import template_of

        source = template_of(config.chat_template)
        assert source is not None, "only a missing flag gives None"
        try:
            ChatTemplate(source)
        except TemplateError as error:
            raise ConfigError(
                f"--chat-template cannot be used: {error.message}", param="chat_template"
            ) from None
