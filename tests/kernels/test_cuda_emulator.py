"""The emulator's checker finds what it says it finds, and launches refuse what does not fit."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from vllmx_core.errors import ConfigError
from vllmx_cuda.kernel_specs import KERNELS, Kernel, Launch
from vllmx_cuda.kernel_specs.types import arguments
from vllmx_testing.cuda.emulator import Emulator, KernelFault, build, empty

from .cuda_arrays import Array, on_device, options

FAULTS = {
    "no_barrier": "uninitialised shared memory|race on shared memory",
    "beyond_the_end": "out of bounds: 4-byte read at byte 256 of pointer argument #0",
    "writes_input": "write to a read-only argument",
    "misaligned": "misaligned",
    "divergent_shuffle": "deadlock|names lanes that do not exist or have ended",
    "blocks_collide": "race on global memory",
    "no_wait": "cp.async",
    "divides_by_zero": "integer division by zero",
}


def described(entry: str) -> Kernel:
    """Describes a kernel as a plugin with kernels of its own would."""
    return Kernel(
        entry=entry,
        source="cuda_faults.cu",
        options={},
        arguments=arguments("in f32* x, out f32* y, i32 n"),
        sizes=("blocks",),
        rule=lambda sizes, options: Launch((sizes["blocks"], 1, 1), 64),
    )


def launch(emulator: Emulator, entry: str) -> tuple[Array, Array]:
    own = Emulator(check=True, order=emulator.order, folder=Path(__file__).parent)
    x, y = on_device(np.arange(64), np.float32), empty(64, np.float32)
    blocks = 2 if entry == "blocks_collide" else 1
    own.launch(described(entry).variant(), {"blocks": blocks}, [x, y, 64])
    return x, y


@pytest.mark.parametrize("entry", FAULTS)
def test_faults_are_found(emulator: Emulator, entry: str) -> None:
    with pytest.raises(KernelFault, match=FAULTS[entry]) as caught:
        launch(emulator, entry)
    assert str(caught.value).startswith(f"{entry}: ")


def test_what_is_right_passes(emulator: Emulator) -> None:
    x, y = launch(emulator, "good")
    np.testing.assert_array_equal(y, x[::-1])


def test_a_grid_of_nothing_is_one_block(emulator: Emulator) -> None:
    """As CuPy launches it, so that a caller that launches nothing is seen."""
    own = Emulator(check=True, order=emulator.order, folder=Path(__file__).parent)
    x, y = on_device(np.arange(64), np.float32), empty(64, np.float32)
    own.launch(described("good").variant(), {"blocks": 0}, [x, y, 64])
    np.testing.assert_array_equal(y, x[::-1])


def test_static_shared_memory_counts() -> None:
    variant = KERNELS["layer_norm"].variant(VX_DTYPE=0, VX_VEC=1)
    sizes = {"rows": 1, "width": 64}
    assert Emulator().shared_bytes(variant, sizes) >= variant.launch(sizes).shared_bytes + 32 * 4


def test_a_fault_names_its_line(emulator: Emulator) -> None:
    with pytest.raises(KernelFault, match=r"at cuda_faults\.cu:\d+"):
        launch(emulator, "beyond_the_end")


def test_arguments_by_name() -> None:
    """Those that may be null may be left out, so that a new one of them breaks no caller."""
    kernel = KERNELS["paged_combine"]
    known = {"partial": 1, "weights": 2, "first_item": 3, "out": 4, "heads": 5}
    assert kernel.ordered(**known) == [1, 2, 3, None, 4, 5]
    with pytest.raises(ConfigError, match=r"missing \['out', 'heads'\], unknown \['head'\]"):
        kernel.ordered(partial=1, weights=2, first_item=3, head=5)


def test_launches_that_do_not_fit_are_refused(emulator: Emulator) -> None:
    kernel = KERNELS["rms_norm"]
    with pytest.raises(ConfigError, match="no variant VX_VEC=3"):
        kernel.variant(**options("bf16", VX_VEC=3))
    with pytest.raises(ConfigError, match="takes the options"):
        kernel.variant(VX_DTYPE=2)
    variant, x = kernel.variant(**options("f32", VX_VEC=1)), empty((1, 4), np.float32)
    with pytest.raises(ConfigError, match="needs the sizes"):
        variant.launch({"rows": 1})
    with pytest.raises(ConfigError, match="rows must be at least 1"):
        variant.launch({"rows": 0, "width": 4})
    with pytest.raises(ConfigError, match="heads must be a multiple of 5, got 12"):
        KERNELS["kv_store"].rule({"tokens": 1, "heads": 12, "kv_heads": 5}, {})
    sizes = {"rows": 1, "width": 4}
    with pytest.raises(TypeError, match="takes 5 arguments, got 2"):
        emulator.launch(variant, sizes, [x, x])
    with pytest.raises(TypeError, match="weight must be a contiguous array"):
        emulator.launch(variant, sizes, [x, None, x, 4, 1e-6])
    with pytest.raises(TypeError, match="width is a i32"):
        emulator.launch(variant, sizes, [x, x, x, x, 1e-6])


def test_modules_share_their_stacks(emulator: Emulator) -> None:
    """Stacks of a block are 2,048 mappings, of which a process has some 65,000."""

    def mappings_after(width: int) -> int:
        x, codes = (
            on_device(np.ones((1, 8192 * width)), np.float32),
            empty((1, 8192 * width), np.int8),
        )
        chosen = options("f32", VX_VEC=width, VX_CODE=0, VX_GROUPS=0)
        sizes = {"rows": 1, "width": 8192 * width}
        variant = KERNELS["quantize_rows"].variant(**chosen)
        emulator.launch(variant, sizes, [x, codes, empty(1, np.float32), 8192 * width, 0.0, 0])
        assert (codes == 127).all()
        return len(Path("/proc/self/maps").read_text().splitlines())

    before = mappings_after(1)
    assert max(mappings_after(2), mappings_after(4)) < before + 200


def test_gpp_takes_the_parsed_headers(tmp_path: Path, emulators: dict[str, Emulator]) -> None:
    """It says so; other options than they were parsed with would make it read them again."""
    how = ("-O1",)
    header = build._prelude(how)
    source = tmp_path / "empty.cpp"
    source.write_text("bool positive(__half x) { return __half2float(x) > 0; }\n")
    command = ["g++", *build.COMPILE, *how, "-DVX_DTYPE=1", "-include", str(header), "-H", "-c",
               str(source), "-o", str(tmp_path / "empty.o")]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"! {header}.gch" in done.stderr
    assert "cuda_fp16.h" not in done.stderr


def test_another_clone_compiles_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, emulators: dict[str, Emulator]
) -> None:
    emulators["forward"]  # it skips where kernels cannot be emulated
    own = build.build_module(build.KERNELS / "clip.cu", ["VX_DTYPE=0"], check=False)
    root = build.KERNELS.parent
    for name in ("KERNELS", "NATIVE"):
        folder = getattr(build, name)
        copy = tmp_path / folder.name
        shutil.copytree(folder, copy)
        monkeypatch.setattr(build, name, copy)
    again = build.build_module(build.KERNELS / "clip.cu", ["VX_DTYPE=0"], check=False)
    assert again == own
    (build.KERNELS / "vx.h").write_text((root / "kernels" / "vx.h").read_text() + "\n//")
    assert build.build_module(build.KERNELS / "clip.cu", ["VX_DTYPE=0"], check=False) != own
