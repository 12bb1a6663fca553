"""Model sources: local folders and files, and the Hugging Face hub."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllmx_core.errors import ModelNotFoundError, WeightFormatError

from vllmx_models.file_names import first_shard, projector_among, shard_names, weight_files

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
MAX_ID_LENGTH = 128
MAX_LISTED = 20
_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_GGUF_NAME = re.compile(r"[\w.+-][\w.+ /-]{0,250}\.gguf")  # no glob characters
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
    folder = _download(model, revision, progress, ALLOW, IGNORE)
    if folder is not None and not _is_whole(folder):
        if next(folder.glob("*.safetensors"), None) is None:
            _refuse_choice(model, revision)
        whole = _whole_snapshots(model, ALLOW)
        if whole:
            raise ModelNotFoundError(
                f"model {model!r} lacks files in the cache's snapshot {folder.name};"
                f" {_which_loads(whole)}",
                param="model",
            )
    return folder


def _refuse_choice(repo: str, revision: str | None) -> None:
    """Raises ModelNotFoundError, with a list of files, if a model consists only of GGUF files."""
    from huggingface_hub import list_repo_files

    try:
        files = list_repo_files(repo, revision=revision)
    except Exception:  # for example offline: a better message is not worth another error
        return
    models = sorted({first_shard(name) for name in files if _is_model_file(name)})
    if models:
        listed = ", ".join(models[:MAX_LISTED]) + (" ..." if len(models) > MAX_LISTED else "")
        raise ModelNotFoundError(
            f"model {repo!r} has GGUF files and no safetensors: name one of them, as in"
            f" {repo}:{models[0]}; it has {listed}",
            param="model",
        )


def _is_model_file(name: str) -> bool:
    """True if the GGUF file is a model, not a vision tower."""
    return name.endswith(".gguf") and not name.rpartition("/")[2].startswith("mmproj")


def hub_file(model: str, revision: str | None, progress: bool) -> Path | None:
    """One file of a Hugging Face model, "org/repo:folder/file.gguf"; of a set of shards all of
    them, the first is returned. Otherwise as `hub_snapshot`."""
    repo, _, name = model.partition(":")
    if not is_repo_id(repo) or not is_gguf_name(name):
        return None
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
    from huggingface_hub.errors import HFValidationError

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
        raise ModelNotFoundError(
            f"{reason.message}; {_which_loads(whole)}", param="model"
        ) from error
    return Path(folder)


def _which_loads(whole: Mapping[str, Path]) -> str:
    return (
        f"the cache has {', '.join(whole)} of it whole: --revision {next(iter(whole))} loads that"
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
        names = weight_files(snapshot)
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
