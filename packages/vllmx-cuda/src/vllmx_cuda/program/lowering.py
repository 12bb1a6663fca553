"""The context in which ops are lowered: weights, memory and kernels of one model."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from vllmx_core.ops.values import Rows, Value, WeightRef

from vllmx_cuda.device.arch import number
from vllmx_cuda.device.device import Device
from vllmx_cuda.device.memory import ITEM_BYTES, Memory
from vllmx_cuda.device.ranks import DeviceRanks
from vllmx_cuda.kernel_specs import DTYPES, KERNELS, Variant
from vllmx_cuda.loading.tuning import Tunable
from vllmx_cuda.loading.weights import Weight
from vllmx_cuda.matrices.form import ProductScratch, Target
from vllmx_cuda.matrices.matrix import Matrix, MatrixProduct
from vllmx_cuda.program.kv_cache import LayerPages, LayerStates
from vllmx_cuda.program.staging import StepMemory
from vllmx_cuda.program.step_arrays import StepSizes

Enqueue = Callable[[StepSizes, StepMemory], None]


@dataclass(frozen=True)
class Lowering:
    """The target of lowering: a model's device, weights, memory and kernels."""

    device: Device
    dtype: str
    weights: Mapping[str, Weight]
    pages: Sequence[LayerPages]
    states: Sequence[LayerStates]
    block_size: int
    kv: int
    """Value of VX_KV."""
    arena: Memory
    offsets: Mapping[Value, int]
    in_place: Mapping[Value, Value]
    scratch: Scratch
    products: ProductScratch
    max_tokens: int
    """The most tokens of a step."""
    wgmma: bool = False
    """True if paged_prefill_wgmma runs the prompts that it supports."""
    fused: bool = True
    """True if attention of single tokens stores their keys and values."""
    variants: list[Variant] = field(default_factory=list)
    """Every kernel that the launches use."""
    features: Sequence[Memory] = ()
    """The store of features of images, part by part."""
    ranks: DeviceRanks | None = None
    """The other ranks of the model, if it has any."""
    fed: dict[Value, MatrixProduct] = field(default_factory=dict)
    """Norms' results whose only reader is the linear behind them -> its product."""
    shapes: dict[Hashable, tuple[Rows, Callable[[int], None]]] = field(default_factory=dict)
    """One product of each shape, and what its rows are."""
    rotations: dict[Rotation, Memory] = field(default_factory=dict)
    """The values of each rotation with axes for the tokens of the step."""

    def take_tunables(self, max_rows: Mapping[Rows, int]) -> list[Tunable]:
        """One product of each shape that was lowered; once, for products know this object."""
        found = [Tunable(enqueue, max_rows[rows]) for rows, enqueue in self.shapes.values()]
        self.shapes.clear()
        return found

    def place(self, value: Value) -> Memory:
        """The memory of a value, from its first row on."""
        return self.arena.at(self.offsets[value])

    @property
    def target(self) -> Target:
        """The dtype and architecture that forms of matrices depend on."""
        return Target(self.dtype, number(self.device.info.arch))

    @property
    def page_shift(self) -> int:
        """Binary logarithm of the tokens of a page."""
        return self.block_size.bit_length() - 1

    def variant(self, entry: str, **options: int) -> Variant:
        """A kernel for this model's dtype."""
        found = KERNELS[entry].variant(VX_DTYPE=DTYPES[self.dtype], **options)
        self.variants.append(found)
        return found

    def vector(self, ref: WeightRef | None) -> Memory | None:
        """A vector or a constant on the device; None for none."""
        if ref is None:
            return None
        weight = self.weights[ref.name]
        assert isinstance(weight, Memory), f"{ref.name} is a matrix"
        return weight

    def turned(self, rope: WeightRef, axes: tuple[int, ...]) -> Memory:
        """The rotation of each token of the step, by `TurnedRows`."""
        return self.rotations[rope, axes]

    def matrix(self, ref: WeightRef) -> Matrix:
        weight = self.weights[ref.name]
        assert isinstance(weight, Matrix), f"{ref.name} is a vector"
        return weight

    def others(self) -> DeviceRanks:
        """The other ranks, for an op between ranks."""
        assert self.ranks is not None, "an op between ranks needs a communicator"
        return self.ranks

    def item_bytes(self, width: int) -> int:
        """Bytes of one row of so many features."""
        return width * ITEM_BYTES[self.dtype]

    def product(self, x: Value, w: WeightRef, out: Value) -> MatrixProduct:
        matrix = self.matrix(w)
        product = matrix.product(self, self.place(x), self.place(out), self.dtype)
        self.shapes.setdefault((x.rows, *matrix.shape), (x.rows, product.enqueue))
        return product


@dataclass(frozen=True, slots=True)
class Scratch:
    """Buffers that live within one op; every op may use all of them."""

    queries: Memory  # (T, H, D), of latents (T, H, C + Dr)
    partial: Memory  # (N, H, D or C) float32
    weights: Memory  # (N, H, 2) float32
    rows: Memory  # (L, E)
    found: Memory  # (T, H, C), of latents
    keys: Memory  # (T, K, D), of segments, as is `values`
    values: Memory
    experts: Memory  # see `vllmx_cuda.program.expert_ops.Spaces`
    turned: Memory  # (T, rotary_dim) float32 of each of `rotations`, which live as long as the step
    own_ids: Memory  # (T,) int32, of tokens in a rank's table
    scores: Memory  # (SCORED_TOKENS, positions) float32, of an indexer
    gathered: Memory  # (L, V) of all ranks, or what they send this one of (T, E) and its sums
    squares: Memory  # (FUSED_TOKENS, blocks) float32, of a residual
    arrivals: Memory  # (T, H) u32, zeros: what paged_decode_mma counts its items by


Rotation = tuple[WeightRef, tuple[int, ...]]
"""A table of rotations, and the axis that turns each of its frequencies."""
