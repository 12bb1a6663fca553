"""Audio in chats through the whole engine, against transformers' greedy answers."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from vllmx_core.backend import LoadOptions
from vllmx_core.errors import ConfigError, ContextLengthError, InvalidRequestError
from vllmx_core.image_plan import tower_plan
from vllmx_core.plugins.checkpoint import open_checkpoint
from vllmx_core.plugins.registry import load_registry
from vllmx_core.plugins.specs import BackendSpec
from vllmx_core.sampling import SamplingParams
from vllmx_engine.audio.decode import AudioLimits, decode
from vllmx_engine.audio.processor import find_audio_processor
from vllmx_engine.audio.slices import finished
from vllmx_engine.images.limits import ImageLimits
from vllmx_engine.llm import LLM
from vllmx_engine.speech.chat_transcriber import transcriber_for
from vllmx_engine.speech.transcriber import Window
from vllmx_engine.wire.outputs import CompletionOutput, RequestOutput

from .audio_models import ASR, AUDIO, BEGIN, END, FAMILIES, TRANSCRIPTION, Family, save
from .whisper_models import sound, wav

REGISTRY = load_registry()
ANSWER = 6
NEVER = {AUDIO: -100.0}
GREEDY = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, logit_bias=NEVER)
WORD = {"type": "text", "text": "w5 w6"}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def oracle(family: Family) -> Any:
    return family.make()


@pytest.fixture(scope="module")
def folder(family: Family, oracle: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(family, oracle, tmp_path_factory.mktemp("hearing"))


def url(file: bytes) -> str:
    return f"data:audio/wav;base64,{base64.b64encode(file).decode()}"


def parts(file: bytes) -> list[dict[str, Any]]:
    """The ways to send an audio."""
    data = base64.b64encode(file).decode()
    return [
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": url(file)}},
        {"type": "audio_url", "audio_url": url(file)},
        {"type": "audio", "audio": url(file)},
    ]


def asked(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(content)}]


def check(
    family: Family, oracle: Any, output: Any, audio: list[np.ndarray], ids: list[int]
) -> None:
    """Each id of an answer is what transformers finds likeliest behind those before it."""
    assert output.prompt_token_ids == ids
    answer = list(output.outputs[0].token_ids)
    assert len(answer) == ANSWER
    found = family.logits(oracle, [*ids, *answer[:-1]], audio)[len(ids) - 1 :]
    found[:, AUDIO] = -np.inf
    assert found.argmax(axis=1).tolist() == answer


@pytest.mark.parametrize("backend", ["numpy", "cpu", "torch", "metal"])
def test_answers_are_transformers(family: Family, oracle: Any, folder: Path, backend: str) -> None:
    """Audio of odd lengths, several in a prompt, in chunks that cut it, with little room for
    features. The second time the prompt is in the prefix cache."""
    last = 2 if family.longest == 2 else 5.3  # three windows
    files = [wav(sound(seconds, seed)) for seed, seconds in enumerate((1.7, 0.31, last))]
    heard = [finished(decode(file, 16000, AudioLimits(1 << 20, 60), "file")) for file in files]
    with LLM(
        str(folder), backend=backend, dtype="float32", block_size=16, max_num_batched_tokens=20
    ) as llm:
        talks = []
        for way, (file, samples) in enumerate(zip(files, heard, strict=True)):
            ids = family.ids(5, 6, samples, 11)
            talks.append((asked(WORD, parts(file)[way]), [samples], ids))
        ids = family.ids(heard[0], 5, 6, heard[1], 11)
        both = asked(parts(files[0])[3], WORD, parts(files[1])[0])
        talks.append((both, heard[:2], ids))
        for _ in range(2):
            outputs = llm.chat([talk for talk, _, _ in talks], GREEDY, use_tqdm=False)
            for (_, audio, ids), output in zip(talks, outputs, strict=True):
                check(family, oracle, output, audio, ids)
        assert [output.num_cached_tokens for output in outputs] == [
            (len(ids) - 1) // 16 * 16 for _, _, ids in talks
        ]


def test_features_are_transformers(family: Family, oracle: Any, folder: Path) -> None:
    """What the tower leaves in the store, audio by audio."""
    samples = [sound(1.9 if family.longest == 2 or family.hears_silence else 5.1, 3), sound(0.5, 4)]
    processor = find_audio_processor(folder)
    checkpoint = open_checkpoint(REGISTRY, folder)
    model = REGISTRY.model_for(checkpoint.config).load()(checkpoint.config)
    options = LoadOptions(dtype="f32", kv_cache_dtype="f32", max_model_len=128, num_kv_blocks=16)
    spec = REGISTRY.find(BackendSpec, "numpy")
    assert spec is not None
    loaded, start = spec.load()().load(model, checkpoint.weights, options), 0
    try:
        for one, theirs in zip(samples, family.features(oracle, samples), strict=True):
            fit = finished(processor.measure(wav(one, width=4), ImageLimits(kind="audio"), "file"))
            given = finished(processor.inputs(0, fit))
            rows = [
                np.frombuffer(one.patches, np.float32).reshape(one.grid[2], -1) for one in given
            ]
            keep = np.arange(start, start := start + fit.num_tokens, dtype=np.int32)
            places = [model.encoder.places(one.grid) for one in given]
            loaded.encode(tower_plan(model.encoder, rows, places, keep, 0))
            found = loaded._features[0][keep]
            assert found.shape == theirs.shape
            assert np.abs(found - theirs).max() < 2e-4 * np.abs(theirs).max()
    finally:
        loaded.close()


def test_what_the_model_does_not_hear_is_refused(family: Family, folder: Path) -> None:
    with LLM(str(folder), backend="numpy", dtype="float32", max_audio_seconds=4) as llm:

        def error(*content: Any) -> str:
            with pytest.raises(InvalidRequestError) as caught:
                llm.chat(asked(*content), GREEDY, use_tqdm=False)
            return caught.value.message

        assert "is an image, but" in error({"type": "image_url", "image_url": "x"})
        assert "without its data" in error({"type": "input_audio"})
        most = 2 if family.longest == 2 else 4
        assert f"more than {most} s" in error(parts(wav(sound(4.5)))[0])
        long = parts(wav(sound(2.5)))[0]
        if family.longest != 2:
            assert llm.chat(asked(long), GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        else:
            assert "of more than 2 s: cut it, the model hears no more" in error(long)
        mark = {"type": "text", "text": family.marks[0]}
        assert "stands for images or audio" in error(mark, parts(wav(sound(1)))[0])
    with LLM(str(folder), backend="numpy", dtype="float32", limit_images=0) as llm:
        assert "reads text alone" in error(parts(wav(sound(0.1)))[0])


def test_other_names_are_read(family: Family, oracle: Any, folder: Path, tmp_path: Path) -> None:
    """Checkpoints of other tools have the names of transformers' modules. Models that also speak
    are published with a prefix, and Qwen3-ASR with other names than transformers saves."""
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    if family.is_thinker:
        family.published(other)
    else:
        (other / "model.safetensors").unlink()
        tensors = {name: tensor.numpy() for name, tensor in oracle.state_dict().items()}
        assert "model.audio_tower.conv1.weight" in tensors
        save_file(tensors, other / "model.safetensors")
    talk, answers = asked(WORD, parts(wav(sound(1)))[0]), []
    for one in (folder, other):
        with LLM(str(one), backend="numpy", dtype="float32") as llm:
            answers.append(llm.chat(talk, GREEDY, use_tqdm=False)[0].outputs[0].token_ids)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("language", [None, "de"])
def test_transcriptions_are_in_the_form_of_mistral(
    family: Family, folder: Path, oracle: Any, language: Any
) -> None:
    """The ids before the text are those of mistral-common's `encode_transcription`."""
    file = wav(sound(3.1, 7))
    with LLM(str(folder), backend="numpy", dtype="float32", max_model_len=68) as llm:
        if not family.hears_silence:
            if family.processor != "Qwen3ASRProcessor":
                with pytest.raises(InvalidRequestError, match="writes down no audio"):
                    llm.transcribe(file)
            return
        found = llm.transcribe(file, language=language)
        for options, message in (
            ({"translate": True}, "translates nothing"),
            ({"timestamps": True}, "gives no times"),
            ({"prompt": "x"}, "takes no prompt"),
            ({"language": "German"}, "give a code"),
        ):
            with pytest.raises(InvalidRequestError, match=message):
                llm.transcribe(file, **options)
        with pytest.raises(ContextLengthError, match="file is an audio of 75 tokens"):
            llm.transcribe(sound(5.9))
    ids = [TRANSCRIPTION["<s>"], TRANSCRIPTION["[INST]"], BEGIN, *[AUDIO] * 50, END]
    ids += [] if language is None else [TRANSCRIPTION["lang:de"]]
    ids.append(TRANSCRIPTION["[TRANSCRIBE]"])
    heard, start = [finished(decode(file, 16000, AudioLimits(1 << 20, 60), "file"))], len(ids)
    while len(ids) < 68:
        ids.append(int(family.logits(oracle, ids, heard)[-1].argmax()))
    specials = (AUDIO, BEGIN, END, *TRANSCRIPTION.values())
    assert found.text == " ".join(f"w{one}" for one in ids[start:] if one not in specials)
    assert found.duration == pytest.approx(3.1)


