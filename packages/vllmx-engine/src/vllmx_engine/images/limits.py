"""What images of a request may be, and where they may come from."""

from __future__ import annotations

from pathlib import Path

from vllmx_core.config import EngineConfig
from vllmx_core.errors import ConfigError, InvalidRequestError
from vllmx_core.records import Record


class ImageLimits(Record):
    """Bounds that are checked before anything is decoded."""

    max_images: int = 16
    """How many images one request may have."""
    max_bytes: int = 20 << 20
    """The largest image, in bytes as it is stored."""
    max_pixels: int = 32 << 20
    """The largest image, in pixels once it is decoded."""
    domains: tuple[str, ...] = ()
    """Hosts that http(s) URLs may name."""
    folder: Path | None = None
    """Files below it may be named by file URLs."""

    @classmethod
    def of(cls, config: EngineConfig) -> ImageLimits:
        """Raises ConfigError for a folder that is none."""
        folder = None
        if config.allowed_local_media_path is not None:
            folder = Path(config.allowed_local_media_path).resolve()
            if not folder.is_dir():
                raise ConfigError(
                    f"--allowed-local-media-path {config.allowed_local_media_path} is no folder:"
                    " name one that holds the images",
                    param="allowed_local_media_path",
                )
        return cls(
            config.limit_images,
            config.max_image_bytes,
            config.max_image_pixels,
            tuple(name.lower().rstrip(".") for name in config.allowed_media_domains),
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
