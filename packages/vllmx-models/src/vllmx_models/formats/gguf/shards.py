"""One model in several files: NAME-00001-of-00003.gguf and so on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vllmx_core.errors import ModelNotFoundError, WeightFormatError, listing, shown
from vllmx_core.weights.file_names import first_shard, shard_names

from vllmx_models.formats.gguf.file import GGUFFile


def model_file(folder: Path) -> Path:
    """The only model in a folder, or its first shard; projectors of vision models are ignored.
    Raises ModelNotFoundError if there is none, or more than one."""
    names = sorted(path.name for path in folder.glob("*.gguf") if path.is_file())
    models = sorted({first_shard(name) for name in names if not name.startswith("mmproj")})
    if len(models) == 1:
        return folder / models[0]
    raise ModelNotFoundError(
        f"{folder} holds {len(models)} GGUF models ({listing(models, 10) or 'none'}): give one file"
        " by its path",
        param="model",
    )


def open_shards(path: Path) -> list[GGUFFile]:
    """The file and the others of its set, in order.

    Raises:
        ModelNotFoundError: the file cannot be opened.
        WeightFormatError: one is damaged or missing, or they do not belong together.
    """
    first = GGUFFile(path)
    files = [first]
    try:
        count = _number(first, "split.count", 1)
        names = shard_names(path.name)
        if count <= 1:
            return files
        if count != len(names):
            raise WeightFormatError(
                f"{path} is one of {count} files by its metadata (split.count), but its name does"
                f" not end in -00001-of-{count:05}.gguf or the like: give the files their original"
                " names"
            )
        files = [
            first if name == path.name else _open_other(path.parent / name, path) for name in names
        ]
        _check_set(files)
        return files
    except BaseException:
        for file in files:
            file.close()
        raise


def _open_other(path: Path, asked: Path) -> GGUFFile:
    if not path.is_file():
        raise WeightFormatError(
            f"{path} is missing: {asked.name} is one of several files, which must lie together;"
            " download all of them"
        )
    return GGUFFile(path)


def _check_set(files: Sequence[GGUFFile]) -> None:
    total = sum(len(file.tensors) for file in files)
    for index, file in enumerate(files):
        number, count = _number(file, "split.no", -1), _number(file, "split.count", -1)
        if (number, count) != (index, len(files)):
            raise WeightFormatError(
                f"{file.path} calls itself file {number} of {count} (counted from 0), by its name"
                f" it is {index} of {len(files)}: give the files their original names"
            )
        claimed = _number(file, "split.tensors.count", total)
        if claimed != total:
            raise WeightFormatError(
                f"{file.path} belongs to {claimed} tensors, the {len(files)} files hold {total}:"
                " they are not of one model, download them again"
            )


def _number(file: GGUFFile, key: str, default: int) -> int:
    value = file.metadata.get(key, default)
    if type(value) is not int:
        raise WeightFormatError(f"{file.path}: {key} = {shown(value)} is not an integer")
    return value
