"""Adds the vision tower of a separate GGUF file ("mmproj" in llama.cpp) to a text model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vllmx_core.errors import (
    ConfigError,
    ModelNotFoundError,
    UnsupportedModelError,
    WeightFormatError,
    shown,
)
from vllmx_core.plan import F32
from vllmx_core.plugins.checkpoint import Checkpoint
from vllmx_core.plugins.registry import architecture_names
from vllmx_core.weights.file_names import projector_among

from vllmx_models.formats.gguf.blocks import weight_part
from vllmx_models.formats.gguf.file import GGUFFile
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.formats.gguf.tower_weights import TowerSource
from vllmx_models.formats.gguf.towers import FORMS, TowerForm, projector_type
from vllmx_models.sources import hub_tower
from vllmx_models.text_types import TEXT_ARCHITECTURES

logger = logging.getLogger("vllmx.models")
_LEAVE_OUT = "leave --mmproj out to serve its text"


def with_tower(checkpoint: Checkpoint, path: Path | None) -> Checkpoint:
    """Adds the tower of a file: `path`, or the only mmproj*.gguf next to the model or in its
    repository. An incompatible file is ignored with a line in the log unless it was requested.

    Raises:
        ConfigError: the file is not a tower, or belongs to another model.
        ModelNotFoundError: it cannot be opened.
        UnsupportedModelError: the tower, or one of its tensors, is not known.
        WeightFormatError: the file is damaged.
    """
    if path is not None:
        return _joined(checkpoint, path)
    forms = _forms_of(checkpoint)
    if not forms:
        return checkpoint
    try:
        path = _tower_of(checkpoint.path, any(FORMS[kind].joined is None for kind in forms))
        if path is None:
            return checkpoint
        joined = _joined(checkpoint, path)
    except (ConfigError, ModelNotFoundError, UnsupportedModelError, WeightFormatError) as error:
        logger.warning("text alone is served, images are refused: %s", error.message)
        return checkpoint
    logger.info("images are seen by the tower in %s", path)
    return joined


def _tower_of(model: Path, on_hub: bool) -> Path | None:
    """The tower's file in the folder of a model, or in its repository on the hub, which is not
    asked for models that usually have none."""
    names = [path.name for path in model.parent.glob("mmproj*.gguf")]
    chosen = projector_among(names)
    if chosen is not None:
        return model.parent / chosen
    if names:
        logger.warning(
            "text alone is served: %s has the towers %s, name one of them by --mmproj",
            model.parent,
            ", ".join(sorted(names)),
        )
        return None
    return hub_tower(model) if on_hub else None


def _forms_of(checkpoint: Checkpoint) -> list[str]:
    """Types of towers that fit the model."""
    names = set(architecture_names(checkpoint.config))
    return [kind for kind, form in FORMS.items() if names.intersection(form.architectures)]


def _joined(checkpoint: Checkpoint, path: Path) -> Checkpoint:
    if not path.is_file():
        raise ModelNotFoundError(
            f"--mmproj {path} is not a file: give the tower's GGUF file, as mmproj-F16.gguf",
            param="mmproj",
        )
    file = GGUFFile(path)
    try:
        header = _header(file)
        form = _form(checkpoint, header)
        _check_width(checkpoint, header)
        config = {**checkpoint.config, **form.config(header)}
        if form.joined is not None:
            (text,) = architecture_names(checkpoint.config)
            config["vllmx_text_type"] = TEXT_ARCHITECTURES.get(text)
            config["architectures"] = [form.joined]
        _check_deepstack(checkpoint, header, config["vision_config"])
        weights = TowerSource(checkpoint.weights, file, form.entries(header))
        return replace(
            checkpoint, config=config, weights=weights, image_processor=form.processor(header)
        )
    except BaseException:
        file.close()
        raise


def _header(file: GGUFFile) -> GGUFHeader:
    name = file.metadata.get("general.architecture")
    if name != "clip":
        raise ConfigError(
            f"--mmproj {file.path} is not a tower but a model of the GGUF architecture"
            f" {shown(name)}: give the file whose name begins with mmproj",
            param="mmproj",
        )

    def vector(tensor: str) -> F32:
        info = file.tensors[tensor]
        return weight_part(tensor, info.kind, info.shape, file.data(tensor)).dequantize()

    return GGUFHeader(file.path, "clip", file.metadata, file.tensors, vector)


def _form(checkpoint: Checkpoint, header: GGUFHeader) -> TowerForm:
    kind, fitting = projector_type(header), _forms_of(checkpoint)
    architecture = next(iter(architecture_names(checkpoint.config)), "")
    if not fitting:
        raise ConfigError(
            f"--mmproj {header.path}: {checkpoint.path} is a model of {architecture}, which reads"
            " text alone here: leave --mmproj out",
            param="mmproj",
        )
    if kind not in FORMS:
        what = f"of the type {shown(kind)}" if kind else "without a projector_type for images"
        raise UnsupportedModelError(
            f"{header.path} is a tower {what}, which is not known here; known:"
            f" {', '.join(FORMS)}; {_LEAVE_OUT}",
            param="mmproj",
        )
    if kind not in fitting:
        raise ConfigError(
            f"--mmproj {header.path} is a tower of the type {kind!r}, {checkpoint.path} is a model"
            f" of {architecture} and takes {_listed(fitting)}: give the tower that was published"
            f" with it, or {_LEAVE_OUT}",
            param="mmproj",
        )
    return FORMS[kind]


def _check_width(checkpoint: Checkpoint, header: GGUFHeader) -> None:
    made, wanted = header.integer("vision.projection_dim"), checkpoint.config["hidden_size"]
    if made != wanted:
        raise ConfigError(
            f"--mmproj {header.path} makes features of {made} numbers, {checkpoint.path} takes"
            f" {wanted}: they are of models of different size; give the tower that was published"
            f" with it, or {_LEAVE_OUT}",
            param="mmproj",
        )


def _check_deepstack(checkpoint: Checkpoint, header: GGUFHeader, vision: dict[str, object]) -> None:
    wanted = checkpoint.config.get("vllmx_deepstack_layers")
    layers = vision.get("deepstack_visual_indexes", ())
    assert isinstance(layers, Sequence)
    if wanted is not None and wanted != len(layers):
        raise ConfigError(
            f"--mmproj {header.path} makes features for {len(layers)} layers, {checkpoint.path}"
            f" takes them in {wanted} (n_deepstack_layers): give the tower that was published with"
            f" it, or {_LEAVE_OUT}",
            param="mmproj",
        )


def _listed(kinds: Sequence[str]) -> str:
    return " or ".join(map(repr, kinds))
