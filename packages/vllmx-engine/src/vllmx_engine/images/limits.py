"""Bounds on a request's images or audio, and their allowed sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from vllmx_core.config import EngineConfig
from vllmx_core.errors import ConfigError, InvalidRequestError, shown
from vllmx_core.records import Record

from vllmx_engine.wire.images import PLURAL, SINGULAR, Kind

_PORTS = frozenset({80, 443})
"""The ports of a host named without a port."""


class ImageLimits(Record):
    """Bounds that are checked before anything is decoded."""

    max_images: int = 16
    """The most images or audio files of one request."""
    max_bytes: int = 20 << 20
    """The largest one, in bytes as it is stored."""
    max_pixels: int = 32 << 20
    """The largest image, in pixels once it is decoded."""
    max_seconds: float = 3600
    """The longest audio or video."""
    kind: Kind = "image"
    hosts: Mapping[str, frozenset[int]] = {}
    """Hosts that http(s) URLs may name, each with its ports."""
    folder: Path | None = None
    """Files below it may be named by file URLs."""

    @classmethod
    def of(cls, config: EngineConfig, kind: Kind = "image") -> ImageLimits:
        """Raises ConfigError for a bad folder or host."""
        folder = None
        if config.allowed_local_media_path is not None:
            folder = Path(config.allowed_local_media_path).resolve()
            if not folder.is_dir():
                raise ConfigError(
                    f"--allowed-local-media-path {config.allowed_local_media_path} is not a folder:"
                    " name one that holds the files",
                    param="allowed_local_media_path",
                )
        return cls(
            config.limit_images,
            getattr(config, f"max_{kind}_bytes"),
            config.max_image_pixels,
            config.max_video_seconds if kind == "video" else config.max_audio_seconds,
            kind,
            allowed_hosts(config.allowed_media_domains),
            folder,
        )

    def check_count(self, count: int) -> None:
        """Raises InvalidRequestError for more images than a request may bring."""
        if count > self.max_images:
            raise InvalidRequestError(
                f"the request has {count} {PLURAL[self.kind]}, at most {self.max_images} are taken:"
                " leave some out, or raise --limit-images",
                param="messages",
            )

    def check_bytes(self, size: int, where: str) -> None:
        """Raises InvalidRequestError for one of more bytes than allowed."""
        if size > self.max_bytes:
            raise InvalidRequestError(
                f"{where} is {SINGULAR[self.kind]} of more than {self.max_bytes} bytes: send a"
                f" smaller one, or raise --max-{self.kind}-bytes",
                param=where,
            )


def allowed_hosts(names: Sequence[str]) -> dict[str, frozenset[int]]:
    """Ports that files may be fetched from, by host. `names`: HOST or HOST:PORT. Raises
    ConfigError."""
    hosts: dict[str, frozenset[int]] = {}
    for name in names:
        is_bare_ipv6 = name.count(":") > 1 and not name.startswith("[")
        try:
            parts = urlsplit(f"//[{name}]" if is_bare_ipv6 else f"//{name}")
            host, port = (parts.hostname or "").rstrip("."), parts.port
        except ValueError:
            host, port = "", None
        if not host or port == 0 or parts.path or parts.query or parts.fragment or parts.username:
            raise ConfigError(
                f"--allowed-media-domains {shown(name)} is not a host: give HOST or HOST:PORT, such"
                " as images.example.org:8443",
                param="allowed_media_domains",
            )
        hosts[host] = hosts.get(host, frozenset()) | (_PORTS if port is None else {port})
    return hosts
