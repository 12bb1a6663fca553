"""What the compiler made of a kernel: registers, stack, instructions.

`python -m tests.kernels.cuda_cubins [SOURCE]` measures `UNITS`, all or those of one source, for all
architectures and rewrites their part of cuda_budget.json, which the tests compare with. Then it
checks all units and notes in cuda_checked.json what each was compiled from: tests do not compile it
again until that changes.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from vllmx_core.errors import ConfigError
from vllmx_cuda.compiler.cubins import CubinCache, Keys, Target, Unit
from vllmx_cuda.compiler.libraries import include_folders
from vllmx_cuda.compiler.nvrtc import Nvrtc
from vllmx_cuda.device.arch import ARCHITECTURES, number
from vllmx_cuda.kernel_specs import KERNELS
from vllmx_cuda.kernel_specs.attention import prefill_keys
from vllmx_cuda.kernel_specs.types import PLAIN, shared_bytes
from vllmx_testing.cuda.emulator.build import KERNELS as FOLDER

from .cuda_sass import kept, measure

BUDGET = Path(__file__).parent / "cuda_budget.json"
CHECKED = Path(__file__).parent / "cuda_checked.json"
Budget = Mapping[str, Mapping[str, int]]
"""Entry with its options -> architecture -> registers."""
BF16 = {"VX_DTYPE": 2}
HEAD = {**BF16, "VX_HEAD": 128, "VX_KV": 0}
W4 = {**BF16, "VX_BITS": 4, "VX_SCALE": 1, "VX_ZERO": 1, "VX_FOLDS": 1, "VX_OUT": 0, **PLAIN}
DECODE = {**HEAD, "VX_STORE": 0}
WORDS = {"VX_SCALE": 1, "VX_ZERO": 1, "VX_ZERO_BYTES": 0}

# What must be among the instructions of an entry, on these architectures.
DISASSEMBLED = ("sm_80", "sm_90a", "sm_120a")
WANTED = {
    "rms_norm": ("LDG.E.128", "STG.E.128"),
    "add_rms_norm": ("LDG.E.128", "STG.E.128"),
    "layer_norm": ("LDG.E.128", "STG.E.128"),
    "head_norm": ("LDG.E.128", "STG.E.128"),
    "kv_store": ("LDG.E.64",),
    "paged_decode": ("LDG.E.128",),
    "paged_decode_mma": ("LDG.E.128", "HMMA.16816.F32.BF16"),
    "paged_prefill": (
        "HMMA.16816.F32.BF16",
        "LDSM.16.M88.4",
        "LDSM.16.MT88.4",
        "LDGSTS.E.BYPASS.128",
    ),
    "paged_prefill_wgmma": ("x16.F32.BF16", "LDGSTS.E.BYPASS.128"),  # HGMMA.64x128x16.F32.BF16
    "wgmma_wrappers": ("x16.F32.BF16",),
    "gated_act": ("LDG.E.128", "STG.E.128"),
    "gate": ("LDG.E.128", "STG.E.128"),
    "recurrence": ("LDG.E.128",),
    "scale_at": ("LDG.E.128", "STG.E.128"),
    "scale_by": ("LDG.E.128", "STG.E.128"),
    "clip": ("LDG.E.128", "STG.E.128"),
    "match_rms": ("LDG.E.128", "STG.E.128"),
    "sparsify": ("LDG.E.128", "STG.E.128"),
    "resize": ("LDG.E.128", "STG.E.128"),
    "add": ("LDG.E.128", "STG.E.128"),
    "pool_mean": ("LDG.E.128", "STG.E.128"),
    "patches": ("LDG.E.128", "STG.E.128"),
    "mix": ("LDG.E.128", "STG.E.128"),
    "keep": ("LDG.E.128", "STG.E.128"),
    "place": ("LDG.E.128", "STG.E.128"),
    "gather_rows": ("LDG.E.128", "STG.E.128"),
    "join_columns": ("LDG.E.128", "STG.E.128"),
    "add_held": ("LDG.E.128", "STG.E.128"),
    "one_shot_sum": ("LDG.E.128", "STG.E.128", "LDG.E.STRONG.SYS", "STG.E.STRONG.SYS"),
    "linear_gemv": ("LDG.E.NA.LTC",),
    "gguf_gemv": ("IDP.4A",),
    "experts_gguf": ("IDP.4A",),
    "w4_linear": ("LDGSTS.E.BYPASS.128", "LDG.E.128", "HMMA.16816.F32"),
    "w4_dequantize": ("LDG.E.", "STG.E.128"),
    "w4_repack_blocks": ("LDG.E.", "STG.E.128"),
    "w4_repack_words": ("LDG.E.", "STG.E.128"),
    "quantize_rows": ("LDG.E.128", "STG.E.64"),
    "rms_norm_codes": ("LDG.E.128", "STG.E.64"),
    "codes8_gemv": ("LDG.E.NA.LTC",),
    "codes8_mma": ("LDGSTS.E.BYPASS.128", "LDG.E.128", "HMMA.16816.F32.BF16"),
    "codes8_blocks": (
        "QMMA.16832.F32.E4M3.E4M3",
        "LDSM.16.M88.4",
        "LDGSTS.E.BYPASS.128",
    ),
    "linear_mma": ("LDGSTS.E.BYPASS.128", "LDG.E.128", "HMMA.16816.F32.BF16"),
    "experts_mma": ("LDGSTS.E.BYPASS.128", "LDG.E.128", "HMMA.16816.F32.BF16"),
    "experts_gemv": ("LDG.E.NA.LTC",),
    "experts_w4": ("LDGSTS.E.BYPASS.128", "LDG.E.128", "HMMA.16816.F32"),
    "experts_codes8": ("LDGSTS.E.BYPASS.128", "LDG.E.128", "HMMA.16816.F32.BF16"),
    "heads_gemv": ("LDG.E.NA.LTC",),
    "experts_sum": ("LDG.E.128", "STG.E.128"),
    "sample_count": ("ATOMS.ADD", ".E.ADD.64.STRONG"),
    "clamped_swiglu": ("LDG.E.128", "STG.E.128"),
}
Units = Sequence[tuple[str, Mapping[str, int]]]
"""Entries with the options that they are compiled with."""

# What a served model uses: bf16, head size 128, and the extremes of the attention kernels.
UNITS: Units = (
    ("rms_norm", {**BF16, "VX_VEC": 8}),
    ("layer_norm", {**BF16, "VX_VEC": 8}),
    ("head_norm", {**BF16, "VX_VEC": 8}),
    ("kv_store", {**HEAD, "VX_VEC": 4}),
    ("kv_store", {**HEAD, "VX_VEC": 4, "VX_KV": 1}),
    ("paged_decode", {**HEAD, "VX_VEC": 8, "VX_GROUP": 1}),
    ("paged_decode", {**HEAD, "VX_VEC": 8, "VX_GROUP": 4}),
    ("paged_decode", {**HEAD, "VX_VEC": 8, "VX_GROUP": 4, "VX_KV": 2}),
    ("paged_decode", {**HEAD, "VX_VEC": 8, "VX_GROUP": 4, "VX_HEAD": 256}),
    ("paged_decode", {**HEAD, "VX_VEC": 16, "VX_GROUP": 2, "VX_HEAD": 512}),
    ("paged_decode_mma", {**DECODE, "VX_GROUP": 4}),
    ("paged_decode_mma", {**DECODE, "VX_GROUP": 8, "VX_KV": 1}),
    ("paged_decode_mma", {**DECODE, "VX_GROUP": 16, "VX_HEAD": 80}),
    ("paged_decode_mma", {**DECODE, "VX_GROUP": 7, "VX_HEAD": 112, "VX_KV": 2}),
    ("paged_decode_mma", {**DECODE, "VX_GROUP": 16, "VX_HEAD": 192}),
    ("paged_decode_mma", {**DECODE, "VX_GROUP": 8, "VX_HEAD": 256}),
    ("paged_decode_mma", {**DECODE, "VX_GROUP": 2, "VX_HEAD": 256, "VX_KV": 1, "VX_DTYPE": 1}),
    ("paged_decode_mma", {**HEAD, "VX_GROUP": 4, "VX_STORE": 1}),
    ("paged_decode_mma", {**HEAD, "VX_GROUP": 2, "VX_STORE": 1}),
    ("paged_decode_mma", {**HEAD, "VX_GROUP": 8, "VX_KV": 1, "VX_STORE": 1}),
    ("paged_decode_mma", {**HEAD, "VX_GROUP": 8, "VX_HEAD": 256, "VX_STORE": 1}),
    ("paged_prefill", {**HEAD, "VX_GROUP": 4, "VX_KEYS": 64}),
    ("paged_prefill", {**HEAD, "VX_GROUP": 1, "VX_KEYS": 64, "VX_HEAD": 64}),
    ("paged_prefill", {**HEAD, "VX_GROUP": 4, "VX_KEYS": 32, "VX_HEAD": 256}),
    ("paged_prefill", {**HEAD, "VX_GROUP": 4, "VX_KEYS": 32, "VX_DTYPE": 1}),
    ("paged_prefill", {**HEAD, "VX_GROUP": 4, "VX_KEYS": 16, "VX_DTYPE": 1, "VX_HEAD": 256}),
    ("paged_prefill", {**HEAD, "VX_GROUP": 8, "VX_KEYS": 16, "VX_HEAD": 512}),
    ("paged_prefill", {**HEAD, "VX_GROUP": 8, "VX_KEYS": 32, "VX_HEAD": 512}),
    ("paged_prefill_wgmma", {**BF16, "VX_HEAD": 128, "VX_GROUP": 4}),
    ("paged_prefill_wgmma", {**BF16, "VX_HEAD": 64, "VX_GROUP": 1}),
    ("paged_prefill_wgmma", {**BF16, "VX_HEAD": 256, "VX_GROUP": 4}),
    ("wgmma_wrappers", BF16),
    ("gated_act", {**BF16, "VX_VEC": 8, "VX_ACT": 0}),
    ("gate", {**BF16, "VX_VEC": 8, "VX_ACT": 4, "VX_WIDE": 0}),
    ("short_conv", BF16),
    ("recurrence", {**BF16, "VX_KEYS": 16, "VX_VEC": 8, "VX_KEEPS": 0}),
    ("recurrence", {**BF16, "VX_KEYS": 16, "VX_VEC": 8, "VX_KEEPS": 1}),
    ("scale_at", {**BF16, "VX_VEC": 8}),
    ("scale_by", {**BF16, "VX_VEC": 8}),
    ("clip", {**BF16, "VX_VEC": 8}),
    ("match_rms", {**BF16, "VX_VEC": 8}),
    ("add", {**BF16, "VX_VEC": 8}),
    ("gather_rows", {**BF16, "VX_VEC": 8}),
    ("join_columns", {**BF16, "VX_VEC": 8}),
    ("one_shot_sum", {**BF16, "VX_VEC": 8}),
    ("pool_mean", {**BF16, "VX_VEC": 8}),
    ("patches", {**BF16, "VX_VEC": 8}),
    ("linear_gemv", {**BF16, "VX_VEC": 8, "VX_TOKENS": 1, "VX_OUT": 0}),
    ("linear_gemv", {**BF16, "VX_VEC": 8, "VX_TOKENS": 4, "VX_OUT": 0}),
    ("linear_mma", {**BF16, "VX_TILES": 1, "VX_ROWS": 1, "VX_OUT": 0, **PLAIN}),
    ("linear_mma", {**BF16, "VX_TILES": 2, "VX_ROWS": 1, "VX_OUT": 0, **PLAIN}),
    ("linear_mma", {**BF16, "VX_TILES": 1, "VX_ROWS": 2, "VX_OUT": 0, **PLAIN}),
    ("linear_mma", {**BF16, "VX_TILES": 2, "VX_ROWS": 2, "VX_OUT": 0, **PLAIN}),
    ("linear_mma", {"VX_DTYPE": 1, "VX_TILES": 2, "VX_ROWS": 2, "VX_OUT": 0, **PLAIN}),
    ("linear_mma", {**BF16, "VX_TILES": 1, "VX_ROWS": 1, "VX_OUT": 0, "VX_NORM": 1, "VX_GATED": 0}),
    ("linear_mma", {**BF16, "VX_TILES": 2, "VX_ROWS": 2, "VX_OUT": 0, "VX_NORM": 1, "VX_GATED": 1}),
    ("route", {**BF16, "VX_SCORE": 0}),
    ("route", {**BF16, "VX_SCORE": 1}),
    ("experts_order", {**BF16, "VX_VEC": 8}),
    ("experts_sum", {**BF16, "VX_VEC": 8}),
    ("clamped_swiglu", {**BF16, "VX_VEC": 8}),
    ("experts_gemv", {**BF16, "VX_VEC": 8, "VX_TOKENS": 4, "VX_OUT": 0}),
    ("experts_mma", {**BF16, "VX_TILES": 1, "VX_ROWS": 2, "VX_OUT": 0}),
    ("experts_mma", {**BF16, "VX_TILES": 2, "VX_ROWS": 2, "VX_OUT": 1}),
    ("heads_gemv", {**BF16, "VX_VEC": 8, "VX_TOKENS": 4, "VX_OUT": 0}),
    ("latent_store", BF16),
    ("latent_decode", BF16),
    ("latent_combine", BF16),
    ("index_store", BF16),
    ("index_score", BF16),
    ("index_pick", BF16),
    ("quantize_q8", BF16),
    ("gguf_gemv", {**BF16, "VX_BLOCK": 8, "VX_TOKENS": 1, "VX_OUT": 0}),
    ("gguf_gemv", {**BF16, "VX_BLOCK": 12, "VX_TOKENS": 4, "VX_OUT": 0}),
    ("experts_gguf", {**BF16, "VX_BLOCK": 39, "VX_TOKENS": 8, "VX_OUT": 1}),
    ("gguf_gemv", {**BF16, "VX_BLOCK": 14, "VX_TOKENS": 8, "VX_OUT": 0}),
    ("gguf_gemv", {**BF16, "VX_BLOCK": 10, "VX_TOKENS": 8, "VX_OUT": 0}),
    ("gguf_gemv", {**BF16, "VX_BLOCK": 23, "VX_TOKENS": 8, "VX_OUT": 1}),
    ("gguf_dequantize", {**BF16, "VX_BLOCK": 14}),
    ("gguf_dequantize", {**BF16, "VX_BLOCK": 11}),
    ("gguf_dequantize", {**BF16, "VX_BLOCK": 39}),
    ("w4_linear", {**W4, "VX_TILES": 1, "VX_ROWS": 1}),
    ("w4_linear", {**W4, "VX_TILES": 2, "VX_ROWS": 2}),
    ("w4_linear", {**W4, "VX_TILES": 4, "VX_ROWS": 2, "VX_ZERO": 2, "VX_FOLDS": 2}),
    ("w4_linear", {**W4, "VX_TILES": 8, "VX_ROWS": 2}),
    ("w4_linear", {**W4, "VX_TILES": 4, "VX_ROWS": 2, "VX_DTYPE": 1, "VX_ZERO": 0}),
    ("w4_linear", {**W4, "VX_TILES": 1, "VX_ROWS": 2, "VX_BITS": 8, "VX_SCALE": 0}),
    ("w4_linear", {**W4, "VX_TILES": 4, "VX_ROWS": 2, "VX_BITS": 8, "VX_ZERO": 0, "VX_FOLDS": 2}),
    ("w4_linear", {**W4, "VX_TILES": 1, "VX_ROWS": 1, "VX_BITS": 6, "VX_ZERO": 0, "VX_FOLDS": 4}),
    ("w4_linear", {**W4, "VX_TILES": 4, "VX_ROWS": 2, "VX_BITS": 6, "VX_ZERO": 0, "VX_FOLDS": 4}),
    ("w4_linear", {**W4, "VX_TILES": 1, "VX_ROWS": 1, "VX_NORM": 1}),
    ("w4_linear", {**W4, "VX_TILES": 2, "VX_ROWS": 2, "VX_NORM": 1, "VX_GATED": 1}),
    ("w4_dequantize", {**BF16, "VX_BITS": 4, "VX_SCALE": 1, "VX_ZERO": 1}),
    ("w4_repack_blocks", {"VX_BLOCK": 2}),
    ("w4_repack_blocks", {"VX_BLOCK": 8}),
    ("w4_repack_blocks", {"VX_BLOCK": 12}),
    ("w4_repack_blocks", {"VX_BLOCK": 14}),
    ("w4_repack_words", {**WORDS, "VX_BITS": 4, "VX_PACKED": 0}),
    ("w4_repack_words", {**WORDS, "VX_BITS": 4, "VX_PACKED": 1}),
    ("w4_repack_words", {**WORDS, "VX_BITS": 4, "VX_PACKED": 2, "VX_ZERO": 0, "VX_SCALE": 2}),
    ("w4_repack_words", {**WORDS, "VX_BITS": 8, "VX_PACKED": 2, "VX_ZERO_BYTES": 1}),
    ("quantize_rows", {**BF16, "VX_VEC": 8, "VX_CODE": 1, "VX_GROUPS": 0}),
    ("quantize_rows", {**BF16, "VX_VEC": 8, "VX_CODE": 1, "VX_GROUPS": 1}),
    ("rms_norm_codes", {**BF16, "VX_VEC": 8, "VX_CODE": 1, "VX_GROUPS": 0}),
    ("rms_norm_codes", {**BF16, "VX_VEC": 8, "VX_CODE": 1, "VX_GROUPS": 1}),
    ("rms_norm_codes", {**BF16, "VX_VEC": 8, "VX_CODE": 0, "VX_GROUPS": 0}),
    ("codes8_gemv", {**BF16, "VX_CODE": 1, "VX_TOKENS": 1, "VX_OUT": 0}),
    ("codes8_gemv", {**BF16, "VX_CODE": 1, "VX_TOKENS": 4, "VX_OUT": 0}),
    ("codes8_gemv", {**BF16, "VX_CODE": 0, "VX_TOKENS": 4, "VX_OUT": 1}),
    ("codes8_mma", {**BF16, "VX_TILES": 1, "VX_ROWS": 1, "VX_OUT": 0, **PLAIN}),
    ("codes8_mma", {**BF16, "VX_TILES": 4, "VX_ROWS": 2, "VX_OUT": 0, **PLAIN}),
    ("codes8_mma", {**BF16, "VX_TILES": 8, "VX_ROWS": 2, "VX_OUT": 0, **PLAIN}),
    ("codes8_mma", {"VX_DTYPE": 1, "VX_TILES": 4, "VX_ROWS": 2, "VX_OUT": 0, **PLAIN}),
    ("codes8_mma", {**BF16, "VX_TILES": 2, "VX_ROWS": 2, "VX_OUT": 0, "VX_NORM": 1, "VX_GATED": 1}),
    ("wrappers", BF16),
    ("codes8_blocks", {**BF16, "VX_OUT": 0}),
    ("mask_logits", {}),
    ("sample_max", {}),
    ("sample_threshold", {}),
    ("sample_among", {}),
    ("logprob_chunks", {}),
)
_SIZES = (1, 16, 32, 64, 128, 192, 256, 512, 576, 1024, 1536, 2048, 4096, 1 << 16)


def units_of(arch: str, units: Units) -> list[Unit]:
    """Those of `units` that the architecture can run, each once."""
    variants = [KERNELS[entry].variant(**options) for entry, options in units]
    able = [v for v in variants if v.runs_on(number(arch))]
    return list(dict.fromkeys(Unit(FOLDER / v.kernel.source, v.defines) for v in able))


def build(arch: str, compiler: Nvrtc, unit: Unit) -> bytes:
    """Compiled once for each content, also between runs."""
    target = Target(arch, compiler.version, tuple(include_folders()))
    key = _keys(target).key(unit)
    return CubinCache(kept()).get_or_compile(key, unit, target, compiler)


@functools.cache
def _keys(target: Target) -> Keys:
    """Reads every header once for all units."""
    return Keys(target)


@functools.cache
def _rules() -> bytes:
    files = ("cuda_cubins.py", "cuda_sass.py")
    return b"".join(Path(__file__).with_name(name).read_bytes() for name in files)


def digest(arch: str, unit: Unit, compiler: Nvrtc, budget: Budget) -> str:
    """Changes with what `faults` depends on: the unit with its headers, the compiler, the
    budget and the rules."""
    target = Target(arch, compiler.version, tuple(include_folders()))
    entries = [entry for entry, kernel in KERNELS.items() if kernel.source == unit.source.name]
    rows = [budget.get(key(entry, unit), {}).get(arch) for entry in entries]
    found = hashlib.sha256(f"{_keys(target).key(unit)} {rows}".encode() + _rules())
    return found.hexdigest()[:16]


def unchecked(arch: str, units: Sequence[Unit], compiler: Nvrtc, budget: Budget) -> list[Unit]:
    """Those that have changed since `main` checked them."""
    known = json.loads(CHECKED.read_text()).get(arch, {})
    return [u for u in units if known.get(u.name) != digest(arch, u, compiler, budget)]


def faults(arch: str, unit: Unit, compiler: Nvrtc, budget: Budget | None) -> list[str]:
    """What is wrong with a compiled unit: stack or local memory, more registers than its budget
    (None: as many as there are), instructions that it was written for and lacks."""
    wrong = []
    entries = [entry for entry, kernel in KERNELS.items() if kernel.source == unit.source.name]
    wanted = arch in DISASSEMBLED and any(_wanted(entry, unit) for entry in entries)
    for entry, usage in measure(build(arch, compiler, unit), disassembled=wanted).items():
        name = f"{key(entry, unit)} on {arch}"
        if usage["stack"] or usage["local"]:
            wrong.append(f"{name}: {usage['stack']} bytes of stack, {usage['local']} local")
        if usage["alone"]:
            wrong.append(f"{name}: products of a warpgroup do not run beside each other")
        if usage["idle"]:
            wrong.append(f"{name}: the softmax waits for products that it should run beside")
        if usage["hasty"] and number(arch) >= 90:
            wrong.append(f"{name}: reads or writes before it waits for the launch before")
        if usage["drained"]:
            wrong.append(f"{name}: a product waits for all copies, also those of later columns")
        if most := _beyond_shared(arch, entry, unit, usage["shared"]):
            wrong.append(f"{name}: {most} bytes of shared memory, static and dynamic")
        if budget is not None:
            allowed = budget[key(entry, unit)][arch]
            if usage["registers"] > allowed:
                wrong.append(f"{name}: {usage['registers']} registers, the budget is {allowed}")
        missing = [
            w for w in _wanted(entry, unit) if not any(w in found for found in usage["sass"])
        ]
        if missing and arch in DISASSEMBLED:
            wrong.append(f"{name}: no {', '.join(missing)} among {sorted(usage['sass'])}")
    return wrong


def _beyond_shared(arch: str, entry: str, unit: Unit, static: int) -> int:
    """The shared memory of a launch that the kernel's rule takes and the architecture does not; 0:
    there is none among `_SIZES`."""
    options = {name: int(value) for name, _, value in (d.partition("=") for d in unit.defines)}
    kernel, limit = KERNELS[entry], shared_bytes(number(arch))
    if number(arch) >= 90:
        limit += 1024  # which cubins count, the system reserves and no block has of its own
    if options.get("VX_KEYS", 0) > prefill_keys(options.get("VX_HEAD", 0), number(arch)):
        return 0  # never chosen there
    for size in _SIZES:
        with suppress(ConfigError, AssertionError):  # no such variant, or the size is refused
            launch = kernel.variant(**options).launch(dict.fromkeys(kernel.sizes, size))
            if static + launch.shared_bytes > limit:
                return static + launch.shared_bytes
    return 0


def _wanted(entry: str, unit: Unit) -> list[str]:
    """`WANTED`, as it reads in f16 and where values are loaded and stored in other widths."""
    kind = "F32" if "VX_DTYPE=1" in unit.defines else "F32.BF16"
    wanted = [w.replace("F32.BF16", kind) for w in WANTED.get(entry, ())]
    codes = entry == "paged_decode_mma" and "VX_KV=0" not in unit.defines
    if "VX_BITS=6" in unit.defines or codes:  # 8 bytes hold what a lane needs
        wanted = [w.replace("LDG.E.128", "LDG.E.64") for w in wanted]
    if entry == "kv_store" and "VX_VEC=4" not in unit.defines:
        return ["LDG.E.128"] if "VX_VEC=8" in unit.defines else []
    return wanted


def key(entry: str, unit: Unit) -> str:
    return " ".join([entry, *unit.defines])


def main() -> None:
    compiler = Nvrtc.open()
    source = sys.argv[1] if len(sys.argv) > 1 else ""
    known = json.loads(BUDGET.read_text()) if source else {}
    registers: dict[str, dict[str, int]] = {}
    for arch in ARCHITECTURES:
        for unit in units_of(arch, UNITS):
            if source not in ("", unit.source.name):
                continue
            for entry, usage in measure(build(arch, compiler, unit)).items():
                registers.setdefault(key(entry, unit), {})[arch] = usage["registers"]
    budget = {**known, **registers}
    BUDGET.write_text(_table(budget))
    checked: dict[str, dict[str, str]] = {}
    for arch in ARCHITECTURES:
        for unit in units_of(arch, UNITS):
            if wrong := faults(arch, unit, compiler, budget):
                print("\n".join(wrong))
            else:
                checked.setdefault(arch, {})[unit.name] = digest(arch, unit, compiler, budget)
    CHECKED.write_text(json.dumps(checked, indent=1) + "\n")


def _table(registers: Mapping[str, Mapping[str, int]]) -> str:
    lines = [f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in registers.items()]
    return "{\n" + ",\n".join(sorted(lines)) + "\n}\n"


if __name__ == "__main__":
    main()
