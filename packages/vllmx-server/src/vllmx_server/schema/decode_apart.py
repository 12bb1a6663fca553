"""Bodies with long texts and long lists of integers, decoded in several calls.

While the library decodes no other thread of the process runs: 20 ms for 8 MB of escapes, as long
for 600,000 token ids. So long values are decoded a piece at a time, the body with *stand-ins* in
their places, texts and lists of the same length that take a fraction of the time, and the values
are put where those came out. Results and errors are those of one call.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from vllmx_server.schema.json_weight import check_escapes, parts_of

T = TypeVar("T")
_LONG_BYTES = 4 << 10
"""Shorter values are left where they are."""
_PIECE_BYTES = 128 << 10
"""Decoded in a millisecond."""
_LONGEST_ESCAPE = 12
"""The bytes of a pair of surrogates."""

_SCALARS = (str, int, float, msgspec.UnsetType, type(None))
"""The values that stay as they are; of others, such as JSON that is kept, nothing is known."""
_CONVERTED = -1
"""The place of a list that its type has made other numbers of."""

_text = msgspec.json.Decoder(str).decode
_ids = msgspec.json.Decoder(list[int]).decode
_IN_IDS = np.zeros(256, np.bool_)
_IN_IDS[list(b"0123456789-, \t\n\r")] = True
_IS_KEY = re.compile(rb"[ \t\n\r]*:")
_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB]")
_BYTE = re.compile(r"(?<=\(byte )\d+(?=\))")


def decode_apart(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """`decoder.decode(body)`. Its type may bound the lengths of texts and lists, but neither the
    numbers in a list nor what a text is made of. Raises what that call does, and
    InvalidRequestError for short texts with too many escapes."""
    stand_ins = _StandIns(body)
    for begin, end, is_text in _long_values(body):
        if is_text:
            stand_ins.add_text(begin, end)
        else:
            stand_ins.add_ids(begin, end)
    shorter = stand_ins.body()
    check_escapes(shorter)
    if not stand_ins.spans:
        return decoder.decode(body)
    try:
        result = decoder.decode(shorter)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise type(error)(stand_ins.told(str(error))) from None
    if stand_ins.restored(holder := [result]):
        return holder[0]
    return decoder.decode(body)


@dataclass(frozen=True, slots=True)
class _Span:
    """The content of a value, and what stands for it: `new_begin` is its place in the new body,
    `shown_from` the place of the first byte of the old one that still stands there, if any does."""

    begin: int
    end: int
    new_begin: int
    new_end: int
    shown_from: int


class _StandIns:
    """What stands for long values, which are added in their order. The first characters, or
    numbers, of each are drawn at random, so that no client knows them, and tell which one it is."""

    def __init__(self, body: bytes) -> None:
        self._old = body
        self._new = bytearray()
        self._values: list[str | list[int]] = []
        self._mark = secrets.token_bytes(8)
        self._text_mark = self._mark.hex()
        self._ids_mark = list(self._mark)
        self.spans: list[_Span] = []

    def add_text(self, begin: int, end: int) -> None:
        found = _decoded_text(self._old, begin, end)
        if isinstance(found, _Broken):
            self._put(begin, end, self._old[found.begin : found.end], found.begin)
        else:
            mark = f"{self._text_mark}{len(self._values):08x}".encode()
            if len(found) >= len(mark):
                self._values.append(found)
                self._put(begin, end, mark.ljust(len(found), b"x"))

    def add_ids(self, begin: int, end: int) -> None:
        found = _decoded_ids(self._old, begin, end)
        if isinstance(found, _Broken):
            self._put(begin, end, self._old[found.begin : found.end], found.begin)
            return
        mark = [*self._ids_mark, *len(self._values).to_bytes(4)]
        if len(found) >= len(mark):
            self._values.append(found)
            numbers = ",".join(map(str, mark)).encode()
            self._put(begin, end, numbers + b",0" * (len(found) - len(mark)))

    def _put(self, begin: int, end: int, content: bytes, shown_from: int = -1) -> None:
        self._new += self._old[self._end : begin]
        new_begin = len(self._new)
        self._new += content
        self.spans.append(_Span(begin, end, new_begin, len(self._new), shown_from))

    @property
    def _end(self) -> int:
        """How far the old body is in the new one."""
        return self.spans[-1].end if self.spans else 0

    def body(self) -> bytes:
        """The body with stand-ins. A value that cannot be decoded is there in part, with its
        fault."""
        return bytes(self._new) + self._old[self._end :]

    def told(self, message: str) -> str:
        """An error's message about `body` as that about the old one."""
        found = _BYTE.search(message)
        if found:
            place = self._old_place(int(found[0]))
            return f"{message[: found.start()]}{place}{message[found.end() :]}"
        at = message.find(self._text_mark)
        if at < 0:
            return message
        value = self._values[int(message[at + 16 : at + 24], 16)]  # as its `repr`
        return f"{message[: at - 1]}{value!r}{message[at + len(value) + 1 :]}"

    def _old_place(self, place: int) -> int:
        for span in reversed(self.spans):
            is_broken = span.shown_from >= 0
            if place >= span.new_end + is_broken:  # which is told of behind it
                return place - span.new_end + span.end
            if place >= span.new_begin:
                return place - span.new_begin + span.shown_from
        return place

    def restored(self, holder: list[Any]) -> bool:
        """Puts the values into what was decoded; some are nowhere, where a member is given twice.
        False: that is no way to come to what one call decodes."""
        if any(span.shown_from >= 0 for span in self.spans):
            return False
        containers: list[Any] = [holder]
        while containers:
            container = containers.pop()
            for key, item in _members(container):
                index = self._index(item)
                if index is None:
                    if isinstance(item, dict | list | msgspec.Struct):
                        containers.append(item)
                    elif not isinstance(item, _SCALARS):
                        return False
                elif index == _CONVERTED:
                    return False
                elif isinstance(container, msgspec.Struct):
                    msgspec.structs.force_setattr(container, key, self._values[index])
                else:
                    container[key] = self._values[index]
        return True

    def _index(self, item: Any) -> int | None:
        """The value that this one stands for."""
        if isinstance(item, str):
            is_stand_in = item.startswith(self._text_mark)
            return int(item[16:24], 16) if is_stand_in else None
        if isinstance(item, list) and item[:8] == self._ids_mark:
            return int.from_bytes(item[8:12]) if type(item[0]) is int else _CONVERTED
        return None


