"""Flags that deployments of other servers carry: taken with a note, translated, or refused."""

from __future__ import annotations

import json
import logging
import os
import runpy
from collections import Counter
from pathlib import Path
from typing import Any

import click
import pytest
from vllmx.cli.command import FOREIGN, ModelCommand
from vllmx.cli.foreign_flags import every_flag, families
from vllmx.cli.options import served_names
from vllmx.cli.serve import serve
from vllmx_core.config import EngineConfig
from vllmx_core.errors import ConfigError
from vllmx_engine.core.generation_config import generation_config

from tests.null.cli.test_options import configs

EVERY = list(every_flag())
PEERS = Path(__file__).parents[2] / "data" / "peer_flags"


def engine(*arguments: str) -> EngineConfig:
    return configs(*arguments)[0]


def test_a_command_line_of_each_family_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vllmx.flags")
    line = (
        "serve-me --trust-remote-code --data-parallel-size 1 --disable-log-requests"
        " --swap-space 0 --tokenizer-mode auto --generation-config auto --max-model-len 2k"
        " --dtype bf16 --device cuda:0 --gpu_memory_utilization 0.8"
    )
    config = engine(*line.split())
    assert (config.model, config.max_model_len, config.dtype) == ("serve-me", 2000, "bfloat16")
    assert (config.backend, config.memory_fraction) == ("cuda", 0.8)
    assert "--trust-remote-code is taken without effect: not needed" in caplog.text
    config = engine(
        *["--m", "org/repo", "--f", "some.gguf", "--d", "0", "--fp8-kvcache", "--server", "--log"]
    )
    assert (config.model, config.kv_cache_dtype) == ("org/repo:some.gguf", "fp8")
    line = (
        "-hf org/repo -hff x.gguf -c 0 -np 4 -ngl 99 -fa -ctk q8_0 -ctv q8_0 --jinja --mlock -t -1"
    )
    config = engine(*line.split())
    assert (config.model, config.max_model_len, config.max_num_seqs) == ("org/repo:x.gguf", None, 4)
    assert (config.backend, config.kv_cache_dtype) == ("auto", "int8")
    assert engine("--cpu").backend == engine("-ngl", "0").backend == "cpu"


@pytest.mark.parametrize(
    ("line", "dtype"),
    [
        ("-ctk q8_0 -ctv q4_0", "q8,q4"),
        ("--cache-type-v q4_0 --cache-type-k q8_0", "q8,q4"),
        ("-ctk q4_0 -ctv q4_0", "q4"),
        ("-ctv q8_0", "int8"),
        ("--kv-cache-dtype turboquant_k8v4", "turboquant_k8v4"),  # for the backend to read
    ],
)
def test_keys_and_values_may_differ(line: str, dtype: str) -> None:
    assert engine(*line.split()).kv_cache_dtype == dtype


