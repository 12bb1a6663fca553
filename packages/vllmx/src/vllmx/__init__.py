"""Serving engine for large language models.

Importing this package imports nothing else; each name below is imported when it is first used.
"""

from __future__ import annotations

TYPE_CHECKING = False  # which `typing` would be imported for, before the command sees to Ctrl-C

if TYPE_CHECKING:
    from typing import Any

    from vllmx_core.config import EngineConfig
    from vllmx_core.errors import VllmxError
    from vllmx_core.sampling import SamplingParams
    from vllmx_core.structured import StructuredOutputsParams
    from vllmx_engine.async_llm import AsyncLLM
    from vllmx_engine.client.arguments import LoRARequest
    from vllmx_engine.client.beams import BeamSearchParams
    from vllmx_engine.client.chat import ChatOptions, Message
    from vllmx_engine.engine import Engine
    from vllmx_engine.llm import LLM
    from vllmx_engine.wire.outputs import CompletionOutput, RequestOutput

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "ChatOptions",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "LoRARequest",
    "Message",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "VllmxError",
]

_HOMES = {
    "LLM": "vllmx_engine.llm",
    "AsyncLLM": "vllmx_engine.async_llm",
    "BeamSearchParams": "vllmx_engine.client.beams",
    "ChatOptions": "vllmx_engine.client.chat",
    "CompletionOutput": "vllmx_engine.wire.outputs",
    "Engine": "vllmx_engine.engine",
    "EngineConfig": "vllmx_core.config",
    "LoRARequest": "vllmx_engine.client.arguments",
    "Message": "vllmx_engine.client.chat",
    "RequestOutput": "vllmx_engine.wire.outputs",
    "SamplingParams": "vllmx_core.sampling",
    "StructuredOutputsParams": "vllmx_core.structured",
    "VllmxError": "vllmx_core.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'vllmx' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
