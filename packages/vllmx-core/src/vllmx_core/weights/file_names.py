"""Names of a model's weight files: shards of GGUF models (NAME-00001-of-00003.gguf and so on),
projectors for images, and the safetensors files of a folder."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllmx_core.errors import WeightFormatError, shown
from vllmx_core.system.json_files import MAX_INDEX_BYTES, read_json_object

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
MAX_SHARDS = 4096
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
FILE_SHARE = 0.8
"""Share of the free memory that a GGUF file may take if it is chosen by size."""
_TYPES = ("bf16", "f16", "f32", "q8_0")


def shard_names(name: str) -> list[str]:
    """Names of all files of the set that `name` belongs to; only itself if it is not a shard."""
    match = _SHARD.fullmatch(name)
    if match is None or not 1 <= int(match["count"]) <= MAX_SHARDS:
        return [name]
    count = int(match["count"])
    return [f"{match['stem']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


def first_shard(name: str) -> str:
    """The first file of a set, which represents it."""
    return shard_names(name)[0]


def projector_among(names: Sequence[str]) -> str | None:
    """The vision tower among file names, if all are of one model: in bfloat16, in which all are
    published, otherwise in the next of the types. None: there is none, or a choice."""
    towers = sorted(name for name in names if name.lower().startswith("mmproj"))
    if len(towers) == 1:
        return towers[0]
    stem: tuple[str, ...] = ()
    typed: dict[str, str] = {}
    for name in towers:
        words = re.split(r"[-.]", name.lower())
        kind = next((one for one in _TYPES if one in words), None)
        rest = tuple(word for word in words if word != kind)
        if kind is None or (typed and rest != stem) or kind in typed:
            return None
        stem, typed[kind] = rest, name
    return next((typed[kind] for kind in _TYPES if kind in typed), None)


def weight_files(path: Path) -> list[Path]:
    """The files that a model's weights are read from, which may be missing: all shards of a GGUF
    file, or those of a folder. Raises WeightFormatError for a bad index."""
    if not path.is_dir():
        return [path.with_name(name) for name in shard_names(path.name)]
    if names := named_files(path)[0]:
        return [path / name for name in names]
    return sorted(each for kind in ("*.safetensors", "*.gguf") for each in path.glob(kind))


def named_files(folder: Path) -> tuple[list[str], dict[str, str]]:
    """(names of files, the weight map of an index that names them)."""
    names = _plain_names(folder)
    index = None
    if names != [SINGLE_NAME]:
        index = read_json_object(folder / INDEX_NAME, MAX_INDEX_BYTES)
    if index is None:
        return names, {}
    weight_map = _weight_map(folder / INDEX_NAME, index)
    return sorted(set(weight_map.values())), weight_map


def _plain_names(folder: Path) -> list[str]:
    """Lists the files in the order of transformers: model.safetensors first. Ignores Mistral's
    second copy of the weights, consolidated*.safetensors."""
    if (folder / SINGLE_NAME).is_file():
        return [SINGLE_NAME]
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    return [name for name in found if not name.startswith("consolidated")]


def _weight_map(path: Path, index: Mapping[str, Any]) -> dict[str, str]:
    """Tensor name -> file name; a file name must stay inside the folder."""
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightFormatError(f"{path} has no weight_map: download the file again")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(".safetensors") or _leaves(file):
            raise WeightFormatError(
                f"{path} places tensor {shown(name)} in {shown(file)}, which is not a"
                " *.safetensors file of the same folder: download the file again"
            )
    return weight_map


def _leaves(name: str) -> bool:
    return any(character in name for character in "/\\\0") or name.startswith("..")


def is_model_file(name: str) -> bool:
    """True if a GGUF file's name is that of a model, not of a vision tower or an importance
    matrix."""
    own = name.rpartition("/")[2].lower()
    return own.endswith(".gguf") and not own.startswith(("mmproj", "imatrix"))


def largest_that_fits(sizes: Mapping[str, int], free_bytes: float) -> str | None:
    """The largest of several GGUF models that leaves a fifth of the memory for the KV cache and
    buffers: its first file. None: none fits.

    Args:
        sizes: bytes of each file by its name; names of other files are ignored.
    """
    totals: dict[str, int] = {}
    for name, size in sizes.items():
        if is_model_file(name):
            first = first_shard(name)
            totals[first] = totals.get(first, 0) + size
    fit = {name: size for name, size in totals.items() if size <= FILE_SHARE * free_bytes}
    return max(fit, key=lambda name: (fit[name], name), default=None)
