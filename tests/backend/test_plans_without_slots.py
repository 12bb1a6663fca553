"""A plan that names no state slots, for a model that keeps states, is refused and not guessed."""

from __future__ import annotations

import pytest
from vllmx_core.backend import LoadOptions
from vllmx_core.plugins.registry import load_registry
from vllmx_core.plugins.specs import BackendSpec
from vllmx_testing.harness import all_logprobs
from vllmx_testing.plans import Row, make_plan
from vllmx_testing.state_checks import recurrent_model


@pytest.mark.parametrize("name", ["numpy", "cpu", "torch"])
def test_a_plan_without_slots_is_refused(name: str) -> None:
    model, source = recurrent_model()
    backend = load_registry().get(BackendSpec, name).load()()
    options = LoadOptions(dtype="f32", max_model_len=64, max_num_seqs=2, num_kv_blocks=8)
    loaded = backend.load(model, source, options)
    try:
        with pytest.raises(ValueError, match="state_from"):
            all_logprobs(loaded, make_plan([Row([1, 2], 0, [0], "all")], 16), 16)
    finally:
        loaded.close()