@pytest.mark.parametrize("value", [["-fa", "on"], ["--flash-attn=auto"], ["-fa", "--port", "1"]])
def test_flash_attention_goes_with_and_without_a_value(value: list[str]) -> None:
    engine(*value)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("--data-parallel-rank 2", "--data-parallel-rank 2 is refused: --replicas starts all"),
        ("--swap-space 4", "recomputes"),
        ("--enable-mm-embeds", "--enable-mm-embeds is refused: .*token ids"),
        ("--device cuda:1", "VLLMX_CUDA_DEVICE=1"),
        ("--d 0,1", "one device"),
        ("--d 2", "VLLMX_CUDA_DEVICE=2"),
        ("-ngl 20", "whole model"),
        ("-ngl 9²", "whole model"),
        ("-ctk q5_0", "f32, f16, bf16, q8_0, q4_0 are taken"),
        ("-ctk q4_0 -ctv q8_0", "--cache-type-v asks for .* int8, which is given as 'q4' too"),
        ("-ctk q8_0 -ctv f16", "asks for --kv-cache-dtype f16, which is given as 'int8' too"),
        ("--fp8-kvcache --kv-cache-dtype int8", "given as 'int8' too"),
        ("--temp warm", "--temp.* 'warm' is refused: a number is wanted"),
        ("--temp nan", "'nan' is refused: a number is wanted"),
        ("-n 1e999", "'1e999' is refused: a number is wanted"),
        ("--top-k " + "9" * 5000, "a number is wanted"),
        ("a --m b", "named twice"),
        ("a -hf b", "given as 'a' too"),
        ("--m a.gguf:b --f c", "is a file itself"),
        ("--dtype bfloat17", r"got 'bfloat17'; did you mean 'bfloat16'\?"),
        ("--log-level warn", r"did you mean 'warning'\?"),
    ],
)
def test_other_values_are_refused_with_the_remedy(line: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        configs(*line.split())


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("--max-model-len 5 --max-model-len 6", "max_model_len", 6),
        ("--max-model-len=6 --max-model-len=5", "max_model_len", 5),
        ("--gpu-memory-utilization .5 --memory-fraction .7", "memory_fraction", 0.7),
        ("--memory-fraction .7 --gpu-memory-utilization .5", "memory_fraction", 0.5),
        ("--dtype f32 --dtype bf16 --dtype f16", "dtype", "float16"),
        ("--enable-prefix-caching --no-enable-prefix-caching", "enable_prefix_caching", False),
        ("--no-enable-prefix-caching --enable-prefix-caching", "enable_prefix_caching", True),
        ("--ctx-size 5 --ctx-size 6", "max_model_len", 6),
        ("--tool-parser none --tool-call-parser auto", "tool_parser", "auto"),
    ],
)
def test_of_an_option_that_is_given_twice_the_last_wins(
    caplog: pytest.LogCaptureFixture, line: str, field: str, value: object
) -> None:
    assert getattr(engine(*line.split()), field) == value
    told = [r.getMessage() for r in caplog.records if "given twice" in r.getMessage()]
    assert len(told) == 1
    assert "the last one is taken" in told[0]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--O.top_k 5 --O.top_k 6", {"top_k": 6}),
        ("--O.a.b 5 --O.a 6", {"a": 6}),
        ("--O.a 6 --O.a.b 5", {"a": {"b": 5}}),
        ("--O.top_k 5 --O {}", {}),
        ("--O {} --O.top_k 5", {"top_k": 5}),
    ],
)
def test_of_a_key_that_is_given_twice_the_last_wins(
    caplog: pytest.LogCaptureFixture, line: str, expected: object
) -> None:
    config = engine(*line.replace("--O", "--default-chat-template-kwargs").split())
    assert json.loads(config.default_chat_template_kwargs or "") == expected
    assert "given twice" in caplog.text


def test_options_that_may_be_repeated_are_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    assert configs("--api-key", "a", "--api-key", "b")[1].api_key == ("a", "b")
    assert "twice" not in caplog.text


def test_a_mistyped_flag_names_the_nearest() -> None:
    with pytest.raises(click.NoSuchOption) as caught:
        configs("--max-model-length", "5")
    assert "--max-model-len" in caught.value.format_message()


@pytest.mark.parametrize(
    ("text", "value"),
    [("2k", 2000), ("2K", 2048), ("1.5k", 1500), ("auto", None), ("-1", None), ("0x10", "integer"),
     ("1.5", "integer"), ("2KB", "integer"), ("9" * 40, "integer")],
)  # fmt: skip
def test_integers_as_people_write_them(text: str, value: Any) -> None:
    if isinstance(value, str):
        with pytest.raises(ConfigError, match=value):
            engine("--max-model-len", text)
    else:
        assert engine("--max-model-len", text).max_model_len == value


def test_bytes_have_units() -> None:
    assert engine("--kv-cache-memory-bytes", "4GB").kv_cache_memory_bytes == 4 * 10**9
    assert engine("--kv-cache-memory", "4GiB").kv_cache_memory_bytes == 4 << 30
    assert configs("--max-body-bytes", "1m")[1].max_body_bytes == 10**6
    with pytest.raises(ConfigError, match="such as 4GiB, got '4 gulps'"):
        engine("--kv-cache-memory", "4 gulps")


