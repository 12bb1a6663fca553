"""Videos in chats: their frames, times and tokens, answers against transformers', and over HTTP."""

from __future__ import annotations

import base64
import io
import json
import re
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from vllmx_core.errors import ConfigError, InvalidRequestError
from vllmx_core.sampling import SamplingParams
from vllmx_engine.audio.slices import finished
from vllmx_engine.images.kinds import find_video_processor
from vllmx_engine.images.limits import ImageLimits
from vllmx_engine.images.video import VideoProcessor
from vllmx_engine.llm import LLM
from vllmx_engine.wire.images import normalised

from tests.waiting import PATIENCE_S

from ...null.images.pictures import data_url, picture, stored  # noqa: TID252 - no package to name
from ..image_models import END, FAMILIES, PAD, PROCESSOR, START, VIDEO, save  # noqa: TID252
from .conftest import running_server

av = pytest.importorskip("av")
CONFIG = {
    **{key: PROCESSOR[key] for key in ("patch_size", "merge_size", "temporal_patch_size")},
    "video_processor_type": "Qwen3VLVideoProcessor",
    "size": {"shortest_edge": 64, "longest_edge": 4096},
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}
NEVER = dict.fromkeys((PAD, VIDEO, 94, 95), -100.0)
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logit_bias=NEVER)
WORD = {"type": "text", "text": "w5 w6 "}


def video(count: int, seed: int, height: int = 16, width: int = 24) -> tuple[bytes, np.ndarray]:
    """A file without loss at 4 frames a second, and its frames."""
    frames = np.random.default_rng(seed).integers(0, 256, (count, height, width, 3), np.uint8)
    data = io.BytesIO()
    with av.open(data, "w", format="matroska") as container:
        stream = container.add_stream("ffv1", rate=4)
        stream.width, stream.height, stream.pix_fmt = width, height, "bgr0"
        for frame in [*frames, None]:
            given = None if frame is None else av.VideoFrame.from_ndarray(frame, "rgb24")
            for packet in stream.encode(given):
                container.mux(packet)
    return data.getvalue(), frames


def part(data: bytes) -> dict[str, Any]:
    url = f"data:video/x-matroska;base64,{base64.b64encode(data).decode()}"
    return {"type": "video_url", "video_url": {"url": url}}


def patched(frames: np.ndarray) -> np.ndarray:
    """Patches of pairs of frames, in the order of transformers' processor."""
    pixels = (frames.astype(np.float32) / 255 - 0.5) / 0.5
    tall, wide = frames.shape[1] // 8, frames.shape[2] // 8
    cut = pixels.transpose(0, 3, 1, 2).reshape(-1, 2, 3, tall, 2, 4, wide, 2, 4)
    return cut.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, 3 * 2 * 4 * 4)


def folder_of(family: str, folder: Path, model: Any) -> Path:
    save(model, folder)
    (folder / "video_preprocessor_config.json").write_text(json.dumps(CONFIG))
    return folder


def ids_of(pairs: int, tokens: int) -> list[int]:
    """Two words for the time of each pair, and its tokens."""
    return [0, 0, START, *[VIDEO] * tokens, END] * pairs


@torch.inference_mode()
def logits(model: Any, ids: list[int], given: dict[str, Any]) -> np.ndarray:
    tokens = torch.tensor([ids])
    types = (tokens == PAD).int() + 2 * (tokens == VIDEO).int()
    model.model.rope_deltas = None
    found = model(input_ids=tokens, mm_token_type_ids=types, **given)
    return np.asarray(found.logits[0])


@pytest.mark.parametrize("family", ["qwen3_vl"])
def test_answers_are_transformers(family: str, tmp_path: Path) -> None:
    """A video, and another behind an image, in chunks that cut them; then from the prefix cache."""
    oracle = FAMILIES[family].make()
    folder = folder_of(family, tmp_path, oracle)
    (first, frames), (second, more) = video(13, 1), video(5, 2)
    image = stored(picture(16, 8, seed=3))
    pixels = np.asarray(picture(16, 8, seed=3))
    taken = [patched(frames[[0, 2, 5, 7, 10, 12]]), patched(more[[0, 1, 3, 4]])]
    grids = [[3, 4, 6], [2, 4, 6]]
    still = {
        "pixel_values": torch.from_numpy(patched(np.stack([pixels, pixels]))),
        "image_grid_thw": torch.tensor([[1, 4, 2]]),
    }
    picture_part = {"type": "image_url", "image_url": {"url": data_url(image)}}
    talks: list[Any] = [
        ([WORD, part(first)], [5, 6, *ids_of(3, 6), 11], [0], {}),
        (
            [part(second), picture_part, WORD, part(first)],
            [*ids_of(2, 6), START, PAD, PAD, END, 5, 6, *ids_of(3, 6), 11],
            [1, 0],
            still,
        ),
    ]
    messages = [[{"role": "user", "content": content}] for content, *_ in talks]
    with LLM(
        str(folder), backend="numpy", dtype="float32", block_size=16, max_num_batched_tokens=20
    ) as llm:
        for _ in range(2):
            outputs = llm.chat(messages, GREEDY, use_tqdm=False)
            for (_, ids, numbers, also), output in zip(talks, outputs, strict=True):
                assert output.prompt_token_ids == ids
                answer = list(output.outputs[0].token_ids)
                given = {
                    "pixel_values_videos": torch.from_numpy(
                        np.concatenate([taken[one] for one in numbers])
                    ),
                    "video_grid_thw": torch.tensor([grids[one] for one in numbers]),
                    **also,
                }
                found = logits(oracle, [*ids, *answer[:-1]], given)[len(ids) - 1 :]
                found[:, list(NEVER)] = -np.inf
                short = found.max(axis=1) - found[np.arange(len(answer)), answer]
                assert short.max() < 2e-4 * np.ptp(found[np.isfinite(found)]), short


