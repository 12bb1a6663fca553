"""Decides which plugin serves a name that several claim.

vllmx's own plugins win over those of others, so that a plugin keeps working if vllmx later ships a
name that it provides; `--prefer PLUGIN` reverses that. Between two plugins of others nothing is
guessed: only a request for the name fails, and the error names both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from vllmx_core.errors import PluginClashError
from vllmx_core.plugins.specs import ModelSpec, ParserSpec

OUR_DISTRIBUTIONS = frozenset(
    {
        "vllmx",
        "vllmx-core",
        "vllmx-engine",
        "vllmx-models",
        "vllmx-cpu",
        "vllmx-cuda",
        "vllmx-metal",
        "vllmx-testing",
        "vllmx-torch",
        "vllmx-server",
        "vllmx-demo",
        "vllmx-ray",
        "vllmx-tp",
    }
)

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Provided(Generic[S]):
    """A spec and the key of the plugin that brought it."""

    spec: S
    key: str


def choose(claim: str, providers: Sequence[Provided[S]], prefer: Sequence[str]) -> Provided[S]:
    """The one that serves a claim. Raises PluginClashError."""
    if len(providers) == 1:
        return providers[0]
    for wanted in prefer:
        named = [each for each in providers if matches(each.key, wanted)]
        if len(named) == 1:
            return named[0]
    ours = [each for each in providers if is_ours(each.key)]
    if len(ours) == 1:
        return ours[0]
    raise PluginClashError(
        f"{claim} is provided by both {' and '.join(each.key for each in providers)}: uninstall"
        f" one, or choose with --prefer {providers[-1].key.partition(':')[0]}"
    )


def passed_over(claim: str, winner: Provided[Any], providers: Sequence[Provided[Any]]) -> str:
    """The log line for a claim that was decided."""
    others = [each.key for each in providers if each is not winner]
    remedy = f"--prefer {others[0].partition(':')[0]} turns it round" if is_ours(winner.key) else ""
    return f"{claim} comes from {winner.key}, not from {', '.join(others)}" + (
        f": {remedy}" if remedy else ""
    )


def is_ours(key: str) -> bool:
    """True if a plugin belongs to vllmx itself."""
    return key.partition(":")[0] in OUR_DISTRIBUTIONS


def matches(key: str, wanted: str) -> bool:
    """True if `wanted` is a plugin's key "distribution:name" or either part of it."""
    return wanted in (key, *key.split(":"))


def kind_name(kind: type[Any]) -> str:
    """A kind of spec in words."""
    words = {"WeightFormat": "weight format", "ModelSource": "model source"}
    words |= {"ModelImpl": "model implementation", "KVConnector": "KV connector"}
    name = kind.__name__.removesuffix("Spec")
    return words.get(name, name.lower())


def claims(spec: Any) -> Iterable[str]:
    """Names that only one spec of its kind can serve."""
    yield f"{kind_name(type(spec))} {spec.name!r}"
    if isinstance(spec, ModelSpec):
        yield from (f"architecture {name!r}" for name in spec.architectures)
        yield from (f"model type {name!r}" for name in spec.model_types)
        yield from (f"GGUF architecture {name!r}" for name in spec.gguf_names)
        yield from (f"text part {name!r}" for name in spec.text_types)
    if isinstance(spec, ParserSpec):
        yield from (f"parser {name!r}" for name in spec.aliases)
