"""Two ranks of the metal backend that MLX joins in a ring, through the public interface."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mlx.core", reason="vllmx-metal runs on MLX")

import mlx.core as mx

from tests.waiting import PATIENCE_S

SCRIPT = Path(__file__).parent / "metal_ring_answers.py"


@pytest.mark.skipif(not mx.distributed.is_available("ring"), reason="this MLX has no ring")
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="a ring wants a core for each rank")
def test_two_ranks_answer_as_one_and_end_together() -> None:
    """`VLLMX_TP_COMPARE` compares the ids of every step besides."""
    run = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env=os.environ | {"VLLMX_TP_COMPARE": "1"},
        stdout=subprocess.PIPE,
        timeout=PATIENCE_S,
        check=True,
    )
    found = json.loads(run.stdout)
    assert "sums between ranks go through MLX (ring)" in found["log"]
    assert found["found"] == found["expected"]
    assert found["message"] == "rank 1 was killed by SIGKILL"
