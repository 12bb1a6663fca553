"""The description of a kernel: source, entry, options, arguments, launch rule.

The launcher on the device and the emulator read the same description, so a wrapper that names an
argument wrongly, in a wrong order or of a wrong type fails on both in the same way.

A source is compiled once for each set of *options*, which become preprocessor definitions
(`-DVX_DTYPE=2`); one compiled source may hold several entries.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from vllmx_core.errors import ConfigError

Direction = Literal["in", "out", "inout", "value"]
Sizes = Mapping[str, int]
Options = Mapping[str, int]

DTYPES = {"f32": 0, "f16": 1, "bf16": 2}
"""Element types by the value of VX_DTYPE; vx.h has the same numbers."""
ITEM_BYTES = {0: 4, 1: 2, 2: 2}
"""Bytes of an element by the value of VX_DTYPE."""
ANY_DTYPE = tuple(DTYPES.values())
HALF_DTYPES = DTYPES["f16"], DTYPES["bf16"]
"""The types that our kernels multiply on tensor cores."""
VECTORS = (8, 4, 2, 1)
"""Values of VX_VEC: elements that a thread reads at once."""
ROW_OPTIONS = {"VX_DTYPE": ANY_DTYPE, "VX_VEC": VECTORS}


@dataclass(frozen=True, slots=True)
class Argument:
    """One parameter of an entry.

    A pointer names its element type: `elem` (what VX_DTYPE says), f32, f16, i32, u32, u64, u8, ...;
    a value is one of i32, i64, u32, u64, f32. A pointer whose `optional` is set may be null.
    """

    name: str
    ctype: str
    direction: Direction
    optional: bool = False

    @property
    def is_pointer(self) -> bool:
        return self.direction != "value"


@dataclass(frozen=True, slots=True)
class Launch:
    """Grid (x, y, z), threads of a block (x), bytes of dynamic shared memory."""

    grid: tuple[int, int, int]
    block: int
    shared_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Kernel:
    """One `extern "C"` entry of a source in `vllmx_cuda/kernels`."""

    entry: str
    source: str
    """File name below `kernels`, without folder."""
    options: Mapping[str, tuple[int, ...]]
    """The definitions that the source takes, with the values that are tested."""
    arguments: tuple[Argument, ...]
    sizes: tuple[str, ...]
    """Names that `rule` reads."""
    rule: Callable[[Sizes, Options], Launch]
    """Launch shape; raises ConfigError beyond a limit."""
    tensor_cores: bool = False
    """True if it multiplies on them; see `has_tensor_cores`."""
    architectures: tuple[int, ...] = ()
    """The only compute capabilities that have its instructions; empty: any."""
    meets: bool = False
    """True if its blocks wait for those of other ranks through shared memory."""
    early: tuple[str, ...] | None = None
    """Set if it may begin before the launch before it has ended: the arguments, weights, that it
    reads until vx_wait_for_predecessor."""

    def ordered(self, **named: Any) -> list[Any]:
        """The arguments of a launch by their names: what may be null may be left out.

        Raises ConfigError for names that are missing or unknown."""
        known = {one.name: one.optional for one in self.arguments}
        missing = [name for name, optional in known.items() if not optional and name not in named]
        unknown = [name for name in named if name not in known]
        if missing or unknown:
            raise ConfigError(
                f"kernel {self.entry} takes the arguments {list(known)}:"
                f" missing {missing}, unknown {unknown}"
            )
        return [named.get(name) for name in known]

    def variant(self, **options: int) -> Variant:
        """The kernel compiled with these options; all must be given."""
        if set(options) != set(self.options):
            raise ConfigError(
                f"kernel {self.entry} takes the options {sorted(self.options)},"
                f" got {sorted(options)}"
            )
        for name, value in options.items():
            if value not in self.options[name]:
                raise ConfigError(
                    f"kernel {self.entry} has no variant {name}={value}:"
                    f" choose one of {list(self.options[name])}",
                    param=name,
                )
        return Variant(self, tuple(sorted(options.items())))


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel with its options chosen. Hashable by entry and options."""

    kernel: Kernel = field(hash=False)
    options: tuple[tuple[str, int], ...]

    @property
    def defines(self) -> tuple[str, ...]:
        """`NAME=value` for the compiler's -D, sorted: part of the key of a compiled binary."""
        return tuple(f"{name}={value}" for name, value in self.options)

    @property
    def module_key(self) -> tuple[str, tuple[str, ...]]:
        """The compilation unit, (source, definitions), which entries of one source share."""
        return self.kernel.source, self.defines

    def runs_on(self, arch: int) -> bool:
        """True if a GPU of this compute capability (75, 90, ...) can run it."""
        if self.kernel.architectures and arch not in self.kernel.architectures:
            return False
        if not self.kernel.tensor_cores:
            return True
        dtype = dict(self.options)["VX_DTYPE"]
        return any(has_tensor_cores(name, arch) for name in DTYPES if DTYPES[name] == dtype)

    def launch(self, sizes: Sizes) -> Launch:
        """The launch shape; raises ConfigError for missing, unknown or too great sizes."""
        if set(sizes) != set(self.kernel.sizes):
            raise ConfigError(
                f"kernel {self.kernel.entry} needs the sizes {sorted(self.kernel.sizes)},"
                f" got {sorted(sizes)}"
            )
        return self.kernel.rule(sizes, dict(self.options))


