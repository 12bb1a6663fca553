"""Which kernel takes a layer's prompts."""

from __future__ import annotations

import pytest
from vllmx_core.errors import ConfigError
from vllmx_core.model import AttentionSpec
from vllmx_cuda.device.driver import is_on
from vllmx_cuda.kernel_specs.attention import KV_E4M3, KV_ELEM
from vllmx_cuda.program.attention_ops import WGMMA_SWITCH, prefill_kernel


def spec(size: int = 128, heads: int = 8, kv_heads: int = 2) -> AttentionSpec:
    return AttentionSpec(0, heads, kv_heads, size, 1.0)


@pytest.mark.parametrize(
    ("layer", "dtype", "kv", "arch", "entry", "tokens"),
    [
        (spec(), "bf16", KV_ELEM, "sm_90a", "paged_prefill_wgmma", 32),
        (spec(heads=10), "f16", KV_ELEM, "sm_90a", "paged_prefill_wgmma", 25),
        (spec(), "bf16", KV_E4M3, "sm_90a", "paged_prefill", 16),
        (spec(80), "bf16", KV_ELEM, "sm_90a", "paged_prefill", 16),
        (spec(), "bf16", KV_ELEM, "sm_100a", "paged_prefill", 16),
        (spec(), "bf16", KV_ELEM, "sm_89", "paged_prefill", 16),
        (spec(512), "bf16", KV_ELEM, "sm_90a", "paged_prefill", 8),
    ],
)
def test_wgmma_takes_what_it_can(
    layer: AttentionSpec, dtype: str, kv: int, arch: str, entry: str, tokens: int
) -> None:
    chosen = prefill_kernel(layer, dtype, kv, arch, wgmma=True)
    assert chosen is not None
    assert (chosen.entry, chosen.tile_tokens) == (entry, tokens)
    usual = prefill_kernel(layer, dtype, kv, arch, wgmma=False)
    assert usual is not None
    assert usual.entry == "paged_prefill"


@pytest.mark.parametrize(
    ("layer", "dtype", "arch"),
    [
        (spec(), "f32", "sm_90a"),
        (spec(20), "bf16", "sm_90a"),
        (spec(), "bf16", "sm_75"),
        (spec(512), "f16", "sm_75"),  # 64 KB of shared memory
    ],
)
def test_no_tensor_cores(layer: AttentionSpec, dtype: str, arch: str) -> None:
    assert prefill_kernel(layer, dtype, KV_ELEM, arch, wgmma=True) is None


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WGMMA_SWITCH, raising=False)
    assert not is_on(WGMMA_SWITCH), "nobody has run it on a GPU"
    for value, wanted in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv(WGMMA_SWITCH, value)
        assert is_on(WGMMA_SWITCH) is wanted
    monkeypatch.setenv(WGMMA_SWITCH, "yes")
    with pytest.raises(ConfigError, match=f"{WGMMA_SWITCH}=yes: set it to 1 or 0"):
        is_on(WGMMA_SWITCH)
