"""Flags that several commands share, generated from EngineConfig so that none is forgotten.

Precedence is flag > environment variable VLLMX_<NAME> > config file > default, for every option.
"""

from __future__ import annotations

import dataclasses
import os
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click
from vllmx_core.config import EngineConfig, resolve_config
from vllmx_core.config_values import convert, nearest
from vllmx_core.errors import ConfigError
from vllmx_core.system.logs import LOG_LEVELS

from vllmx.cli.command import FOREIGN, SERVED_NAME, ModelCommand
from vllmx.cli.config_file import known_keys, read_yaml
from vllmx.cli.flag_texts import ALIASES, HELP
from vllmx.cli.foreign_flags import ForeignFlag, apply, every_flag

if TYPE_CHECKING:
    from vllmx.cli.presets import Preset

F = TypeVar("F", bound=Callable[..., Any])


def options_of(cls: type[Any], help_texts: Mapping[str, str]) -> Callable[[F], F]:
    """A decorator that adds one option for each field of a config dataclass; values that were not
    given arrive as None."""
    hints = typing.get_type_hints(cls)

    def decorate(command: F) -> F:
        for field in reversed(dataclasses.fields(cls)):
            command = _option(field, hints[field.name], help_texts)(command)
        return command

    return decorate


def _option(
    field: dataclasses.Field[Any], hint: Any, help_texts: Mapping[str, str]
) -> Callable[[F], F]:
    flag = "--" + field.name.replace("_", "-")
    text = help_texts[field.name]
    if hint is bool:
        aliases = ALIASES.get(field.name, ())
        names = [f"{flag}/--no-{flag[2:]}", *aliases]
        text += f"  [default: {'yes' if field.default else 'no'}]"
        return click.option(*names, field.name, default=None, help=text)
    if field.default not in (None, (), ""):
        default: Any = field.default
        shown = ", ".join(default) if isinstance(default, tuple) else default
        text += f"  [default: {shown}]"
    names = [flag, *ALIASES.get(field.name, ())]
    multiple = typing.get_origin(hint) is tuple or field.name == SERVED_NAME
    return click.option(
        *names, field.name, type=_click_type(hint), default=None, multiple=multiple, help=text
    )