@pytest.mark.parametrize("language", [None, "de"])
def test_transcriptions_of_qwen3_asr(tmp_path: Path, language: Any) -> None:
    """A chat of an audio whose answer begins with the language. The tiny model names none."""
    family, file = FAMILIES["qwen3_asr"], wav(sound(3.1, 7))
    oracle = family.make()
    folder = save(family, oracle, tmp_path)
    with LLM(str(folder), backend="numpy", dtype="float32", max_model_len=68) as llm:
        found = llm.transcribe(file, language=language, prompt="w9 <asr_text>")
        for options, message in (
            ({"translate": True}, "translates nothing"),
            ({"timestamps": True}, "gives no times"),
            ({"language": "German"}, "the model knows ar, cs"),
        ):
            with pytest.raises(InvalidRequestError, match=message):
                llm.transcribe(file, **options)
        transcriber = transcriber_for(llm._engine.builder)
        choice = CompletionOutput(index=0, text="", token_ids=[86, 87, 93])
        heard = RequestOutput(
            request_id="", prompt=None, prompt_token_ids=[], outputs=[choice], finished=True
        )
        assert transcriber.language_of(heard) == "de"
        samples = sound(5.9)
        work = transcriber.heard(Window(0.0, samples))  # begins on the event loop: does nothing yet
        with pytest.raises(ContextLengthError, match="file is an audio of 77 tokens"):
            finished(work)
        assert find_audio_processor(folder).fit(samples, "file").samples is samples
    assert (found.language, found.duration) == (language or "None", pytest.approx(3.1))
    start, end, text = (ASR[one] for one in ("<|im_start|>", "<|im_end|>", "<asr_text>"))
    ids = [start, 0, 9, 0, end, start, 0, BEGIN, *[AUDIO] * 41, END, end, start, 0]
    ids += [86, 87 if language else 0, text]
    samples, begin = [finished(decode(file, 16000, AudioLimits(1 << 20, 60), "file"))], len(ids)
    while len(ids) < 68:
        ids.append(int(family.logits(oracle, ids, samples)[-1].argmax()))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert found.text == tokenizer.decode(ids[begin:])


def test_files_of_processors(family: Family, folder: Path, tmp_path: Path) -> None:
    """The older file and the one that transformers 5 writes."""
    found = find_audio_processor(folder)
    frames = json.loads((folder / "preprocessor_config.json").read_text())
    whole = {"processor_class": frames.pop("processor_class"), "feature_extractor": frames}
    (tmp_path / "processor_config.json").write_text(json.dumps(whole))
    shutil.copy(folder / "config.json", tmp_path)
    assert find_audio_processor(tmp_path) == found
    for wrong in ({**whole, "processor_class": "X"}, {**whole, "feature_extractor": {"n_fft": 0}}):
        (tmp_path / "processor_config.json").write_text(json.dumps(wrong))
        with pytest.raises(ConfigError):
            find_audio_processor(tmp_path)
