"""`BackendSuite`: what every backend must do, as pytest tests.

    class TestMyBackend(BackendSuite):
        def make_backend(self) -> Backend:
            return MyBackend()

Everything goes through the public face (`Backend.load`, `LoadedModel.step` and `forward`); the
judges are `vllmx_core.reference.formulas` in float64 and `vllmx_core.reference.sampler`.
"""

from __future__ import annotations

from vllmx_testing.adapter_checks import AdapterChecks
from vllmx_testing.attention_checks import AttentionChecks
from vllmx_testing.cache_group_checks import CacheGroupChecks
from vllmx_testing.compressed_checks import CompressedChecks
from vllmx_testing.kv_dtype_checks import KVDtypeChecks
from vllmx_testing.late_checks import LateChecks
from vllmx_testing.latent_checks import LatentChecks
from vllmx_testing.moving_checks import MovingChecks
from vllmx_testing.op_checks import OpChecks
from vllmx_testing.sampler_checks import SamplerChecks
from vllmx_testing.sparse_checks import SparseChecks
from vllmx_testing.state_checks import StateChecks
from vllmx_testing.step_checks import StepChecks
from vllmx_testing.tap_checks import TapChecks
from vllmx_testing.vector_checks import VectorChecks
from vllmx_testing.weight_checks import WeightChecks


class BackendSuite(
    OpChecks,
    AttentionChecks,
    LatentChecks,
    SparseChecks,
    StateChecks,
    CompressedChecks,
    CacheGroupChecks,
    KVDtypeChecks,
    SamplerChecks,
    StepChecks,
    WeightChecks,
    LateChecks,
    MovingChecks,
    VectorChecks,
    TapChecks,
    AdapterChecks,
):
    """Override `make_backend`, and the attributes of `Harness` where the backend promises less."""
