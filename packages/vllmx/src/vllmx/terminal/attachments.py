"""Files, images and web pages that the next question of a chat brings along."""

from __future__ import annotations

import base64
import mimetypes
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from vllmx_core.errors import ConfigError
from vllmx_core.system.files import open_regular
from vllmx_core.system.memory import format_bytes

MAX_TEXT_BYTES = 4 << 20
MAX_IMAGE_BYTES = 20 << 20
_TIMEOUT_S = 30
_UNSEEN = {"script", "style", "head", "svg", "template"}


def image_part(argument: str) -> dict[str, Any]:
    """An image file as part of a message. Raises ConfigError."""
    kind = mimetypes.guess_type(argument)[0] or ""
    if not kind.startswith("image/"):
        raise ConfigError(f"{argument!r} is not the name of an image, such as photo.png")
    return _image(kind, _read(argument, MAX_IMAGE_BYTES))


def file_part(argument: str) -> dict[str, Any]:
    """A text file as part of a message. Raises ConfigError."""
    return _text(argument, _read(argument, MAX_TEXT_BYTES))


def url_part(argument: str) -> dict[str, Any]:
    """The text of a web page, or an image, as part of a message. Raises ConfigError."""
    if not argument.startswith(("http://", "https://")):
        raise ConfigError(f"give an address that begins with http:// or https://, got {argument!r}")
    import urllib.request  # 30 ms

    try:
        with urllib.request.urlopen(argument, timeout=_TIMEOUT_S) as answer:  # noqa: S310
            kind, data = answer.headers.get_content_type(), answer.read(MAX_IMAGE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ConfigError(f"{argument} cannot be fetched: {reason}") from None
    if kind.startswith("image/"):
        return _image(kind, _bounded(argument, data, MAX_IMAGE_BYTES))
    part = _text(argument, _bounded(argument, data, MAX_TEXT_BYTES))
    if kind == "text/html":
        page = _Page()
        page.feed(part["text"])
        part["text"] = "\n".join(page.lines)
    return part


def _image(kind: str, data: bytes) -> dict[str, Any]:
    url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def _text(name: str, data: bytes) -> dict[str, Any]:
    try:
        return {"type": "text", "text": f"{name}:\n{data.decode()}"}
    except UnicodeDecodeError:
        raise ConfigError(f"{name} is not UTF-8 text: /image attaches images") from None


def _read(argument: str, limit: int) -> bytes:
    if not argument:
        raise ConfigError("name a file")
    path = Path(argument).expanduser()
    try:
        with open_regular(path) as file:
            return _bounded(argument, file.read(limit + 1), limit)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None


def _bounded(name: str, data: bytes, limit: int) -> bytes:
    if len(data) > limit:
        raise ConfigError(
            f"{name} has more than {format_bytes(limit)}, the most that is attached: attach a part"
        )
    return data


class _Page(HTMLParser):
    """Gathers the visible text of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden += tag in _UNSEEN

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in _UNSEEN and self._hidden > 0

    def handle_data(self, data: str) -> None:
        if not self._hidden and data.strip():
            self.lines.append(" ".join(data.split()))
