"""Short names of models, such as qwen3:4b: the files that list them, and their settings."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllmx_core.config import DEMO_MODEL, DRAFTERS
from vllmx_core.config_values import as_text, convert, nearest
from vllmx_core.errors import ConfigError, shown
from vllmx_core.records import Record
from vllmx_models.sources import MODELSCOPE

SHIPPED = Path(__file__).with_name("models.yaml")
KEYS = ("repo", "file", "revision", "source", "template", "sampling", "context", "draft")
SOURCES = ("hub", "modelscope")
_SHORT = re.compile(r"[A-Za-z0-9][\w.-]*(:[\w.-]+)?")
_MAX_ALIASES = 8
_UNSEEN = ("version", "load-on-startup", "stop-timeout")
"""Keys of llama.cpp's presets that are about its router."""


class Preset(Record):
    """One short name."""

    name: str
    model: str
    """The model as commands take it: org/repo, org/repo:file.gguf, or a path."""
    settings: Mapping[str, Any]
    """Fields of `EngineConfig`, which flags, environment and config file override."""
    flags: tuple[Mapping[str, Any], ...]
    """Keys of a config file, as llama.cpp's presets have them: those for all models, its own."""
    origin: str
    """The file that has it."""


def user_files() -> tuple[Path, Path]:
    """The user's own presets: models.yaml, and models.ini in the form of llama.cpp."""
    folder = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    place = Path(folder).expanduser() / "vllmx"
    return place / "models.yaml", place / "models.ini"


def find_preset(name: str) -> Preset | None:
    """The preset of a short name. None: the name is a path, the demo, or one that no file has.
    Raises ConfigError for a file with mistakes, and for an unknown name with a tag."""
    if name == DEMO_MODEL or os.path.exists(os.path.expanduser(name)):
        return None
    own_ini = user_files()[1]
    if _SHORT.fullmatch(name) is None and not (own_ini.is_file() and "://" not in name):
        return None
    found = presets()
    if name in found:
        return found[name]
    if _SHORT.fullmatch(name) is not None and ":" in name:
        raise ConfigError(
            f"there is no short name {name!r}{nearest(name, found)}: `vllmx list --presets` shows"
            f" them, and {user_files()[0]} takes your own",
            param="model",
        )
    return None


def presets() -> dict[str, Preset]:
    """All presets by name; the user's win. Raises ConfigError for a file with mistakes."""
    yaml_file, ini_file = user_files()
    entries: dict[str, tuple[Any, Path]] = {}
    for path in (SHIPPED, yaml_file):
        entries |= {name: (entry, path) for name, entry in _read_yaml(path).items()}
    found = {name: _preset(name, entries, 0) for name in entries}
    return found | _read_ini(ini_file)


def _read_yaml(path: Path) -> dict[str, Any]:
    from vllmx.cli.config_file import read_yaml

    return read_yaml(path) if path.is_file() else {}


def _preset(name: str, entries: Mapping[str, tuple[Any, Path]], depth: int) -> Preset:
    entry, path = entries[name]
    where = f"{path}: {name!r}"
    if isinstance(entry, str):
        if entry not in entries or depth == _MAX_ALIASES:
            raise ConfigError(f"{where} leads to {entry!r}, which is not a name in it")
        aimed = _preset(entry, entries, depth + 1)
        return Preset(name, aimed.model, aimed.settings, (), str(path))
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} must be another name or have keys, got {shown(entry)}")
    unknown = [key for key in entry if key not in KEYS]
    if unknown:
        raise ConfigError(
            f"{where} has the unknown key {unknown[0]!r}{nearest(str(unknown[0]), KEYS)}; known:"
            f" {', '.join(KEYS)}"
        )
    texts = {
        key: convert(entry[key], str, key, f"{where}: {key}")
        for key in ("repo", "file", "revision", "source", "template", "draft")
        if key in entry
    }
    if "repo" not in texts:
        raise ConfigError(f"{where} has no repo: give a repository (org/repo), a folder or a file")
    source = texts.get("source", "hub")
    if source not in SOURCES:
        raise ConfigError(f"{where} has source {source!r}: it must be {' or '.join(SOURCES)}")
    model = os.path.expanduser(texts["repo"]) + (f":{texts['file']}" if "file" in texts else "")
    model = (MODELSCOPE if source == "modelscope" else "") + model
    return Preset(name, model, _settings(texts, entry, where, path, entries), (), str(path))


def _settings(
    texts: Mapping[str, str],
    entry: Mapping[str, Any],
    where: str,
    path: Path,
    entries: Mapping[str, tuple[Any, Path]],
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "revision" in texts:
        found["revision"] = texts["revision"]
    if "template" in texts:
        found["chat_template"] = str(path.parent / Path(texts["template"]).expanduser())
    if "context" in entry:
        found["max_model_len"] = convert(
            entry["context"], int, "max_model_len", f"{where}: context"
        )
    if "sampling" in entry:
        if not isinstance(entry["sampling"], dict):
            raise ConfigError(
                f"{where}: sampling must have keys such as temperature, got"
                f" {shown(entry['sampling'])}"
            )
        found["override_generation_config"] = json.dumps(entry["sampling"])
    if "draft" in texts:
        draft = texts["draft"]
        if draft in entries and draft not in DRAFTERS:
            draft = _preset(draft, entries, 1).model
        found["speculate"] = draft if draft in DRAFTERS else f"model:{draft}"
    return found


def _read_ini(path: Path) -> dict[str, Preset]:
    """llama.cpp's model presets: a section for each model; [*] has keys for all."""
    if not path.is_file():
        return {}
    import configparser

    parser = configparser.ConfigParser(
        delimiters=("=",), comment_prefixes=("#", ";"), default_section="", interpolation=None
    )
    try:
        lines = path.read_text("utf-8")
        begin = lines.find("[")
        parser.read_string(lines[max(begin, 0) :], str(path))  # before it is the file's version
    except (OSError, UnicodeDecodeError, configparser.Error) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path} cannot be read as presets of llama.cpp: {reason}") from None
    sections = {name: dict(parser[name]) for name in parser.sections()}
    _, shared = _ini_flags(sections.pop("*", {}))
    found = {}
    for name, keys in sections.items():
        model, own = _ini_flags(keys)
        found[name] = Preset(name, model or name, {}, (shared, own), str(path))
    return found


def _ini_flags(keys: Mapping[str, str]) -> tuple[str | None, dict[str, Any]]:
    """The model that a section names, if any, and its flags."""
    model, flags = None, {}
    for key, text in keys.items():
        plain = key.removeprefix("llama_arg_").replace("_", "-").lstrip("-")
        if plain in ("model", "m", "hf-repo", "hf", "hfr"):
            model = os.path.expanduser(text)
        elif plain not in _UNSEEN:
            flags[plain] = {"true": True, "false": False}.get(text.lower(), text)
    return model, flags


def merged(name: str, own: Any, preset: Any) -> Any:
    """A field's value over that of a preset: JSON objects are joined, key by key."""
    if name != "override_generation_config":
        return own
    try:
        return json.dumps({**json.loads(preset), **json.loads(as_text(own))})
    except (ValueError, TypeError):
        return own  # refused later, by name