class Shown(click.ParamType[Any]):
    """A type that click only shows by name: `vllmx_core.config_values` converts values of flags,
    environment and config file alike."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str | None:
        return f"[{self.name}]" if "|" in self.name else None


def _click_type(hint: Any) -> Shown:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return _click_type(next(arg for arg in typing.get_args(hint) if arg is not type(None)))
    if origin is Literal:
        return Shown("|".join(typing.get_args(hint)))
    if origin is tuple:
        return _click_type(typing.get_args(hint)[0])
    return Shown({int: "integer", float: "number"}.get(hint, "text"))


def engine_options(command: F) -> F:
    """Every field of EngineConfig as a flag, the argument MODEL, --file and --config."""
    decorated = options_of(EngineConfig, HELP)(command)
    for names, text in ((("--config", "config_file"), "YAML file with flags."), FILE):
        decorated = click.option(*names, type=Shown("path"), help=text)(decorated)
    wrapped: F = click.argument("model_argument", metavar="[MODEL]", required=False)(decorated)
    return wrapped


FILE = (("--file", "-f", "--f", "file"), "A GGUF file: of MODEL, or by its path alone.")


def take_several(parameter: str) -> Callable[[F], F]:
    """A decorator that makes an option of a command repeatable; applied after the options."""

    def decorate(command: F) -> F:
        for option in command.__click_params__:  # type: ignore[attr-defined]
            if option.name == parameter:
                option.multiple, option.nargs = True, 1
        return command

    return decorate


def log_level_option(default: str) -> Callable[[F], F]:
    """--log-level, for commands that have no configuration record with one."""
    return click.option(
        "--log-level",
        type=Shown("|".join(LOG_LEVELS)),
        default=default,
        show_default=True,
        help="How much is logged.",
    )


def resolve(
    classes: tuple[type[Any], ...], flags: dict[str, Any], extra: Collection[str] | None = ()
) -> tuple[Any, ...]:
    """Builds the config records from flags, environment and `--config` file. Raises ConfigError for
    a key of the file that is neither in a record nor in `extra`; None allows any key."""
    flags = {name: value for name, value in flags.items() if value not in (None, ())}
    if served := served_names(flags.get(SERVED_NAME)):
        flags[SERVED_NAME] = served[0]
    command = click.get_current_context().command
    path = config_path(flags)
    flags.pop("config_file", None)
    _one_model(flags)
    for name in [name for name in flags if name.startswith(FOREIGN)]:
        assert isinstance(command, ModelCommand)
        apply(command.foreign[name], flags.pop(name), flags)
    names = {field.name for cls in classes for field in dataclasses.fields(cls)}
    content = read_yaml(path)
    others: Iterable[ForeignFlag] = ()
    if content and isinstance(command, ModelCommand):
        others = command.foreign.values()
    if extra is None:
        others = [flag for flag in others if flag.field in names]
    else:
        content = {key: content[key] for key in content if key not in extra}
    file = known_keys(content, names, others, ALIASES, takes_all=extra is None)
    if SERVED_NAME in file:
        file[SERVED_NAME] = next(iter(served_names(file[SERVED_NAME])), None)
    _file_of_model(flags)
    if "model" in names:
        file = _with_preset(flags, file, names)
    if "backend" in flags:
        flags["backend"] = device(flags["backend"])
    return tuple(
        resolve_config(cls, flags=flags, environment=os.environ, file=_of(cls, file))
        for cls in classes
    )


def _with_preset(
    flags: dict[str, Any], file: Mapping[str, Any], names: Collection[str]
) -> dict[str, Any]:
    """The file over the preset that the model's short name leads to, if any; `flags` get the model
    of the preset. Raises ConfigError for presets with mistakes."""
    name = flags.get("model") or os.environ.get("VLLMX_MODEL") or file.get("model")
    if not isinstance(name, str):
        return dict(file)
    from vllmx.cli.presets import find_preset, merged

    preset = find_preset(name)
    if preset is None:
        return dict(file)
    settings = {SERVED_NAME: name, **preset.settings, **_ini_settings(preset, names)}
    flags["model"] = preset.model
    for given in (flags, file):
        for key in [key for key in settings if key in given]:
            settings[key] = merged(key, given[key], settings[key])
    for key in [key for key in settings if key in flags]:
        flags[key] = settings[key]
    return {**file, **settings}


def _ini_settings(preset: Preset, names: Collection[str]) -> dict[str, Any]:
    """Our fields for the flags of llama.cpp in a preset. Raises ConfigError for unknown ones."""
    if not preset.flags:
        return {}
    from vllmx.cli.presets import merged

    theirs = list(every_flag())
    ours = {field.name.replace("_", "-") for field in dataclasses.fields(EngineConfig)}
    known = {name.lstrip("-") for flag in theirs for name in flag.names} | ours
    known |= {name.lstrip("-") for texts in ALIASES.values() for name in texts}
    of_engine = [flag for flag in theirs if flag.field is None or flag.field in names]
    found: dict[str, Any] = {}
    for flags in preset.flags:
        for key in flags:
            if key not in known:
                raise ConfigError(
                    f"{preset.origin}: {preset.name!r} has the unknown key {key!r}"
                    f"{nearest(key, known)}; known are the flags of llama.cpp and vllmx"
                )
        own = known_keys(flags, names, of_engine, ALIASES, takes_all=True)
        found |= {key: merged(key, own[key], found.get(key, "{}")) for key in own}
    return found


def config_path(flags: Mapping[str, Any]) -> str | None:
    """The file of `--config` or VLLMX_CONFIG."""
    return flags.get("config_file") or os.environ.get("VLLMX_CONFIG")


def served_names(given: Any) -> tuple[str, ...]:
    """All names of a model, from a flag that may be repeated or a list in the config file; commas
    part names, as in llama.cpp's `--alias`. Raises ConfigError for a value that is not a name."""
    if given is None:
        return ()
    names = [*given] if isinstance(given, list | tuple) else [given]
    texts = [convert(name, str, SERVED_NAME, "--served-model-name") for name in names]
    parts = ([part.strip() for part in text.split(",") if part.strip()] or [text] for text in texts)
    return tuple(dict.fromkeys(chain.from_iterable(parts)))


