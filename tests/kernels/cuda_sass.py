"""What nvdisasm and cuobjdump say of a compiled kernel: registers, memory, instructions, and what
waits for what."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import tempfile
import zlib
from contextlib import suppress
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from vllmx_cuda.compiler.cubins import write_whole

OVERLAPPED = ("paged_prefill_wgmma",)
"""Entries whose softmax runs while products of a warpgroup are under way."""
RINGS = ("linear_mma", "experts_mma", "w4_linear", "experts_w4", "codes8_mma")
"""Entries that multiply while copies of later columns are under way."""
EARLY = ("linear_mma", "w4_linear", "codes8_mma", "paged_decode_mma")
"""Entries that may begin before the launch before them has ended."""
_USAGE = re.compile(r"Function (\w+):\s*REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_INSTRUCTION = re.compile(
    r"\b((?:HGMMA|HMMA|QMMA|LDSM|LDGSTS|LDG|STG|LDL|STL|IDP|ATOMS|RED)[A-Z0-9_.x]*)"
)


def tool(name: str) -> Path | None:
    """cuobjdump or nvdisasm of NVIDIA's wheels."""
    spec = find_spec("nvidia")
    for root in (spec and spec.submodule_search_locations) or ():
        if (path := Path(root) / "cu13" / "bin" / name).exists():
            return path
    return None


def kept() -> Path:
    """The folder of this user for cubins and for what was found out about them."""
    return Path(tempfile.gettempdir()) / f"vllmx-cubins-{os.getuid()}"


def measure(cubin: bytes, *, disassembled: bool = False) -> dict[str, dict[str, Any]]:
    """Entry -> registers, stack, local and shared bytes, and, which takes longest, the memory and
    tensor instructions."""
    dump = tool("cuobjdump")
    assert dump is not None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _run([str(dump), "-res-usage", file.name])
    sass = _disassembly(cubin) if disassembled else ""
    found = {}
    for entry, registers, stack, shared, local in _USAGE.findall(usage):
        found[entry] = {
            "registers": int(registers),
            "stack": int(stack),
            "shared": int(shared),
            "local": int(local),
            "sass": set(),
            "alone": False,
            "idle": False,
            "drained": False,
            "hasty": False,
        }
    for part in re.split(r"\n\s*\.section\s+\.text\.", sass)[1:]:
        entry = re.match(r"\w+", part)
        if entry and entry[0] in found:
            found[entry[0]]["sass"] = set(_INSTRUCTION.findall(part))
            found[entry[0]]["alone"] = _products_alone(part)
            found[entry[0]]["idle"] = entry[0] in OVERLAPPED and _softmax_waits(part)
            found[entry[0]]["hasty"] = entry[0] in EARLY and _is_hasty(part)
            found[entry[0]]["drained"] = entry[0] in RINGS and _ring_drains(part)
    return found


def _disassembly(cubin: bytes) -> str:
    """Disassembles by nvdisasm, which takes half a second for the smallest cubin: once for each,
    also between runs."""
    stored = kept() / f"{hashlib.sha256(cubin).hexdigest()}.sass"
    with suppress(OSError):
        return zlib.decompress(stored.read_bytes()).decode()
    disassembler = tool("nvdisasm")
    assert disassembler is not None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        sass = _run([str(disassembler), "-c", file.name])
    with suppress(OSError):
        write_whole(stored, zlib.compress(sass.encode()))
    return sass


def _products_alone(sass: str) -> bool:
    """Whether ptxas had each product of a warpgroup waited for before the next is issued, which it
    does where it cannot prove that nothing touches their registers."""
    return sass.count("WARPGROUP.ARRIVE") * 4 > sass.count("HGMMA") > 0


def _softmax_waits(sass: str) -> bool:
    """Whether less than all of a step's softmax stands between the wait for the scores alone (one
    group of products stays under way) and the wait for all. A lane has a score for each two
    columns, of which each has an exponential, another one with a soft cap, and its two rows have a
    factor each."""
    columns = re.search(r"HGMMA\.64x(\d+)x16", sass)
    steps = re.split(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x\d)", sass)
    beside = [after.count("MUFU.EX2") for waits, after in pairwise(steps) if waits == "0x1"]
    return columns is None or len(beside) != 1 or beside[0] < 2 * (int(columns[1]) // 2) + 2


def _ring_drains(sass: str) -> bool:
    """Whether a product waits for every copy (`cp.async`) that is under way, or none waits."""
    *loops, _ = re.split(r"\b[HQ]MMA\.", sass)
    waits = re.findall(r"DEPBAR\.LE SB\d, (0x[0-9a-f]+)", "".join(loops))
    return not waits or "0x0" in waits


def _is_hasty(sass: str) -> bool:
    """Whether anything but copies of weights (`cp.async`) stands before griddepcontrol.wait, or
    there is no wait."""
    before, waits, _ = sass.partition("ACQBULK")
    return not waits or re.search(r"\b(LDG|STG|ATOMG|RED)\.", before) is not None


def _run(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
