"""Bounded readers for the small JSON and template files of a model folder.

A model folder is data from somebody else: every file has a size limit, malformed JSON is a typed
error that names the file, and nothing in it is executed here."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllmx_core.errors import ConfigError, VllmxError, excerpt
from vllmx_core.system.files import open_model_file

MIB = 1 << 20
MAX_TOKENIZER_BYTES = 256 * MIB
MAX_CONFIG_BYTES = 32 * MIB
MAX_TEMPLATE_BYTES = 1 * MIB


def read_bytes(path: Path, limit_bytes: int) -> bytes | None:
    """The file's content, or None where there is none.

    Raises:
        ConfigError: the file cannot be read or is larger than `limit_bytes`.
    """
    try:
        with open_model_file(path) as file:
            size = os.fstat(file.fileno()).st_size  # read() allocates all that it is asked for
            data = file.read(min(size, limit_bytes) + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        reason = error.strerror or "unknown reason"
        raise ConfigError(f"{path} cannot be read: {reason}; check the model folder") from error
    if len(data) > limit_bytes:
        raise ConfigError(
            f"{path} is larger than the {limit_bytes // MIB} MiB allowed for this file; "
            "use the file of the original model"
        )
    return data


def read_text(path: Path, limit_bytes: int) -> str | None:
    """Reads a file as `read_bytes` does, and decodes it as UTF-8."""
    data = read_bytes(path, limit_bytes)
    if data is None:
        return None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 text (byte {error.start}); download the file again"
        ) from error


def read_json_object(path: Path, limit_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """The JSON object in the file; an absent file is an empty one.

    Raises:
        ConfigError: unreadable, too large, malformed, or JSON that is not an object.
    """
    text = read_text(path, limit_bytes)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        where = f"line {error.lineno}" if isinstance(error, json.JSONDecodeError) else "too deep"
        raise ConfigError(f"{path} is not valid JSON ({where}); download the file again") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a JSON {type(value).__name__}, an object is needed")
    return value


def read_chat_templates(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """All chat templates of a model folder by name; the unnamed one is `default`.

    Separate files win over the entry in tokenizer_config.json, as in Hugging Face transformers:
    `chat_template.jinja` over `chat_template.json`, and `additional_chat_templates/NAME.jinja`
    adds or replaces NAME.
    """
    templates = _templates_of_config(tokenizer_config, folder / "tokenizer_config.json")
    path = folder / "chat_template.json"
    legacy = read_json_object(path, MAX_CONFIG_BYTES)
    templates.update(_templates_of_config(legacy, path))
    single = read_text(folder / "chat_template.jinja", MAX_TEMPLATE_BYTES)
    if single is not None:
        templates["default"] = single
    extra = folder / "additional_chat_templates"
    if extra.is_dir():
        for path in sorted(extra.glob("*.jinja")):
            source = read_text(path, MAX_TEMPLATE_BYTES)
            if source is not None:
                templates[path.stem] = source
    return templates


def _templates_of_config(config: Mapping[str, Any], path: Path) -> dict[str, str]:
    """`chat_template` of a config: absent, one string, or a list of {name, template}."""
    value = config.get("chat_template")
    if value is None:
        return {}
    entries: dict[str, str] = {}
    if isinstance(value, str):
        entries = {"default": value}
    elif isinstance(value, dict):
        entries = value
    elif isinstance(value, list) and all(isinstance(item, dict) for item in value):
        entries = {item.get("name"): item.get("template") for item in value}
    for name, source in entries.items():
        if not isinstance(name, str) or not isinstance(source, str):
            entries = {}
            break
        if len(source.encode("utf-8", "surrogatepass")) > MAX_TEMPLATE_BYTES:
            raise ConfigError(f"chat template {name!r} in {path} is larger than 1 MiB")
    if not entries and value != []:
        raise ConfigError(
            f"chat_template in {path} must be a string or a list of objects with name and template"
        )
    return dict(entries)


_TEMPLATE_SIGNS = frozenset("{}\n")


def template_of(flag: str | None) -> str | None:
    """The source that `--chat-template` names: of a file, or the template itself in one line.
    Raises ConfigError for a file that cannot be read."""
    if flag is None:
        return None
    path = os.path.expanduser(flag)
    if not os.path.exists(path) and not _TEMPLATE_SIGNS.isdisjoint(flag):
        return flag
    source = read_text(Path(path), MAX_TEMPLATE_BYTES)
    if source is None:
        raise ConfigError(
            f"--chat-template {flag} does not exist: check the path, or give the template itself"
            " in one line, with braces",
            param="chat_template",
        )
    return source


@contextmanager
def library_errors(make: Callable[[str], VllmxError]) -> Iterator[None]:
    """Turns errors of the library into ours; it is put around its calls and nothing else. `make`
    gets the reason, one short line. Errors of ours pass."""
    try:
        yield
    except VllmxError:
        raise
    except Exception as error:
        raise make(_reason(error)) from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise make(_reason(error)) from error


def _reason(error: BaseException) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    line = excerpt(lines[0].removeprefix("Cannot instantiate Tokenizer from buffer: "))
    # It may quote a token of a damaged file, and is shown in terminals.
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in line
    )
