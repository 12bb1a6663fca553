"""Chooses what runs a checkpoint: an architecture's own file, or code for those that have none."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from vllmx_core.config_values import nearest
from vllmx_core.errors import ConfigError, UnsupportedModelError
from vllmx_core.plugins.checkpoint import Checkpoint, build_model, is_served
from vllmx_core.plugins.registry import PLUGIN_CAN, Registry
from vllmx_core.plugins.specs import ModelImplSpec
from vllmx_core.records import Record

if TYPE_CHECKING:
    from vllmx_core.model import Model

logger = logging.getLogger("vllmx.models")

AUTO, OWN = "auto", "vllmx"
_SAME = {"vllm": OWN}
"""vLLM's name for its own models."""
_INSTALL = "`pip install 'vllmx[transformers]'` runs many such models by transformers' code, slowly"


class ChosenModel(Record):
    """A constructed architecture."""

    model: Model
    backend: str
    """The value of `--backend`, or the only backend that runs the model."""
    impl: str = OWN


def choose_model(
    registry: Registry,
    checkpoint: Checkpoint,
    impl: str = AUTO,
    backend: str = "auto",
    task: str = AUTO,
) -> ChosenModel:
    """Constructs the model of a checkpoint for a task of `EngineConfig`. `impl` is auto (an
    architecture's own file, else whatever code runs it), vllmx (the own file) or the name of such
    code.

    Raises UnsupportedModelError that says what would serve the architecture, and ConfigError for an
    unknown `impl`, or one that does not go with `backend`.
    """
    impl = _SAME.get(impl, impl)
    if impl not in (AUTO, OWN):
        _check_task(task, impl)
        return _run_by(_named(registry, impl), checkpoint, backend)
    if impl == OWN or is_served(registry, checkpoint.config):
        try:
            return ChosenModel(build_model(registry, checkpoint, task), backend)
        except UnsupportedModelError as error:
            left = impl == AUTO and task in (AUTO, "generate")
            hint = _perhaps(registry) if left and checkpoint.path.suffix != ".gguf" else ""
            raise UnsupportedModelError(error.message + hint) from error
    _check_task(task, "code of others")
    reasons = []
    for other in registry.all(ModelImplSpec):
        reason = other.unavailable_reason()
        if reason is None and backend not in ("auto", other.backend):
            reason = f"it runs on backend {other.backend!r} alone: leave --backend {backend} out"
        if reason is None:
            try:
                return _run_by(other, checkpoint, backend)
            except UnsupportedModelError as error:
                reason = error.message
        reasons.append(f"{other.name}: {reason}")
    tried = "; ".join(reasons) or _INSTALL
    raise UnsupportedModelError(f"{registry.unserved(checkpoint.config)}; {tried}. {PLUGIN_CAN}")


def _check_task(task: str, impl: str) -> None:
    if task not in (AUTO, "generate"):
        raise ConfigError(
            f"--task {task} is for models that vllmx has a file for, {impl} generates text: leave"
            " --task out",
            param="task",
        )


def _perhaps(registry: Registry) -> str:
    """Suggests other implementations for a model that ours refuses, if `--model-impl` is auto."""
    specs = registry.all(ModelImplSpec)
    able = [spec.name for spec in specs if spec.unavailable_reason() is None]
    return f"; --model-impl {' or '.join(able)} may run it, slowly" if able else ""


def _named(registry: Registry, impl: str) -> ModelImplSpec:
    spec = registry.find(ModelImplSpec, impl)
    if spec is None and impl == "transformers":
        raise ConfigError(
            "--model-impl transformers needs vllmx-torch and transformers: `pip install"
            " 'vllmx[transformers]'`",
            param="model_impl",
        )
    if spec is None:
        known = [AUTO, OWN, *(each.name for each in registry.all(ModelImplSpec))]
        raise ConfigError(
            f"--model-impl {impl!r} is not known{nearest(impl, known)}; known: {', '.join(known)}",
            param="model_impl",
        )
    reason = spec.unavailable_reason()
    if reason is not None:
        raise ConfigError(f"--model-impl {impl} cannot run here: {reason}", param="model_impl")
    return spec


def _run_by(spec: ModelImplSpec, checkpoint: Checkpoint, backend: str) -> ChosenModel:
    if backend not in ("auto", spec.backend):
        raise ConfigError(
            f"--model-impl {spec.name} runs on backend {spec.backend!r} alone: leave --backend"
            f" {backend} out",
            param="backend",
        )
    if checkpoint.path.suffix == ".gguf":
        raise UnsupportedModelError(
            f"{checkpoint.path} is a GGUF file, --model-impl {spec.name} reads folders with"
            " safetensors alone"
        )
    model: Model = spec.load()(checkpoint.config)
    logger.warning("%s runs this model on backend %s: %s", spec.name, spec.backend, spec.cost)
    return ChosenModel(model, spec.backend, spec.name)
