"""A pytest plugin, given with -p sanitized: the cases of the suite that compute-sanitizer watches.

A tool makes a kernel 10 to 50 times slower, so these are fewer than the suite has: each kernel, in
the dtypes that it is written for, with the features that change what it reads. They run in the
order of `CASES`, and what has not begun after SANITIZED_SECONDS is skipped: a run that is cut keeps
what it found. `EAGER` cases launch each kernel from the host; the others replay captured graphs.
"""

from __future__ import annotations

import os
import time

import pytest

EAGER = (
    "TestTensorCores::test_attention[everything-bf16]",
    "TestTensorCores::test_attention[head size 128-bf16]",
    "TestQuantised::test_weights[Q4_K_M-bf16]",
    "TestQuantised::test_weights[fp8-bf16]",
    "TestQuantised::test_weights[blocks-bf16]",
    "TestQuantised::test_weights[int8-bf16]",
    "TestQuantised::test_weights[Q8_0-bf16]",
    "TestCuda::test_attention[everything]",
    "TestCuda::test_attention_over_codes[everything-int8]",
    "TestCuda::test_attention_over_codes[everything-fp8]",
    "TestCuda::test_another_setting_in_each_row",
    "TestCuda::test_penalties[penalties3-0.8]",
    "TestCuda::test_masks[0.8]",
    "TestCuda::test_edits[0.8]",
    "TestCuda::test_targets_are_scored",
    "TestCuda::test_references_to_the_step_before",
    "TestCuda::test_decoder_in_the_dtype_of_its_checkpoint[bf16]",
    "TestCuda::test_op[rms_norm: width 33, offset 1.0]",
    "TestCuda::test_op[add_rms_norm: width 16, offset 0.0]",
    "TestCuda::test_op[layer_norm: width 33, biased]",
    "TestCuda::test_op[activation: gelu, width 33]",
    "TestCuda::test_op[gated_act: gelu, width 33]",
    "TestCuda::test_op[gate: sigmoid, 20 for 80]",
    "TestCuda::test_op[gate: tanh, 33 for 33]",
    "TestCuda::test_op[scale_at: 48 of 80]",
    "TestCuda::test_op[scale_by: 20 for 80]",
    "TestCuda::test_op[clip: 48 and 16 and 8]",
    "TestCuda::test_op[logits: softcap 2.5, tied]",
    "TestCuda::test_op[linear: 33 to 17, biased]",
    "TestCuda::test_op[linear: 130 to 259, plain]",
    "TestCuda::test_op[add: both inputs are kept]",
    "TestTensorCores::test_head_sizes[80-7-fp8]",
    "TestTensorCores::test_head_sizes[112-12-fp8]",
    "TestTensorCores::test_head_sizes[192-16-int8]",
    "TestTensorCores::test_head_sizes[256-8-auto]",
    "TestTensorCores::test_attention[window 23-bf16]",
    "TestTensorCores::test_attention[head size 20-bf16]",
    "TestTensorCores::test_attention[rope interleaved partial-bf16]",
    "TestTensorCores::test_attention[everything-f16]",
    "TestTensorCores::test_attention[head size 64-f16]",
    "TestQuantised::test_weights[Q4_K_M-f16]",
    "TestQuantised::test_weights[fp8-f16]",
    "TestCuda::test_long_context[features1]",
    "TestCuda::test_attention[grouped 16]",
    "TestCuda::test_attention[head size 20]",
    "TestCuda::test_the_largest_step",
    "TestCuda::test_what_a_page_held_before_does_not_leak",
    "TestCuda::test_attention_both_ways",
    "TestCuda::test_block_sizes[128]",
)
GRAPHS = (
    "TestCuda::test_eager_and_recorded_give_the_same_answers",
    "TestTensorCores::test_attention[qk norm and rope-bf16]",
    "TestCuda::test_decoder_in_the_dtype_of_its_checkpoint[f16]",
)
CASES = (*EAGER[:16], *GRAPHS, *EAGER[16:])


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Watch(float(os.environ.get("SANITIZED_SECONDS", "inf"))))


class Watch:
    def __init__(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        found = {item.nodeid.partition("::")[2]: item for item in items}
        missing = [name for name in CASES if name not in found]
        if missing:
            raise pytest.UsageError(f"sanitized.py names cases that there are not: {missing}")
        chosen = [found[name] for name in CASES]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if time.monotonic() > self._deadline:
            pytest.skip("no time left")
        assert isinstance(item, pytest.Function)
        item.instance.eager = item.nodeid.partition("::")[2] in EAGER
