"""The weight format "safetensors": a folder with config.json and one or more *.safetensors files,
or a single such file next to its config.json."""

from __future__ import annotations

import difflib
import logging
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path

from vllmx_core.errors import ModelNotFoundError, WeightFormatError, listing
from vllmx_core.plugins.checkpoint import Checkpoint
from vllmx_core.system.json_files import read_json_object
from vllmx_core.weights.file_names import INDEX_NAME, named_files
from vllmx_core.weights.files import KeptReads
from vllmx_core.weights.part import DENSE, StoredPart

from vllmx_models.formats.mistral_folder import WEIGHTS, MistralNames, read_params
from vllmx_models.formats.safetensors_file import SafetensorsFile
from vllmx_models.quantization.detect import find_quantization

logger = logging.getLogger("vllmx.models")
_CONFIG_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class SafetensorsSource:
    """A `WeightSource` over one or several files; every part is dense. `weight_map` is the index:
    tensor name -> file name. A tensor is read from the file that has it; the index decides
    between two. Raises WeightFormatError for a tensor in two files if the index names neither."""

    def __init__(
        self,
        files: Collection[SafetensorsFile],
        folder: Path,
        weight_map: Mapping[str, str] | None = None,
    ) -> None:
        self._files = tuple(files)
        self._folder = folder
        self._map = weight_map or {}
        self._owner: dict[str, SafetensorsFile] = {}
        twice = []
        for file in self._files:
            for name in file.entries:
                before = self._owner.get(name)
                if before is not None:
                    twice.append(name)
                    self._owner[name] = self._listed(name, before, file)
                else:
                    self._owner[name] = file
        self._warn("are in two files, the one of the index is taken", twice)
        self._warn(
            "are in another file than the index says, they are taken where they are",
            [
                name
                for name, listed in self._map.items()
                if name in self._owner and self._owner[name].path.name != listed
            ],
        )
        self._warn(
            "are in the index and in no file, they are left out",
            [name for name in self._map if name not in self._owner],
        )

    def _listed(self, name: str, *files: SafetensorsFile) -> SafetensorsFile:
        """The file of two that the index names for a tensor."""
        listed = self._map.get(name)
        for file in files:
            if file.path.name == listed:
                return file
        raise WeightFormatError(
            f"tensor {name!r} is in both {files[0].path} and {files[1].path}:"
            " remove the file that does not belong to the model"
        )

    def _warn(self, what: str, names: Collection[str]) -> None:
        if names:
            logger.warning("%s: tensors that %s: %s", self._folder, what, listing(names, 3))

    def names(self) -> Collection[str]:
        return self._owner.keys()

    def part(self, name: str) -> StoredPart:
        """Raises WeightFormatError, with the nearest names, when `name` is missing."""
        file = self._owner.get(name)
        if file is None:
            near = difflib.get_close_matches(name, self._owner, n=3)
            hint = f"nearest: {', '.join(near)}" if near else f"it has {len(self._owner)} others"
            if name in self._map:
                hint = f"{INDEX_NAME} places it in {self._map[name]}, which lacks it"
            raise WeightFormatError(
                f"{self._folder} has no tensor {name!r} ({hint}): the weights do not belong to"
                " this config.json or are incomplete, download the model again"
            )
        tensor = file.tensor(name)
        return StoredPart(name, tensor.shape, DENSE, {"weight": tensor})

    def close(self) -> None:
        """Closes the files; parts must not be used any more."""
        for file in self._files:
            file.close()

    def main_dtype(self) -> str | None:
        """The float dtype that most tensors have, in config.json's words."""
        found = Counter(file.entries[name][0] for name, file in self._owner.items())
        floats = [dtype for dtype, _ in found.most_common() if dtype in _CONFIG_DTYPES]
        return _CONFIG_DTYPES[floats[0]] if floats else None


DERIVED_KEYS = (
    "modules",
    "score_rows",
    "score_tokens",
    "scores_pairs",
    "text_limit",
    "text_settings",
)
"""Keys that vllmx derives from a folder's other files (`vllmx_core.text_modules`) or from a GGUF
file; config.json may not set them."""


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a folder, or one file of it.

    Raises:
        ModelNotFoundError: config.json or the weights are missing.
        WeightFormatError: a file is damaged, truncated, missing from its index or too large.
    """
    folder = path.parent if path.is_file() else path
    config = read_json_object(folder / "config.json")
    if config is None and (params := read_params(folder)) is not None:
        source = open_files(sorted(one.name for one in folder.glob(WEIGHTS)), folder, {})
        return Checkpoint(folder, params | {"dtype": source.main_dtype()}, MistralNames(source))
    if config is None:
        raise ModelNotFoundError(
            f"{folder} has no config.json: give the folder of a complete Hugging Face model",
            param="model",
        )
    for key in DERIVED_KEYS:
        config.pop(key, None)
    quantization = find_quantization(folder, config)
    if quantization:
        config["quantization_config"] = quantization
    generation_config = read_json_object(folder / "generation_config.json") or {}
    source = open_weights(path)
    if not config.get("dtype") and not config.get("torch_dtype"):
        config["dtype"] = source.main_dtype()
    return Checkpoint(folder, config, source, generation_config)


def open_weights(path: Path) -> SafetensorsSource:
    """The tensors of a folder or file; raises as `open_checkpoint`."""
    weight_map: dict[str, str] = {}
    if path.is_file():
        folder, names = path.parent, [path.name]
    else:
        folder = path
        names, weight_map = named_files(path)
    return open_files(names, folder, weight_map)


def open_files(
    names: Collection[str], folder: Path, weight_map: Mapping[str, str]
) -> SafetensorsSource:
    """The tensors of these files; raises as `open_checkpoint`."""
    if not names:
        raise ModelNotFoundError(f"{folder} holds no *.safetensors files", param="model")
    files: dict[str, SafetensorsFile] = {}
    kept = KeptReads()
    try:
        for name in names:
            if weight_map and not (folder / name).is_file():
                raise WeightFormatError(
                    f"{folder / name} is missing, but {INDEX_NAME} names it: download the model"
                    " again"
                )
            files[name] = SafetensorsFile(folder / name, kept)
        return SafetensorsSource(files.values(), folder, weight_map)
    except BaseException:
        for file in files.values():
            file.close()
        raise
