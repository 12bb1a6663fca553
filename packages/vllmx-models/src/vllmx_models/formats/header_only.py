"""Models of which only the header is available: config.json without weights, or the metadata on the
Hugging Face hub."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllmx_core.errors import (
    ModelNotFoundError,
    UnsupportedModelError,
    VllmxError,
    WeightFormatError,
)
from vllmx_core.model import Model
from vllmx_core.plugins.checkpoint import (
    Checkpoint,
    model_sources,
    open_checkpoint,
    text_checkpoint,
)
from vllmx_core.plugins.registry import Registry
from vllmx_core.system.json_files import read_json_object
from vllmx_core.weights.file_names import shard_names
from vllmx_core.weights.part import WeightPart

from vllmx_models.formats.gguf.file import GGUFFile
from vllmx_models.quantization.detect import find_quantization
from vllmx_models.sources import is_gguf_name, is_repo_id, unreachable_model

CONFIG = "config.json"
FIRST_BYTES = 4 << 20
"""Bytes of a GGUF file on the hub that are read first, then four times as many until the header
ends."""
MOST_BYTES = 256 << 20
"""The largest header; the longest vocabularies take 20 MB."""
HUB = ("Hugging Face hub", "file on the hub", "ModelScope")
"""The model sources that would download a model."""


@dataclass(frozen=True, slots=True)
class Header:
    """A model's config and, where known, the sizes of its weights."""

    checkpoint: Checkpoint
    """The checkpoint, with names and perhaps shapes of weights, but no values."""
    has_shapes: bool
    """True if `checkpoint.weights.part` knows how each tensor is stored."""
    stored_bytes: int | None = None
    """The bytes of all weight files, where that is known."""


class NamedWeights:
    """A `WeightSource` that only has the names of the tensors that an architecture reads."""

    def __init__(self, model: Model | None = None) -> None:
        specs = () if model is None else model.weights()
        self._names = {part.name for spec in specs for part in spec.parts}

    def names(self) -> Collection[str]:
        """Names of tensors that the architecture asks for first."""
        return self._names

    def part(self, name: str) -> WeightPart:
        """Raises WeightFormatError always."""
        raise WeightFormatError(f"tensor {name!r} cannot be read: no weights are at hand")

    def close(self) -> None:
        """Nothing was opened."""


@contextmanager
def opened_header(registry: Registry, model: str, revision: str | None = None) -> Iterator[Header]:
    """The header of a folder or file, of a config.json alone, or of a model on the hub, without
    downloading the rest. Raises ModelNotFoundError, UnsupportedModelError and WeightFormatError as
    loading does."""
    path = _path_at_hand(registry, model, revision)
    with tempfile.TemporaryDirectory(prefix="vllmx-header-") as folder:
        header = (
            _hub_header(registry, model, revision, Path(folder))
            if path is None
            else _header_at(registry, path)
        )
        try:
            yield replace(header, checkpoint=text_checkpoint(registry, header.checkpoint))
        finally:
            header.checkpoint.weights.close()


def _header_at(registry: Registry, path: Path) -> Header:
    """The header of a local model."""
    if _is_config_alone(path):
        config = path / CONFIG if path.is_dir() else path
        return Header(_config_alone(config), has_shapes=False)
    return Header(open_checkpoint(registry, path), has_shapes=True)


def _hub_header(registry: Registry, model: str, revision: str | None, folder: Path) -> Header:
    """The header of a model on the hub or, if the hub cannot be reached, of an earlier download.
    `folder` holds the beginnings of its files."""
    repo, _, name = model.partition(":")
    if not is_repo_id(repo) or (name and not is_gguf_name(name)):
        raise ModelNotFoundError(
            f"model {model!r} was not found: give a folder, a config.json, a GGUF file, or a"
            " Hugging Face id such as Qwen/Qwen3-0.6B or org/repo:file.gguf",
            param="model",
        )
    try:
        if name:
            first = _hub_gguf(repo, name, revision, folder)
            return Header(open_checkpoint(registry, first), has_shapes=True)
        return _hub_config(repo, revision)
    except ModelNotFoundError:
        path = _downloaded(repo, name, revision)
        if path is None:
            raise
        return _header_at(registry, path)


def _downloaded(repo: str, name: str, revision: str | None) -> Path | None:
    """The folder of a model in the hub's cache, or its file of this name."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(repo, revision=revision, local_files_only=True))
    except Exception:  # not in the cache, which has many errors
        return None
    path = folder / (name or "config.json")
    if not path.is_file():
        return None
    return path if name else folder


def _path_at_hand(registry: Registry, model: str, revision: str | None) -> Path | None:
    """The folder or file of a local model: a path, or in a package such as the demo's."""
    for spec in model_sources(registry):
        if spec.name not in HUB:
            path: Path | None = spec.load()(model, revision, False)
            if path is not None:
                return path
    return None


def _is_config_alone(path: Path) -> bool:
    if path.is_file():
        return path.suffix == ".json"
    endings = ("*.safetensors", "*.gguf")
    weights = any(next(path.glob(pattern), None) for pattern in endings)
    return (path / CONFIG).is_file() and not weights


def _config_alone(path: Path) -> Checkpoint:
    """A config of any name. Other files of its folder are read only if it is config.json."""
    config = read_json_object(path)
    folder = path.parent
    if config is None:
        raise ModelNotFoundError(f"{path} does not exist", param="model")
    if not isinstance(config.get("architectures"), list) and "model_type" not in config:
        raise UnsupportedModelError(
            f"{path} is not a model's config: it has neither architectures nor model_type; give a"
            " config.json, under whatever name",
            param="model",
        )
    quantization = find_quantization(folder if path.name == CONFIG else None, config)
    if quantization:
        config["quantization_config"] = quantization
    return Checkpoint(folder, config, NamedWeights())


def _hub_config(repo: str, revision: str | None) -> Header:
    """Reads config.json and the size of the weights in its repository."""
    from huggingface_hub import HfApi, hf_hub_download

    try:
        path = Path(hf_hub_download(repo, "config.json", revision=revision))
        listed: Any = HfApi().model_info(repo, revision=revision, files_metadata=True).siblings
    except Exception as error:  # the HTTP client's errors have another base class
        raise unreachable_model(repo, revision, error) from error
    sizes = [
        each.size
        for each in listed or ()
        if each.rfilename.endswith(".safetensors") and "/" not in each.rfilename
    ]
    known = bool(sizes) and all(isinstance(size, int) for size in sizes)
    return Header(_config_alone(path), False, sum(sizes) if known else None)


def _hub_gguf(repo: str, name: str, revision: str | None, folder: Path) -> Path:
    """Local files of the same size as those on the hub, with only the header filled in."""
    paths = []
    for shard in shard_names(name):
        path = folder / Path(shard).name
        try:
            _fetch_header(repo, shard, revision, path)
        except VllmxError:
            raise
        except Exception as error:  # as above
            raise unreachable_model(f"{repo}:{shard}", revision, error) from error
        paths.append(path)
    return paths[0]


def _fetch_header(repo: str, name: str, revision: str | None, path: Path) -> None:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, utils

    make_headers: Any = utils.build_hf_headers  # type: ignore[attr-defined]
    session: Any = utils.get_session()  # type: ignore[attr-defined]

    about = get_hf_file_metadata(hf_hub_url(repo, name, revision=revision))
    if about.size is None:
        raise ModelNotFoundError(f"the hub does not tell the size of {repo}:{name}", param="model")
    count = FIRST_BYTES
    while True:
        count = min(count, about.size)
        headers = make_headers() | {"Range": f"bytes=0-{count - 1}"}
        answer = session.get(about.location, headers=headers)
        answer.raise_for_status()
        with path.open("wb") as file:
            file.write(answer.content[:count])
            file.truncate(about.size)
        if _is_whole(path, count):
            return
        if count == about.size or count >= MOST_BYTES:
            GGUFFile(path).close()  # says what is wrong with it
            raise WeightFormatError(
                f"the header of {repo}:{name} is longer than {MOST_BYTES} bytes"
            )
        count *= 4


def _is_whole(path: Path, count: int) -> bool:
    """True if a header ends within the first `count` bytes; the rest of the file is empty."""
    try:
        file = GGUFFile(path)
    except WeightFormatError:
        return False
    starts = [info.start for info in file.tensors.values()]
    file.close()
    return min(starts, default=0) <= count
