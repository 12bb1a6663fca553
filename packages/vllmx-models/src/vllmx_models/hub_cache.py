"""Models in the cache of the Hugging Face hub, read without its client, whose import would delay a
server's start."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from vllmx_core.config_values import nearest
from vllmx_core.errors import ModelNotFoundError, VllmxError, WeightFormatError
from vllmx_core.records import Record
from vllmx_core.system.files import open_model_file
from vllmx_core.weights.file_names import is_model_file, named_files, shard_names

PREFIX = "models--"


class CachedModel(Record):
    """One model of a snapshot: its safetensors, or one of its GGUF files."""

    name: str
    """The name that commands take: org/repo, or org/repo:file.gguf."""
    repo: str
    commit: str
    path: Path
    """The snapshot's folder, or the (first) GGUF file."""
    num_bytes: int
    """Bytes of the snapshot's files without GGUF, or of the GGUF file and its shards."""
    modified_s: float
    """Time of the last change of a file, in seconds since 1970."""
    fault: str = ""
    """Why it cannot be loaded; empty: all files are there."""
    is_current: bool = True
    """False if another snapshot of the repository is loaded by the same name."""


def cache_folder() -> Path:
    """The folder that the hub's client uses, by the same variables."""
    home = os.environ.get("HF_HOME")
    if not home:
        home = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    names = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")
    given = next(filter(None, map(os.environ.get, names)), None)
    return Path(os.path.expandvars(os.path.expanduser(given or os.path.join(home, "hub"))))


def repo_folder(repo: str) -> Path:
    """The place of a repository in the cache, which may not exist."""
    return cache_folder() / (PREFIX + repo.replace("/", "--"))


def cached_models(repo: str | None = None) -> list[CachedModel]:
    """All models in the cache, or those of one repository, by name; current snapshots first."""
    if repo is not None:
        folders = [repo_folder(repo)]
    else:
        folders = sorted(cache_folder().glob(f"{PREFIX}*"))
    found = [model for folder in folders for model in _models_of(folder)]
    return sorted(found, key=lambda model: (model.name, not model.is_current))


def find_cached(name: str) -> CachedModel:
    """A model of the cache by its name; a repository with a single GGUF file needs no file name.
    Raises ModelNotFoundError, which names the nearest."""
    found = matching(name)
    names = {model.name for model in found}
    if len(names) == 1:
        return found[0]
    if names:
        listed = ", ".join(sorted(names))
        raise ModelNotFoundError(f"{name!r} is one of several files: {listed}; name one of them")
    known = {model.name for model in cached_models()}
    hint = nearest(name, known) or ": `vllmx list` shows what it has"
    raise ModelNotFoundError(f"the cache {cache_folder()} has no model {name!r}{hint}")


def matching(name: str) -> list[CachedModel]:
    """The models that a name means: exactly that one, or else all GGUF files of the repository
    whose names have the tag behind the colon, such as Q4_K_M, if there is one."""
    repo, _, tag = name.partition(":")
    found = cached_models(repo)
    exact = [model for model in found if model.name == name]
    files = [model for model in found if ":" in model.name]
    return exact or [
        model for model in files if tag.lower() in model.name.partition(":")[2].lower()
    ]


def _models_of(folder: Path) -> list[CachedModel]:
    repo = folder.name.removeprefix(PREFIX).replace("--", "/", 1)
    try:
        snapshots = [each for each in (folder / "snapshots").iterdir() if each.is_dir()]
        snapshots.sort(key=lambda each: each.stat().st_mtime, reverse=True)
    except OSError:
        return []
    with suppress(OSError):
        main = (folder / "refs" / "main").read_text().strip()
        snapshots.sort(key=lambda each: each.name != main)
    found = [model for each in snapshots for model in _models_in(repo, each)]
    current: dict[str, CachedModel] = {}
    for model in found:
        if model.name not in current or (current[model.name].fault and not model.fault):
            current[model.name] = model
    return [replace(model, is_current=current[model.name] is model) for model in found]


def _models_in(repo: str, snapshot: Path) -> Iterator[CachedModel]:
    """The safetensors of a snapshot, then each GGUF file, a set of shards once."""
    files = {
        str(path.relative_to(snapshot)): path.stat()
        for path in sorted(snapshot.rglob("*"))
        if path.is_file()
    }
    models = [name for name in files if is_model_file(name)]
    rest = {name: about for name, about in files.items() if not name.endswith(".gguf")}
    if "config.json" in rest or (rest and not models):
        fault = _fault_of_folder(snapshot)
        if not fault or not models:
            yield CachedModel(
                name=repo,
                repo=repo,
                commit=snapshot.name,
                path=snapshot,
                num_bytes=sum(about.st_size for about in rest.values()),
                modified_s=max(about.st_mtime for about in rest.values()),
                fault=fault,
            )
    for first in sorted({shard_names(name)[0] for name in models}):
        shards = shard_names(first)
        there = [files[name] for name in shards if name in files]
        yield CachedModel(
            name=f"{repo}:{first}",
            repo=repo,
            commit=snapshot.name,
            path=snapshot / first,
            num_bytes=sum(about.st_size for about in there),
            modified_s=max(about.st_mtime for about in there),
            fault=_fault_of_files(snapshot, shards),
        )


def _fault_of_folder(snapshot: Path) -> str:
    if not (snapshot / "config.json").is_file():
        return "config.json is missing"
    try:
        names, _ = named_files(snapshot)
    except VllmxError as error:
        return error.message
    return _fault_of_files(snapshot, names) if names else "the weights are missing"


def _fault_of_files(snapshot: Path, names: list[str]) -> str:
    for name in names:
        try:
            open_model_file(snapshot / name).close()
        except WeightFormatError as error:
            return error.message
        except OSError:
            return f"{name} is missing"
    return ""


def remove(model: CachedModel) -> int:
    """Deletes a model from the cache with all snapshots of its repository, or one GGUF file in
    all of them. Returns the bytes that were freed. Raises OSError."""
    folder = repo_folder(model.repo)
    before = _bytes_below(folder)
    file = model.name.partition(":")[2]
    if file:
        for name in shard_names(file):
            for path in folder.glob("snapshots/*"):
                (path / name).unlink(missing_ok=True)
        _drop_unused_blobs(folder)
    if not file or not cached_models(model.repo):
        shutil.rmtree(folder)
        shutil.rmtree(folder.parent / ".locks" / folder.name, ignore_errors=True)
        return before
    return before - _bytes_below(folder)


def _drop_unused_blobs(folder: Path) -> None:
    used = {path.resolve() for path in folder.glob("snapshots/**/*") if path.is_symlink()}
    for blob in folder.glob("blobs/*"):
        if blob.resolve() not in used and not blob.name.endswith(".incomplete"):
            blob.unlink()


def _bytes_below(folder: Path) -> int:
    """Bytes of files; those behind links are counted where they lie."""
    files = (path.lstat() for path in folder.rglob("*") if not path.is_dir())
    return sum(about.st_size for about in files)
