"""Our preprocessing against transformers' processors on Pillow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from vllmx_core.errors import ConfigError, InvalidRequestError
from vllmx_engine.images.kinds import find_processor
from vllmx_engine.images.processor import ImageProcessor
from vllmx_engine.wire.images import PreparedImage, normalised

QWEN3 = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": 16,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "size": {"shortest_edge": 65536, "longest_edge": 262144},
}
QWEN2 = {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": 60000}
GEMMA = {
    "image_processor_type": "Gemma3ImageProcessor",
    "size": {"height": 896, "width": 896},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "resample": 2,
    "rescale_factor": 0.00392156862745098,
}


def picture(width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def processor(folder: Path, config: dict[str, Any]) -> ImageProcessor:
    (folder / "preprocessor_config.json").write_text(json.dumps(config))
    found = find_processor(folder)
    assert found is not None
    return found


def prepared(processor: ImageProcessor, image: Image.Image) -> PreparedImage:
    fit = processor.fit(image.height, image.width, "here")
    (found,) = processor.prepare(np.asarray(image), fit)
    assert (found.grid, found.num_tokens) == (fit.grid, fit.num_tokens)
    assert found.patches.nbytes == fit.num_bytes
    return found


SIZES = [(100, 80), (28, 28), (333, 1000), (1, 150), (640, 17)]


@pytest.mark.parametrize("config", [QWEN2, QWEN3])
def test_qwen(tmp_path: Path, config: dict[str, Any]) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil,
    )

    ours = processor(tmp_path, config)
    theirs = Qwen2VLImageProcessorPil.from_dict(config)
    for size in SIZES:
        image = picture(*size)
        wanted = theirs(image, return_tensors="np")
        found = prepared(ours, image)
        assert found.grid == tuple(wanted["image_grid_thw"][0])
        assert found.num_tokens * 4 == found.patches.shape[0] == np.prod(found.grid)
        assert found.patches.dtype == np.uint8  # a quarter of what they become
        values = normalised(found.patches, found.levels)
        assert values.dtype == np.float32
        np.testing.assert_array_equal(values, wanted["pixel_values"])


def test_glm(tmp_path: Path) -> None:
    from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil

    config = {
        "image_processor_type": "Glm4vImageProcessorFast",
        "size": {"shortest_edge": 12544, "longest_edge": 200000},
    }
    ours, theirs = processor(tmp_path, config), Glm4vImageProcessorPil.from_dict(config)
    for size in [*SIZES, (1, 1), (27, 29)]:
        image = picture(*size)
        wanted = theirs(image, return_tensors="np")
        found = prepared(ours, image)
        assert found.grid == tuple(wanted["image_grid_thw"][0])
        values = normalised(found.patches, found.levels)
        np.testing.assert_array_equal(values, wanted["pixel_values"])


@pytest.mark.parametrize("merge", [1, 2])
def test_pixtral(tmp_path: Path, merge: int) -> None:
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    config: dict[str, Any] = {"patch_size": {"height": 14, "width": 14}}
    config |= {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 200}}
    (tmp_path / "config.json").write_text(json.dumps({"spatial_merge_size": merge}))
    ours, theirs = processor(tmp_path, config), PixtralImageProcessorPil.from_dict(config)
    unit = {"height": 14 * merge, "width": 14 * merge}
    for size in [*SIZES, (1, 1), (200, 1), (1, 199)]:
        image = picture(*size)
        wanted = theirs(image, return_tensors="np", patch_size=unit)
        fit = ours.fit(image.height, image.width, "here")
        (found,) = ours.prepare(np.asarray(image), fit)
        tall, wide = np.array(wanted["image_sizes"][0]) // (14 * merge)
        lines = ["[IMG]" * wide] * tall
        assert ours.written(fit) == "[IMG_BREAK]".join(lines) + "[IMG_END]"
        assert found.num_tokens == fit.num_tokens == tall * wide + tall - 1
        assert (found.grid, found.patches.nbytes) == (fit.grid, fit.num_bytes)
        pixels = wanted["pixel_values"][0]
        values = normalised(found.patches, found.levels)
        np.testing.assert_array_equal(values, cut(pixels, 14, merge))
    with pytest.raises(InvalidRequestError, match="more than 200 times"):
        ours.fit(10000, 1, "here")


@pytest.mark.parametrize("unit", [14, 28])
def test_lighton(tmp_path: Path, unit: int) -> None:
    """Files name the patch of the tower or that of a token."""
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    config = {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 200}}
    tower = {"spatial_merge_size": 2, "vision_config": {"patch_size": 14}}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "lighton_ocr", **tower}))
    ours = processor(tmp_path, {**config, "patch_size": unit})
    token = {**config, "patch_size": {"height": 28, "width": 28}}
    theirs = PixtralImageProcessorPil.from_dict(token)
    for size in SIZES:
        image = picture(*size)
        wanted = theirs(image, return_tensors="np")
        fit = ours.fit(image.height, image.width, "here")
        found = prepared(ours, image)
        tall, wide = np.array(wanted["image_sizes"][0]) // 28
        assert ours.written(fit) == "<|image_pad|>" * found.num_tokens
        assert found.num_tokens == tall * wide
        values = normalised(found.patches, found.levels)
        np.testing.assert_array_equal(values, cut(wanted["pixel_values"][0], 14, 2))


def test_gemma(tmp_path: Path) -> None:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    ours = processor(tmp_path, GEMMA)
    theirs = Gemma3ImageProcessorPil.from_dict(GEMMA)
    for size in SIZES[:2]:
        image = picture(*size)
        wanted = theirs(image, return_tensors="np")["pixel_values"][0]  # (3, 896, 896)
        found = prepared(ours, image)
        assert (found.grid, found.num_tokens) == ((1, 64, 64), 256)
        cut = wanted.reshape(3, 16, 4, 14, 16, 4, 14).transpose(1, 4, 2, 5, 0, 3, 6)
        cut = cut.reshape(4096, -1)  # 4 x 4 patches become a token
        np.testing.assert_array_equal(normalised(found.patches, found.levels), cut)


def test_gemma4(tmp_path: Path) -> None:
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    config = {"image_processor_type": "Gemma4ImageProcessor", "max_soft_tokens": 70}
    ours, theirs = processor(tmp_path, config), Gemma4ImageProcessorPil.from_dict(config)
    for size in [*SIZES[:3], (1000, 9), (9, 1000)]:
        image = picture(*size)
        wanted = theirs(image, return_tensors="np")
        found = prepared(ours, image)
        _, tall, wide = found.grid
        assert found.num_tokens == wanted["num_soft_tokens_per_image"][0]
        values = normalised(found.patches, found.levels)
        pixels = wanted["pixel_values"][0][: tall * wide].reshape(tall, wide, 16, 16, 3)
        pixels = pixels.reshape(tall // 3, 3, wide // 3, 3, 16, 16, 3)
        cut = 2 * (pixels.transpose(0, 2, 1, 3, 6, 4, 5).reshape(values.shape) - np.float32(0.5))
        np.testing.assert_array_equal(values, cut)


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("kind", ["Idefics3ImageProcessor", "SmolVLMImageProcessorFast"])
def test_pieces(tmp_path: Path, kind: str, splits: bool) -> None:
    """Pixels of all pieces, and the text that stands for them."""
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

    config = {
        "image_processor_type": kind,
        "size": {"longest_edge": 250},
        "max_image_size": {"longest_edge": 96},
        "do_image_splitting": splits,
    }
    tower = {"vision_config": {"patch_size": 16}, "scale_factor": 3}
    (tmp_path / "config.json").write_text(json.dumps(tower))
    ours, theirs = processor(tmp_path, config), Idefics3ImageProcessorPil.from_dict(config)
    for size in [*SIZES, (400, 399)]:
        image = picture(*size)
        wanted = theirs(image, return_tensors="np", return_row_col_info=True)
        fit = ours.fit(image.height, image.width, "here")
        found = ours.prepare(np.asarray(image), fit)
        rows, columns = wanted["rows"][0][0], wanted["cols"][0][0]
        assert (fit.pieces or (0, 0)) == (rows, columns)
        assert ours.written(fit) == get_image_prompt_string(
            rows, columns, 4, "<fake_token_around_image>", "<image>", "<global-img>"
        )
        assert len(found) == len(wanted["pixel_values"][0]) == len(fit.runs)
        assert sum(one.num_tokens for one in found) == fit.num_tokens
        assert sum(one.patches.nbytes for one in found) == fit.num_bytes
        for mine, pixels in zip(found, wanted["pixel_values"][0], strict=True):
            cut = pixels.reshape(3, 2, 3, 16, 2, 3, 16).transpose(1, 4, 2, 5, 0, 3, 6)
            np.testing.assert_array_equal(
                normalised(mine.patches, mine.levels), cut.reshape(36, -1)
            )


def cut(pixels: np.ndarray, patch: int, merge: int) -> np.ndarray:
    """(N, 3 * patch * patch) of (3, height, width): the patches of a token lie together."""
    tall, wide = (size // patch // merge for size in pixels.shape[1:])
    found = pixels.reshape(3, tall, merge, patch, wide, merge, patch)
    return found.transpose(1, 4, 2, 5, 0, 3, 6).reshape(-1, 3 * patch * patch)


TILED = {
    "image_processor_type": "GotOcr2ImageProcessorFast",
    "crop_to_patches": False,
    "size": {"height": 56, "width": 56},
}


@pytest.mark.parametrize("bounds", [(1, 12), (1, 1), (3, 7)])
def test_tiles(tmp_path: Path, bounds: tuple[int, int]) -> None:
    """InternVL's own processor cuts whatever the file says."""
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    config = TILED | {"min_patches": bounds[0], "max_patches": bounds[1]}
    tower = {"vision_config": {"patch_size": [14, 14]}, "downsample_ratio": 0.5}
    (tmp_path / "config.json").write_text(json.dumps(tower))
    ours = processor(tmp_path, config)
    theirs = GotOcr2ImageProcessorPil.from_dict(config)
    for size in [*SIZES, (1, 1), (10000, 1), (57, 57), (113, 57)]:
        image = picture(*size)
        wanted = theirs(image, return_tensors="np", crop_to_patches=True)
        fit = ours.fit(image.height, image.width, "here")
        found = ours.prepare(np.asarray(image), fit)
        assert len(found) == wanted["num_patches"][0] == len(fit.runs)
        assert sum(one.num_tokens for one in found) == fit.num_tokens == 4 * len(found)
        assert sum(one.patches.nbytes for one in found) == fit.num_bytes
        assert ours.written(fit) == f"<img>{'<IMG_CONTEXT>' * fit.num_tokens}</img>"
        for mine, pixels in zip(found, wanted["pixel_values"], strict=True):
            values = normalised(mine.patches, mine.levels)
            np.testing.assert_array_equal(values, cut(pixels, 14, 2))


CLIP = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 60},
    "crop_size": {"height": 56, "width": 56},
}
SIGLIP = {"image_processor_type": "SiglipImageProcessor", "size": {"height": 56, "width": 56}}


@pytest.mark.parametrize("config", [CLIP, SIGLIP])
def test_squares(tmp_path: Path, config: dict[str, Any]) -> None:
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    ours = processor(tmp_path, config)
    kind = CLIPImageProcessorPil if config is CLIP else SiglipImageProcessorPil
    for size in [*SIZES, (1, 1)]:
        image = picture(*size)
        wanted = kind.from_dict(config)(image, return_tensors="np")["pixel_values"][0]
        found = prepared(ours, image)
        assert (found.grid, found.num_tokens) == ((1, 4, 4), 16)
        np.testing.assert_array_equal(normalised(found.patches, found.levels), cut(wanted, 14, 1))


def test_digests_tell_pixels_and_sizes_apart(tmp_path: Path) -> None:
    ours = processor(tmp_path, QWEN2)
    digests = {prepared(ours, picture(*size)).digest for size in SIZES}
    assert len(digests) == len(SIZES)
    again = prepared(ours, picture(*SIZES[0])).digest
    assert again in digests


def test_what_cannot_be_seen(tmp_path: Path) -> None:
    for config in (QWEN2, CLIP):
        ours = processor(tmp_path, config)
        with pytest.raises(InvalidRequestError, match="at most 200 times"):
            ours.fit(201, 1, "here")