@dataclass(frozen=True, slots=True)
class _Broken:
    """A part of a value that fails as the whole does, at its first piece that is at fault."""

    begin: int
    end: int


def _decoded_text(body: bytes, begin: int, end: int) -> str | _Broken:
    pieces, broken = [], None
    while begin < end:
        stop = _between_characters(body, begin, begin + _PIECE_BYTES, end)
        try:
            pieces.append(_text(b'"%b"' % body[begin:stop]))
        except msgspec.DecodeError:
            return _Broken(begin, end)
        except UnicodeDecodeError:  # found when the escapes of the whole text are sound
            broken = broken or _Broken(begin, stop)
        begin = stop
    return broken or "".join(pieces)


def _between_characters(body: bytes, begin: int, place: int, end: int) -> int:
    """The next place, at `place` or before, that is inside of no escape or character of the text
    from `begin` to `end`."""
    if place >= end:
        return end
    for found in range(place, place - _LONGEST_ESCAPE - 1, -1):
        if body[found] & 0xC0 != 0x80 and _escape_end(body, begin, found) <= found:
            return found
    return place  # no UTF-8


def _escape_end(body: bytes, begin: int, place: int) -> int:
    """The end of the last escape that begins before `place`."""
    slash = body.rfind(b"\\", max(begin, place - 6), place)
    if slash < 0:
        return begin
    run = body[begin : slash + 1]
    if (len(run) - len(run.rstrip(b"\\"))) % 2 == 0:  # the last half of an escaped backslash
        return slash + 1
    if body[slash + 1] != ord("u"):
        return slash + 2
    return slash + (_LONGEST_ESCAPE if _HIGH_SURROGATE.match(body, slash) else 6)


def _decoded_ids(body: bytes, begin: int, end: int) -> list[int] | _Broken:
    found: list[int] = []
    before = begin
    while True:
        stop = body.rfind(b",", begin, begin + _PIECE_BYTES) if end - begin > _PIECE_BYTES else end
        if stop < 0:
            stop = body.find(b",", begin, end)
        stop = end if stop < 0 else stop
        try:
            piece = _ids(b"[%b]" % body[begin:stop])
        except msgspec.DecodeError:
            return _Broken(begin, end)
        if not piece:
            return _Broken(before, end)
        found += piece
        if stop == end:
            return found
        before, begin = begin, stop + 1


def _long_values(body: bytes) -> Iterator[tuple[int, int, bool]]:
    """The content of each long text and list of integers, in order: (begin, end, is a text)."""
    in_strings, in_ids = _Runs(), _Runs()
    for part in parts_of(body):
        in_strings.add(part.begin, part.inside)
        outside = ~part.inside
        in_ids.add(part.begin, _IN_IDS[part.text] & outside if outside.any() else outside)
    texts = [
        (begin + 1, end, True)
        for begin, end in in_strings.longer_than(_LONG_BYTES)
        if not _IS_KEY.match(body, end + 1)
    ]
    ids = [
        (begin, end, False)
        for begin, end in in_ids.longer_than(_LONG_BYTES)
        if body[begin - 1 : begin] == b"[" and body[end : end + 1] == b"]"
    ]
    yield from sorted(texts + ids)


class _Runs:
    """Runs of true values, in parts of them that are added in order."""

    def __init__(self) -> None:
        self._changes: list[NDArray[np.intp]] = []
        self._last = False

    def add(self, begin: int, values: NDArray[np.bool_]) -> None:
        if values.all() if self._last else not values.any():
            return
        before = np.concatenate(([self._last], values[:-1]))
        self._changes.append(np.flatnonzero(values != before) + begin)
        self._last = bool(values[-1])

    def longer_than(self, length: int) -> list[tuple[int, int]]:
        """(begin, end) of each that has ended."""
        changes = np.concatenate([np.zeros(0, np.intp), *self._changes])
        begins, ends = changes[: len(changes) // 2 * 2].reshape(-1, 2).T
        chosen = ends - begins > length
        return list(zip(begins[chosen].tolist(), ends[chosen].tolist(), strict=True))


def _members(container: Any) -> list[tuple[Any, Any]]:
    """What is in a container, each with its index, key or field."""
    if isinstance(container, list):
        return list(enumerate(container))
    if isinstance(container, dict):
        return list(container.items())
    return [(name, getattr(container, name)) for name in container.__struct_fields__]
