"""Compiles the kernels of the first call's models side by side, before anything is measured.

    python bench/gpu/warm.py [--rehearse]

Which kernels a model needs is found without the GPU: each is loaded with one layer and a small
vocabulary on a device that keeps a list and launches nothing. What this misses, a load compiles.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from checkpoints import SHAPES, RandomSource
from devices import IdleDevice
from golden import NAMES
from vllmx_core.backend import LoadOptions
from vllmx_cuda.backend import CudaBackend
from vllmx_cuda.compiler.compiling import compiled
from vllmx_cuda.compiler.cubins import KERNELS_FOLDER, Unit, kernel_cache
from vllmx_cuda.kernel_specs import KERNELS, Variant
from vllmx_models.families.qwen import qwen3
from vllmx_testing.attention_checks import FEATURES, attention_model

MODELS = (("0.6b", "bf16"), ("8b", "bf16"), ("8b", "q4_k_m"), ("8b", "fp8 blocks"))
SMALL = {"num_hidden_layers": 1, "vocab_size": 1536}


def variants(arch: str, shape: str | None = None) -> list[Variant]:
    """What the models of the first call launch on GPUs of this architecture, each once."""
    found: list[Variant] = []
    for name, form in MODELS:
        config: dict[str, Any] = {**SHAPES[shape or name], **SMALL}
        found += _of(arch, qwen3(config), RandomSource(config, form), "bf16")
    for dtype in ("bf16", "f16", "f32"):
        for name in NAMES:
            found += _of(arch, *attention_model(**FEATURES[name]), dtype)
        if dtype != "f32":
            found.append(KERNELS["wrappers"].variant(VX_DTYPE={"f16": 1, "bf16": 2}[dtype]))
    return list(dict.fromkeys(found))


def _of(arch: str, model: Any, source: Any, dtype: str) -> list[Variant]:
    device = IdleDevice(arch=arch, memory_bytes=32 << 30, num_processors=132)
    options = LoadOptions(
        dtype=dtype,
        max_model_len=256,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        num_kv_blocks=32,
    )
    CudaBackend(lambda: device, tune_s=0, capture_s=0).load(model, source, options).close()
    return device.prepared


def main() -> int:
    began = time.perf_counter()
    if "--rehearse" in sys.argv:
        print(f"{len(variants('sm_90a', 'tiny'))} kernels would be compiled")
        return 0
    from vllmx_cuda.device.cupy_device import CupyDevice

    device = CupyDevice.open()
    wanted = variants(device.info.arch)
    units = [Unit(KERNELS_FOLDER / key[0], key[1]) for key in {v.module_key for v in wanted}]
    compiled(units, device._target, device._nvrtc, kernel_cache())
    device.close()
    seconds = time.perf_counter() - began
    print(f"{len(wanted)} kernels of {len(units)} files in {seconds:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