def test_frames_and_times() -> None:
    processor, limits = VideoProcessor(CONFIG), ImageLimits(kind="video")
    data, frames = video(13, 4)
    fit = finished(processor.measure(data, limits, "video"))
    assert processor.written(fit) == "".join(
        f"<{second} seconds><|vision_start|>{'<|video_pad|>' * 6}<|vision_end|>"
        for second in ("0.2", "1.5", "2.8")
    )
    pairs = finished(processor.inputs(fit, limits, "video"))
    rows = np.concatenate([np.frombuffer(one.patches, np.uint8).reshape(24, -1) for one in pairs])
    levels = np.frombuffer(pairs[0].levels, np.float32).reshape(3, 256)
    np.testing.assert_array_equal(normalised(rows, levels), patched(frames[[0, 2, 5, 7, 10, 12]]))
    one = finished(processor.measure(video(1, 5)[0], limits, "video"))
    assert (one.numbers, one.runs) == ([0, 0], [6])


def recoded(codec: str, form: str, shift: int = 0, large: int = 0) -> bytes:
    """13 frames of 24 x 16 pixels, from `shift` on by an edit list; `large` of 48 x 32 behind the
    first."""
    found = io.BytesIO()
    with av.open(found, "w", format=form) as container:
        stream = container.add_stream(codec, rate=4)
        encoders = [stream, *(av.CodecContext.create(codec, "w") for _ in range(large))]
        for number, encoder in enumerate(encoders):
            encoder.width, encoder.height = (48, 32) if number else (24, 16)
            encoder.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
            encoder.time_base = Fraction(1, 4)
        for number, pixels in enumerate([*video(13, 4)[1], None]):
            encoder = encoders[number] if 0 < number <= large else stream
            frame = None
            if pixels is not None:
                frame = av.VideoFrame.from_ndarray(pixels, "rgb24")
                frame = frame.reformat(encoder.width, encoder.height)
                frame.pts = number
            for packet in encoder.encode(frame):
                packet.stream = stream
                packet.pts, packet.dts = packet.pts - shift, packet.dts - shift
                container.mux(packet)
    return found.getvalue()


def test_a_trimmed_video() -> None:
    """Frames before the beginning are decoded for others, but are not part of the video."""
    processor, limits = VideoProcessor(CONFIG), ImageLimits(kind="video")
    with av.open(io.BytesIO(recoded("libx264", "mp4"))) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    fit = finished(processor.measure(recoded("libx264", "mp4", 4), limits, "video"))
    assert (len(frames), fit.numbers) == (13, [0, 3, 5, 8])
    # As in files with packets without a frame of their own: the last frame stands for them.
    fit = replace(fit, numbers=[*fit.numbers, 11, 12], seconds=[*fit.seconds, 3.0])
    pairs = finished(processor.inputs(fit, limits, "video"))
    rows = np.concatenate([np.frombuffer(one.patches, np.uint8).reshape(24, -1) for one in pairs])
    levels = np.frombuffer(pairs[0].levels, np.float32).reshape(3, 256)
    expected = patched(np.stack([frames[number] for number in (4, 7, 9, 12, 12, 12)]))
    np.testing.assert_array_equal(normalised(rows, levels), expected)


