"""What the HTTP server itself is told; names are vLLM's where it has one."""

from __future__ import annotations

from dataclasses import dataclass

from vllmx_core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Everything about the socket and the limits of the API; the engine's part is EngineConfig."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    """Path of a unix socket instead of host and port."""
    root_path: str = ""
    api_key: tuple[str, ...] = ()
    """Accepted bearer tokens; empty: no authorisation."""
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    max_body_bytes: int = 8 << 20
    max_concurrent_requests: int = 4096
    """Generation requests in flight, queue included; more get 503."""
    drain_timeout_s: float = 30.0
    """How long SIGTERM waits for requests in flight."""
    disable_access_log: bool = False
    log_level: str = "info"

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must be between 0 and 65535, got {self.port}", param="port")
        for name in ("max_body_bytes", "max_concurrent_requests"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}",
                    param=name,
                )
        if not 0 <= self.drain_timeout_s <= 86400:
            raise ConfigError(
                f"--drain-timeout-s must be between 0 and 86400, got {self.drain_timeout_s}",
                param="drain_timeout_s",
            )
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("--ssl-certfile and --ssl-keyfile go together: give both")
        if any(not key for key in self.api_key):
            raise ConfigError("--api-key is empty: give a key or leave it out", param="api_key")
