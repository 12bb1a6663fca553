"""Tokenizers from GGUF metadata: token-exact against the models' own, and damaged tables."""

from __future__ import annotations

import gzip
import json
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from vllmx_core.errors import UnsupportedModelError, VllmxError, WeightFormatError
from vllmx_demo.source import MODEL_FOLDER
from vllmx_engine.text import gguf_backends
from vllmx_engine.text.gguf_backends import PRE_TOKENIZERS
from vllmx_engine.text.gguf_tokenizer import gguf_tokenizer
from vllmx_engine.text.prompt_text import Spellings
from vllmx_engine.text.tokenizer import Tokenizer
from vllmx_models.formats.gguf.file import GGUFFile

from .models import tokens_of

ROOT = Path(__file__).parents[3]
DATA = ROOT / "tests" / "data" / "ggml-vocab"
SHARED = ROOT.parent / "shared" / "tokenizers"
TEXTS = (DATA / "texts.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
OWN = ("gpt-2", "phi-3", "bert-bge")
OTHERS = ("deepseek-coder", "deepseek-llm", "falcon", "llama-spm", "mpt", "refact", "starcoder")
CONTROL = 3
PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
OTHER_BYTES = [byte for byte in range(256) if byte not in PRINTABLE]
ALPHABET = [
    chr(byte if byte in PRINTABLE else 0x100 + OTHER_BYTES.index(byte)) for byte in range(256)
]
"""GPT-2's characters for the bytes."""


def expected_ids(path: Path) -> list[list[int]]:
    lines = path.read_text().split("\n")
    return [[int(word) for word in line.split()] for line in lines[: len(TEXTS)]]


def open_file(name: str, folder: Path) -> Tokenizer:
    """The tokenizer of a vocabulary file, unpacked into `folder` where it is our own copy."""
    path = SHARED / "ggml-vocab" / f"ggml-vocab-{name}.gguf"
    if name in OWN:
        path = folder / "vocab.gguf"
        packed = DATA / f"ggml-vocab-{name}.gguf.gz"
        path.write_bytes(gzip.decompress(packed.read_bytes()))
    file = GGUFFile(path)
    try:
        return gguf_tokenizer(file.metadata)
    finally:
        file.close()


def metadata_of(folder: Path, pre: str, **more: Any) -> dict[str, Any]:
    """What a converter makes of a byte-level tokenizer.json."""
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokens, types = tokens_of(model)
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": merges,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def small(**more: Any) -> dict[str, Any]:
    """A byte-level tokenizer without merges: 256 bytes and three special tokens."""
    tokens = ["<s>", "</s>", "<|end|>", *ALPHABET]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([CONTROL] * 3 + [1] * 256, np.int32),
        "tokenizer.ggml.merges": [],
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


@pytest.mark.parametrize("name", OWN + OTHERS)
def test_ids_are_those_of_the_models_own_tokenizer(name: str, tmp_path: Path) -> None:
    folder = DATA if name in OWN else SHARED / "ggml-vocab"
    if not folder.is_dir():
        pytest.skip("the larger vocabularies lie outside the repository")
    tokenizer = open_file(name, tmp_path)
    expected = expected_ids(folder / f"ggml-vocab-{name}.gguf.out")
    assert len(expected) == len(TEXTS) == 47
    for text, ids in zip(TEXTS, expected, strict=True):
        assert tokenizer.encode(text, add_special_tokens=False) == ids


def gemma4(**more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The metadata of a file with what Gemma 4's vocabulary has of some texts, and those texts."""
    part = json.loads(gzip.decompress((DATA / "gemma-4-part.json.gz").read_bytes()))
    values = {
        "model": "gemma4",
        "tokens": part["tokens"],
        "merges": part["merges"],
        "token_type": np.array(part["types"], np.int32),
        "add_space_prefix": False,
        **part["ids"],
        **more,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}, part


def test_merges_over_spaces_as_marks() -> None:
    metadata, part = gemma4(add_bos_token=False)
    tokenizer = gguf_tokenizer(metadata)
    assert len(part["texts"]) == len(part["expected"]) == 46
    for text, ids in zip(part["texts"], part["expected"], strict=True):
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.encode(text) == [part["ids"]["bos_token_id"], *ids]
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("name", ["gpt-2", "phi-3", "gemma-4"])
def test_special_tokens_that_users_spell_are_text(name: str, tmp_path: Path) -> None:
    tokenizer = gguf_tokenizer(gemma4()[0]) if name == "gemma-4" else open_file(name, tmp_path)
    plain = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    plain.encode_special_tokens = True
    added = tokenizer.backend.get_added_tokens_decoder()
    token = next(each.content for each in reversed(added.values()) if each.special)
    spellings = Spellings(tokenizer.control_tokens(""))
    text = spellings.settled(spellings.guarded(f"x{token} y"))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == plain.encode(f"x{token} y", add_special_tokens=False).ids
    assert tokenizer.token_to_id(token) not in ids


def test_merges_of_a_gemma_4_are_checked() -> None:
    with pytest.raises(WeightFormatError, match="does not make a tokenizer"):
        gguf_tokenizer(gemma4(merges=["no such"])[0])


def test_reasons_that_quote_a_token_are_safe_to_show() -> None:
    """An escape sequence of a damaged file does nothing to a terminal."""
    with pytest.raises(WeightFormatError, match="does not make a tokenizer") as raised:
        gguf_tokenizer(gemma4(merges=["\x1b[2J\x07 such"])[0])
    assert str(raised.value).isprintable()
    assert "x1b[2J" in str(raised.value)


@pytest.mark.parametrize(
    ("folder", "pre"),
    [("qwen3", "qwen2"), ("qwen3", "deepseek-r1-qwen"), ("llama3", "llama-bpe")],
)
def test_kinds_whose_vocabulary_is_a_tokenizer_json(folder: str, pre: str) -> None:
    if not (SHARED / folder / "tokenizer.json").is_file():
        pytest.skip("the larger vocabularies lie outside the repository")
    tokenizer = gguf_tokenizer(metadata_of(SHARED / folder, pre))
    expected = expected_ids(SHARED / "ggml-vocab" / f"ggml-vocab-{pre}.gguf.out")
    for text, ids in zip(TEXTS, expected, strict=True):
        assert tokenizer.encode(text, add_special_tokens=False) == ids


def test_the_demo_tokenizer_survives_the_way_through_metadata() -> None:
    original = Tokenizer.from_folder(MODEL_FOLDER)
    config = json.loads((MODEL_FOLDER / "tokenizer_config.json").read_text())
    metadata = metadata_of(MODEL_FOLDER, "smollm", eos_token_id=2, padding_token_id=0)
    metadata["tokenizer.chat_template"] = config["chat_template"]
    metadata["tokenizer.chat_template.tool_use"] = "{{ tools }}"
    ours = gguf_tokenizer(metadata)
    for text in (*TEXTS, "<|im_start|>user\nHi 2024<|im_end|>\n<think>x</think><tool_call>"):
        ids = original.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == original.decode(ids)
        assert ours.decode(ids, skip_special_tokens=False) == text
    assert ours.special_ids == original.special_ids
    assert (ours.vocab_size, ours.eos_token_id) == (original.vocab_size, original.eos_token_id)
    assert ours.named_tokens["pad_token"] == "<|endoftext|>"
    assert ours.eos_token_ids == original.eos_token_ids
    assert ours.chat_templates["default"] == original.chat_templates["default"]
    assert ours.chat_templates["tool_use"] == "{{ tools }}"


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_kind_cuts_without_loss(pre: str) -> None:
    tokenizer = gguf_tokenizer(small(pre=pre, add_bos_token=False))
    for text in TEXTS:
        plain = text.encode() if not PRE_TOKENIZERS[pre].nfc else None
        ids = tokenizer.encode(text)
        if plain is not None:
            assert [token - 3 for token in ids] == list(plain)
            assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("tekken", ["Hello", "World", "'s", " ", "1", "2", "3", "4", " MIXed", "Case"]),
        ("gpt-4o", ["Hello", "World's", " ", "123", "4", " MIXed", "Case"]),
        ("llama-bpe", ["HelloWorld", "'s", " ", "123", "4", " MIXedCase"]),
        ("qwen2", ["HelloWorld", "'s", " ", "1", "2", "3", "4", " MIXedCase"]),
        ("gpt-2", ["HelloWorld", "'s", " 1234", " MIXedCase"]),
        ("smollm", ["HelloWorld", "'s", " ", "1", "2", "3", "4", " MIXedCase"]),
    ],
)
def test_where_the_kinds_cut(pre: str, pieces: list[str]) -> None:
    backend = gguf_tokenizer(small(pre=pre)).backend
    assert backend.pre_tokenizer is not None
    cut = backend.pre_tokenizer.pre_tokenize_str("HelloWorld's 1234 MIXedCase")
    assert [piece.replace("Ġ", " ") for piece, _ in cut] == pieces


