"""File names of a GGUF model in several files: NAME-00001-of-00003.gguf and so on."""

from __future__ import annotations

import re

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
MAX_SHARDS = 4096


def shard_names(name: str) -> list[str]:
    """Names of all files of the set that `name` belongs to; itself alone when it is no shard."""
    match = _SHARD.fullmatch(name)
    if match is None or not 1 <= int(match["count"]) <= MAX_SHARDS:
        return [name]
    count = int(match["count"])
    return [f"{match['stem']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


def first_shard(name: str) -> str:
    """The file of a set that stands for it."""
    return shard_names(name)[0]
