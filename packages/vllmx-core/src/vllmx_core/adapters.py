"""LoRA adapters: low-rank changes of a model's matrices. One step can use several.

A model that is loaded with `LoadOptions.adapters` has numbered slots for adapters; a row of a step
names one (`StepPlan.adapters`). What an adapter changes is found by the model's weight map, with
the rows and columns that the map picks, so fused matrices and the parts of ranks need nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Generic, TypeVar

from vllmx_core.errors import AdapterError, WeightFormatError, listing
from vllmx_core.ops.adapt import Adapt
from vllmx_core.ops.op import Op
from vllmx_core.plan import F32
from vllmx_core.records import Record
from vllmx_core.weights.map import choices, parts_of
from vllmx_core.weights.part import WeightPart, dense_part
from vllmx_core.weights.spec import PartSpec, RankShare, WeightSpec

A = TypeVar("A")
MAX_RANK = 512
"""The greatest rank of an adapter."""
_OUTER = frozenset(
    ("backbone", "base_model", "decoder", "language_model", "model", "text_model", "transformer")
)
"""Modules around the text model, which the classes of one checkpoint name differently."""
_TABLES = frozenset(("embed", "embed_tokens", "embeddings", "tok_embeddings", "wte"))
"""Names of tables that may be tied to the head."""


class AdapterRoom(Record):
    """The adapters that a loaded model must have room for."""

    slots: int
    """Adapters that rows of one step may use."""
    rank: int
    """The greatest rank of one."""


class LowRank(Record):
    """The change of one matrix: B A, (N, r) and (r, K); an embedding's A is (r, V)."""

    a: F32
    b: F32
    """Scaled already."""


class Adapter(Record):
    """An adapter in host memory."""

    modules: Mapping[str, LowRank]
    """Changes by `module_key`."""

    @property
    def rank(self) -> int:
        """The greatest rank of its changes."""
        return max((change.a.shape[0] for change in self.modules.values()), default=0)

    @property
    def num_bytes(self) -> int:
        return sum(change.a.nbytes + change.b.nbytes for change in self.modules.values())


class Piece(Record, Generic[A]):
    """The change of some rows of a weight."""

    begin: int
    end: int
    a: A  # (r, K)
    b: A  # (end - begin, r)


Pieces = Mapping[str, Sequence[Piece[A]]]
"""The changes of an adapter by the name of the weight."""


def module_key(name: str) -> str:
    """Returns a module's name without the modules around the text model."""
    parts = name.split(".")
    first = next((i for i, part in enumerate(parts) if part not in _OUTER), len(parts) - 1)
    return ".".join(parts[first:])


class AdapterTargets:
    """The weights of a recorded step that adapters change.

    Args:
        specs: the weight map of the step.
        ops: those of the step, with `Adapt` behind what can be changed.
    """

    def __init__(self, specs: Iterable[WeightSpec], ops: Iterable[Op]) -> None:
        names = {op.w.name for op in ops if isinstance(op, Adapt)}
        self._specs = [spec for spec in specs if spec.name in names]

    @property
    def names(self) -> list[str]:
        """The names of these weights."""
        return [spec.name for spec in self._specs]

    @property
    def num_parts(self) -> Mapping[str, int]:
        """The parts of each weight, the most pieces that an adapter has of it."""
        return {spec.name: len(spec.parts) for spec in self._specs}

    def is_table(self, name: str) -> bool:
        """True for a table of embeddings."""
        return any(spec.name == name and spec.kind == "embedding" for spec in self._specs)

    def num_bytes(self, room: AdapterRoom, item_bytes: int = 4) -> int:
        """Memory that the slots take when all are filled."""
        return room.slots * room.rank * item_bytes * sum(map(_numbers_of, self._specs))

    def pieces(self, adapter: Adapter) -> Pieces[F32]:
        """The adapter's changes, cut as the map cuts the weights. Raises AdapterError for a change
        that does not have the shape of its weight."""
        found = {spec.name: list(_pieces(spec, adapter)) for spec in self._specs}
        return {name: pieces for name, pieces in found.items() if pieces}

    def check(self, adapter: Adapter) -> None:
        """Raises AdapterError for changes of modules that the step does not have or cannot adapt,
        and as `pieces`."""
        keys = {key for spec in self._specs for part in spec.parts for key, _ in _named(spec, part)}
        strange = sorted(adapter.modules.keys() - keys)
        if strange:
            raise AdapterError(
                f"the adapter changes {listing(strange, 3)}, which this model does not have or"
                " cannot adapt while it runs: merge the adapter into the model with vllmx quantize"
                " --merge-lora, and serve the result"
            )
        if adapter.rank > MAX_RANK:
            raise AdapterError(
                f"the adapter has rank {adapter.rank}, the greatest is {MAX_RANK}: merge it into"
                " the model with vllmx quantize --merge-lora"
            )
        self.pieces(adapter)


