"""Tokenizer of a model folder: text to ids and back, special tokens, chat templates.

The algorithm is the `tokenizers` library's, built from tokenizer.json. Around it: what the other
files of the folder say about special tokens and end-of-sequence ids, and tables of bytes per token
for detokenizing (see `pieces`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from vllmx_core.errors import ConfigError, InvalidRequestError, ModelNotFoundError, shown

from vllmx_engine.text.model_files import (
    MAX_TOKENIZER_BYTES,
    library_errors,
    read_bytes,
    read_chat_templates,
    read_json_object,
)
from vllmx_engine.text.pieces import PieceCoding, PieceTable, TextTable, piece_coding
from vllmx_engine.text.prompt_text import PromptText
from vllmx_engine.text.special_tokens import (
    MAX_ID,
    NAMED_TOKENS,
    add_missing_tokens,
    added_tokens_file,
    declared_tokens,
    is_markup,
    literal_backend,
    named_tokens,
    unusable,
)
from vllmx_engine.text.tekken import read_tekken
from vllmx_engine.text.token_bound import (
    PIECE_CHARS,
    TokenBound,
    fewest_tokens,
    part_with,
    token_bound,
)

TOKENIZER_NAME = "tokenizer.json"
_LONG_CHARS = PIECE_CHARS
"""Longer texts are refused by a bound on their tokens where that is enough; of others the message
tells the exact number."""
_WHOLE_CHARS = 1 << 20
"""Longer texts are measured in pieces before they are tokenised whole, and shorter ones too where
each of the tokens that are wanted would stand for more than `_USUAL_CHARS`."""
_USUAL_CHARS = 8
_CONTROL = re.compile(r"<[|\uff5c].+[|\uff5c]>", re.DOTALL)
"""Tokens of this form steer a model, whether its files call them special or not."""
_MANY_IDS = 4096
"""Decoding more of them takes a noticeable time."""


class TooManyTokensError(Exception):
    """A text has more tokens than were wanted: `num_tokens`, or where that is not `exact` at least
    so many. `count` says it."""

    def __init__(self, num_tokens: int, *, exact: bool) -> None:
        super().__init__(num_tokens)
        self.num_tokens = num_tokens
        self.exact = exact
        self.count = f"{num_tokens}" if exact else f"at least {num_tokens}"


class Tokenizer:
    """Text to token ids and back.

    Args:
        backend: the tokenizer itself; owned by this object from here on (truncation and padding
            that it may carry are switched off, missing special tokens are added).
        config: what tokenizer_config.json would hold; `bos_token`, `eos_token`, `pad_token`,
            `add_bos_token`, `add_eos_token`, `added_tokens_decoder` are used.
        eos_token_ids: further ids that end a sequence (generation_config.json).
        chat_templates: Jinja sources by name; `default` is the usual one.

    Raises:
        ConfigError: an entry of `config` has the wrong type.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: Mapping[str, Any] | None = None,
        *,
        eos_token_ids: Sequence[int] = (),
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        self.backend = backend
        self.config: Mapping[str, Any] = dict(config or {})
        self.chat_templates: Mapping[str, str] = dict(chat_templates or {})
        self.named_tokens = named_tokens(self.config)
        declared = declared_tokens(self.config)
        with library_errors(unusable):
            backend.no_truncation()
            backend.no_padding()
            add_missing_tokens(backend, declared, self.named_tokens)
            added = backend.get_added_tokens_decoder()
            last_id = backend.get_vocab_size(with_added_tokens=True) - 1
            self._coding = piece_coding(backend)
        self._tables: dict[frozenset[int], tuple[PieceTable, TextTable]] = {}
        self._markers: dict[str, tuple[int, ...]] = {}
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size = 1 + max(last_id, *added) if added else 1 + last_id
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        self.pad_token_id = self._named_id("pad_token")
        own_eos = () if self.eos_token_id is None else (self.eos_token_id,)
        self.eos_token_ids = frozenset((*own_eos, *eos_token_ids))
        self._prefix, self._suffix = self._missing_sequence_marks()

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Load tokenizer.json, or tekken.json where that is missing, and its companions.

        Raises:
            ModelNotFoundError: there is no such folder or no tokenizer.json in it.
            ConfigError: a file is malformed or larger than its limit.
        """
        folder = Path(folder)
        own = None if (folder / TOKENIZER_NAME).is_file() else read_tekken(folder)
        backend, config = own or (_load_backend(folder), {})
        special = read_json_object(folder / "special_tokens_map.json")
        config.update({name: special[name] for name in NAMED_TOKENS if name in special})
        config.update(read_json_object(folder / "tokenizer_config.json"))
        if "added_tokens_decoder" not in config:
            config["added_tokens_decoder"] = added_tokens_file(folder / "added_tokens.json")
        return cls(
            backend,
            config,
            eos_token_ids=_generation_eos_ids(folder),
            chat_templates=read_chat_templates(folder, config),
        )

    def encode(
        self, text: str, add_special_tokens: bool = True, *, limit: int | None = None
    ) -> list[int]:
        """Token ids of `text`; special tokens spelt in the text become their ids, but for those
        spellings that a `PromptText` says are text.

        Args:
            limit: more tokens are counted, but not made into a list.

        Raises:
            TooManyTokensError: there are more than `limit`.
            InvalidRequestError: the text is not valid Unicode (a lone surrogate), or the model's
                tokenizer has no token for a part of it.
        """
        if limit is None:
            return self.encode_batch((text,), add_special_tokens)[0]
        self._check_bound((text,), limit)
        encoding = self._within(text, add_special_tokens, limit)
        return self._ids(encoding, add_special_tokens)

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[list[int]]:
        """`encode` of each text; runs outside the interpreter lock."""
        encodings = self._encodings(texts, add_special_tokens)
        return [self._ids(encoding, add_special_tokens) for encoding in encodings]

    def marker(self, text: str) -> tuple[int, ...]:
        """Ids of a marker of the model's format, which are kept: there are a few, and each request
        asks for them."""
        found = self._markers.get(text)
        if found is None:
            found = tuple(self.encode(text, add_special_tokens=False))
            self._markers[text] = found
        return found

    def encode_pair(
        self,
        first: str | None,
        second: str,
        add_special_tokens: bool = True,
        *,
        limit: int | None = None,
        exact: bool = False,
    ) -> tuple[list[int], list[int]]:
        """Ids of two texts as the model's tokenizer joins them, and for each id 0 or 1: the text
        that it belongs to. Without a first one it is `encode` of the second. Runs outside the
        interpreter lock.

        Args:
            limit: as for `encode`.
            exact: the error tells the exact number of tokens, however long the texts are.

        Raises TooManyTokensError, InvalidRequestError.
        """
        texts = (second,) if first is None else (first, second)
        if limit is not None and not exact:
            self._check_bound(texts, limit)
        given = second if first is None else (first, second)
        encoding = self._within(given, add_special_tokens, limit)
        ids = self._ids(encoding, add_special_tokens)
        if first is None:
            return ids, [0] * len(ids)
        types = list(encoding.type_ids)
        if len(ids) > len(types):
            behind = len(ids) - len(types) - len(self._prefix)
            types = [*[0] * len(self._prefix), *types, *types[-1:] * behind]
        return ids, types

    def without_last(self, text: str, num_tokens: int) -> str:
        """A text without so many of its last tokens. Raises InvalidRequestError."""
        with library_errors(_cannot_encode):
            # `encode`, and a list of all offsets, would hold the interpreter lock.
            (encoding,) = self.backend.encode_batch([text], add_special_tokens=False)
            kept = len(encoding) - num_tokens
            place = encoding.token_to_chars(kept - 1) if kept > 0 else None
        return "" if place is None else text[: place[1]]

    def part_with(self, text: str, num_tokens: int, *, from_end: bool = False) -> str:
        """The beginning of a text, or its end, that has more than so many tokens; the whole text
        where it is not long, or has no more. Raises InvalidRequestError."""
        if len(text) <= _WHOLE_CHARS:
            return text
        part = part_with(text, num_tokens, self._num_tokens, from_end=from_end)
        if not isinstance(text, PromptText):
            return part
        begin = len(text) - len(part) if from_end else 0
        return text.part(begin, begin + len(part))

    def _num_tokens(self, text: str) -> int:
        return len(self._encodings((text,), add_special_tokens=False)[0])

    def _check_bound(self, texts: Sequence[str], limit: int) -> None:
        """Raises TooManyTokensError for long texts that cannot have so few tokens."""
        num_chars = sum(map(len, texts))
        if num_chars <= _LONG_CHARS:
            return
        fewest = 0 if self._bound is None else sum(map(self._bound.fewest_tokens, texts))
        if fewest <= limit and num_chars > min(_WHOLE_CHARS, _USUAL_CHARS * limit):
            fewest = fewest_tokens(texts, limit, self._num_tokens)
        if fewest > limit:
            raise TooManyTokensError(fewest, exact=False)

    def _within(
        self, given: str | tuple[str, str], add_special_tokens: bool, limit: int | None
    ) -> tokenizers.Encoding:
        """The encoding of a text or a pair. Raises TooManyTokensError."""
        (encoding,) = self._encodings((given,), add_special_tokens)
        marks = len(self._prefix) + len(self._suffix) if add_special_tokens else 0
        num_tokens = len(encoding) + marks
        if limit is not None and num_tokens > limit:
            del encoding  # a gigabyte perhaps, which the error's traceback would keep
            raise TooManyTokensError(num_tokens, exact=True)
        return encoding

    def _encodings(
        self, texts: Sequence[str | tuple[str, str]], add_special_tokens: bool
    ) -> list[tokenizers.Encoding]:
        backend, given = self.backend, list(texts)
        if any(isinstance(text, PromptText) for text in given):
            backend = self._literal_backend
            given = [text.marked if isinstance(text, PromptText) else text for text in given]
        try:
            with library_errors(_cannot_encode):
                return backend.encode_batch_fast(given, add_special_tokens=add_special_tokens)
        except InvalidRequestError as error:
            if not isinstance(error.__cause__, TypeError):
                raise
            raise InvalidRequestError(
                "the text holds a lone surrogate, which is not a Unicode character; remove it"
            ) from error.__cause__

    def _ids(self, encoding: tokenizers.Encoding, add_special_tokens: bool) -> list[int]:
        ids: list[int] = encoding.ids
        if not add_special_tokens or not (self._prefix or self._suffix):
            return ids
        return [*self._prefix, *ids, *self._suffix]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The whole text of `ids`, exactly as the `tokenizers` library gives it.

        Raises:
            InvalidRequestError: an id is outside [0, 2**32), or the tokenizer cannot decode them.
        """
        with library_errors(self._cannot_decode):
            if len(ids) > _MANY_IDS:  # in a batch the library lets go of the interpreter lock
                return self.backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]
            return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token (`Ġthe`, `▁the`, `<0x0A>`), None if unknown."""
        with library_errors(self._cannot_decode):
            return self.backend.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        """Id of a vocabulary entry, None if there is none."""
        with library_errors(_cannot_encode):
            return self.backend.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token stands for, leading space and special tokens included.

        What a logprobs entry shows as `bytes`. An id without a token gives none.
        """
        if self.all_pieces is not None:
            return self.all_pieces[token_id]
        return self.decode([token_id], skip_special_tokens=False).encode("utf-8")

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text for a logprobs entry; U+FFFD where it is part of a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    @property
    def coding(self) -> PieceCoding | None:
        """The bytes per token that make a text (`pieces.PieceCoding`), None if the decoder has
        none."""
        return self._coding

    @cached_property
    def _literal_backend(self) -> tokenizers.Tokenizer:
        with library_errors(unusable):
            return literal_backend(self.backend)

    def control_tokens(self, source: str) -> frozenset[str]:
        """Spellings of tokens that a text of a user must not become, by the template that writes
        its prompts: special ones, ends of sequences, `<|...|>`, and tags of the template."""
        found = set(self.named_tokens.values())
        for token_id, token in self.backend.get_added_tokens_decoder().items():
            text = token.content
            is_special = token.special or token_id in self.eos_token_ids
            if is_special or _CONTROL.fullmatch(text) or (is_markup(token) and text in source):
                found.add(text)
        return frozenset(text for text in found if len(text.strip()) > 1)

    @cached_property
    def _bound(self) -> TokenBound | None:
        return token_bound(self.backend)

    @cached_property
    def all_pieces(self) -> PieceTable | None:
        """Bytes per token, special tokens as their text."""
        tables = self.tables(frozenset())
        return None if tables is None else tables[0]

    def tables(self, hidden: frozenset[int]) -> tuple[PieceTable, TextTable] | None:
        """Bytes and text per token, `hidden` ones as nothing; None where tokens have no bytes of
        their own."""
        if self._coding is None:
            return None
        found = self._tables.get(hidden)
        if found is None:
            pieces = PieceTable(self.id_to_token, self._coding, hidden)
            found = self._tables.setdefault(hidden, (pieces, TextTable(pieces)))
        return found

    def _cannot_decode(self, reason: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"token ids must be integers from 0 to {self.vocab_size - 1} that the model's tokenizer"
            f" can decode ({reason})",
            param="tokens",
        )

    def _named_id(self, name: str) -> int | None:
        token = self.named_tokens.get(name)
        with library_errors(unusable):
            return None if token is None else self.backend.token_to_id(token)

    def _missing_sequence_marks(self) -> tuple[list[int], list[int]]:
        """BOS and EOS that the config asks for and tokenizer.json's post-processor does not add."""
        with library_errors(unusable):
            marks = self.backend.encode("").ids
        prefix = self._missing("bos", self.bos_token_id, marks)
        return prefix, self._missing("eos", self.eos_token_id, marks)

    def _missing(self, kind: str, token: int | None, marks: list[int]) -> list[int]:
        is_wanted = self.config.get(f"add_{kind}_token") is True
        return [token] if is_wanted and token is not None and token not in marks else []


