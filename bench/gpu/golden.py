"""What the device computes, for comparison with the emulator: every PTX wrapper once, and the
log-probabilities of small models.

    python bench/gpu/golden.py OUT.npz [--rehearse] [--dtypes bf16,f16]

The same models and steps whatever runs them, so two files differ by what the hardware does
otherwise than the emulator. The file is written after each of them, and what fails is told and
passed over. Small enough for compute-sanitizer, for which each model also samples
with everything that a request can ask for. A file that a GPU made is committed as
tests/kernels/cuda_golden.npz, which the tests compare the emulator with.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from devices import opener
from vllmx_core.backend import LoadedModel, LoadOptions
from vllmx_core.plan import LogitEdits, TokenCounts
from vllmx_cuda.backend import CudaBackend
from vllmx_cuda.device.device import Device
from vllmx_cuda.kernel_specs import KERNELS
from vllmx_testing.attention_checks import FEATURES, attention_model
from vllmx_testing.harness import PAGE, VOCAB, all_logprobs, mixed_steps
from vllmx_testing.plans import Row, make_plan, sampling_rows

DTYPES = ("bf16", "f16", "f32")
"""What matters most first, for a run may be cut."""
NAMES = ("qk norm and rope", "head size 64", "head size 128", "window 23", "softcap", "everything")
TOLERANCE = {"f32": 1e-4, "bf16": 0.05, "f16": 0.01}
"""The tolerance of log-probabilities: what other last bits of exp2, rsqrt and tensor-core sums come
to after two layers, each rounded to the dtype."""

OpenDevice = Callable[[], Device]


def outputs(
    open_device: OpenDevice, dtypes: Sequence[str] = DTYPES, names: Sequence[str] = NAMES
) -> dict[str, Any]:
    """Key -> (L, V) log-probabilities, for each dtype, model and step; and the wrappers' results
    for each 16-bit dtype."""
    found: dict[str, Any] = {}
    for _, make in cases(open_device, dtypes, names):
        found |= make()
    return found


def cases(
    open_device: OpenDevice, dtypes: Sequence[str], names: Sequence[str]
) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Name of each part, and what makes its outputs; the wrappers first."""
    for dtype in dtypes:
        if dtype != "f32":
            yield f"{dtype} wrappers", partial(wrapper_outputs, open_device, dtype)
    for dtype in dtypes:
        for name in names:
            yield f"{dtype} {name}", partial(model_outputs, open_device, dtype, name)


def model_outputs(open_device: OpenDevice, dtype: str, name: str) -> dict[str, Any]:
    """Log-probabilities of the steps of one small model."""
    options = LoadOptions(
        dtype=dtype,
        max_model_len=128,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        num_kv_blocks=64,
    )
    backend = CudaBackend(open_device, capture_s=0)
    loaded = backend.load(*attention_model(**FEATURES[name]), options)
    found = {}
    for index, rows in enumerate(mixed_steps()):
        plan = make_plan(rows, PAGE)
        found[f"{dtype} {name} {index}"] = all_logprobs(loaded, plan, VOCAB)
    sample_everything(loaded)
    loaded.close()
    return found


def wrapper_outputs(open_device: OpenDevice, dtype: str) -> dict[str, Any]:
    """Outputs of kernels/wrappers.cu for fixed random inputs."""
    device, random = open_device(), np.random.default_rng(6)
    values = random.integers(0, 1 << 16, 24 * 16).astype(np.uint16)
    exponents = {"bf16": (0x807F, 0x3F00), "f16": (0x83FF, 0x3800)}[dtype]  # 0.5 to 1, signed
    values = values & np.uint16(exponents[0]) | np.uint16(exponents[1])
    words = random.integers(0, 256, 96 * 16).astype(np.uint8)
    results: dict[str, tuple[Any, tuple[int, ...]]] = {
        "products": (np.float32, (2, 16, 8)),
        "fused": (np.uint32, (32,)),
        "coded": (np.float32, (16, 8)),
        "permuted": (np.uint32, (4, 32)),
        "fragments": (np.uint32, (2, 32, 4)),
        "copied": (np.uint32, (2, 32, 4)),
        "loaded": (np.uint32, (32, 4)),
        "dots": (np.int32, (32,)),
    }
    arguments = []
    for raw in (values[: 16 * 16].view(np.uint8), values[16 * 16 :].view(np.uint8), words):
        pinned = device.pinned(raw.nbytes)
        pinned[...] = raw
        arguments.append(device.empty(raw.nbytes))
        device.upload(arguments[-1], pinned)
        device.synchronize()
    sizes = [4 * int(np.prod(shape)) for _, shape in results.values()]
    arguments += [device.empty(size) for size in sizes]
    variant = KERNELS["wrappers"].variant(VX_DTYPE={"f16": 1, "bf16": 2}[dtype])
    named = dict(zip(("a", "b", "words", *results), arguments, strict=True))
    device.launch(variant, {}, variant.kernel.ordered(**named))
    found = {}
    for memory, (name, (kind, shape)) in zip(arguments[3:], results.items(), strict=True):
        pinned = device.pinned(memory.num_bytes)
        device.download(pinned, memory)
        device.synchronize()
        found[f"{dtype} wrapper {name}"] = np.array(pinned).view(kind).reshape(shape)
    return found


def sample_everything(loaded: LoadedModel) -> None:
    """Two decode steps of two rows that draw, with biases, penalties and a mask."""
    i32, f32 = np.int32, np.float32
    for position in (3, 4):
        plan = make_plan([Row([5], position, [7]), Row([6], position, [9])], PAGE)
        rows = sampling_rows(
            2,
            temperature=0.8,
            top_k=9,
            top_p=0.9,
            min_p=0.01,
            seed=3,
            position=position,
            repetition_penalty=1.2,
            frequency_penalty=0.1,
            presence_penalty=0.2,
        )
        rows.edits = LogitEdits(np.array([0, 1, 1], i32), np.array([4], i32), np.array([2], f32))
        rows.counts = TokenCounts(
            np.array([0, 1, 2], i32),
            np.array([3, 6], i32),
            np.array([1, 2], i32),
            np.array([True, False]),
        )
        rows.masks = np.full((1, -(-VOCAB // 32)), 0xFFFF, np.uint32)
        rows.mask_index = np.array([0, -1], i32)
        loaded.step(plan, rows).result()


def differences(golden: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """One line for each step of `found` that is further off than `TOLERANCE`, or not there."""
    wrong = []
    for key, got in found.items():
        if key not in golden:
            wrong.append(f"{key}: not in the golden file, make it again")
            continue
        error = float(np.abs(golden[key].astype(np.float64) - got).max())
        limit = TOLERANCE[key.split()[0]]
        if " wrapper " in key:
            limit = 1e-4 if key.endswith("products") else 0.0
        if not error <= limit:
            wrong.append(f"{key}: off by {error:.2g}, the limit is {limit}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rehearse", action="store_true", help="one model, on the emulator")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    chosen = parser.parse_args()
    dtypes, names = chosen.dtypes.split(","), list(NAMES)
    if chosen.rehearse:
        dtypes, names = dtypes[:2], names[:1]
    found: dict[str, Any] = {}
    failed = 0
    for name, make in cases(opener(chosen.rehearse), dtypes, names):
        try:
            found |= make()
        except Exception:
            failed += 1
            print(f"{name} failed", flush=True)
            traceback.print_exc()
        np.savez_compressed(chosen.out, **found)
    print(f"{len(found)} arrays in {chosen.out}, {failed} parts failed")
    return min(failed, 100)


if __name__ == "__main__":
    sys.exit(main())
