"""Requests of commands to a running server (`--url`)."""

from __future__ import annotations

from vllmx_core.errors import ConfigError


def ask_server(
    url: str, path: str, api_key: str | None, body: bytes | None = None, timeout_s: float = 10
) -> tuple[int, bytes]:
    """Status and body of the answer to GET, or to POST of JSON. Raises ConfigError if `--url` is
    not an address, and if no server answers there."""
    from vllmx_core.system.deadline_http import ask

    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url must begin with http:// or https://, got {url!r}", param="url")
    url = url.rstrip("/")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    if body is not None:
        headers["Content-Type"] = "application/json"
    try:
        return ask(url + path, headers, timeout_s, body=body)
    except (OSError, ValueError) as error:
        raise ConfigError(f"no server answers at {url} ({error}): start `vllmx serve`") from None


def get_from_server(url: str, path: str, api_key: str | None) -> bytes:
    """The body of the answer to GET. Raises ConfigError for a status other than 200, too."""
    status, body = ask_server(url, path, api_key)
    if status != 200:
        remedy = ": give --api-key" if status in (401, 403) else ""
        raise ConfigError(f"{url.rstrip('/')}{path} answers {status}{remedy}")
    return body
