"""Bounds on a request's images, and their allowed sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from vllmx_core.config import EngineConfig
from vllmx_core.errors import ConfigError, InvalidRequestError, shown
from vllmx_core.records import Record

_PORTS = frozenset({80, 443})
"""The ports of a host named without a port."""


class ImageLimits(Record):
    """Bounds that are checked before anything is decoded."""

    max_images: int = 16
    """The most images of one request."""
    max_bytes: int = 20 << 20
    """The largest image, in bytes as it is stored."""
    max_pixels: int = 32 << 20
    """The largest image, in pixels once it is decoded."""
    hosts: Mapping[str, frozenset[int]] = {}
    """Hosts that http(s) URLs may name, each with its ports."""
    folder: Path | None = None
    """Files below it may be named by file URLs."""

    @classmethod
    def of(cls, config: EngineConfig) -> ImageLimits:
        """Raises ConfigError for a bad folder or host."""
        folder = None
        if config.allowed_local_media_path is not None:
            folder = Path(config.allowed_local_media_path).resolve()
            if not folder.is_dir():
                raise ConfigError(
                    f"--allowed-local-media-path {config.allowed_local_media_path} is not a folder:"
                    " name one that holds the images",
                    param="allowed_local_media_path",
                )
        return cls(
            config.limit_images,
            config.max_image_bytes,
            config.max_image_pixels,
            allowed_hosts(config.allowed_media_domains),
            folder,
        )

    def check_count(self, count: int) -> None:
        """Raises InvalidRequestError for more images than a request may bring."""
        if count > self.max_images:
            raise InvalidRequestError(
                f"the request has {count} images, at most {self.max_images} are taken: leave some"
                " out, or raise --limit-images",
                param="messages",
            )

    def check_bytes(self, size: int, where: str) -> None:
        """Raises InvalidRequestError for an image of more bytes than allowed."""
        if size > self.max_bytes:
            raise InvalidRequestError(
                f"{where} is an image of more than {self.max_bytes} bytes: send a smaller one, or"
                " raise --max-image-bytes",
                param=where,
            )


def allowed_hosts(names: Sequence[str]) -> dict[str, frozenset[int]]:
    """Ports that images may be fetched from, by host. `names`: HOST or HOST:PORT. Raises
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
