"""Log-probabilities of small models as the device computes them, for comparison with the emulator.

    python bench/gpu/golden.py OUT.npz [--emulated]

The same models and steps whatever runs them, so two files differ by what the hardware does
otherwise than the emulator. Small enough for compute-sanitizer.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from vllmx_core.backend import LoadOptions
from vllmx_core.testing.attention_checks import FEATURES, attention_model
from vllmx_core.testing.harness import PAGE, VOCAB, all_logprobs, mixed_steps
from vllmx_core.testing.plans import make_plan
from vllmx_cuda.backend import CudaBackend

NAMES = ("qk norm and rope", "head size 64", "head size 128", "window 23", "softcap", "everything")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--emulated", action="store_true")
    chosen = parser.parse_args()
    backend = CudaBackend()
    if chosen.emulated:
        from vllmx_cuda.emulated_device import EmulatedDevice

        backend = CudaBackend(EmulatedDevice)
    found: dict[str, Any] = {}
    for dtype in ("f32", "bf16", "f16"):
        options = LoadOptions(
            dtype=dtype, max_model_len=128, max_num_seqs=16, max_num_batched_tokens=256,
            num_kv_blocks=64,
        )  # fmt: skip
        for name in NAMES:
            loaded = backend.load(*attention_model(**FEATURES[name]), options)
            for index, rows in enumerate(mixed_steps()):
                plan = make_plan(rows, PAGE)
                found[f"{dtype} {name} {index}"] = all_logprobs(loaded, plan, VOCAB)
            loaded.close()
    np.savez_compressed(chosen.out, **found)
    print(f"{len(found)} steps in {chosen.out}")


if __name__ == "__main__":
    main()
