"""Architectures on ranks: what `ModelSuite` asks of any backend."""

from __future__ import annotations

from functools import partial

import pytest
from vllmx_core.errors import ConfigError
from vllmx_testing.ranked_backend import RankedBackend
from vllmx_tp.region import Region

from tests.usable_backends import backend_spec

from . import (
    test_architectures,
    test_compressed_architectures,
    test_expert_architectures,
    test_latent_architectures,
    test_recurrent_architectures,
)
from .served_models import suites
from .test_backend_ranks import shared_by

SUITES = {
    name.removeprefix("Test"): suite
    for name, suite in suites(
        test_architectures,
        test_compressed_architectures,
        test_expert_architectures,
        test_latent_architectures,
        test_recurrent_architectures,
    ).items()
}
RANKS = {"cpu": (2, 4), "torch": (2,), "metal": (2,)}


@pytest.mark.parametrize("name", SUITES)
def test_ranks_agree_with_the_reference(name: str) -> None:
    for kind, counts in RANKS.items():
        for count in counts:
            regions: list[Region] = []
            meet = partial(shared_by, regions=regions)
            backend = RankedBackend(backend_spec(kind).load()(), count, meet)
            try:
                SUITES[name]().check_backends({f"{count} ranks of {kind}": backend}, (7, 1 << 20))
            except ConfigError as error:
                if error.param != "tensor_parallel_size" or (kind, count) == ("cpu", 2):
                    raise
            finally:
                for region in regions:
                    region.close()
