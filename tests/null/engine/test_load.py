"""What a backend is asked for, given a configuration and a model."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllmx_core.config import EngineConfig
from vllmx_core.errors import CapacityError
from vllmx_engine.core.load_options import AUTOMATIC_CONTEXT, fitting_length, load_options

COLUMNS = 256


class LongModel:
    """What matters of a model that claims a context of so many tokens."""

    def __init__(self, max_model_len: int) -> None:
        self.shape = SimpleNamespace(whole_prompts=False, max_model_len=max_model_len)

    def constants(self, max_model_len: int) -> Mapping[str, Any]:
        assert max_model_len == 1, "tables are made when their size is known to fit"
        return {"rope": np.zeros((1, COLUMNS), np.float32), "local": np.zeros((1, COLUMNS), "f4")}


@pytest.mark.parametrize(
    ("claimed", "free", "expected"),
    [
        (4096, 1 << 36, 4096),
        (1 << 31, 1 << 40, AUTOMATIC_CONTEXT),
        (1 << 31, 1 << 30, (1 << 30) // 8 // (2 * 4 * COLUMNS)),
        (1 << 20, 0, 1),
    ],
)
def test_what_a_config_claims_is_bounded_by_memory(
    monkeypatch: pytest.MonkeyPatch, claimed: int, free: int, expected: int
) -> None:
    monkeypatch.setattr("vllmx_engine.core.load_options.free_bytes", lambda: free)
    options = load_options(EngineConfig(), LongModel(claimed), progress=False)  # type: ignore[arg-type]
    assert options.max_model_len == expected
    assert options.shrink_to_fit


def test_a_length_that_was_asked_for_is_kept_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllmx_engine.core.load_options.free_bytes", lambda: 1 << 33)
    model: Any = LongModel(1 << 31)
    config = EngineConfig(max_model_len=(1 << 19))
    assert load_options(config, model, progress=False).max_model_len == 1 << 19
    config = EngineConfig(max_model_len=(1 << 19) + 1)
    with pytest.raises(CapacityError, match="lower it to 524288"):
        load_options(config, model, progress=False)


def test_a_window_holds_what_steps_of_this_size_write(caplog: pytest.LogCaptureFixture) -> None:
    """A backend that has room for larger steps, one token of each sequence, gets none of them."""
    room: dict[str, Any] = {"num_kv_blocks": 64, "block_size": 16, "kv_cache_bytes": 1 << 20}
    info: Any = SimpleNamespace(cache_windows=(None, 21), max_num_batched_tokens=256, **room)
    asked: Any = SimpleNamespace(max_model_len=944, max_num_batched_tokens=32)
    config = EngineConfig(max_num_batched_tokens=32)
    assert fitting_length(config, asked, info) == 944
    assert not caplog.records
    assert fitting_length(EngineConfig(), asked, info) == 720
    assert "max_model_len reduced from 944 to 720" in caplog.text
