"""The YAML file of `--config`: its keys are the names of flags without their dashes."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from vllmx_core.config_values import Written, nearest, written
from vllmx_core.errors import ConfigError

from vllmx.cli.foreign_flags import ForeignFlag, apply


def read_yaml(path: str | Path | None) -> dict[str, Any]:
    """Reads the content of a file; empty without a path. Raises ConfigError."""
    if path is None:
        return {}
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
        content = _load(text)
        twice = _twice(yaml.compose(text, yaml.SafeLoader), set())
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"the config file {path} is not valid YAML: {reason}") from None
    if twice is not None:
        raise ConfigError(f"the config file {path} has the key {twice!r} twice: keep one")
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"the config file {path} must hold keys and values, such as port: 8000")
    return content


def _load(text: str) -> Any:
    """Loads like `yaml.safe_load`, but numbers keep their spelling: the name 007 is not 7.
    Raises yaml.YAMLError and ValueError."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Safe like its base."""

    def number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Written:
        is_whole = node.tag.endswith(":int")
        value = (loader.construct_yaml_int if is_whole else loader.construct_yaml_float)(node)
        return written(value, node.value)

    for kind in ("int", "float"):
        Loader.add_constructor(f"tag:yaml.org,2002:{kind}", number)
    return yaml.load(text, Loader)  # noqa: S506 - it is a safe one


def _twice(node: Any, seen: set[int]) -> str | None:
    """A key that a mapping of a YAML document has twice, which would lose its first value. `seen`
    has the visited nodes: aliases refer to one node many times."""
    from yaml import MappingNode, ScalarNode, SequenceNode

    if id(node) in seen:
        return None
    seen.add(id(node))
    if isinstance(node, SequenceNode):
        return next(filter(None, (_twice(each, seen) for each in node.value)), None)
    if not isinstance(node, MappingNode):
        return None
    found = set[str]()
    for key, value in node.value:
        if isinstance(key, ScalarNode):
            if key.value in found:
                return str(key.value)
            found.add(key.value)
        if (inside := _twice(value, seen)) is not None:
            return inside
    return None


def known_keys(
    file: Mapping[str, Any],
    fields: Collection[str],
    foreign: Iterable[ForeignFlag],
    aliases: Mapping[str, tuple[str, ...]],
    *,
    takes_all: bool = False,
) -> dict[str, Any]:
    """The file by names of fields: aliases of our flags are replaced, flags of other servers are
    applied as on the command line. Raises ConfigError for an unknown key, unless `takes_all`, which
    drops such keys."""
    names = {
        name.lstrip("-"): field
        for field, texts in aliases.items()
        for text in texts
        for name in text.split("/")[:1]
    }
    others = {name.lstrip("-"): flag for flag in foreign for name in flag.names}
    found: dict[str, Any] = {}
    theirs = list[tuple[ForeignFlag, Any]]()
    for key, value in file.items():
        dashed = key.replace("_", "-")
        if key.replace("-", "_") in fields:
            _put(found, key.replace("-", "_"), value)
        elif names.get(dashed) in fields:
            _put(found, names[dashed], value)
        elif dashed in others:
            if not (others[dashed].bare and value is False):
                theirs.append((others[dashed], value))
        elif not takes_all:
            known = [name.replace("_", "-") for name in fields]
            raise ConfigError(
                f"the config file has the unknown key {key!r}{nearest(dashed, [*known, *names])};"
                " known are the flags of this command without their dashes"
            )
    for flag, value in theirs:  # last, because some add to values of ours
        apply(flag, value, found)
    return found


def _put(found: dict[str, Any], key: str, value: Any) -> None:
    if any(key.replace("-", "_") == other.replace("-", "_") for other in found):
        raise ConfigError(f"the config file has the key {key!r} twice, under two names: keep one")
    found[key] = json.dumps(value, default=str) if isinstance(value, dict) else value
