"""An error on its way from one process of the server to another."""

from __future__ import annotations

from functools import cache

import msgspec
from vllmx_core.errors import VllmxError


class ErrorSent(msgspec.Struct, frozen=True):
    """An error as it is shown to the client."""

    type: str
    message: str
    code: str
    http_status: int
    param: str | None = None
    retry_after_s: float | None = None
    headers: dict[str, str] | None = None

    @classmethod
    def of(cls, error: VllmxError) -> ErrorSent:
        return cls(
            type(error).__name__,
            error.message,
            error.code,
            error.http_status,
            error.param,
            getattr(error, "retry_after_s", None),
            getattr(error, "headers", None),
        )

    def rebuild(self) -> VllmxError:
        """The same error; a VllmxError where its type is not known here."""
        error = _kinds().get(self.type, VllmxError)(self.message, param=self.param)
        error.code, error.http_status = self.code, self.http_status
        if self.retry_after_s is not None:
            error.retry_after_s = self.retry_after_s  # type: ignore[attr-defined]
        if self.headers is not None:
            error.headers = self.headers  # type: ignore[attr-defined]
        return error


@cache
def _kinds() -> dict[str, type[VllmxError]]:
    from vllmx_core import errors as core

    from vllmx_server import errors as server

    return {
        name: kind
        for module in (core, server)
        for name, kind in vars(module).items()
        if isinstance(kind, type) and issubclass(kind, VllmxError)
    }
