"""A fake model on disk, and engines over it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from vllmx_core.config import EngineConfig
from vllmx_core.plugins.registry import Registry
from vllmx_engine.async_llm import AsyncLLM
from vllmx_engine.text.tokenizer import Tokenizer
from vllmx_engine.wire.messages import CoreInfo
from vllmx_testing.fake_checkpoint import FakePlugin, make_fake_checkpoint

MakeEngine = Callable[..., AbstractAsyncContextManager[AsyncLLM]]


@pytest.fixture
def registry() -> Registry:
    registry = Registry()
    registry.add(FakePlugin, "test:fake")
    return registry


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[..., str]:
    """A model folder whose tokens are mostly printable: ids below 128, no end of sequence."""

    def make(name: str = "model", **options: Any) -> str:
        settings = {"vocab_size": 259, "eos_id": None, "max_model_len": 512} | options
        return str(make_fake_checkpoint(tmp_path / name, **settings))

    return make


@pytest.fixture
def folder(make_folder: Callable[..., str]) -> str:
    return make_folder()


@pytest.fixture
def slow_folder(make_folder: Callable[..., str]) -> str:
    """A model whose requests live long enough to be ended by somebody."""
    return make_folder("slow", step_s=0.01)


@pytest.fixture
def tokenizer(folder: str) -> Tokenizer:
    return Tokenizer.from_folder(folder)


@pytest.fixture
def info(folder: str) -> CoreInfo:
    """The description of a small core that need not exist."""
    return CoreInfo(
        model="fake",
        path=folder,
        architecture="FakeForCausalLM",
        max_model_len=64,
        vocab_size=259,
        backend="fake",
        device="none",
        dtype="f32",
        kv_cache_dtype="u64",
        block_size=16,
        num_kv_blocks=64,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        weight_bytes=0,
        kv_cache_bytes=0,
        load_seconds=0.0,
    )


@pytest.fixture
def make_engine(folder: str, registry: Registry) -> MakeEngine:
    """`async with make_engine(in_process=..., max_num_seqs=..., ...) as llm`."""

    @asynccontextmanager
    async def make(
        *, in_process: bool = True, model: str = folder, **config: Any
    ) -> AsyncIterator[AsyncLLM]:
        settings = EngineConfig(model=model, backend="fake", **config)
        llm = await AsyncLLM.start(settings, registry=registry, in_process=in_process)
        async with llm:
            yield llm

    return make
