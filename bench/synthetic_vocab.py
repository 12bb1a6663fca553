"""A byte-level BPE vocabulary of any size, made of syllables instead of learned from text.

Random weights need a tokenizer that engines accept: the right number of tokens, every byte covered,
merges that are consistent. Tokens are the 256 byte symbols of GPT-2, then words built from
consonant-vowel syllables, so that generated text has lengths like real text; the last three ids are
the special tokens of ChatML.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice, product
from typing import Any

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SPLIT_PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Vocabulary:
    """`tokens[i]` is id i in GPT-2's byte alphabet; each merge is a pair of earlier tokens."""

    tokens: list[str]
    merges: list[tuple[str, str]]

    @property
    def eos_id(self) -> int:
        return len(self.tokens) - 1

    @property
    def bos_id(self) -> int:
        return len(self.tokens) - len(SPECIAL_TOKENS)


def byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in GPT-2's byte-level BPE."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def make_vocabulary(size: int) -> Vocabulary:
    """A vocabulary of exactly `size` tokens, the bytes and the specials included."""
    num_words = size - 256 - len(SPECIAL_TOKENS)
    if num_words < 0:
        raise ValueError(
            f"vocabulary of {size} tokens is too small: at least {size - num_words} are needed"
        )
    merges = list(islice(_merges(), num_words))
    if len(merges) < num_words:
        raise ValueError(
            f"vocabulary of {size} tokens is too large: the syllables give {len(merges)} words"
        )
    words = [left + right for left, right in merges]
    return Vocabulary([*byte_alphabet(), *words, *SPECIAL_TOKENS], merges)


def _merges() -> Iterator[tuple[str, str]]:
    """The merges in order of priority: syllables, words of two, both with a leading space, words of
    three."""
    space = byte_alphabet()[ord(" ")]
    letters = [(c, v) for c in "bcdfghjklmnpqrstvwxyz" for v in "aeiou"]
    syllables = [consonant + vowel for consonant, vowel in letters]
    pairs = list(product(syllables, syllables))
    words = [first + second for first, second in pairs]
    with_space = ((space, word) for word in chain(syllables, words))
    long_words = ((space + word, last) for word, last in product(words, syllables))
    return chain(letters, pairs, with_space, long_words)


def tokenizer_json(vocabulary: Vocabulary) -> dict[str, Any]:
    """The vocabulary as the content of a Hugging Face `tokenizer.json`."""
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    split = {
        "type": "Split",
        "pattern": {"Regex": SPLIT_PATTERN},
        "behavior": "Isolated",
        "invert": False,
    }
    plain = vocabulary.tokens[: vocabulary.bos_id]
    specials = [
        {
            "id": vocabulary.bos_id + i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i, token in enumerate(SPECIAL_TOKENS)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": specials,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(plain)},
            "merges": [list(pair) for pair in vocabulary.merges],
        },
    }


def tokenizer_config() -> dict[str, Any]:
    """The content of `tokenizer_config.json` beside it."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": SPECIAL_TOKENS[2],
        "pad_token": SPECIAL_TOKENS[0],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
