"""Core's own plugin: the numpy reference as a backend, and Redis as a store of KV blocks."""

from __future__ import annotations

from vllmx_core.plugins.hooks import hookimpl
from vllmx_core.plugins.specs import BackendSpec, KVConnectorSpec


@hookimpl
def vllmx_backends() -> tuple[BackendSpec, ...]:
    return (
        BackendSpec(
            "numpy",
            "vllmx_core.reference.backend:ReferenceBackend",
            probe="vllmx_core.plugin:probe",
            priority=-2,  # below every other: it defines what is right, slowly
            summary="numpy reference, for tests and tiny models",
        ),
    )


@hookimpl
def vllmx_kv_connectors() -> tuple[KVConnectorSpec, ...]:
    return (KVConnectorSpec("redis", "vllmx_core.redis_store:RedisStore"),)


def probe() -> None:
    """numpy is a dependency of core: it runs everywhere."""
