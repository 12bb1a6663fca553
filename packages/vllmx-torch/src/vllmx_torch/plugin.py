"""What this distribution brings; see `vllmx_core.hooks`."""

from __future__ import annotations

from importlib.util import find_spec

from vllmx_core.hooks import hookimpl
from vllmx_core.specs import BackendSpec


@hookimpl
def vllmx_backends() -> tuple[BackendSpec, ...]:
    return (
        BackendSpec(
            "torch",
            "vllmx_torch.backend:TorchBackend",
            probe="vllmx_torch.plugin:probe",
            priority=-1,  # a second oracle, and what is left where nothing else can run
            summary="torch tensors on any of torch's devices",
        ),
    )


def probe() -> str | None:
    """None where torch is installed; it is not imported, and a device is judged at load."""
    if find_spec("torch") is None:
        return "torch is not installed: pip install 'vllmx[torch]'"
    return None