_PARAMETER = re.compile(
    r"((?P<mode>in|out|inout) )?(?P<type>\w+)(?P<star>\*)? (?P<name>\w+)(?P<opt>\?)?"
)


def arguments(text: str) -> tuple[Argument, ...]:
    """Arguments from `"in elem* x, out elem* y, in f32* bias?, i32 rows"`; `?`: may be null."""
    parsed = []
    for part in text.split(","):
        match = _PARAMETER.fullmatch(" ".join(part.split()))
        assert match is not None, f"malformed argument {part!r}"
        assert (match["mode"] is None) == (match["star"] is None), part
        direction: Direction = match["mode"] or "value"  # type: ignore[assignment]
        parsed.append(Argument(match["name"], match["type"], direction, match["opt"] is not None))
    return tuple(parsed)


def kernel(
    source: str,
    signature: str,
    sizes: str,
    rule: Callable[[Sizes, Options], Launch],
    options: Mapping[str, tuple[int, ...]] = {},
    *,
    tensor_cores: bool = False,
    architectures: tuple[int, ...] = (),
    meets: bool = False,
    early: tuple[str, ...] | None = None,
) -> Kernel:
    """A `Kernel` from its signature, `entry(in elem* x, ...)`, and the names of its sizes in one
    string. For the arguments see `arguments`."""
    entry, _, rest = signature.removesuffix(")").partition("(")
    return Kernel(
        entry,
        source,
        options,
        arguments(rest),
        tuple(sizes.split()),
        rule,
        tensor_cores,
        architectures,
        meets,
        early,
    )


FUSED = (
    " in elem* residual?, out f32* squares?, in f32* norm?, in f32* norm_squares?,"
    " i32 num_squares, f32 eps)"
)
"""The last arguments of products of few tokens: a residual that y is added to, and a norm of x."""
FUSIONS = {"VX_NORM": (0, 1), "VX_GATED": (0, 1, 2, 3, 4)}
"""Options of these products: a norm of x; 1 + VX_ACT of a gate, whose rows are the first half."""
PLAIN = dict.fromkeys(FUSIONS, 0)
FUSED_TOKENS = 16
"""Tokens for which products take a norm or a residual of their neighbours, at most."""


def vector_width(*sizes: int) -> int:
    """VX_VEC: the most elements (8, 4, 2, 1) that divide every size: rows stay aligned."""
    return next(width for width in (8, 4, 2, 1) if all(size % width == 0 for size in sizes))


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def has_tensor_cores(dtype: str, arch: int) -> bool:
    """True if our kernels multiply this type on tensor cores of `arch`; those of sm_75 support f16
    only."""
    return dtype == "f16" or (dtype == "bf16" and arch >= 80)


def shared_bytes(arch: int) -> int:
    """Bytes of shared memory that a block may use; from sm_80 on, the size that all GPUs offer."""
    return {75: 64, 90: 227}.get(arch, 99) << 10


def by_outputs(sizes: Sizes, rows: int, tokens: int, threads: int = 128) -> Launch:
    """A block takes `rows` outputs of `tokens` tokens."""
    at_least("tokens", sizes["tokens"], 1)
    grid = (ceil_div(sizes["outputs"], rows), ceil_div(sizes["tokens"], tokens), 1)
    return Launch(grid, threads)


def block_rows(sizes: Sizes, options: Options) -> int:
    """Tiles of outputs of a block that has VX_ROWS tiles of rows: one with a gate, which half of
    the rows are."""
    if not options["VX_GATED"]:
        return options["VX_ROWS"]
    assert (options["VX_ROWS"], sizes["splits"]) == (2, 1), (sizes, options)
    return 1


def along_rows(sizes: Sizes, unit: int, values: int) -> Launch:
    """A block of 256 threads takes so many values of a row, which is made of whole units."""
    at_least("rows", sizes["rows"], 1)
    if sizes["width"] % unit:
        raise ConfigError(f"rows of {sizes['width']} values are not whole units of {unit}")
    return Launch((sizes["rows"], ceil_div(sizes["width"], values), 1), 256)


def at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise ConfigError(f"{name} must be at least {low}, got {value}", param=name)


def multiple_of(name: str, value: int, factor: int) -> None:
    if value % factor:
        raise ConfigError(f"{name} must be a multiple of {factor}, got {value}", param=name)


def at_most(name: str, value: int, high: int, why: str) -> None:
    if value > high:
        raise ConfigError(f"{name} must be at most {high} ({why}), got {value}", param=name)
