"""Model sources: local folders and files, the Hugging Face hub, and ModelScope."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from vllmx_core.errors import CapacityError, ModelNotFoundError, WeightFormatError, excerpt
from vllmx_core.system.memory import format_bytes, free_bytes
from vllmx_core.weights.file_names import (
    FILE_SHARE,
    is_model_file,
    largest_that_fits,
    named_files,
    projector_among,
    shard_names,
)

from vllmx_models.hub_cache import cached_models

logger = logging.getLogger("vllmx.load")

# A snapshot takes only what serving needs: no copies of the weights in other formats or layouts,
# no folders of other runtimes.
ALLOW = (
    "*.json",
    "*.jinja",
    "*.txt",
    "tokenizer.model",
    "model*.safetensors",
    "gptq_model*.safetensors",  # AutoGPTQ's own name for a single file
)
IGNORE = ("original/*", "onnx/*", "openvino/*", "coreml/*", "*/model*.safetensors")
MODELSCOPE = "modelscope://"
MAX_ID_LENGTH = 128
MAX_LISTED = 20
_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_GGUF_NAME = re.compile(r"[\w.+-][\w.+ /-]{0,250}\.gguf")  # no glob characters
_QUANTISATION = re.compile(r"(?:UD-)?(?:I?Q\d\w*|TQ\d\w*|BF16|F16|F32|MXFP4\w*)", re.I)
_ACCESS_REMEDY = "set HF_TOKEN to a token that has access (https://huggingface.co/settings/tokens)"


def local_path(model: str, revision: str | None, progress: bool) -> Path | None:
    """An existing folder or file; `~` is the home folder."""
    path = os.path.expanduser(model)  # unlike pathlib it never raises
    return Path(path) if os.path.exists(path) else None


def hub_snapshot(model: str, revision: str | None, progress: bool) -> Path | None:
    """The folder of a Hugging Face model, downloaded unless the cache holds it. Honours HF_TOKEN,
    HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE; without a network the cache alone is asked.

    Raises:
        ModelNotFoundError: no such model or revision, no access, or no network and not cached.
    """
    if not is_repo_id(model):
        return None
    folder: Path | None = None
    cached = _cached_files(model) if revision is None else {}
    try:
        folder = _download(model, revision, progress, ALLOW, IGNORE)
    except ModelNotFoundError:
        if not cached:
            raise
    if folder is None or not _is_whole(folder):
        if folder is None or next(folder.glob("*.safetensors"), None) is None:
            sizes = cached or _listed_files(model, revision)
            if any(map(is_model_file, sizes)):
                file = choose_file(model, sizes, free_bytes())
                return hub_file(f"{model}:{file}", revision, progress)
        whole = _whole_snapshots(model, ALLOW)
        if whole:
            return _only_whole(model, revision, whole, f"model {model!r} lacks files in the cache")
    return folder


def choose_file(repo: str, sizes: Mapping[str, int], free: float) -> str:
    """The GGUF file of a repository that is loaded if none is named, with a line in the log if it
    has several. Raises CapacityError if all are too large.

    Args:
        sizes: bytes of each file by its name.
        free: bytes of free memory.
    """
    chosen = largest_that_fits(sizes, free)
    models = sorted({shard_names(name)[0] for name in sizes if is_model_file(name)})
    listed = ", ".join(models[:MAX_LISTED]) + (" ..." if len(models) > MAX_LISTED else "")
    if chosen is None and len(models) > 1:
        raise CapacityError(
            f"none of the GGUF files of {repo!r} fits {FILE_SHARE:.0%} of the free memory"
            f" ({format_bytes(int(free))}): name one of them, as in {repo}:{models[0]}, or free"
            f" memory; it has {listed}"
        )
    if len(models) > 1:
        logger.warning(
            "%s has %d GGUF files: %s is the largest that fits the free memory (%s); others: %s",
            repo, len(models), chosen, format_bytes(int(free)), listed,
        )  # fmt: skip
    return chosen or models[0]


def _cached_files(repo: str) -> dict[str, int]:
    """Sizes of the GGUF models of a repository that the cache has whole, by their first files."""
    found = [model for model in cached_models(repo) if ":" in model.name and not model.fault]
    return {model.name.partition(":")[2]: model.num_bytes for model in found}


def _listed_files(repo: str, revision: str | None) -> dict[str, int]:
    """Sizes of all files of a repository on the hub; empty if it cannot be reached."""
    from huggingface_hub import HfApi

    try:
        listed = HfApi().model_info(repo, revision=revision, files_metadata=True).siblings
    except Exception:  # for example offline: a better message is not worth another error
        return {}
    return {each.rfilename: each.size or 0 for each in listed or ()}


def hub_file(model: str, revision: str | None, progress: bool) -> Path | None:
    """One file of a Hugging Face model, "org/repo:folder/file.gguf" or, by the type in its name,
    "org/repo:Q4_K_M"; the first one of a set of shards. Otherwise as `hub_snapshot`."""
    repo, _, name = model.partition(":")
    if not is_repo_id(repo) or not (is_gguf_name(name) or _QUANTISATION.fullmatch(name)):
        return None
    if not name.endswith(".gguf"):
        sizes = (_cached_files(repo) if revision is None else {}) or _listed_files(repo, revision)
        sizes = {file: size for file, size in sizes.items() if name.lower() in file.lower()}
        if not any(map(is_model_file, sizes)):
            raise ModelNotFoundError(
                f"model {repo!r} has no GGUF file with {name!r} in its name, or the hub cannot be"
                " reached: name the file",
                param="model",
            )
        name = choose_file(repo, sizes, free_bytes())
    wanted = shard_names(name)
    snapshot = _download(repo, revision, progress, wanted, ())
    if snapshot is None:
        return None
    for path in wanted:
        if not (snapshot / path).is_file():
            raise ModelNotFoundError(
                f"model {repo!r} has no file {path!r} on the Hugging Face hub: check the name on"
                f" the model's page{'' if revision is None else f', at revision {revision!r}'}",
                param="model",
            )
    return snapshot / wanted[0]


def hub_tower(path: Path) -> Path | None:
    """The vision tower (mmproj*.gguf) for a GGUF file in the hub's cache, downloaded if missing.

    None if `path` is not in the cache, the hub cannot be reached, or it has no tower or several.

    Raises:
        ModelNotFoundError: it cannot be downloaded.
    """
    folder = next((each for each in path.parents if each.parent.name == "snapshots"), None)
    kind, _, repo = ("" if folder is None else folder.parent.parent.name).partition("--")
    if folder is None or kind != "models":
        return None
    from huggingface_hub import list_repo_files

    repo = repo.replace("--", "/", 1)
    try:
        files = list_repo_files(repo, revision=folder.name)
    except Exception:  # for example offline: the model still serves text
        return None
    name = projector_among([file for file in files if "/" not in file and file.endswith(".gguf")])
    if name is None:
        return None
    snapshot = _download(repo, folder.name, False, [name], ())
    return None if snapshot is None else snapshot / name


def modelscope_model(model: str, revision: str | None, progress: bool) -> Path | None:
    """A model of ModelScope, "modelscope://org/repo" or "modelscope://org/repo:file.gguf", in the
    cache of its client, which downloads it if necessary. Raises ModelNotFoundError."""
    if not model.startswith(MODELSCOPE):
        return None
    repo, _, name = model.removeprefix(MODELSCOPE).partition(":")
    if not is_repo_id(repo) or (name and not is_gguf_name(name)):
        raise ModelNotFoundError(
            f"{model!r} is not a model of ModelScope: give {MODELSCOPE}org/repo or"
            f" {MODELSCOPE}org/repo:file.gguf",
            param="model",
        )
    try:
        client: Any = import_module("modelscope")
    except ImportError:
        raise ModelNotFoundError(
            f"{model!r} needs the client of ModelScope: pip install 'vllmx[modelscope]'",
            param="model",
        ) from None
    wanted, ignored = (shard_names(name), []) if name else ([*ALLOW], [*IGNORE])
    try:
        folder = Path(
            client.snapshot_download(
                repo, revision=revision, allow_patterns=wanted, ignore_patterns=ignored
            )
        )
    except Exception as error:  # its errors have no common base
        raise ModelNotFoundError(
            f"{model!r} cannot be downloaded from ModelScope: {excerpt(str(error))}", param="model"
        ) from error
    path = folder / wanted[0] if name else folder
    if not path.exists() or (not name and not _is_whole(folder)):
        raise ModelNotFoundError(
            f"{model!r} has no such weights on ModelScope: check the name, or name a GGUF file, as"
            f" in {MODELSCOPE}org/repo:file.gguf",
            param="model",
        )
    return path


def is_repo_id(text: str) -> bool:
    """True if the text may be the id of a model on the hub."""
    return _REPO_ID.fullmatch(text) is not None and len(text) <= MAX_ID_LENGTH


def is_gguf_name(name: str) -> bool:
    """True if the name may be the path of a GGUF file in a repository."""
    return _GGUF_NAME.fullmatch(name) is not None and ".." not in name


def unreachable_model(repo: str, revision: str | None, error: Exception) -> ModelNotFoundError:
    """Makes the error for an exception of the hub's client."""
    label = repr(repo) if revision is None else f"{repo!r} at revision {revision!r}"
    return ModelNotFoundError(f"model {label} {_reason(error)}", param="model")


