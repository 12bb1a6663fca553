"""Tokenizer: what the files of a model folder mean, against Hugging Face transformers."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from vllmx_core.errors import ConfigError, InvalidRequestError, ModelNotFoundError
from vllmx_engine.text import model_files
from vllmx_engine.text.detokenizer import make_detokenizer
from vllmx_engine.text.tokenizer import Tokenizer, TooManyTokensError

TEXTS = ["", "Hi there", " two  spaces ", "é 🚀 你好\n\n", "<s>x</s> <|im_end|>"]


def save(tokenizer: Tokenizer, folder: Path, **files: Any) -> Path:
    """Write tokenizer.json and, by name without .json, more JSON files."""
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def test_round_trip_and_batch(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("The quick fox", add_special_tokens=False)
    assert tokenizer.decode(ids) == "The quick fox"
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


@pytest.mark.parametrize(
    "work",
    [
        lambda tokenizer, text: tokenizer.encode(text),
        lambda tokenizer, text: tokenizer.encode_pair(text, "b", limit=1, exact=True),
        lambda tokenizer, text: tokenizer.without_last(text, 1),
        lambda tokenizer, text: tokenizer.decode([5] * len(text)),
    ],
    ids=["encode", "encode_pair", "without_last", "decode"],
)
def test_other_threads_run_meanwhile(
    byte_level: Tokenizer, work: Callable[[Tokenizer, str], object]
) -> None:
    """What is long runs outside the interpreter lock, all but a part of it."""
    text = "over a lazy dog, " * 80_000
    tries = (longest_wait(lambda: work(byte_level, text)) for _ in range(5))
    assert any(waited_s < elapsed_s / 2 for waited_s, elapsed_s in tries)


def longest_wait(work: Callable[[], object]) -> tuple[float, float]:
    """How long another thread could not run while this one worked, and how long it worked."""
    waited_s, done = 0.0, threading.Event()

    def wait() -> None:
        nonlocal waited_s
        before_s = time.monotonic()
        while not done.is_set():
            time.sleep(0.001)
            now_s = time.monotonic()
            waited_s, before_s = max(waited_s, now_s - before_s), now_s

    thread, begun_s = threading.Thread(target=wait), time.monotonic()
    thread.start()
    with contextlib.suppress(TooManyTokensError):
        work()
    elapsed_s = time.monotonic() - begun_s
    done.set()
    thread.join()
    return waited_s, elapsed_s


def test_pairs_over_the_limit_are_counted_or_not_even_tokenised(byte_level: Tokenizer) -> None:
    ids, types = byte_level.encode_pair("the dog", "a fox")
    assert byte_level.encode_pair("the dog", "a fox", limit=len(ids)) == (ids, types)
    with pytest.raises(TooManyTokensError) as refused:
        byte_level.encode_pair("the dog", "a fox", limit=len(ids) - 1)
    assert (refused.value.num_tokens, refused.value.exact) == (len(ids), True)
    for first in (None, "the dog"):
        with pytest.raises(TooManyTokensError) as refused:
            byte_level.encode_pair(first, "a fox" * 100_000, limit=10)
        assert not refused.value.exact
        with pytest.raises(TooManyTokensError) as refused:
            byte_level.encode_pair(first, "a fox" * 100_000, limit=10, exact=True)
        assert refused.value.exact


def test_the_last_tokens_are_left_out(tokenizer: Tokenizer) -> None:
    text = "The quick brown fox jumps"
    for num_tokens in range(len(tokenizer.encode(text, add_special_tokens=False)) + 2):
        kept = tokenizer.without_last(text, num_tokens)
        assert text.startswith(kept)
        assert (kept == text) == (num_tokens == 0)
    assert kept == ""


def test_equal_to_transformers(tokenizer: Tokenizer, request: pytest.FixtureRequest) -> None:
    transformers = pytest.importorskip("transformers")
    name = request.node.callspec.params["tokenizer"]
    folder = Path(__file__).parents[4] / "shared" / name
    if not (folder / "tokenizer_config.json").is_file():
        pytest.skip("no tokenizer_config.json")
    # transformers' Llama class replaces parts of tokenizer.json (normalizer, rstrip of </s>);
    # the file is what the model was trained with.
    replaces = name.endswith(("phi-3-mini", "stories260K"))
    loader = "PreTrainedTokenizerFast" if replaces else "AutoTokenizer"
    theirs = getattr(transformers, loader).from_pretrained(str(folder))
    for text in TEXTS:
        assert tokenizer.encode(text) == theirs.encode(text)
        plain = theirs.encode(text, add_special_tokens=False)
        assert tokenizer.encode(text, add_special_tokens=False) == plain
    assert tokenizer.bos_token_id == theirs.bos_token_id
    assert tokenizer.eos_token_id == theirs.eos_token_id
    assert tokenizer.pad_token_id == theirs.pad_token_id
    assert tokenizer.vocab_size == len(theirs)
    assert set(theirs.all_special_ids) <= tokenizer.special_ids


def test_end_of_sequence_ids_come_from_everywhere(byte_level: Tokenizer, tmp_path: Path) -> None:
    folder = save(
        byte_level,
        tmp_path,
        tokenizer_config={"eos_token": {"content": "</s>"}},
        generation_config={"eos_token_id": [2, 7]},
        config={"eos_token_id": 9},
    )
    assert Tokenizer.from_folder(folder).eos_token_ids == {1, 2, 7}
    (folder / "generation_config.json").unlink()
    assert Tokenizer.from_folder(folder).eos_token_ids == {1, 9}


def test_sequence_marks_are_added_once(
    byte_level: Tokenizer, sentencepiece: Tokenizer, tmp_path: Path
) -> None:
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    plain = byte_level.encode("Hi")
    folder = save(byte_level, tmp_path, tokenizer_config=config)
    assert Tokenizer.from_folder(folder).encode("Hi") == [0, *plain]
    assert Tokenizer.from_folder(folder).encode("Hi", add_special_tokens=False) == plain
    save(byte_level, tmp_path, tokenizer_config=config | {"add_eos_token": True})
    assert Tokenizer.from_folder(folder).encode("Hi") == [0, *plain, 1]
    save(sentencepiece, tmp_path, tokenizer_config=config)
    assert Tokenizer.from_folder(folder).encode("a") == sentencepiece.encode("a")


def test_special_tokens_of_the_companion_files(byte_level: Tokenizer, tmp_path: Path) -> None:
    next_id = byte_level.vocab_size
    folder = save(
        byte_level,
        tmp_path,
        special_tokens_map={"pad_token": "Ġ"},
        added_tokens={"<new>": next_id, "<elsewhere>": next_id + 70},
    )
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("<new>") == [next_id]
    assert tokenizer.token_to_id("<elsewhere>") is None
    assert tokenizer.pad_token_id in tokenizer.special_ids


def test_truncation_and_padding_of_the_file_are_ignored(
    byte_level: Tokenizer, tmp_path: Path
) -> None:
    copy = Tokenizer(type(byte_level.backend).from_str(byte_level.backend.to_str()))
    copy.backend.enable_truncation(2)
    copy.backend.enable_padding(length=50)
    tokenizer = Tokenizer.from_folder(save(copy, tmp_path))
    text = "a longer text than two tokens"
    assert tokenizer.encode(text) == byte_level.encode(text)


def test_chat_templates_of_all_places(byte_level: Tokenizer, tmp_path: Path) -> None:
    named = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    folder = save(byte_level, tmp_path, tokenizer_config={"chat_template": named})
    assert Tokenizer.from_folder(folder).chat_templates == {"default": "A", "tool_use": "B"}
    (folder / "chat_template.json").write_text('{"chat_template": "C"}')
    assert Tokenizer.from_folder(folder).chat_templates["default"] == "C"
    (folder / "chat_template.jinja").write_text("D")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("E")
    templates = Tokenizer.from_folder(folder).chat_templates
    assert templates == {"default": "D", "tool_use": "B", "rag": "E"}


def test_missing_tokenizer_names_folder_and_remedy(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no tokenizer\.json.*save_pretrained") as caught:
        Tokenizer.from_folder(tmp_path)
    assert str(tmp_path) in str(caught.value)
    with pytest.raises(ModelNotFoundError, match="no such folder"):
        Tokenizer.from_folder(tmp_path / "absent")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model": 1}', "\xff", "[" * 100_000])
def test_malformed_tokenizer_is_a_typed_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer_config", "generation_config", "special_tokens_map"])
@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff", "[" * 100_000, '{"a": ' * 100_000])
def test_malformed_companions_are_typed_errors(
    byte_level: Tokenizer, tmp_path: Path, name: str, text: str
) -> None:
    save(byte_level, tmp_path)
    (tmp_path / f"{name}.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=name):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("file", "value"),
    [
        ("tokenizer_config", {"bos_token": 3}),
        ("tokenizer_config", {"chat_template": 3}),
        ("tokenizer_config", {"chat_template": [{"name": "default"}]}),
        ("tokenizer_config", {"chat_template": "x" * (1 << 20) + "x"}),
        ("tokenizer_config", {"added_tokens_decoder": {"x": {}}}),
        ("tokenizer_config", {"added_tokens_decoder": [1]}),
        ("tokenizer_config", {"added_tokens_decoder": {"9" * 5000: {"content": "x"}}}),
        ("tokenizer_config", {"added_tokens_decoder": {"\u00b2": {"content": "x"}}}),
        ("tokenizer_config", {"added_tokens_decoder": {"7": {"content": 5}}}),
        ("tokenizer_config", {"bos_token": [["x"] * 5000] * 5000}),
        ("generation_config", {"eos_token_id": 1 << 31}),
        ("generation_config", {"eos_token_id": 10**4200}),
        ("generation_config", {"eos_token_id": ["x"]}),
        ("generation_config", {"eos_token_id": -1}),
    ],
)
def test_wrong_types_are_typed_errors(
    byte_level: Tokenizer, tmp_path: Path, file: str, value: dict[str, Any]
) -> None:
    save(byte_level, tmp_path, **{file: value})
    with pytest.raises(ConfigError, match=file) as raised:
        Tokenizer.from_folder(tmp_path)
    assert len(str(raised.value)) < 500


@pytest.mark.parametrize(
    ("file", "value"),
    [
        ("tokenizer_config", {"bos_token": "\ud800"}),
        ("tokenizer_config", {"added_tokens_decoder": {"7": {"content": "\ud800"}}}),
        ("special_tokens_map", {"pad_token": "a\ud800"}),
        ("added_tokens", {"\ud800": 300}),
        ("added_tokens", {"x": [1]}),
    ],
)
def test_names_that_are_no_text_are_typed_errors(
    byte_level: Tokenizer, tmp_path: Path, file: str, value: dict[str, Any]
) -> None:
    save(byte_level, tmp_path, **{file: value})
    with pytest.raises(ConfigError):
        Tokenizer.from_folder(tmp_path)


class PanicException(BaseException):
    """Stands for the library's, by its name."""


