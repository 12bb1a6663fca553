"""Numbers of YAML as they are written: a name such as 007 stays a text where one is wanted."""

from __future__ import annotations

from typing import Any

import yaml
from vllmx_core.config_values import WrittenFloat, WrittenInt


class _Loader(yaml.SafeLoader):
    """Safe, with numbers that remember how they are written."""


def _integer(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> WrittenInt:
    return WrittenInt(loader.construct_yaml_int(node), str(node.value))


def _number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> WrittenFloat:
    return WrittenFloat(loader.construct_yaml_float(node), str(node.value))


_Loader.add_constructor("tag:yaml.org,2002:int", _integer)
_Loader.add_constructor("tag:yaml.org,2002:float", _number)


def load(text: str) -> Any:
    """What `yaml.safe_load` gives. Raises yaml.YAMLError and ValueError."""
    return yaml.load(text, _Loader)  # noqa: S506 - it is a safe one
