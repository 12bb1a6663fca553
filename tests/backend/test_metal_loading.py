"""What the metal backend does beyond the conformance suite: where it is chosen, dtypes, refusals,
memory, threads, and errors of a step."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from vllmx_core.arrays import NUMPY
from vllmx_core.backend import LoadOptions, free_memory
from vllmx_core.cache.capacity import CachePlan
from vllmx_core.errors import CapacityError, ConfigError
from vllmx_core.model import KVSpec, ModelShape
from vllmx_core.plugins.registry import Registry
from vllmx_core.plugins.specs import BackendSpec
from vllmx_core.sampling import gumbel_noise
from vllmx_core.weights.part import WeightSource
from vllmx_testing.harness import PAGE
from vllmx_testing.plans import Row, make_plan, sampling_rows
from vllmx_testing.step_checks import decoder
from vllmx_testing.synthetic import ArraySource, Builder, SyntheticModel

mx = pytest.importorskip("mlx.core", reason="vllmx-metal runs on MLX")
pytest.importorskip("vllmx_metal")

from vllmx_cpu import plugin as cpu_plugin  # noqa: E402
from vllmx_metal import plugin  # noqa: E402
from vllmx_metal.arrays import METAL  # noqa: E402
from vllmx_metal.backend import MetalBackend  # noqa: E402
from vllmx_metal.device import Device  # noqa: E402
from vllmx_metal.kv_cache import plan_kv  # noqa: E402
from vllmx_metal.loaded import MetalLoadedModel  # noqa: E402

LIMITS: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 64}
GIB = 1 << 30


def load(model: SyntheticModel, source: WeightSource, **options: Any) -> MetalLoadedModel:
    return MetalBackend().load(model, source, LoadOptions(**(LIMITS | options)))


class TestProbe:
    @pytest.mark.parametrize(
        ("system", "machine", "priority"),
        [
            ("darwin", "arm64", 20),
            ("darwin", "x86_64", -1),
            ("linux", "x86_64", -1),
            ("linux", "aarch64", -1),
        ],
    )
    def test_auto_takes_it_on_apple_silicon_alone(
        self, monkeypatch: pytest.MonkeyPatch, system: str, machine: str, priority: int
    ) -> None:
        monkeypatch.setattr("sys.platform", system)
        monkeypatch.setattr("platform.machine", lambda: machine)
        (spec,) = plugin.vllmx_backends()
        assert spec.priority == priority
        reason = plugin.probe()
        if (system, machine) == ("darwin", "x86_64"):
            assert "Intel" in str(reason)
        else:
            assert reason is None

    @pytest.mark.parametrize(
        ("system", "machine", "chosen"),
        [("darwin", "arm64", "metal"), ("linux", "x86_64", "cpu"), ("linux", "aarch64", "cpu")],
    )
    def test_auto_chooses_among_what_is_there(
        self, monkeypatch: pytest.MonkeyPatch, system: str, machine: str, chosen: str
    ) -> None:
        """The plugins are those that a machine of that kind would see, all of which could run."""
        monkeypatch.setattr("sys.platform", system)
        monkeypatch.setattr("platform.machine", lambda: machine)
        registry = Registry()
        for plugin_of, name in ((plugin, "vllmx-metal:metal"), (cpu_plugin, "vllmx-cpu:cpu")):
            registry.add(plugin_of, name)
        monkeypatch.setattr(BackendSpec, "unavailable_reason", lambda self: None)
        spec, reason = registry.choose_backend("auto")
        assert spec.name == chosen, reason

    def test_a_missing_mlx_is_named_with_the_command(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(plugin, "find_spec", lambda name: None)
        assert "pip install 'vllmx[metal]'" in str(plugin.probe())


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_auto_takes_the_dtype_of_the_checkpoint(dtype: str) -> None:
    model, source = decoder()
    loaded = load(replace(model, shape=replace(model.shape, dtype=dtype)), source)
    assert (loaded.info.dtype, loaded.info.kv_cache_dtype) == (dtype, dtype)
    loaded.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"dtype": "f8"}, "dtype 'f8': choose bf16"), ({"block_size": 0}, r"block_size.*at least 1")],
)
def test_options_that_cannot_be_honoured(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(*decoder(), **options)


class TestMemory:
    @pytest.fixture
    def gpu(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
        """A GPU with 24 GiB, 20 of them free; what MLX is told by name."""
        told: dict[str, list[int]] = {"wired": [], "cache": []}
        device = Device("Apple M9", True, 24 * GIB, 20 * GIB)
        monkeypatch.setattr("vllmx_metal.backend.current_device", lambda: device)
        for name, values in told.items():
            monkeypatch.setattr(f"mlx.core.set_{name}_limit", values.append)
        return told

    def test_a_model_stays_resident_while_it_is_loaded(self, gpu: dict[str, list[int]]) -> None:
        loaded = load(*decoder(), num_kv_blocks=64)
        (wired,), (cache,) = gpu["wired"], gpu["cache"]
        assert wired - cache == loaded.info.weight_bytes + loaded.info.kv_cache_bytes
        loaded.close()
        assert gpu["wired"][1:] == [0]

    def test_a_gpu_is_filled_and_the_host_is_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sizes = []

        class Planned(Exception):
            pass

        def stop(plan: CachePlan) -> None:
            sizes.append(plan.num_bytes)
            raise Planned

        monkeypatch.setattr("vllmx_metal.backend.allocate", stop)
        for is_gpu in (True, False):
            device = Device("any", is_gpu, 24 * GIB, 20 * GIB)
            monkeypatch.setattr("vllmx_metal.backend.current_device", lambda d=device: d)
            with pytest.raises(Planned):
                load(*decoder(), max_num_seqs=1 << 20, max_num_batched_tokens=64)
        assert 16 * GIB < sizes[0] < 18 * GIB
        assert sizes[1] <= 4 * GIB

    @pytest.mark.parametrize(
        ("options", "free_mib", "expected"),
        [
            ({}, 110, 32),  # a long model's sequences are rarely long
            ({}, 30, 20),
            ({}, 13, 8),
            ({"max_model_len": 512}, 13, 24),
            ({"kv_cache_dtype": "int8"}, 20, 17),
            ({"memory_fraction": 0.5}, 40, 10),
            ({"num_kv_blocks": 9 * 256}, 19, 9),
            ({"kv_cache_memory_bytes": 11 << 20}, 22, 11),
            ({"max_num_seqs": 77}, 13, 77),
        ],
    )
    def test_sequences_together_by_memory(
        self, options: dict[str, Any], free_mib: int, expected: int
    ) -> None:
        """10 MiB are taken; 4096 tokens take one in bfloat16, nine sixteenths in int8."""
        limits = {"max_model_len": 40960, "shrink_to_fit": True, "memory_fraction": 1.0}
        device = Device("Apple M9", True, free_mib << 20, free_mib << 20)
        dtype = options.get("kv_cache_dtype", "bf16")
        shape = ModelShape(97, 64, 40960, (KVSpec(2, 32),))
        asked = LoadOptions(**limits | options)
        assert plan_kv(shape, asked, dtype, device, 10 << 20)[1] == expected

    def test_the_number_of_sequences_is_reported(self) -> None:
        for asked, found in ((None, 32), (5, 5)):
            loaded = load(*decoder(), max_num_seqs=asked)
            assert loaded.info.max_num_seqs == found
            assert loaded.info.max_num_batched_tokens >= found
            loaded.close()

    def test_weights_that_do_not_fit_are_refused_before_they_are_read(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, dense = decoder()
        for is_gpu, remedy in ((True, "iogpu.wired_limit_mb"), (False, "--isq")):
            device = Device("Apple M9", is_gpu, 24 * GIB, 1000)
            monkeypatch.setattr("vllmx_metal.backend.current_device", lambda d=device: d)
            with pytest.raises(CapacityError, match=rf"1000 bytes .* on Apple M9.*{remedy}"):
                load(model, dense)

    def test_tied_embeddings_are_held_once_and_sizes_are_right(self) -> None:
        sizes = []
        for tied in (False, True):
            builder = Builder(4096)
            builder.embedding("embed", 64)
            if tied:
                builder.tied("head", "embed", 64)
            else:
                builder.linear("head", 4096, 64, biases=[0])
            model = builder.build(
                64,
                lambda ops, w, step: ops.logits(
                    ops.embedding(step.tokens, w["embed"]), step.logit_rows, w["head"]
                ),
            )
            loaded = load(model, ArraySource(builder.arrays), dtype="bf16")
            sizes.append(loaded.info.weight_bytes)
            loaded.close()
        assert sizes == [2 * 4096 * 64 * 2 + 4096 * 2, 4096 * 64 * 2]


def test_any_thread_may_call_it() -> None:
    """MLX's arrays belong to the thread that asked for them; the owner's thread asks for all."""
    loaded = load(*decoder())
    plan, rows = make_plan([Row([1, 2, 3], 0, [0], "all")], PAGE), sampling_rows(3)
    expected = loaded.step(plan, rows).result().ids
    handles: list[Any] = []
    for act in (
        lambda: handles.append(loaded.step(plan, rows)),
        lambda: handles.append(handles.pop().result().ids),
        loaded.close,
    ):
        thread = threading.Thread(target=act)
        thread.start()
        thread.join()
    np.testing.assert_array_equal(handles[0], expected)


def test_threads_end_with_their_model() -> None:
    def count() -> int:
        return sum("vllmx-mlx" in thread.name for thread in threading.enumerate())

    before = count()
    loaded = load(*decoder())
    assert count() == before + 1
    loaded.close()
    with pytest.raises(ConfigError):
        load(*decoder(), dtype="f8")
    assert count() == before


def test_what_a_step_raises_its_result_raises() -> None:
    loaded = load(*decoder())
    good = make_plan([Row([1, 2, 3], 0, [0])], PAGE)

    class Broken:
        def run(self, frame: Any) -> Any:
            raise ValueError("no such op")

    whole = loaded._interpreter
    loaded._interpreter = Broken()
    with pytest.raises(ValueError, match="no such op"):
        loaded.step(good, sampling_rows(1)).result()
    with pytest.raises(ValueError, match="no such op"):
        loaded.forward(good).sample(sampling_rows(1)).result()
    loaded._interpreter = whole
    loaded.step(good, sampling_rows(1)).result()
    loaded.close()


def test_a_reference_to_nothing_is_refused() -> None:
    loaded = load(*decoder())
    loaded.step(make_plan([Row([1], 0, [0])], PAGE), sampling_rows(1)).result()
    with pytest.raises(AssertionError, match="reference -2 to 1 sampled rows"):
        loaded.step(make_plan([Row([-2], 1, [0])], PAGE), sampling_rows(1))
    loaded.close()


def test_noise_is_that_of_every_backend() -> None:
    seeds = np.array([0, 1, (1 << 64) - 1, 0x123456789ABCDEF0], np.uint64)
    positions = np.array([0, 5, (1 << 31) - 1, 77], np.int32)
    for size in (1, 131, 4099):
        x = np.zeros((4, size), np.float32)
        found = np.array(gumbel_noise(METAL, mx.array(x), seeds, positions))
        expected = gumbel_noise(NUMPY, x, seeds, positions)
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_progress_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    load(*decoder(), progress=True).close()
    assert "loading weights [##############################] 100%\n" in capsys.readouterr().err


def test_the_memory_that_is_told_is_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device("a GPU", True, 4 * GIB, 3 * GIB)
    monkeypatch.setattr("vllmx_metal.backend.current_device", lambda: device)
    assert free_memory(MetalBackend()) == 3 * GIB