def test_configs(tmp_path: Path) -> None:
    assert find_processor(tmp_path) is None
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": QWEN3}))
    assert find_processor(tmp_path) is not None
    for wrong in (
        {"image_processor_type": "DonutImageProcessor"},
        {**QWEN2, "patch_size": "x"},
        {**QWEN2, "patch_size": -1},
        {**QWEN2, "image_mean": [0.5]},
        {**QWEN2, "image_std": [0, 1, 1]},
        {**QWEN2, "size": [1]},
        {**QWEN2, "min_pixels": 1e400},
        {**QWEN2, "resample": -1},
        {**CLIP, "resample": 6},
        {**QWEN2, "rescale_factor": float("nan")},
        {**GEMMA, "do_pan_and_scan": True},
        {**TILED, "max_patches": 1 << 12},
        {**TILED, "min_patches": 5, "max_patches": 4},
        {**TILED, "max_patches": -1},
        {**TILED, "max_patches": 0},
        {**TILED, "size": {"height": 57, "width": 57}},
        {**CLIP, "size": {"shortest_edge": 55}},
        {**CLIP, "crop_size": {"height": 56, "width": 28}},
        {**SIGLIP, "size": {"height": 1 << 20, "width": 1 << 20}},
    ):
        with pytest.raises(ConfigError, match=r"image processor .* --limit-images 0"):
            processor(tmp_path, wrong)
