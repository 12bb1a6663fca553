"""Whisper through the whole engine, against transformers' greedy answers."""

from __future__ import annotations

import io
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import WhisperFeatureExtractor
from vllmx_core.errors import ConfigError, InvalidRequestError
from vllmx_engine.audio.decode import AudioLimits, Resampler, decode
from vllmx_engine.audio.features import LogMel
from vllmx_engine.audio.slices import finished
from vllmx_engine.client.request import RequestOptions
from vllmx_engine.core.speech_rules import SpeechRow
from vllmx_engine.llm import LLM
from vllmx_engine.speech.offline import answers as answered
from vllmx_engine.speech.transcriber import SpeechTask, Transcriber, Window
from vllmx_engine.wire.grammars import SpeechRules

from .whisper_models import IDS, LETTERS, STAMP, make, save, sound

NOBODY = RequestOptions()


@pytest.fixture(scope="module")
def oracle() -> Any:
    return make()


@pytest.fixture(scope="module")
def folder(oracle: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(oracle, tmp_path_factory.mktemp("whisper"))


@pytest.mark.parametrize(("mels", "size"), [(80, 480000), (80, 1), (128, 112003)])
def test_the_frames_are_transformers(mels: int, size: int) -> None:
    samples = sound(size / 16000)
    theirs = WhisperFeatureExtractor(feature_size=mels)
    want = theirs(samples, sampling_rate=16000, return_tensors="np")["input_features"][0].T
    frames = LogMel.of({"feature_size": mels}, "here")
    got = finished(frames.frames(frames.padded(samples)))
    assert got.shape == want.shape
    assert np.abs(got - want).max() < 1e-4


def expected(
    oracle: Any, samples: np.ndarray, *, stamps: bool, prompt: Sequence[int] = ()
) -> list[int]:
    """transformers' greedy ids behind the prompt."""
    mel = LogMel(oracle.config.num_mel_bins, 16000, 400, 160, 2)
    frames = finished(mel.frames(mel.padded(samples)))
    features = torch.from_numpy(frames.T[None].copy())
    with torch.no_grad():
        found = oracle.generate(
            features,
            language="en",
            task="transcribe",
            return_timestamps=stamps,
            prompt_ids=torch.tensor([IDS["startofprev"], *prompt]) if prompt else None,
            do_sample=False,
            num_beams=1,
            return_dict_in_generate=True,
            force_unique_generate_call=True,
        )
    ids = found["sequences"][0].tolist()
    start = ids.index(IDS["transcribe"]) + (1 if stamps else 2)
    return ids[start:]


def answers(llm: LLM, samples: list[np.ndarray], task: SpeechTask) -> list[list[int]]:
    """The engine's ids for windows that run together."""
    transcriber = Transcriber(llm._engine.builder)
    requests = [
        transcriber.request(finished(transcriber.heard(Window(0.0, each))), task, "en", NOBODY)
        for each in samples
    ]
    return [output.outputs[0].token_ids for output in answered(llm._engine, requests)]


SAMPLES = [sound(seconds, seed) for seed, seconds in enumerate((2, 0.31, 1.7, 0.003, 1.1))]
PROMPTS = ("", "abcdefghijklmnopqrstuvw")
CASES = [(stamps, prompt) for stamps in (False, True) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def wanted(oracle: Any) -> dict[tuple[bool, str], list[list[int]]]:
    """transformers' ids of each case."""
    ids = {letter: number for number, letter in enumerate(LETTERS)}
    return {
        (stamps, prompt): [
            expected(oracle, each, stamps=stamps, prompt=[ids["Ġ"], *map(ids.get, prompt)])
            if prompt
            else expected(oracle, each, stamps=stamps)
            for each in SAMPLES
        ]
        for stamps, prompt in CASES
    }


@pytest.mark.parametrize("backend", ["numpy", "cpu", "torch"])
def test_ids_are_transformers(
    wanted: dict[tuple[bool, str], list[list[int]]], folder: Path, backend: str
) -> None:
    """Several audios of odd lengths side by side, more than the store of features holds, with
    prompts in chunks and blocks of the prefix cache."""
    options = {"dtype": "float32", "max_num_batched_tokens": 16, "encoder_cache_memory": 1}
    with LLM(str(folder), backend=backend, block_size=16, **options) as llm:
        for stamps, prompt in CASES:
            task = SpeechTask("en", prompt=prompt, timestamps=stamps)
            got = answers(llm, SAMPLES, task)
            for mine, theirs in zip(got, wanted[stamps, prompt], strict=True):
                assert mine[: len(theirs)] == theirs, (stamps, prompt)
                assert set(mine[len(theirs) :]) <= {IDS["endoftext"]}
            assert not stamps or all(each[0] >= STAMP for each in got)


def test_heads_of_odd_sizes_and_long_audio_on_the_cpu(tmp_path: Path) -> None:
    """Heads that fill no vector, keys beyond one partition, prompts of several tiles."""
    folder = save(make(d_model=40, max_source_positions=300), tmp_path)
    samples, task = [sound(6, 1), sound(5.5, 2)], SpeechTask("de", prompt="ab" * 12)
    found = []
    for backend in ("numpy", "cpu"):
        with LLM(str(folder), backend=backend, dtype="float32") as llm:
            found.append(answers(llm, samples, task))
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


def test_what_cannot_be_transcribed_is_refused(folder: Path) -> None:
    with LLM(str(folder), backend="numpy", dtype="float32") as llm:
        assert "/v1/audio/transcriptions" in (llm.generate("ab")[0].error or "")
        with pytest.raises(InvalidRequestError, match="knows de, en"):
            llm.transcribe(sound(1), language="fr")
        with pytest.raises(InvalidRequestError, match="finite"):
            llm.transcribe(np.array([np.nan], np.float32))
    with pytest.raises(ConfigError, match="log-mel"):
        LogMel.of({"hop_length": 0}, "here")


def test_rules_let_timestamps_come_in_pairs() -> None:
    """Each fact of Whisper's rules: the first token, pairs, their order, and the end."""
    row = SpeechRow(SpeechRules((1,), (2,), 5, 8, 3), 20)

    def allowed() -> list[int]:
        mask = np.zeros(1, np.uint32)
        row.fill_mask(mask)
        return [one for one in range(20) if mask[0] >> one & 1]

    text = [0, 2, 3, 4]
    assert allowed() == [8, 9, 10, 11]
    row.accept(9)
    assert allowed() == [*text, 5, 6, 7]
    row.accept(3)
    assert allowed() == [*text, 5, 6, 7, *range(10, 20)]
    row.accept(12)
    assert allowed() == [5, 6, 7, *range(12, 20)]
    row.accept(12)
    assert allowed() == [*text, 5, 6, 7]
    plain = SpeechRow(SpeechRules((1,), (2,), 5), 20)
    mask = np.zeros(1, np.uint32)
    plain.fill_mask(mask)
    assert not mask[0] >> 2 & 1
    plain.accept(3)
    plain.fill_mask(mask)
    assert mask[0] == (1 << 20) - 1 - (1 << 1)


def test_a_small_file_of_much_silence_takes_little_memory() -> None:
    library = pytest.importorskip("soundfile")
    file, silence = io.BytesIO(), np.zeros((1_920_000, 8), np.int16)
    library.write(file, silence, 96_000, format="FLAC")  # 61 MB as floats
    assert len(file.getvalue()) < 50_000
    tracemalloc.start()
    samples = finished(decode(file.getvalue(), 16_000, AudioLimits(1 << 20, 30), "file"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert samples.size == 20 * 16_000
    assert peak < 40e6
    with pytest.raises(InvalidRequestError, match="more than 19 s"):
        finished(decode(file.getvalue(), 16_000, AudioLimits(1 << 20, 19), "file"))


@pytest.mark.parametrize(("old", "new"), [(44_100, 16_000), (8_000, 16_000), (22_050, 16_000)])
def test_pieces_are_resampled_as_a_whole(old: int, new: int) -> None:
    noise = np.random.default_rng().standard_normal(3001).astype(np.float32)
    whole, cut = Resampler(old, new), Resampler(old, new)
    expected = np.concatenate([whole.feed(noise), whole.rest()])
    assert expected.size == -(-noise.size * new // old)
    parts = [cut.feed(part) for part in np.split(noise, [1, 2, 700, 700, 2999])]
    np.testing.assert_array_equal(np.concatenate([*parts, cut.rest()]), expected)


def test_weights_of_an_odd_rate_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file of silence may have an hour at any rate. 24001 and 16000 have no factor in
    common, so each second has all 16000 phases."""
    sizes, sinc = list[int](), np.sinc
    monkeypatch.setattr(np, "sinc", lambda x: (sizes.append(x.size), sinc(x))[1])
    resampler = Resampler(24_001, 16_000)
    for _ in range(4):
        resampler.feed(np.zeros(24_001, np.float32))
    assert sum(sizes) == 16_000 * 2 * 25


def test_stages_are_refused_and_no_images_is_no_limit(folder: Path) -> None:
    common: dict[str, Any] = {"backend": "numpy", "dtype": "float32"}
    with pytest.raises(ConfigError, match="use --tensor-parallel-size"):
        LLM(str(folder), pipeline_parallel_size=2, **common)
    with LLM(str(folder), limit_images=0, **common) as llm:
        assert llm.transcribe(sound(0.5)).language in ("en", "de")