def _download(
    repo: str, revision: str | None, progress: bool, allow: Sequence[str], ignore: Sequence[str]
) -> Path | None:
    """Downloads matching files and returns the snapshot's folder; None for an invalid id."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
    )

    try:
        folder = snapshot_download(
            repo,
            revision=revision,
            allow_patterns=list(allow),
            ignore_patterns=list(ignore),
            tqdm_class=None if progress else _silent_bar(),
        )
    except HFValidationError:
        return None
    except Exception as error:  # the errors of its HTTP client share no base with its own
        reason = unreachable_model(repo, revision, error)
        whole = _whole_snapshots(repo, allow)
        if not whole:
            raise reason from error
        if revision in whole:  # offline the client cannot resolve a branch or tag
            return whole[revision]
        refused = isinstance(error, GatedRepoError | RepositoryNotFoundError)
        return _only_whole(repo, "main" if refused else revision, whole, reason.message)
    return Path(folder)


def _only_whole(repo: str, revision: str | None, whole: Mapping[str, Path], reason: str) -> Path:
    """The only whole snapshot of the cache, with a line in the log, if no revision was named.
    Otherwise raises ModelNotFoundError, which names the whole ones."""
    commit, folder = next(iter(whole.items()))
    if revision is None and len(whole) == 1:
        logger.warning("%s; %s is loaded at %s, its only whole snapshot", reason, repo, commit)
        return folder
    raise ModelNotFoundError(
        f"{reason}; the cache has {', '.join(whole)} of it whole: --revision {commit} loads that",
        param="model",
    )


def _whole_snapshots(repo: str, wanted: Sequence[str]) -> dict[str, Path]:
    """Folders by the commits of which the cache has a model, the newest first: all files of
    `wanted` that are not patterns, else config.json and the weights."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}" / "snapshots"
    named = [name for name in wanted if "*" not in name and name.endswith(".gguf")]
    try:
        found = [each for each in folder.iterdir() if _is_whole(each, named)]
        found.sort(key=lambda each: each.stat().st_mtime, reverse=True)
    except OSError:
        return {}
    return {each.name: each for each in found}