def _load_backend(folder: Path) -> tokenizers.Tokenizer:
    data = read_bytes(folder / TOKENIZER_NAME, MAX_TOKENIZER_BYTES)
    if data is None:
        what = "no tokenizer.json" if folder.is_dir() else "no such folder"
        raise ModelNotFoundError(
            f"no tokenizer for {folder}: {what}; point to a folder with tokenizer.json, or convert "
            "the model's tokenizer once with transformers' AutoTokenizer(...).save_pretrained"
        )
    path = folder / TOKENIZER_NAME
    with library_errors(
        lambda reason: ConfigError(
            f"{path} is not a tokenizer that can be loaded ({reason}); download the file again"
        )
    ):
        return tokenizers.Tokenizer.from_buffer(data)


def _cannot_encode(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"the model's tokenizer cannot encode this text ({reason})")


def _generation_eos_ids(folder: Path) -> tuple[int, ...]:
    """End-of-sequence ids of generation_config.json, or of config.json where there is none."""
    for name in ("generation_config.json", "config.json"):
        value = read_json_object(folder / name).get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(type(i) is int and 0 <= i <= MAX_ID for i in ids):
            raise ConfigError(
                f"eos_token_id in {folder / name} must be one id or a list of ids up to {MAX_ID},"
                f" it is {shown(value)}"
            )
        return tuple(ids)
    return ()
