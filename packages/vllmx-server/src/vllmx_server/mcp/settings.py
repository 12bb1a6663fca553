"""The file of MCP servers: which there are, how each is started or reached, what of it is used."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta
from vllmx_core.errors import ConfigError, shown
from vllmx_core.system.files import warn_of_readers

from vllmx_server.schema.json_file import read_json_file

MAX_FILE_BYTES = 1 << 20
MAX_SERVERS = 64
INHERITED = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TERM")
"""The variables of our environment that every server gets, in addition to LC_*."""
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]|_(?=[A-Za-z0-9-]))*")
_MAX_NAME = 48
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_SPARE = re.compile(r"[\r\n\0]")
_Seconds = Annotated[float, Meta(gt=0, le=86400)]


class ServerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """One entry of `mcpServers`."""

    command: str | None = None
    """A program that speaks over its standard input and output."""
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    """Variables in addition to `INHERITED`; `${NAME}` is a variable of our own environment."""
    cwd: str | None = None
    url: str | None = None
    """The address of a server that is reached over streamable HTTP."""
    headers: dict[str, str] = {}
    """The headers of each request to it; `${NAME}` as in `env`."""
    type: Literal["stdio", "http", "streamable-http"] | None = None
    """Must agree with `command` and `url`."""
    disabled: bool = False
    allowed_tools: tuple[str, ...] | None = None
    """Names of tools that models may call; None: all."""
    start_timeout_seconds: _Seconds = 30.0
    """The seconds from the start to the list of tools."""
    call_timeout_seconds: _Seconds = 60.0
    max_result_bytes: Annotated[int, Meta(ge=256, le=4 << 20)] = 64 << 10
    """The bytes of a result's text; the rest is cut, which the model can see."""
    name: str = ""
    """The key in the file; set by `read_servers`."""

    @property
    def environment(self) -> dict[str, str]:
        """All that its process gets."""
        kept = {k: v for k, v in os.environ.items() if k in INHERITED or k.startswith("LC_")}
        return kept | self.env


def read_servers(
    path: str | os.PathLike[str], flag: str, *, warns: bool = False
) -> tuple[ServerSettings, ...]:
    """The servers that a file names and does not disable. Raises ConfigError for a file that
    cannot be read or says something else, for programs and folders that are not there, and where
    the package `mcp` is missing.

    Args:
        flag: that named the file, for messages.
        warns: of a file with secrets that others may read.
    """
    where = f"{flag} {shown(str(path))}"
    _check_package(flag)
    entries = _entries(path, where)
    if len(entries) > MAX_SERVERS:
        raise ConfigError(f"{where} names {len(entries)} servers, at most {MAX_SERVERS} are taken")
    if warns and any(isinstance(each, dict) and _has_secrets(each) for each in entries.values()):
        warn_of_readers(path, flag)
    found = [_server(name, entry, where) for name, entry in entries.items()]
    return tuple(server for server in found if not server.disabled)


def _has_secrets(entry: Mapping[str, Any]) -> bool:
    """True if an entry contains values of variables or headers, and not just names of variables
    that have them."""
    values = [entry.get("env"), entry.get("headers")]
    texts = [text for value in values if isinstance(value, dict) for text in value.values()]
    return any(isinstance(text, str) and not _VARIABLE.search(text) for text in texts)


def _check_package(flag: str) -> None:
    try:
        found = version("mcp")
    except PackageNotFoundError:
        found = "none"
    if found.partition(".")[0] != "2":
        raise ConfigError(
            f"{flag} needs the package mcp, version 2 ({found} is installed): pip install"
            " 'vllmx[mcp]'"
        )


def _entries(path: str | os.PathLike[str], where: str) -> dict[str, Any]:
    found = read_json_file(path, where, MAX_FILE_BYTES, "check the path")
    servers = found.get("mcpServers") if isinstance(found, dict) else None
    if not isinstance(servers, dict):
        raise ConfigError(f'{where} has no servers: it must be {{"mcpServers": {{NAME: {{...}}}}}}')
    others = [key for key in found if key != "mcpServers"]
    if others:
        raise ConfigError(f"{where} has the unknown field {shown(others[0])} next to mcpServers")
    return servers


def _server(name: str, entry: Any, where: str) -> ServerSettings:
    where = f"{where}, server {shown(name)}"
    if not _NAME.fullmatch(name) or len(name) > _MAX_NAME:
        raise ConfigError(
            f"{where}: a name has 1 to {_MAX_NAME} letters, digits, '-' and single '_', which no"
            " name begins or ends with"
        )
    if isinstance(entry, dict) and entry.get("type") == "sse":
        raise ConfigError(
            f"{where} is of the old type sse, which is not spoken here: use the server's address"
            ' for streamable HTTP ("type": "http")'
        )
    try:
        server = msgspec.convert(entry, ServerSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from error
    server = msgspec.structs.replace(
        server,
        name=name,
        env={key: _expanded(value, where) for key, value in server.env.items()},
        headers={key: _expanded(value, where) for key, value in server.headers.items()},
    )
    if not server.disabled:
        _check(server, where)
    return server


def _expanded(text: str, where: str) -> str:
    def value(found: re.Match[str]) -> str:
        if found[1] not in os.environ:
            raise ConfigError(f"{where} needs the variable {found[1]}, which is not set: set it")
        return os.environ[found[1]]

    return _VARIABLE.sub(value, text)


def _check(server: ServerSettings, where: str) -> None:
    if (server.command is None) == (server.url is None):
        raise ConfigError(f"{where} needs a command or a url, and not both")
    if (server.type == "stdio") != (server.command is not None) and server.type is not None:
        raise ConfigError(f"{where} is of type {server.type}, which its other fields contradict")
    if server.command is not None:
        _check_process(server, server.command, where)
    elif server.url is not None:
        _check_address(server, server.url, where)


def _check_process(server: ServerSettings, command: str, where: str) -> None:
    if server.headers:
        raise ConfigError(f"{where} has headers, which a command does not take: leave them out")
    for text in (command, *server.args, *server.env, *server.env.values()):
        if "\0" in text:
            raise ConfigError(f"{where} has a NUL character in {shown(text)}")
    wrong = next((key for key in server.env if not key or "=" in key), None)
    if wrong is not None:
        raise ConfigError(f"{where} has {shown(wrong)} in env, which is not the name of a variable")
    if server.cwd is not None and not os.path.isdir(server.cwd):
        raise ConfigError(
            f"{where} has the cwd {shown(server.cwd)}, which is not a folder: make it"
        )
    program = command
    if os.sep in command and server.cwd is not None:
        program = os.path.join(server.cwd, command)
    if shutil.which(program, path=server.environment.get("PATH")) is None:
        raise ConfigError(
            f"{where} has the command {shown(command)}, which is not a program on PATH: install it,"
            " or name its path"
        )


def _check_address(server: ServerSettings, url: str, where: str) -> None:
    if server.args or server.env or server.cwd is not None:
        raise ConfigError(f"{where} has args, env or cwd, which no url takes: leave them out")
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        good = False
    if not good or _SPARE.search(url) or " " in url:
        raise ConfigError(f"{where} has the url {shown(url)}: it must be http(s)://HOST/...")
    for key, value in server.headers.items():
        if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", key) or _SPARE.search(value):
            raise ConfigError(f"{where} has the header {shown(key)}, which cannot be sent")
        if not value.isascii():
            raise ConfigError(f"{where} has the header {shown(key)}, whose value is not ASCII")