def _is_whole(snapshot: Path, named: Sequence[str] = ()) -> bool:
    """True if a folder has the files `named`, by default config.json and the weights."""
    if named:
        return all((snapshot / name).is_file() for name in named)
    if not (snapshot / "config.json").is_file():
        return False
    try:
        names, _ = named_files(snapshot)
    except (ModelNotFoundError, WeightFormatError):
        return False
    return bool(names) and all((snapshot / name).is_file() for name in names)


def _silent_bar() -> type[Any]:
    """A hidden progress bar: huggingface_hub's own switch is global."""
    from huggingface_hub import utils

    shown: Any = utils.tqdm  # type: ignore[attr-defined]

    class SilentBar(shown):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})

    return SilentBar


def _reason(error: Exception) -> str:
    """The cause and the remedy, without the internals of the hub's client."""
    from huggingface_hub import errors as hub

    if isinstance(error, hub.GatedRepoError):
        return (
            "is gated on the Hugging Face hub: accept its terms on the model's page, then"
            f" {_ACCESS_REMEDY}"
        )
    if isinstance(error, hub.RevisionNotFoundError):
        return "has no such revision on the Hugging Face hub: check --revision"
    if isinstance(error, hub.RepositoryNotFoundError):
        return (
            "is neither a local path nor a public model of the Hugging Face hub: check the name;"
            f" if the model is private, {_ACCESS_REMEDY}"
        )
    if isinstance(error, hub.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        return _unreachable(error.__cause__)
    return _unreachable(error)


def _unreachable(error: Exception) -> str:
    """The cause and the remedy if the hub failed and the cache has no copy."""
    from huggingface_hub import errors as hub

    remedy = "give the path of a local copy, or download it once where there is a network"
    if isinstance(error, hub.OfflineModeIsEnabled | hub.LocalEntryNotFoundError):
        return (
            "is no local path and not wholly in the Hugging Face cache, and HF_HUB_OFFLINE forbids"
            f" to download it: unset HF_HUB_OFFLINE, {remedy}"
        )
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return f"is refused by the Hugging Face hub (HTTP {status}): {_ACCESS_REMEDY}"
    if status is not None:
        return f"cannot be downloaded: the Hugging Face hub answers HTTP {status}; try again later"
    if isinstance(error, OSError) and error.errno is not None:
        return (
            f"cannot be stored in the Hugging Face cache ({error.strerror}): check HF_HOME and the"
            " free disk space"
        )
    return (
        "is no local path and not wholly in the Hugging Face cache, and the hub cannot be reached:"
        " this machine seems to be offline; check the network, HF_ENDPOINT and the proxy settings,"
        f" {remedy}"
    )
