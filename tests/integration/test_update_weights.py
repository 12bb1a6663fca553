"""New weights in place of a served model's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from vllmx_core.backend import LoadedModel
from vllmx_core.config import EngineConfig
from vllmx_core.errors import (
    CapacityError,
    ConfigError,
    InvalidRequestError,
    ModelNotFoundError,
    WeightFormatError,
)
from vllmx_core.sampling import SamplingParams
from vllmx_demo.source import MODEL_FOLDER
from vllmx_engine.async_llm import AsyncLLM
from vllmx_engine.core import control, load
from vllmx_engine.core.found_model import FoundModel

LONG = SamplingParams(max_tokens=200, ignore_eos=True)
PROMPT, GREEDY = (
    "Once upon a time there was a little",
    SamplingParams(temperature=0.0, max_tokens=12),
)


async def answer(llm: AsyncLLM) -> tuple[int, ...]:
    stream = await llm.submit(PROMPT, GREEDY, kind="final")
    return tuple((await stream.last()).outputs[0].token_ids)


def other_weights(folder: Path) -> Path:
    """The demo model with its vocabulary shuffled."""
    shutil.copytree(MODEL_FOLDER, folder)
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    info = json.loads(data[8:start])["model.embed_tokens.weight"]
    begin, end = (start + offset for offset in info["data_offsets"])
    row = (end - begin) // info["shape"][0]
    data[begin:end] = data[begin + 7 * row : end] + data[begin : begin + 7 * row]
    path.write_bytes(data)
    return folder


async def test_new_weights_answer_as_a_fresh_start_with_them(tmp_path: Path) -> None:
    folder = other_weights(tmp_path / "new")
    async with await AsyncLLM.start(EngineConfig(model=str(folder)), in_process=True) as fresh:
        expected = await answer(fresh)
    async with await AsyncLLM.start(EngineConfig(model="demo")) as llm:
        before = await answer(llm)
        assert before != expected
        await llm.update_weights(str(folder))
        assert await answer(llm) == expected, "no prefix of the old weights is found"
        await llm.update_weights(str(MODEL_FOLDER))
        assert await answer(llm) == before


async def test_weights_that_cannot_be_loaded_leave_the_old_ones(tmp_path: Path) -> None:
    folder = other_weights(tmp_path / "cut")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    other = other_weights(tmp_path / "other")
    text = (other / "config.json").read_text().replace(": 2048", ": 1024")
    (other / "config.json").write_text(text)
    async with await AsyncLLM.start(EngineConfig(model="demo"), in_process=True) as llm:
        before = await answer(llm)
        with pytest.raises(WeightFormatError):
            await llm.update_weights(str(folder))
        with pytest.raises(ConfigError, match="another model"):
            await llm.update_weights(str(other))
        with pytest.raises(ModelNotFoundError):
            await llm.update_weights(str(tmp_path / "missing"))
        stream = await llm.submit(PROMPT, LONG, kind="cumulative")
        await anext(stream)
        await llm.pause("keep")
        with pytest.raises(InvalidRequestError, match="pause"):
            await llm.update_weights(str(other_weights(tmp_path / "new")))
        await llm.resume()
        assert len((await stream.last()).outputs[0].token_ids) == 200
        assert await answer(llm) == before


async def test_a_load_that_fails_midway_brings_the_old_weights_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, load_model = other_weights(tmp_path / "new"), load.load_model

    def fails(found: FoundModel, opened: load.OpenedModel) -> LoadedModel:
        if found.path == folder:
            raise CapacityError("no room")
        return load_model(found, opened)

    monkeypatch.setattr(control, "load_model", fails)
    async with await AsyncLLM.start(EngineConfig(model="demo"), in_process=True) as llm:
        before = await answer(llm)
        with pytest.raises(CapacityError, match="no room"):
            await llm.update_weights(str(folder))
        assert await answer(llm) == before