def _one_model(flags: dict[str, Any]) -> None:
    positional = flags.pop("model_argument", None)
    if positional is not None and flags.get("model") is not None:
        raise ConfigError(
            f"the model is named twice, {positional!r} and --model {flags['model']!r}: give one"
        )
    if positional is not None:
        flags["model"] = positional


def _file_of_model(flags: dict[str, Any]) -> None:
    """`--m REPO --f FILE` is a file of the repository, or of a folder."""
    file, model = flags.pop("file", None), flags.get("model")
    if file is None:
        return
    if model is None:
        flags["model"] = file
    elif os.path.isdir(os.path.expanduser(model)):
        flags["model"] = os.path.join(model, file)
    elif os.path.exists(model) or ":" in model:
        raise ConfigError(
            f"--file {file!r} names a file of a model, but {model!r} is a file itself: give one"
        )
    else:
        flags["model"] = f"{model}:{file}"


def device(text: str) -> str:
    """The backend for a PyTorch device or its number. Raises ConfigError for devices other than the
    first: a variable selects the GPU."""
    name, _, number = text.partition(":")
    if name.isdigit() and not number:
        name, number = "auto", name
    if not number.isdigit():
        if "," in text:
            raise ConfigError(
                f"--backend {text!r}: vllmx runs a model on one device", param="backend"
            )
        return {"none": "cpu", "gpu": "auto", "mps": "metal"}.get(text, text)
    if int(number):
        raise ConfigError(
            f"--backend {text!r}: the number of the GPU is given by a variable: set"
            f" VLLMX_CUDA_DEVICE={number}",
            param="backend",
        )
    return device(name)


def _of(cls: type[Any], file: Mapping[str, Any]) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(cls)}
    return {key: value for key, value in file.items() if key.replace("-", "_") in names}


# --- sampling -------------------------------------------------------------------------------------
_SAMPLING = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "sampling_seed",
    "stop",
    "min_tokens",
    "ignore_eos",
)


def sampling_options(command: F) -> F:
    """One option for each sampling parameter; None, if it is not given, means the model's own."""
    options = (
        click.option("--max-tokens", "-n", type=int, help="Longest output, in tokens."),
        click.option("--temperature", type=float, help="0 = greedy."),
        click.option("--top-p", type=float, help="Nucleus sampling."),
        click.option("--top-k", type=int, help="Keep the k likeliest; 0 = all."),
        click.option("--min-p", type=float, help="Keep what is this likely relative to the best."),
        click.option("--repetition-penalty", type=float, help="Above 1 discourages repetition."),
        click.option("--presence-penalty", type=float, help="-2 to 2."),
        click.option("--frequency-penalty", type=float, help="-2 to 2."),
        click.option("--sampling-seed", type=int, help="Makes the draws repeat."),
        click.option("--stop", multiple=True, help="Text that ends the output; may be repeated."),
        click.option("--min-tokens", type=int, help="Shortest output, in tokens."),
        click.option("--ignore-eos", is_flag=True, default=None, help="Go on after the end."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def take_sampling(flags: dict[str, Any]) -> dict[str, Any]:
    """Moves the sampling parameters out of a command's flags, for `SamplingParams`."""
    given = {name: flags.pop(name) for name in _SAMPLING}
    given["seed"] = given.pop("sampling_seed")
    return {name: value for name, value in given.items() if value not in (None, ())}
