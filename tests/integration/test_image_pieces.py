"""Images that a model sees in pieces, through the whole engine, against transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from vllmx_core.sampling import SamplingParams
from vllmx_engine.llm import LLM

from ..null.images.pictures import data_url, picture, stored  # noqa: TID252 - no package to name
from .image_models import FAMILIES, PAD

FAKE, WHOLE, PIECE = 91, 92, 60
"""Tokens around images, of the whole image, and of the first piece."""
ANSWER = 6
Given = Callable[[Mapping[str, Any], list[Any]], Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class Case:
    """A family, and what its processor makes of a picture of 40 x 25 and of one of 11 x 30."""

    processor: Mapping[str, Any]
    marks: Mapping[str, int]
    wide: list[int]
    tall: list[int]
    given: Given

    @property
    def mark(self) -> str:
        return next(iter(self.marks))


def _idefics_ids(rows: int, columns: int) -> list[int]:
    ids = [
        token
        for row in range(rows)
        for column in range(columns)
        for token in (FAKE, PIECE + 3 * row + column, *[PAD] * 9)
    ]
    return [*ids, FAKE, WHOLE, *[PAD] * 9, FAKE]


def _idefics(config: Mapping[str, Any], pictures: list[Any]) -> Mapping[str, torch.Tensor]:
    theirs = Idefics3ImageProcessorPil.from_dict(config)
    return {"pixel_values": theirs([pictures], return_tensors="pt")["pixel_values"]}


def _intern(config: Mapping[str, Any], pictures: list[Any]) -> Mapping[str, torch.Tensor]:
    theirs = GotOcr2ImageProcessorPil.from_dict(config)
    found = theirs(pictures, return_tensors="pt", crop_to_patches=True)
    return {"pixel_values": found["pixel_values"]}


def _clip(config: Mapping[str, Any], pictures: list[Any]) -> Mapping[str, torch.Tensor]:
    return CLIPImageProcessorPil.from_dict(config)(pictures, return_tensors="pt")


def _pixtral(config: Mapping[str, Any], pictures: list[Any]) -> Mapping[str, torch.Tensor]:
    """The processor of both gives that of images the size of a token for that of a patch."""
    theirs = PixtralImageProcessorPil.from_dict(config)
    return theirs(pictures, return_tensors="pt", patch_size={"height": 8, "width": 8})


CASES = {
    "idefics3": Case(
        {
            "image_processor_type": "Idefics3ImageProcessor",
            "size": {"longest_edge": 72},
            "max_image_size": {"longest_edge": 24},
        },
        {
            "<image>": PAD,
            "<fake_token_around_image>": FAKE,
            "<global-img>": WHOLE,
            **{f"<row_{n // 3 + 1}_col_{n % 3 + 1}>": PIECE + n for n in range(9)},
        },
        _idefics_ids(2, 3),
        _idefics_ids(3, 2),
        _idefics,
    ),
    "internvl": Case(
        {
            "image_processor_type": "GotOcr2ImageProcessorFast",
            "size": {"height": 24, "width": 24},
            "max_patches": 6,
        },
        {"<IMG_CONTEXT>": PAD, "<img>": FAKE, "</img>": WHOLE},
        [FAKE, *[PAD] * 9 * 7, WHOLE],
        [FAKE, *[PAD] * 9 * 4, WHOLE],
        _intern,
    ),
    "llava": Case(
        {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 16},
            "crop_size": {"height": 16, "width": 16},
        },
        {"<image>": PAD},
        [PAD] * 16,
        [PAD] * 16,
        _clip,
    ),
    "mistral3": Case(
        {"image_processor_type": "PixtralImageProcessorFast", "size": {"longest_edge": 24}},
        {"[IMG]": PAD, "[IMG_BREAK]": FAKE, "[IMG_END]": WHOLE},
        [*[PAD] * 3, FAKE, *[PAD] * 3, WHOLE],
        [PAD, FAKE, PAD, FAKE, PAD, WHOLE],
        _pixtral,
    ),
}
_TEMPLATE = (
    "{%% for message in messages %%}{%% for part in message.content %%}"
    "{%% if part.type == 'image' %%}%s{%% else %%} {{ part.text }} {%% endif %%}"
    "{%% endfor %%}{%% endfor %%} w11"
)


@pytest.fixture(scope="module", params=CASES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def oracle(name: str) -> Any:
    return FAMILIES[name].make()


@pytest.fixture(scope="module")
def folder(name: str, oracle: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    case, folder = CASES[name], tmp_path_factory.mktemp("pieces")
    oracle.save_pretrained(folder)
    words = {f"w{index}": index for index in range(97) if index not in case.marks.values()}
    tokenizer = Tokenizer(WordLevel({**words, **case.marks}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in case.marks])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = {"chat_template": _TEMPLATE % case.mark}
    (folder / "tokenizer_config.json").write_text(json.dumps(template))
    (folder / "preprocessor_config.json").write_text(json.dumps(case.processor))
    return folder


@torch.inference_mode()
def check(case: Case, oracle: Any, ids: list[int], pictures: list[Any], output: Any) -> None:
    """Each id of an answer is what transformers finds likeliest behind those before it."""
    assert output.prompt_token_ids == ids
    answer = list(output.outputs[0].token_ids)
    assert len(answer) == ANSWER
    given = case.given(case.processor, pictures)
    found = oracle(input_ids=torch.tensor([[*ids, *answer[:-1]]]), **given).logits[0]
    found = found[len(ids) - 1 :].numpy()
    found[:, PAD] = -np.inf
    assert found.argmax(axis=1).tolist() == answer


@pytest.mark.parametrize("backend", ["numpy", "cpu"])
def test_answers_are_transformers(name: str, oracle: Any, folder: Path, backend: str) -> None:
    case, wide, tall = CASES[name], picture(40, 25, seed=1), picture(11, 30, seed=2)
    params = SamplingParams(
        temperature=0, max_tokens=ANSWER, ignore_eos=True, logit_bias={PAD: -100.0}
    )
    parts = [{"type": "image_url", "image_url": data_url(stored(one))} for one in (wide, tall)]
    word = {"type": "text", "text": "w5 w6"}
    with LLM(
        str(folder),
        backend=backend,
        dtype="float32",
        block_size=16,
        max_num_seqs=4,
        max_num_batched_tokens=12,
    ) as llm:
        first, second = ([{"role": "user", "content": one}] for one in ([word, *parts], parts[:1]))
        for _ in range(2):
            outputs = llm.chat([first, second], params, use_tqdm=False)
            ids = [5, 6, *case.wide, *case.tall, 11]
            check(case, oracle, ids, [wide, tall], outputs[0])
            check(case, oracle, [*case.wide, 11], [wide], outputs[1])
        assert outputs[0].num_cached_tokens == (len(ids) - 1) // 16 * 16