def test_frames_that_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are checked, also those that are not taken; measuring many takes turns."""
    processor, data = VideoProcessor(CONFIG), recoded("mjpeg", "matroska", large=1)
    limits = ImageLimits(kind="video", max_pixels=1500)
    fit = finished(processor.measure(data, limits, "video"))
    assert fit.numbers[:2] == [0, 2]
    with pytest.raises(InvalidRequestError, match="frames of more than 1500 pixels"):
        finished(processor.inputs(fit, limits, "video"))
    limits = ImageLimits(kind="video")
    assert len(finished(processor.inputs(fit, limits, "video"))) == 3
    monkeypatch.setattr("vllmx_engine.images.video._MOST_PIXELS", 13 * 24 * 16)
    fit = finished(processor.measure(data, limits, "video"))
    with pytest.raises(InvalidRequestError, match=r"of 11 or more frames .* send fewer frames"):
        finished(processor.inputs(fit, limits, "video"))
    monkeypatch.undo()
    assert len(list(processor.measure(video(600, 6)[0], limits, "video"))) == 3


def test_sizes_are_transformers() -> None:
    module = pytest.importorskip("transformers.models.qwen3_vl.video_processing_qwen3_vl")
    processor = VideoProcessor({**CONFIG, "size": {"shortest_edge": 3000, "longest_edge": 9000}})
    for count in (2, 3, 5, 6, 9, 40):
        for height, width in ((5, 9), (16, 24), (31, 90), (200, 33), (640, 480)):
            expected = module.smart_resize(count, height, width, 2, 8, 3000, 9000)
            assert processor._sides(count, height, width, "video") == expected


def test_opening_decodes_no_large_frame_and_few_streams() -> None:
    """FFmpeg decodes a frame of each stream to learn its format."""
    processor = VideoProcessor(CONFIG)
    for size, count in ((400, 1), (16, 40)):
        file = io.BytesIO()
        with av.open(file, "w", format="avi") as container:
            streams = [container.add_stream("png", rate=1) for _ in range(count)]
            frame = av.VideoFrame.from_ndarray(np.zeros((size, size), np.uint8), format="gray")
            for stream in streams:
                stream.width, stream.height, stream.pix_fmt = size, size, "gray"
            for stream in streams:
                container.mux(stream.encode(frame) + stream.encode())
        with pytest.raises(InvalidRequestError):
            list(processor.measure(file.getvalue(), ImageLimits(max_pixels=100_000), "v"))


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of("qwen3_vl", tmp_path, FAMILIES["qwen3_vl"].make())
    data, _ = video(13, 1)
    with LLM(
        str(folder), backend="numpy", dtype="float32", max_video_seconds=3, max_video_bytes=30_000,
        max_image_pixels=1000, max_model_len=100,
    ) as llm:  # fmt: skip

        def error(*content: Any) -> str:
            with pytest.raises(InvalidRequestError) as caught:
                llm.chat([{"role": "user", "content": list(content)}], GREEDY, use_tqdm=False)
            return caught.value.message

        assert "a video of more than 3 s: cut it, or raise --max-video-seconds" in error(part(data))
        assert "is a video of more than 30000 bytes" in error(part(bytes(31_000)))
        large, _ = video(2, 1, 32, 40)
        assert "frames of more than 1000 pixels" in error(part(large))
        long, _ = video(2, 1, 2, 500)
        assert "is 250 times the other, it may be at most 200" in error(part(long))
        for broken in (b"", b"RIFF" * 9, data[:900]):
            assert "is no video that can be read here: send MP4" in error(part(broken))
        assert "without a URL" in error({"type": "video_url"})
        assert "--allowed-media-domains" in error({"type": "video", "video": "https://a.org/b.mp4"})
        short, _ = video(9, 1)
        message = "a video of 12 tokens, with which the request's videos take 108"
        assert message in error(*[part(short)] * 9)
        monkeypatch.setattr("vllmx_engine.images.video._MOST_PIXELS", 3000)
        message = "of 8 or more frames of 24 x 16 pixels, at most 3000 pixels are decoded: send"
        assert message in error(part(short))
        monkeypatch.setitem(sys.modules, "av", None)
        assert "pip install 'vllmx[video]'" in error(part(short))
    (folder / "video_preprocessor_config.json").write_text(json.dumps({**CONFIG, "fps": -1}))
    with pytest.raises(ConfigError):
        find_video_processor(folder)
    (folder / "video_preprocessor_config.json").unlink()
    with LLM(str(folder), backend="numpy", dtype="float32") as llm:
        assert "reads text and images here" in error(part(data))


def test_over_http(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The answer is that in Python, and the example of docs/images.md runs as it stands."""
    folder = folder_of("qwen3_vl", tmp_path, FAMILIES["qwen3_vl"].make())
    data, _ = video(13, 1)
    messages: Any = [{"role": "user", "content": [WORD, part(data)]}]
    with LLM(str(folder), backend="numpy", dtype="float32") as llm:
        params = SamplingParams(temperature=0, max_tokens=8)
        expected = llm.chat(messages, params, use_tqdm=False)[0].outputs[0].text
    with running_server(
        "--model", str(folder), "--served-model-name", "seeing", "--backend", "numpy",
        "--dtype", "float32",
    ) as running:  # fmt: skip
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", timeout=PATIENCE_S)
        found = client.chat.completions.create(
            model="seeing", messages=messages, temperature=0, max_tokens=8
        )
        assert found.choices[0].message.content == expected
        (card,) = running.get("/v1/models").json()["data"]
        assert card["input_modalities"] == ["text", "image", "video"]
        (tmp_path / "cat.mp4").write_bytes(data)
        monkeypatch.chdir(tmp_path)
        page = (Path(__file__).parents[3] / "docs" / "images.md").read_text(encoding="utf-8")
        (example,) = re.findall(r"```python\n([^`]*video_url.*?)```", page, re.DOTALL)
        example = example.replace("Qwen/Qwen3-VL-4B-Instruct", "seeing")
        example = example.replace("http://localhost:8000", running.url)
        exec(compile(example, "an example of docs", "exec"), {"__name__": "__main__"})
        assert capsys.readouterr().out.strip()