def _numbers_of(spec: WeightSpec) -> int:
    """Numbers of an adapter of rank 1."""
    return sum(part.rows + spec.cols for part in spec.parts)


def _named(spec: WeightSpec, part: PartSpec) -> Iterator[tuple[str, PartSpec]]:
    """The keys under which an adapter may have the change of a part, and the part by that name."""
    for one in choices(part):
        key = module_key(one.name.removesuffix(".weight"))
        # a tied head and the table have one tensor and are two modules
        if spec.kind == "linear" and key in _TABLES:
            key = "lm_head"
        if spec.kind == "linear" or key != "lm_head":
            yield key, one


def _pieces(spec: WeightSpec, adapter: Adapter) -> Iterator[Piece[F32]]:
    begin = 0
    for part in spec.parts:
        named = (pair for pair in _named(spec, part) if pair[0] in adapter.modules)
        for key, wanted in islice(named, 1):
            change = adapter.modules[key]
            if spec.kind == "embedding":
                yield Piece(0, spec.cols, *_table(spec, key, change))
            else:
                yield Piece(begin, begin + part.rows, *_cut(spec, wanted, key, change))
        begin += part.rows


def _table(spec: WeightSpec, key: str, change: LowRank) -> tuple[F32, F32]:
    """A and B of an embedding."""
    found = (change.a.shape[1], change.b.shape[0])
    if found != (spec.rows, spec.cols):
        raise AdapterError(
            f"the adapter does not fit the model: its change of {key!r} is of a table {found}, the"
            f" model's is ({spec.rows}, {spec.cols})"
        )
    return change.a, change.b


def _cut(spec: WeightSpec, part: PartSpec, key: str, change: LowRank) -> tuple[F32, F32]:
    """A with the columns and B with the rows that the part has of its tensor."""
    rank, share = len(change.a), part.share
    plain = replace(part, name=key, bias=None, alternatives=(), entry=None, transposed=False)
    by_rows = by_cols = None
    if share is not None:
        rows_order = share.order if share.rows is not None else b""
        cols_order = share.order if share.cols is not None else b""
        by_rows = replace(share, whole_cols=rank, cols=None, order=rows_order)
        by_cols = RankShare(rank, share.whole_cols, None, share.cols, cols_order)
    b = replace(plain, first_col=None, share=by_rows)
    a = replace(plain, runs=None, rows=rank, share=by_cols)
    try:
        return (
            _read(replace(spec, parts=(a,)), change.a),
            _read(replace(spec, parts=(b,), cols=rank), change.b),
        )
    except WeightFormatError as error:
        raise AdapterError(f"the adapter does not fit the model: {error.message}") from None


def _read(spec: WeightSpec, values: F32) -> F32:
    (part,) = parts_of(spec, _Matrix(values))
    return part.dequantize()


class _Matrix:
    """A `WeightSource` of one matrix, whatever its name."""

    def __init__(self, values: F32) -> None:
        self._values = values

    def names(self) -> Collection[str]:
        return ()

    def part(self, name: str) -> WeightPart:
        return dense_part(name, self._values)

    def close(self) -> None: ...


class AdapterSlots(Generic[A]):
    """The adapters of a loaded model, for backends whose ops are formulas over arrays.

    Args:
        room: None: the model takes none.

    Attributes:
        filled: the pieces of each slot, for `ArrayFrame.adapters`.
        num_bytes: memory that they take at the most.
    """

    def __init__(
        self, room: AdapterRoom | None, specs: Iterable[WeightSpec], ops: Iterable[Op]
    ) -> None:
        self._targets = AdapterTargets(specs, ops)
        self.filled: dict[int, Pieces[A]] = {}
        self.num_bytes = 0 if room is None else self._targets.num_bytes(room)

    def put(self, slot: int, adapter: Adapter | None, upload: Callable[[F32], A]) -> None:
        pieces = {} if adapter is None else self._targets.pieces(adapter)
        self.filled[slot] = {
            name: [Piece(one.begin, one.end, upload(one.a), upload(one.b)) for one in found]
            for name, found in pieces.items()
        }