def test_a_panic_at_request_time_is_the_requests_error(
    byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Backend:
        def panic(self, *arguments: Any, **options: Any) -> Any:
            raise PanicException("index out of bounds")

        decode = id_to_token = token_to_id = encode_batch_fast = panic

    monkeypatch.setattr(byte_level, "backend", Backend())
    calls = (
        lambda: byte_level.encode("x"),
        lambda: byte_level.decode([1]),
        lambda: byte_level.id_to_token(1),
        lambda: byte_level.token_to_id("x"),
        lambda: byte_level.token_bytes(1 << 20),
    )
    for call in calls:
        with pytest.raises(InvalidRequestError, match="index out of bounds"):
            call()


def test_size_limit(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"a": 1}')
    assert model_files.read_json_object(tmp_path / "x.json", 8) == {"a": 1}
    with pytest.raises(ConfigError, match="larger than"):
        model_files.read_json_object(tmp_path / "x.json", 7)


def test_bad_input_of_requests(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="surrogate"):
        byte_level.encode("a\ud800")
    for ids in ([-1], [1 << 40]):
        with pytest.raises(InvalidRequestError, match="token ids"):
            byte_level.decode(ids)
    assert byte_level.decode([byte_level.vocab_size + 5]) == ""


def test_what_the_library_raises_is_a_typed_error(byte_level: Tokenizer, tmp_path: Path) -> None:
    """A post-processor that names a missing token (a panic), a text without tokens (Exception)."""
    saved = json.loads(byte_level.backend.to_str())
    piece = {"SpecialToken": {"id": "<x>", "type_id": 0}}
    saved["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [piece],
        "pair": [piece],
        "special_tokens": {},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    with pytest.raises(ConfigError, match="tokenizer"):
        Tokenizer.from_folder(tmp_path)
    words = tokenizers.Tokenizer(tokenizers.models.WordPiece({"a": 0}, unk_token="<unk>"))
    with pytest.raises(InvalidRequestError, match="cannot encode this text"):
        Tokenizer(words).encode("b")


def test_small_files_take_little_memory(byte_level: Tokenizer, tmp_path: Path) -> None:
    save(byte_level, tmp_path, tokenizer_config={})
    tracemalloc.start()
    try:
        assert model_files.read_bytes(tmp_path / "tokenizer.json", 1 << 30)
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()


def test_logprobs_entry_of_a_token(
    byte_level: Tokenizer, sentencepiece: Tokenizer, metaspace: Tokenizer
) -> None:
    ids = byte_level.encode("🚀")
    assert b"".join(byte_level.token_bytes(i) for i in ids) == "🚀".encode()
    assert byte_level.token_text(ids[0]) == "\ufffd"
    assert byte_level.token_text(2) == "<|im_end|>"
    the = sentencepiece.token_to_id("▁the")
    assert the is not None
    assert sentencepiece.token_text(the) == " the"
    assert metaspace.token_bytes(1) == b"<s>"


def test_trained_reference_of_stories260k(shared: Path) -> None:
    tokenizer = Tokenizer.from_folder(shared / "models" / "stories260K")
    reference = json.loads((shared / "models/stories260K/reference_greedy.json").read_text())
    for case in reference["token_cases"]:
        assert tokenizer.encode(case["text"]) == case["ids"]
    detokenizer = make_detokenizer(tokenizer, reference["prompt_ids"])
    text = "".join(detokenizer.push([i]) for i in reference["greedy_ids"]) + detokenizer.finish()
    assert text == reference["text"].removeprefix(" ")