def test_the_config_file_takes_them_too(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "data-parallel-size: 1\ntrust_remote_code: true\ngpu-memory-utilization: 0.5\n"
        "enable-mm-embeds: false\nfp8-kvcache: true\n"
    )
    config = engine("--config", str(file))
    assert (config.memory_fraction, config.kv_cache_dtype) == (0.5, "fp8")
    file.write_text(
        "structured-outputs-config:\n  backend: guidance\n  reasoning_parser: think\n"
        "hf-overrides: {}\nlimit-mm-per-prompt: {image: 2}\nno-trust-remote-code: true\n"
    )
    assert engine("--config", str(file)).reasoning_parser == "think"
    for text, error in (
        ("hf-overrides: {a: 1}", "edit config.json"),
        ("data-parallel-rank: 2", "--replicas starts all"),
        ("enable-mm-embeds: true", "token ids"),
        ("gpu-memory-utilization: 0.5\nmemory-fraction: 0.5", "twice"),
        ("max-model-length: 5", "did you mean 'max-model-len'"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=error):
            engine("--config", str(file))


def test_a_token_sets_the_variable_and_stays_out_of_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vllmx.flags")
    monkeypatch.setenv("HF_TOKEN", "")
    engine("--hf-token", "hf_secret")
    assert os.environ["HF_TOKEN"] == "hf_secret"
    assert "--hf-token is taken" in caplog.text
    assert "hf_secret" not in caplog.text


def own_options() -> dict[str, click.Option]:
    """The options of `vllmx serve` itself, by their names."""
    return {
        name: param
        for param in serve.params
        if isinstance(param, click.Option) and not (param.name or "").startswith(FOREIGN)
        for name in (*param.opts, *param.secondary_opts)
    }


def test_no_flag_is_in_two_tables_or_unreachable() -> None:
    names = Counter(name for flag in EVERY for name in flag.names)
    assert not [name for name, count in names.items() if count > 1]
    tables = {name for family in families().values() for line in family for name in line.names}
    assert not own_options().keys() & tables, "vllmx has these itself"
    assert isinstance(serve, ModelCommand)
    assert len(serve.foreign) == len(EVERY)


@pytest.mark.parametrize("peer", ["vllm", "vllm_rs", "llama_cpp"])
def test_every_flag_of_a_peer_is_known(peer: str) -> None:
    """Taken, translated or refused with its reason, and none takes its neighbour for a value."""
    assert isinstance(serve, ModelCommand)
    foreign = {name: flag for flag in serve.foreign.values() for name in flag.names}
    is_bare = {name: option.is_flag for name, option in own_options().items()}
    is_bare |= {name: flag.bare for name, flag in foreign.items()}
    lines = (PEERS / f"{peer}.txt").read_text(encoding="utf-8").splitlines()
    flags = dict(line.partition(" ")[::2] for line in lines if not line.startswith("#"))
    unknown = flags.keys() - is_bare.keys()
    assert not unknown, "a line in a table of vllmx.cli says what they come to"
    other = [name for name, value in flags.items() if is_bare[name] == bool(value)]
    wrong = [name for name in other if name not in foreign or not foreign[name].optional]
    assert not wrong, "these differ in whether a value follows"


def test_flags_of_other_servers_are_learnt_as_they_are_given() -> None:
    assert engine("-c4096").max_model_len == 4096
    assert engine("--ctx_size=4096").max_model_len == 4096
    for _ in range(2):
        assert engine("-c", "-1", "--seed", "5").seed == 5


def test_switches_of_vllm_are_turned_off_too() -> None:
    line = "--no-enable-lora --disable-log-deltas --no-trust-remote-code --enable-cascade-attn"
    engine(*line.split())
    assert configs("--enable-uvicorn-access-log")[1].disable_access_log is False
    assert engine("--disable-expert-parallel").expert_parallel is False
    assert engine("--disable-prefix-caching").enable_prefix_caching is False
    server = configs("--enable-force-include-usage")[1]
    assert server.enable_force_include_usage is True
    assert configs("--disable-force-include-usage")[1].enable_force_include_usage is False
    assert engine("--no-enable-expert-parallel", "--enable-expert-parallel").expert_parallel
    assert not engine("--enable-expert-parallel", "--no-enable-expert-parallel").expert_parallel


def test_keys_of_an_object_are_flags_too() -> None:
    line = "--override-generation-config.temperature 0 --override_generation_config.top_k=5 -c 64"
    config = engine(*line.split())
    assert json.loads(config.override_generation_config or "") == {"temperature": 0, "top_k": 5}
    assert config.max_model_len == 64
    line = "--default-chat-template-kwargs.a.b true --structured-outputs-config.reasoning_parser x"
    config = engine(*line.split())
    assert json.loads(config.default_chat_template_kwargs or "") == {"a": {"b": True}}
    assert config.reasoning_parser == "x"
    engine("--limit-mm-per-prompt.image", "2", "-cc.mode", "3", "--attention-config.backend", "F")
    for line, text in (
        ("--speculative-config.method medusa", "other drafters are not served yet"),
        ("--override-generation-config.top_k", "wants a value"),
    ):
        with pytest.raises(ConfigError, match=text):
            engine(*line.split())
    config = engine("--speculative-config.method", "ngram")
    assert (config.speculate, config.speculate_tokens) == ("ngram", "auto")
    assert engine("-mmodel.gguf").model == "model.gguf"
    with pytest.raises(click.NoSuchOption):
        configs("--no-such-flag.key", "5")


@pytest.mark.parametrize(
    ("line", "speculate", "tokens"),
    [
        (
            ["-sc", '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}'],
            "ngram",
            "5",
        ),
        (["-sc", '{"model": "small", "num_speculative_tokens": 3}'], "model:small", "3"),
        (["-sc", '{"method": "draft_model", "model": "small"}'], "model:small", "auto"),
        (["--speculative-model", "a/b", "--num-speculative-tokens", "4"], "model:a/b", "4"),
        (["-md", "small.gguf", "--draft-max", "32", "--draft-min", "2"], "model:small.gguf", "16"),
        (["-md", "small.gguf", "--spec-type", "draft-simple"], "model:small.gguf", "auto"),
        (["-md", "eagle.gguf", "--spec-type", "draft-eagle3"], "model:eagle.gguf", "auto"),
        (["-sc", '{"method": "eagle3", "model": "e"}'], "model:e", "auto"),
        (["-sc.method", "dflash", "-sc.model", "d"], "model:d", "auto"),
        (["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "8"], "ngram", "auto"),
        (["-sc", '{"method": "mtp", "num_speculative_tokens": 2}'], "heads", "2"),
        (["-sc", '{"method": "qwen3_next_mtp", "model": "a/b"}'], "heads", "auto"),
        (["-sc", '{"method": "mtp", "model": "a/b-assistant"}'], "model:a/b-assistant", "auto"),
        (["-md", "a.gguf", "--spec-type", "draft-mtp"], "model:a.gguf", "auto"),
        (["--spec-type", "draft-mtp", "-md", "a b.gguf"], "model:a b.gguf", "auto"),
        (["--speculative-config.method", "deepseek_mtp"], "heads", "auto"),
        (["--spec-type", "draft-mtp", "--spec-draft-n-max", "3"], "heads", "3"),
        (["--spec-default"], "auto", "auto"),
        (["--spec-type", "none"], "off", "auto"),
    ],
)
def test_flags_of_speculation(line: list[str], speculate: str, tokens: str) -> None:
    config = engine(*line)
    assert (config.speculate, config.speculate_tokens) == (speculate, tokens)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ('{"disable_any_whitespace": true}', "requests say structured_outputs.disable_any"),
        ('{"disable_additional_properties": true}', "schemas say additionalProperties"),
        ('{"reasoning_parser_plugin": "a.py"}', "vllmx_parsers"),
        ('{"enable_in_reasoning": true}', "thoughts are free"),
        ('{"reasonning_parser": "qwen3"}', "did you mean 'reasoning_parser'"),
        ('{"reasoning_parser": 5}', "must be the name of a format, got 5"),
        ('[]', "must be a JSON object"),
        ('{"reasoning_parser": "think"} --reasoning-parser none', "given as 'none' too"),
    ],
)  # fmt: skip
def test_the_configuration_of_structured_outputs(given: str, text: str) -> None:
    config = engine(
        "--structured-outputs-config",
        '{"backend": "xgrammar", "reasoning_parser": "deepseek_r1", "enable_in_reasoning": false}',
    )
    assert config.reasoning_parser == "deepseek_r1"
    assert (
        engine("--structured-outputs-config", '{"backend": "guidance"}').reasoning_parser == "auto"
    )
    first, _, rest = given.partition(" --")
    with pytest.raises(ConfigError, match=text):
        engine("--structured-outputs-config", first, *(f"--{rest}".split() if rest else ()))


def test_the_page_has_every_flag() -> None:
    docs = Path(__file__).parents[3] / "docs"
    page = runpy.run_path(str(docs / "list_flags.py"))["page"]()
    names = [name for family in families().values() for line in family for name in line.names]
    assert [name for name in names if f"`{name}`" not in page] == []


LLAMA_LINE = (
    "-m demo --temp 0.6 --top-p 0.95 --top-k 20 --min-p 0 --repeat-penalty 1.05 -n 512"
    " --presence-penalty 1.5 --samplers x"
)


def test_sampling_of_a_command_line_is_the_default_of_requests() -> None:
    line, found = LLAMA_LINE.removesuffix(" --samplers x"), engine
    config = found(*line.split())
    assert json.loads(config.override_generation_config or "") == {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0,
        "repetition_penalty": 1.05,
        "max_new_tokens": 512,
        "presence_penalty": 1.5,
    }
    assert generation_config(config, {"top_k": 1})["top_k"] == 20
    assert engine("-n", "-1").override_generation_config is None
    both = engine("--override-generation-config", '{"top_k": 1}', "--temp", "0")
    assert json.loads(both.override_generation_config or "") == {"top_k": 1, "temperature": 0}
    for line, text in (
        (LLAMA_LINE, "--samplers x is refused"),
        ('--temp 1 --override-generation-config {"temperature":0}', "0 there: give one"),
        ("--temp 1 --override-generation-config []", "must be a JSON object"),
    ):
        with pytest.raises(ConfigError, match=text):
            engine(*line.split())


def test_variables_of_the_template_come_by_several_flags(tmp_path: Path) -> None:
    for line, wanted in (
        ("--reasoning-budget 0", {"enable_thinking": False}),
        (
            "--reasoning off --reasoning-effort low",
            {"enable_thinking": False, "reasoning_effort": "low"},
        ),
        ('--chat-template-kwargs {"a":1} --reasoning on', {"a": 1, "enable_thinking": True}),
    ):
        config = engine(*line.split())
        assert json.loads(config.default_chat_template_kwargs or "") == wanted
    assert engine("--reasoning-budget", "-1").default_chat_template_kwargs is None
    with pytest.raises(ConfigError, match="thinking_token_budget"):
        engine("--reasoning-budget", "100")
    file = tmp_path / "c.yaml"
    file.write_text("temp: 0.5\noverride-generation-config:\n  top_k: 3\nreasoning: 'off'\n")
    config = engine("--config", str(file))
    assert json.loads(config.override_generation_config or "") == {"top_k": 3, "temperature": 0.5}
    assert json.loads(config.default_chat_template_kwargs or "") == {"enable_thinking": False}


def test_keys_of_a_file_and_tasks(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\none\n\n two \n")
    assert configs("--api-key-file", str(file))[1].api_key == ("one", "two")
    file.write_text("\n")
    for text, error in ((str(file), "holds no key"), (str(tmp_path / "none"), "cannot be read")):
        with pytest.raises(ConfigError, match=error):
            configs("--api-key-file", text)
    assert engine("--embeddings").task == engine("--convert", "embed").task == "embed"
    assert engine("--convert", "none", "--task", "score").task == "score"
    with pytest.raises(ConfigError, match="--runner pooling is refused: say --task"):
        engine("--runner", "pooling")
    assert configs("--cors-origins", "a,b")[1].allowed_origins == ("a", "b")


def test_commas_part_names_of_a_model() -> None:
    assert served_names(["a, b", "c,", "a"]) == ("a", "b", "c")
    assert engine("--alias", "a,b").served_model_name == "a"
