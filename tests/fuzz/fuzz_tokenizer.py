"""Fuzz target: any bytes as tokenizer.json, or any files of a tokenizer's folder.

An input that is a JSON object of file names is a folder: a string is a file's text, anything else
is written as JSON. Whatever else is tokenizer.json.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import tokenizers
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from vllmx_core.errors import VllmxError
from vllmx_engine.text.chat_template import ChatTemplate
from vllmx_engine.text.detokenizer import make_detokenizer
from vllmx_engine.text.tokenizer import Tokenizer

from .folders import folder_of
from .mutations import DEEP_TEXTS, as_json, changed_json, odd_json

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "config.json",
    "chat_template.json",
    "chat_template.jinja",
)
TEXTS = ("", "hello a b", "<s>x</s> \u00e9\u4e2d\U0001f642\n\n", "aaaa" * 50)
MAX_IDS = 300


def one_input(data: bytes) -> bool:
    """Whether `data` is a tokenizer that encodes and decodes. Only errors made for users are
    expected."""
    with folder_of(_files(data)) as folder:
        try:
            tokenizer = Tokenizer.from_folder(folder)
            _use(tokenizer)
            if tokenizer.chat_templates:
                template = ChatTemplate.from_tokenizer(tokenizer)
                template.render([{"role": "user", "content": "hi"}])
        except VllmxError:
            return False
    return True


def _use(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        ids = tokenizer.encode(text)
        tokenizer.decode(ids)
        detokenizer = make_detokenizer(tokenizer)
        shown = "".join(detokenizer.push((token_id,)) for token_id in ids) + detokenizer.finish()
        assert isinstance(shown, str)
    for token_id in range(min(tokenizer.vocab_size, MAX_IDS)):
        tokenizer.token_text(token_id)
        tokenizer.id_to_token(token_id)


def _files(data: bytes) -> dict[str, bytes]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return {"tokenizer.json": data}
    if not isinstance(value, dict) or not value.keys() & set(FILES):
        return {"tokenizer.json": data}
    return {
        name: content.encode("utf-8", "replace") if isinstance(content, str) else as_json(content)
        for name, content in value.items()
        if name in FILES
    }


def mutations() -> st.SearchStrategy[bytes]:
    """Folders whose files say something else, tokenizer.json alone that does, and any bytes."""
    folders = [json.loads(seed) for seed in seeds()]
    alone = [folder["tokenizer.json"] for folder in folders]
    pieces = [json.loads(made.__getstate__()) for made in _stages()]
    keys = [*FILES, "bos_token", "eos_token", "add_bos_token", "added_tokens_decoder", "model",
            "type", "vocab", "merges", "unk_token", "unk_id", "byte_fallback", "ignore_merges",
            "continuing_subword_prefix", "end_of_word_suffix", "dropout", "special", "content",
            "pattern", "Regex", "String", "truncation", "padding"]  # fmt: skip
    swapped = st.builds(
        _with_stage, st.sampled_from(alone), st.sampled_from(STAGES), st.sampled_from(pieces)
    )
    changed = [
        changed_json(folders, keys),
        changed_json(alone, keys),
        swapped,
        swapped.flatmap(lambda made: changed_json([made], keys)),
    ]
    return st.one_of(
        *(strategy.map(as_json) for strategy in changed),
        odd_json([as_json(tokenizer) for tokenizer in alone]),
        DEEP_TEXTS,
        st.binary(max_size=80),
    )


STAGES = ("normalizer", "pre_tokenizer", "post_processor", "decoder")


def _with_stage(tokenizer: dict[str, Any], name: str, stage: Any) -> dict[str, Any]:
    return tokenizer | {name: stage}


def _stages() -> list[Any]:
    """Parts of a tokenizer that the seeds do not have; often in the wrong place."""
    return [
        normalizers.NFC(), normalizers.Lowercase(), normalizers.Strip(),
        normalizers.Prepend("\u2581"), normalizers.Replace(tokenizers.Regex(r"\s+"), " "),
        normalizers.BertNormalizer(), pre_tokenizers.Metaspace(), pre_tokenizers.BertPreTokenizer(),
        pre_tokenizers.Digits(True),
        pre_tokenizers.Split(tokenizers.Regex(r"\p{L}+|\p{N}"), "isolated"),
        pre_tokenizers.UnicodeScripts(), processors.BertProcessing(("</s>", 2), ("<s>", 1)),
        processors.ByteLevel(), decoders.WordPiece(), decoders.Metaspace(), decoders.CTC(),
        decoders.BPEDecoder(), decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.Fuse()]),
    ]  # fmt: skip


@cache
def seeds() -> list[bytes]:
    """A folder for each algorithm, with all its files."""
    companions = {
        "tokenizer_config.json": {
            "bos_token": "<s>",
            "eos_token": {"content": "</s>"},
            "add_bos_token": True,
            "added_tokens_decoder": {"1": {"content": "<s>", "special": True}},
            "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
        },
        "special_tokens_map.json": {"pad_token": "</s>"},
        "generation_config.json": {"eos_token_id": [2, 3]},
    }
    backends = (_byte_level(), _sentencepiece(), _unigram(), _word_piece())
    return [
        as_json({"tokenizer.json": json.loads(backend.to_str()), **companions})
        for backend in backends
    ]


SPECIAL = ["<unk>", "<s>", "</s>"]
LETTERS = [*"abcdefghijklmnopqrstuvwxyz"]


def _byte_level() -> tokenizers.Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*SPECIAL, *letters, "ab", "he"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("a", "b"), ("h", "e")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens(SPECIAL)
    return backend


def _sentencepiece() -> tokenizers.Tokenizer:
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *LETTERS, "\u2581a"]
    vocab = {token: index for index, token in enumerate(pieces)}
    model = models.BPE(
        vocab, [("\u2581", "a")], unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens(SPECIAL)
    return backend


def _unigram() -> tokenizers.Tokenizer:
    pieces = [(token, -float(index)) for index, token in enumerate([*SPECIAL, "\u2581", *LETTERS])]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, 0, False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return backend


def _word_piece() -> tokenizers.Tokenizer:
    pieces = [*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    vocab = {token: index for index, token in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="<unk>"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend
