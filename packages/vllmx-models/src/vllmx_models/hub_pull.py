"""Downloads of the Hugging Face hub, whose files and sizes are known before they begin.

Weights are fetched into the blobs of the hub's cache and continue where an earlier download broke
off, which the hub's client does not do between processes. The client then fetches the small files
and lays the snapshot.
"""

from __future__ import annotations

import glob
import hashlib
import os
import shutil
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from vllmx_core.errors import ConfigError, ModelNotFoundError, VllmxError
from vllmx_core.records import Record
from vllmx_core.system.memory import format_bytes
from vllmx_core.weights.file_names import is_model_file, projector_among, shard_names

from vllmx_models.hub_cache import cache_folder, repo_folder
from vllmx_models.sources import ALLOW, IGNORE, choose_file, is_gguf_name, is_repo_id
from vllmx_models.sources import unreachable_model as unreachable

_WEIGHTS = (".safetensors", ".gguf")
_SPARE_BYTES = 64 << 20
"""Disk space that a download leaves."""


class Pull(Record):
    """A download that can begin."""

    repo: str
    revision: str | None
    commit: str
    name: str
    """The name by which commands load the model."""
    sizes: Mapping[str, int]
    """Bytes of each file by its name."""
    missing: Sequence[str]
    """The files that the cache lacks."""
    present_bytes: int
    """Bytes of missing files that an earlier download left."""

    @property
    def missing_bytes(self) -> int:
        return sum(self.sizes[name] for name in self.missing) - self.present_bytes


def plan_pull(model: str, revision: str | None, free_bytes: float) -> Pull:
    """Asks the hub which files a model needs.

    Args:
        model: org/repo, org/repo:file.gguf, or org/repo:TAG with a part of a file's name.
        free_bytes: free memory, for which one of several GGUF files is chosen.

    Raises:
        ModelNotFoundError: no such model, revision or file, no access, or no network.
        CapacityError: no GGUF file fits the memory.
    """
    from huggingface_hub import HfApi

    repo, _, tag = model.partition(":")
    if not is_repo_id(repo) or ".." in model or "--" in repo:
        raise ModelNotFoundError(
            f"{model!r} is not a model's name: give a short name (`vllmx list --presets`), org/repo"
            " or org/repo:file.gguf",
            param="model",
        )
    try:
        about = HfApi().model_info(repo, revision=revision, files_metadata=True)
    except Exception as error:  # the HTTP client's errors have another base class
        raise unreachable(repo, revision, error) from error
    every = {each.rfilename: each.size or 0 for each in about.siblings or ()}
    every = {name: size for name, size in every.items() if ".." not in Path(name).parts}
    file, names = _wanted(repo, tag, every, free_bytes)
    sizes = {name: every[name] for name in names}
    folder, commit = repo_folder(repo), str(about.sha)
    missing = [name for name in names if not (folder / "snapshots" / commit / name).exists()]
    partial = {path.name: path.stat().st_size for path in folder.glob("blobs/*.incomplete")}
    blobs = {each.rfilename: _blob(each) for each in about.siblings or ()}
    present = sum(partial.get(f"{blobs[name]}.incomplete", 0) for name in missing)
    name = f"{repo}:{file}" if file else repo
    return Pull(repo, revision, commit, name, sizes, missing, present)


def _blob(sibling: Any) -> str | None:
    """The name of a file's blob in the cache."""
    return sibling.blob_id if sibling.lfs is None else str(sibling.lfs.sha256)


def _wanted(
    repo: str, tag: str, sizes: Mapping[str, int], free_bytes: float
) -> tuple[str, list[str]]:
    """The GGUF file to load, if any, and the names of all files that it or the model needs."""
    models = {shard_names(name)[0] for name in sizes if is_model_file(name)}
    plain = [
        name
        for name in sizes
        if any(fnmatchcase(name, pattern) for pattern in ALLOW)
        and not any(fnmatchcase(name, pattern) for pattern in IGNORE)
    ]
    if not tag and any(name.endswith(".safetensors") for name in plain):
        return "", plain
    if not models:
        raise ModelNotFoundError(
            f"model {repo!r} has neither safetensors nor GGUF files: vllmx reads these",
            param="model",
        )
    if tag not in models:
        fits = {name: sizes[name] for name in sizes if tag.lower() in name.lower()}
        if is_gguf_name(tag) or not any(map(is_model_file, fits)):
            raise ModelNotFoundError(
                f"model {repo!r} has no file {tag!r}; it has {', '.join(sorted(models))}",
                param="model",
            )
        tag = choose_file(repo, fits, free_bytes)
    shards = [name for name in shard_names(tag) if name in sizes]
    tower = projector_among([name for name in sizes if "/" not in name and "mmproj" in name])
    return tag, [*shards, *([tower] if tower else [])]


def check_disk(pull: Pull) -> None:
    """Raises ConfigError if the disk of the cache has no room for what is missing."""
    place = cache_folder()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    needed = pull.missing_bytes + _SPARE_BYTES
    if pull.missing and needed > free:
        raise ConfigError(
            f"{pull.name} needs {format_bytes(needed)} on the disk of {cache_folder()}, where"
            f" {format_bytes(free)} are free: delete models (`vllmx list`, `vllmx rm`), or set"
            " HF_HOME to a folder on another disk"
        )


def pull_files(pull: Pull) -> Path:
    """Downloads what is missing, with progress on standard error, and returns the snapshot's
    folder. Raises ModelNotFoundError; the next call goes on where this one broke off."""
    from huggingface_hub import snapshot_download

    try:
        for name in pull.missing:
            if name.endswith(_WEIGHTS):
                _fetch(pull, name)
        patterns = [glob.escape(name) for name in pull.sizes]
        return Path(snapshot_download(pull.repo, revision=pull.revision, allow_patterns=patterns))
    except VllmxError:
        raise
    except Exception as error:  # the HTTP client's errors have another base class
        reason = unreachable(pull.repo, pull.revision, error).message
        raise ModelNotFoundError(
            f"the download of {pull.name} broke off: {reason}; the same command goes on from there",
            param="model",
        ) from error


def _fetch(pull: Pull, name: str) -> None:
    """Downloads a file into the cache's blobs, from where an earlier download ended."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, utils
    from huggingface_hub.file_download import http_get

    lock: Any = utils.WeakFileLock  # type: ignore[attr-defined]
    headers: dict[str, str] = utils.build_hf_headers()  # type: ignore[attr-defined]
    url = hf_hub_url(pull.repo, name, revision=pull.commit)
    about = get_hf_file_metadata(url)
    if about.etag is None or about.size is None:
        return  # the hub's client says what is wrong
    folder = repo_folder(pull.repo)
    blob = folder / "blobs" / about.etag
    partial = blob.with_name(f"{blob.name}.incomplete")
    locks = folder.parent / ".locks" / folder.name
    for each in (blob.parent, locks):
        each.mkdir(parents=True, exist_ok=True)
    if urlsplit(about.location).netloc != urlsplit(url).netloc:
        headers.pop("authorization", None)  # the storage behind the hub must not see the token
    with lock(locks / f"{about.etag}.lock"):
        if blob.exists():
            return
        partial.touch()
        with partial.open("r+b") as file:
            if partial.stat().st_size > about.size:
                file.truncate(0)
            start = file.seek(0, os.SEEK_END)
            http_get(
                about.location,
                file,
                resume_size=start,
                headers=headers,
                expected_size=about.size,
                displayed_filename=name,
            )
        _check(pull, name, partial, about.etag)
        partial.rename(blob)


def _check(pull: Pull, name: str, partial: Path, digest: str) -> None:
    """Deletes a file whose SHA-256 is not the hub's and raises ModelNotFoundError."""
    if len(digest) != hashlib.sha256().digest_size * 2:
        return
    with partial.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != digest:
        partial.unlink()
        raise ModelNotFoundError(
            f"{name} of {pull.repo!r} arrived damaged (its SHA-256 is not the hub's): pull it"
            " again",
            param="model",
        )