def sentencepiece(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's BPE as its paper says it: the neighbours whose union has the best score are
    joined, the leftmost of equals, until no union is a token."""
    symbols = list("▁" + text.replace(" ", "▁"))
    while True:
        unions = [left + right for left, right in pairwise(symbols)]
        found = [(scores[union], -at) for at, union in enumerate(unions) if union in scores]
        if not found:
            return symbols
        at = -max(found)[1]
        symbols[at : at + 2] = [unions[at]]


@pytest.fixture(scope="module")
def phi3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, dict[str, float]]:
    folder = tmp_path_factory.mktemp("phi3")
    tokenizer = open_file("phi-3", folder)
    file = GGUFFile(folder / "vocab.gguf")
    types = file.metadata["tokenizer.ggml.token_type"]
    scores = file.metadata["tokenizer.ggml.scores"]
    tokens = file.metadata["tokenizer.ggml.tokens"]
    table = {t: float(scores[i]) for i, t in enumerate(tokens) if types[i] == 1}
    return tokenizer, table


def test_word_piece_finds_its_unknown_token_whatever_its_type() -> None:
    tokens = ["[UNK]", "\u2581a", "[CLS]", "[SEP]"]
    ids = {"unknown_token_id": 0, "cls_token_id": 2, "seperator_token_id": 3}
    metadata = {"model": "bert", "tokens": tokens, **ids}
    tokenizer = gguf_tokenizer({f"tokenizer.ggml.{key}": v for key, v in metadata.items()})
    assert tokenizer.encode("a b", add_special_tokens=False) == [1, 0]


def test_unigram_takes_the_cut_of_the_highest_scores() -> None:
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "\u2581", "c", "a", "t", "s", "at", "\u2581cat"]
    scores = [0.0, 0.0, 0.0, 0.0, -4.0, -6.0, -5.0, -7.0, -3.0, -20.0, -8.0]
    metadata = {
        "model": "t5",
        "tokens": pieces,
        "scores": np.array(scores, np.float32),
        "token_type": np.array([3, 3, 3, 2, *[1] * 7], np.int32),
        "unknown_token_id": 3,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "add_bos_token": True,
        "add_eos_token": True,
    }
    tokenizer = gguf_tokenizer({f"tokenizer.ggml.{key}": v for key, v in metadata.items()})
    assert tokenizer.encode("  cats  at ") == [0, 10, 8, 4, 6, 7, 2]  # a and t are likelier than at
    assert tokenizer.encode("a</s>x", add_special_tokens=False) == [4, 6, 2, 4, 3]
    assert tokenizer.encode_pair("cat", "s")[0] == [0, 10, 2, 2, 4, 8, 2]
    assert tokenizer.decode([10, 8, 4, 6]) == "cats a"


@settings(max_examples=60)
@given(text=st.text(alphabet="abcdeinorst ,.=-\t\u2581é", min_size=1, max_size=40))
def test_scores_join_as_sentencepiece_does(
    phi3: tuple[Tokenizer, dict[str, float]], text: str
) -> None:
    tokenizer, scores = phi3
    got = [tokenizer.id_to_token(i) for i in tokenizer.encode(text, add_special_tokens=False)]
    expected: list[str] = []
    for symbol in sentencepiece(text, scores):
        known = tokenizer.token_to_id(symbol) is not None
        expected += [symbol] if known else [f"<0x{byte:02X}>" for byte in symbol.encode()]
    assert got == expected


def test_marks_of_phi_3_and_bert(phi3: tuple[Tokenizer, dict[str, float]], tmp_path: Path) -> None:
    tokenizer = phi3[0]
    ids = tokenizer.encode("<|user|>\n Hi<|end|>")
    assert [tokenizer.id_to_token(i) for i in ids] == ["<s>", "<|user|>", "▁Hi", "<|end|>"]
    assert tokenizer.eos_token_ids == {2, 32000, 32007}
    assert tokenizer.decode(ids) == "Hi"
    bert = open_file("bert-bge", tmp_path)
    assert bert.encode("Hello") == [101, 7592, 102]


def test_bos_rules() -> None:
    for more, begins in (
        ({}, False),
        ({"pre": "llama-bpe"}, True),
        ({"pre": "llama-bpe", "add_bos_token": False}, False),
        ({"add_bos_token": True}, True),
    ):
        tokenizer = gguf_tokenizer(small(bos_token_id=0, eos_token_id=1, **more))
        assert (tokenizer.encode("a")[0] == 0) == begins
    both = gguf_tokenizer(small(bos_token_id=0, eos_token_id=1, add_eos_token=True))
    assert both.encode("a")[-1] == 1
    beyond = gguf_tokenizer(small(bos_token_id=4000, eos_token_id=1))
    assert beyond.bos_token_id is None


def test_end_tokens() -> None:
    assert gguf_tokenizer(small(eos_token_id=1)).eos_token_ids == {1, 2}
    assert gguf_tokenizer(small(eos_token_id=1, eot_token_id=5)).eos_token_ids == {1, 2, 5}
    harmony = small(eos_token_id=1)
    harmony["tokenizer.ggml.tokens"][:2] = ["<|call|>", "<|return|>"]
    assert gguf_tokenizer(harmony).eos_token_ids == {0, 1}


def test_without_a_space_prefix() -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a"]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array([0.0] * 259 + [-1, -2, -3], np.float32),
        "tokenizer.ggml.token_type": np.array([2, 3, 3] + [6] * 256 + [1] * 3, np.int32),
    }
    ours = gguf_tokenizer(metadata)
    assert ours.encode("a aé") == [1, 261, 261, 3 + 0xC3, 3 + 0xA9]
    assert ours.decode([261, 261]) == "a a"
    bare = gguf_tokenizer(metadata | {"tokenizer.ggml.add_space_prefix": False})
    assert bare.encode("a a") == [1, 260, 261]
    assert bare.decode([260, 261]) == "a a"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": None}, "has no tokenizer"),
        ({"tokenizer.ggml.tokens": None}, r"tokens .* array of strings"),
        ({"tokenizer.ggml.tokens": np.zeros(4)}, r"tokens .* array of strings"),
        ({"tokenizer.ggml.tokens": []}, "0 tokens"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "tokens twice"),
        ({"tokenizer.ggml.token_type": np.zeros(4, np.int32)}, "4 entries for 259 tokens"),
        ({"tokenizer.ggml.token_type": "x"}, "array of numbers"),
        ({"tokenizer.ggml.merges": ["ab"]}, "is not a pair"),
        ({"tokenizer.ggml.merges": ["a zz"]}, "does not make a tokenizer"),
        ({"tokenizer.ggml.merges": None}, r"merges .* array of strings"),
        ({"tokenizer.ggml.add_bos_token": 1}, "truth value"),
        ({"tokenizer.ggml.bos_token_id": "0"}, "token id"),
        ({"tokenizer.chat_template": 5}, "must be text"),
        ({"tokenizer.chat_template": "x" * (1 << 21)}, "at most"),
    ],
)
def test_damaged_tables_are_named(change: dict[str, Any], message: str) -> None:
    metadata = {key: value for key, value in (small() | change).items() if value is not None}
    with pytest.raises(WeightFormatError, match=message):
        gguf_tokenizer(metadata)


class PanicException(BaseException):
    """Stands for the library's, by its name."""


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma4", "t5", "bert"])
def test_a_panic_of_the_library_is_a_typed_error(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def panic(*arguments: Any, **options: Any) -> Any:
        raise PanicException("index out of bounds")

    broken = SimpleNamespace(BPE=panic, Unigram=panic, WordPiece=panic)
    monkeypatch.setattr(gguf_backends, "models", broken)
    with pytest.raises(WeightFormatError, match="index out of bounds"):
        gguf_tokenizer(small(model=kind))


@pytest.mark.parametrize("mark", ["[C LS]", "x:y"])
def test_marks_that_a_template_cannot_hold(mark: str) -> None:
    tokens = ["[UNK]", mark, "[SEP]", "a"]
    ids = {"unknown_token_id": 0, "cls_token_id": 1, "seperator_token_id": 2}
    metadata = {"model": "bert", "tokens": tokens, **ids}
    with pytest.raises(WeightFormatError, match="does not make a tokenizer"):
        gguf_tokenizer({f"tokenizer.ggml.{key}": value for key, value in metadata.items()})


@pytest.mark.parametrize(
    ("key", "value"),
    [("merges", ["a b", 5]), ("tokens", ["a", 5]), ("token_type", np.zeros((300, 2), np.int32))],
)
def test_arrays_of_other_things(key: str, value: Any) -> None:
    with pytest.raises(WeightFormatError, match=key):
        gguf_tokenizer(small(**{key: value}))


def test_scores_must_be_finite() -> None:
    scores = np.full(259, np.nan, np.float32)
    with pytest.raises(WeightFormatError, match=r"scores .* not finite"):
        gguf_tokenizer(small(model="llama", scores=scores))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "rwkv"}, r"'rwkv'.*known: gpt2, llama, gemma4, t5, bert"),
        ({"tokenizer.ggml.pre": "kimi-k9"}, r"'kimi-k9'.*known: .*qwen2"),
    ],
)
def test_unknown_kinds_list_the_known(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        gguf_tokenizer(small() | change)


@settings(max_examples=60)
@given(
    values=st.dictionaries(
        st.sampled_from(
            ["pre", "tokens", "token_type", "scores", "merges", "bos_token_id", "add_bos_token",
             "eot_token_id", "model", "add_space_prefix", "unknown_token_id", "cls_token_id"]
        ),
        st.one_of(
            st.none(), st.integers(-3, 600), st.booleans(), st.text(max_size=5), st.floats(),
            st.sampled_from(["llama", "bert", "gpt2", "gemma4", "default"]),
            st.lists(st.text(max_size=4), max_size=5),
            st.lists(st.integers(-5, 9), max_size=300).map(lambda v: np.array(v, np.int32)),
        ),
        max_size=4,
    )
)  # fmt: skip
def test_wild_metadata_never_crash(values: dict[str, Any]) -> None:
    with suppress(VllmxError):
        gguf_tokenizer(small(**values)).encode("a b")
