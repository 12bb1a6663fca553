"""Registers what this distribution brings; see `vllmx_core.plugins.hooks`."""

from __future__ import annotations

from importlib.util import find_spec

from vllmx_core.plugins.hooks import hookimpl
from vllmx_core.plugins.specs import BackendSpec, ModelImplSpec


@hookimpl
def vllmx_backends() -> tuple[BackendSpec, ...]:
    return (
        BackendSpec(
            "torch",
            "vllmx_torch.backend:TorchBackend",
            probe="vllmx_torch.plugin:probe",
            priority=-1,  # a second oracle, and what is left where nothing else can run
            own_devices="vllmx_torch.device:ranks_have_devices",
            summary="torch tensors on any of torch's devices",
        ),
    )


@hookimpl
def vllmx_model_impls() -> tuple[ModelImplSpec, ...]:
    return (
        ModelImplSpec(
            "transformers",
            "vllmx_torch.foreign.model:TransformersModel",
            backend="torch",
            probe="vllmx_torch.plugin:probe_transformers",
            cost="several times slower than a model of vllmx's own, without its kernels; quantised"
            " weights are dequantised at load",
        ),
    )


def probe_transformers() -> str | None:
    """None where torch and transformers are installed; neither is imported."""
    if find_spec("transformers") is None:
        return (
            "transformers, which runs many models that vllmx has no file for, is not installed:"
            " pip install 'vllmx[transformers]'"
        )
    return probe()


def probe() -> str | None:
    """None where torch is installed; it is not imported, and a device is judged at load."""
    if find_spec("torch") is None:
        return "torch is not installed: pip install 'vllmx[torch]'"
    return None
