"""Images that a model sees in pieces, through the whole engine, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from vllmx_core.sampling import SamplingParams
from vllmx_engine.llm import LLM

from ..null.images.pictures import data_url, picture, stored  # noqa: TID252 - no package to name
from .image_models import FAMILIES, PAD

FAKE, WHOLE, PIECE = 91, 92, 60
"""Tokens around images, of the whole image, and of the first piece."""
PROCESSOR = {
    "image_processor_type": "Idefics3ImageProcessor",
    "size": {"longest_edge": 72},
    "max_image_size": {"longest_edge": 24},
}
TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}{% if part.type == 'image' %}"
    "<image>{% else %} {{ part.text }} {% endif %}{% endfor %}{% endfor %} w11"
)
ANSWER = 6


@pytest.fixture(scope="module")
def oracle() -> Any:
    return FAMILIES["idefics3"].make()


@pytest.fixture(scope="module")
def folder(oracle: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pieces")
    oracle.save_pretrained(folder)
    marks = {"<image>": PAD, "<fake_token_around_image>": FAKE, "<global-img>": WHOLE}
    for place in range(9):
        marks[f"<row_{place // 3 + 1}_col_{place % 3 + 1}>"] = PIECE + place
    words = {f"w{index}": index for index in range(97) if index not in marks.values()}
    tokenizer = Tokenizer(WordLevel({**words, **marks}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


def ids_of(rows: int, columns: int) -> list[int]:
    ids = [
        token
        for row in range(rows)
        for column in range(columns)
        for token in (FAKE, PIECE + 3 * row + column, *[PAD] * 9)
    ]
    return [*ids, FAKE, WHOLE, *[PAD] * 9, FAKE]


@torch.inference_mode()
def check(oracle: Any, ids: list[int], pictures: list[Any], output: Any) -> None:
    """Each id of an answer is what transformers finds likeliest behind those before it."""
    assert output.prompt_token_ids == ids
    answer = list(output.outputs[0].token_ids)
    assert len(answer) == ANSWER
    theirs = Idefics3ImageProcessorPil.from_dict(PROCESSOR)
    pixels = theirs([pictures], return_tensors="pt")["pixel_values"]
    found = oracle(input_ids=torch.tensor([[*ids, *answer[:-1]]]), pixel_values=pixels).logits[0]
    found = found[len(ids) - 1 :].numpy()
    found[:, PAD] = -np.inf
    assert found.argmax(axis=1).tolist() == answer


@pytest.mark.parametrize("backend", ["numpy", "cpu"])
def test_answers_are_transformers(oracle: Any, folder: Path, backend: str) -> None:
    wide, tall = picture(40, 25, seed=1), picture(11, 30, seed=2)
    params = SamplingParams(
        temperature=0, max_tokens=ANSWER, ignore_eos=True, logit_bias={PAD: -100.0}
    )
    parts = [{"type": "image_url", "image_url": data_url(stored(one))} for one in (wide, tall)]
    word = {"type": "text", "text": "w5 w6"}
    with LLM(
        str(folder), backend=backend, dtype="float32", block_size=16, max_num_batched_tokens=40
    ) as llm:
        first, second = ([{"role": "user", "content": one}] for one in ([word, *parts], parts[:1]))
        for _ in range(2):
            outputs = llm.chat([first, second], params, use_tqdm=False)
            ids = [5, 6, *ids_of(2, 3), *ids_of(3, 2), 11]
            check(oracle, ids, [wide, tall], outputs[0])
            check(oracle, [*ids_of(2, 3), 11], [wide], outputs[1])
        assert outputs[0].num_cached_tokens == (len(ids) - 1) // 16 * 16
