"""Models and loaded cores that hosts of ranks compare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from vllmx_core.backend import LoadedInfo
from vllmx_core.config import EngineConfig
from vllmx_core.errors import ConfigError, VllmxError
from vllmx_core.plugins.registry import Registry
from vllmx_engine.core.fingerprint import files_digest
from vllmx_engine.core.found_model import FoundModel
from vllmx_tp.executor import agreed_ranks, agreed_stages
from vllmx_tp.messages import Marks, RankReady

LOADED = LoadedInfo(
    backend="cpu", device="a processor", dtype="bf16", kv_cache_dtype="bf16", block_size=8,
    num_kv_blocks=16, max_num_seqs=4, max_num_batched_tokens=64, max_logit_rows=8,
    weight_bytes=0, kv_cache_bytes=0, details={},
)  # fmt: skip


@pytest.mark.parametrize("agreed", [agreed_ranks, partial(agreed_stages, num_stages=2)])
def test_another_dtype_on_one_host(
    agreed: Callable[[LoadedInfo, Sequence[RankReady]], LoadedInfo],
) -> None:
    """Each host chooses by itself where no flag says which."""
    other = RankReady.of(replace(LOADED, dtype="f32"))
    with pytest.raises(VllmxError, match=r"differ in dtype: \['bf16', 'f32'\]; set it by its flag"):
        agreed(LOADED, [other])
    found = agreed(LOADED, [RankReady.of(LOADED)])
    assert found.num_kv_blocks == LOADED.num_kv_blocks


def test_hosts_that_may_draw_different_ids(caplog: pytest.LogCaptureFixture) -> None:
    """Each host samples by itself."""
    wide, narrow = (
        replace(LOADED, details={"instruction set": name, "threads": number})
        for number, name in enumerate(("avx512", "avx2"))
    )
    agreed_ranks(wide, [RankReady.of(wide), RankReady.of(LOADED)])
    assert not caplog.text
    agreed_ranks(wide, [RankReady.of(wide), RankReady.of(narrow)])
    assert "differ in instruction set (avx512, avx512, avx2)" in caplog.text
    assert "set VLLMX_CPU_ISA" in caplog.text
    assert "threads" not in caplog.text


def test_models_are_told_apart_by_their_bytes(tmp_path: Path) -> None:
    for name, byte in (("a", b"1"), ("b", b"1"), ("c", b"2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(bytes(300_000) + byte)
        (tmp_path / name / "notes.txt").write_text(name)
    marks = [files_digest(tmp_path / name) for name in "abc"]
    assert marks[0] == marks[1] != marks[2]
    weights = [files_digest(tmp_path / name / "model.safetensors") for name in "abc"]
    assert weights[0] == weights[1] != weights[2]


@pytest.mark.parametrize("num_files", [1, 3])
def test_models_are_told_apart_by_any_of_their_layers(num_files: int, tmp_path: Path) -> None:
    """Hosts with other layers in files of equal sizes would compute a mixture."""
    num_layers, file_bytes = 120, 12_000_000 // num_files
    files = [tmp_path / f"model-{number}.safetensors" for number in range(num_files)]
    for file in files:
        file.write_bytes(bytes(file_bytes))
    marks = {files_digest(tmp_path)}
    for layer in range(num_layers):
        number, at = divmod(layer, num_layers // num_files)
        with files[number].open("r+b") as file:
            file.seek(100_000 * at)
            file.write(b"1" * 100_000)
        marks.add(files_digest(tmp_path))
    assert len(marks) == 1 + num_layers


def test_a_tower_that_rank_0_has_is_the_same_on_each_host(tmp_path: Path) -> None:
    model, tower, other = (tmp_path / name for name in ("m.gguf", "tower.gguf", "other.gguf"))
    for number, file in enumerate((model, tower, other)):
        file.write_bytes(bytes([number]) * 100)
    config = EngineConfig(model=str(model), mmproj="x")
    found = [FoundModel(config, model, Registry(), False, one) for one in (None, tower, other)]
    none, mine, another = map(Marks.of, found)
    for marks, one, wanted in ((mine, 1, mine), (mine, 1, none), (none, 0, none)):
        marks.check(wanted, found[one], "a:1")
    with pytest.raises(ConfigError, match=r"host of ranks at a:1 has no --mmproj: copy the file"):
        none.check(mine, found[0], "a:1")
    with pytest.raises(ConfigError, match=r"another file in .*other.gguf: .* `vllmx rank --mmproj"):
        another.check(mine, found[2], "a:1")
