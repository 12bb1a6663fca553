"""Makes the site's page from the tables of flags: `python docs/list_flags.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
from vllmx.cli.flag_texts import ALIASES
from vllmx.cli.foreign_flags import ForeignFlag, families
from vllmx.cli.serve import serve

TARGET = Path(__file__).parent / "flags.md"
HEAD = """\
# Flags of other servers

What flags of vLLM, vLLM.rs and llama.cpp's server come to in vllmx; this page is made from the
code by `python docs/list_flags.py`. What has the same name and meaning in vllmx is not listed:
`vllmx serve --help` shows it. The same names are keys of the YAML file of `--config`. Dashes may
be underscores.

A flag that changes nothing here is *taken*, with a note in the log. A flag that asks for what vllmx
does not do is *refused* with the remedy, so that no deployment runs with other settings than it
states. vLLM's switches are taken turned off too (`--no-enable-mm-embeds`). An option that is given
twice, under one name or two, has its last value, with a warning.

Values: integers may be `2k` (2000), `2K` (2048) or `1.5m`, bytes also `4GB` and `4GiB`; dtypes
`bf16`, `f16`, `fp16`, `f32`; keys of a JSON object may be flags
(`--override-generation-config.temperature 0`); `auto` or `-1` stands for what vllmx chooses by
itself. A device may be `cuda:0` or `0`, the first; another is named by `VLLMX_CUDA_DEVICE`. `--m
REPO --f FILE` is a GGUF file of a repository or folder, as `REPO:FILE`.

## Other names

| flag | also |
|-|-|
"""


def page() -> str:
    """The text of docs/flags.md."""
    lines = [HEAD.rstrip()]
    for option in serve.params:
        if option.name in ALIASES and isinstance(option, click.Option):
            own = "--" + option.name.replace("_", "-")
            others = [name for name in (*option.opts, *option.secondary_opts) if name != own]
            also = ", ".join(f"`{name}`" for name in others if name != f"--no-{own[2:]}")
            lines.append(f"| `{own}` | {also} |")
    for family, flags in families().items():
        lines += ["", f"## {family}", "", "| flag | in vllmx |", "|-|-|", *rows(flags)]
    return "\n".join(lines) + "\n"


def rows(flags: tuple[ForeignFlag, ...]) -> Iterator[str]:
    """A line for each flag."""
    for flag in flags:
        yield f"| {', '.join(f'`{name}`' for name in flag.names)} | {flag.outcome} |"


if __name__ == "__main__":
    TARGET.write_text(page(), encoding="utf-8")
