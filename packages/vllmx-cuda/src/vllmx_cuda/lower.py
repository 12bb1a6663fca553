"""From a recorded step to launches: each node becomes a function that enqueues its kernels.

What such a function launches depends on a step's padded sizes alone, never on its values or
lengths: that is what makes a step of one size capturable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from vllmx_core.model import AttentionSpec
from vllmx_core.tape import Node, Rows, Value, WeightRef

from vllmx_cuda.arch import number
from vllmx_cuda.device import Device, Memory
from vllmx_cuda.dtypes import ITEM_BYTES
from vllmx_cuda.kernel_specs import DTYPES, KERNELS, Variant, vector_width
from vllmx_cuda.kernel_specs.attention import (
    decode_group,
    decode_vector,
    group_tile,
    store_vector,
)
from vllmx_cuda.kernel_specs.codes8 import CODES
from vllmx_cuda.kernel_specs.rows import ACTIVATIONS
from vllmx_cuda.kv_cache import LayerPages
from vllmx_cuda.layout import (
    Scratch,
    decodes_on_tensor_cores,
    visibility,
)
from vllmx_cuda.matrices.form import ActivationCodes, ProductScratch, Target
from vllmx_cuda.matrices.matrix import Matrix, MatrixProduct
from vllmx_cuda.prefill import PrefillKernel, prefill_kernel
from vllmx_cuda.staging import StepMemory, StepSizes
from vllmx_cuda.tuning import Tunable
from vllmx_cuda.weights import Weight

Enqueue = Callable[[StepSizes, StepMemory], None]


@dataclass(frozen=True, slots=True)
class CodedNorm:
    """A norm that writes codes."""

    kernel: Variant
    codes: ActivationCodes


@dataclass(frozen=True)
class Lowering:
    """What nodes are lowered against."""

    device: Device
    dtype: str
    weights: Mapping[str, Weight]
    pages: Sequence[LayerPages]
    block_size: int
    kv: int
    """Value of VX_KV."""
    arena: Memory
    offsets: Mapping[Value, int]
    in_place: Mapping[Value, Value]
    scratch: Scratch
    products: ProductScratch
    wgmma: bool = False
    """Whether paged_prefill_wgmma takes the prompts that it can take."""
    variants: list[Variant] = field(default_factory=list)
    """Every kernel that was lowered to."""
    fed: dict[Value, MatrixProduct] = field(default_factory=dict)
    """Norms' results whose only reader is the linear behind them -> its product."""
    shapes: dict[Hashable, tuple[Rows, Callable[[int], None]]] = field(default_factory=dict)
    """One product of each shape, and what its rows are."""

    def lower(self, nodes: Sequence[Node]) -> list[Enqueue]:
        """In the order of the nodes."""
        makers: Mapping[str, Callable[[Node], Enqueue]] = {
            "embedding": self._embedding, "rms_norm": self._rms_norm,
            "layer_norm": self._layer_norm, "linear": self._linear,
            "attention": self._attention, "gated_act": self._gated_act,
            "activation": self._activation, "add": self._add, "scale": self._scale,
        }  # fmt: skip
        self._feed(nodes)
        launches = [makers[node.op](node) for node in nodes]
        self.fed.clear()  # products know this object: no cycle may keep the device's memory
        return launches

    def take_tunables(self, max_rows: Mapping[Rows, int]) -> list[Tunable]:
        """One product of each shape that was lowered; once, for products know this object."""
        found = [Tunable(enqueue, max_rows[rows]) for rows, enqueue in self.shapes.values()]
        self.shapes.clear()
        return found

    def _feed(self, nodes: Sequence[Node]) -> None:
        """Finds the norms whose result one linear reads, and at once: it may be codes then."""
        uses = Counter(value for node in nodes for value in node.reads)
        for norm, following in pairwise(nodes):
            out = norm.writes[0]
            linear = following.op == "linear" and following.writes[0].rows == "T"
            if norm.op == "rms_norm" and linear and following.reads == (out,) and uses[out] == 1:
                self.fed[out] = self._product(following)

    def place(self, value: Value) -> Memory:
        """Of a value, from its first row on."""
        return self.arena.at(self.offsets[value])

    @property
    def target(self) -> Target:
        """What forms of matrices are lowered for."""
        return Target(self.dtype, number(self.device.info.arch))

    def variant(self, entry: str, **options: int) -> Variant:
        """A kernel for this model's dtype."""
        found = KERNELS[entry].variant(VX_DTYPE=DTYPES[self.dtype], **options)
        self.variants.append(found)
        return found

    def _vector(self, ref: WeightRef | None) -> Memory | None:
        if ref is None:
            return None
        weight = self.weights[ref.name]
        assert isinstance(weight, Memory), f"{ref.name} is a matrix"
        return weight

    def _matrix(self, ref: WeightRef) -> Matrix:
        weight = self.weights[ref.name]
        assert isinstance(weight, Matrix), f"{ref.name} is a vector"
        return weight

    def _item(self, width: int) -> int:
        return width * ITEM_BYTES[self.dtype]

    def _embedding(self, node: Node) -> Enqueue:
        gather = self._matrix(node.weights["w"]).gather(self, self.place(node.writes[0]))

        def enqueue(sizes: StepSizes, step: StepMemory) -> None:
            gather(step.tokens, sizes.tokens)

        return enqueue

    def _rms_norm(self, node: Node) -> Enqueue:
        if len(node.reads) == 2:
            return self._add_rms_norm(node)
        x, y = node.reads[0], self.place(node.writes[0])
        source, weight, width = self.place(x), self._vector(node.weights["w"]), x.width
        kernel, eps = self.variant("rms_norm", VX_VEC=vector_width(width)), node.options["eps"]
        coded = self._coded("rms_norm_codes", node)

        def enqueue(sizes: StepSizes, step: StepMemory) -> None:
            shape, norm = {"rows": sizes.tokens, "width": width}, coded(sizes.tokens)
            if norm is None:
                self.device.launch(kernel, shape, (source, weight, y, width, eps))
                return
            out = self.products.codes, self.products.scales
            codes = norm.codes
            arguments = (source, weight, *out, width, eps, codes.scale, codes.pitch(sizes.tokens))
            self.device.launch(norm.kernel, shape, arguments)

        return enqueue

    def _add_rms_norm(self, node: Node) -> Enqueue:
        """The kernel adds in place: where the residual is still wanted, into a copy of it."""
        (x, residual), (out, total) = node.reads, node.writes
        source, before, y, after = map(self.place, (x, residual, out, total))
        weight, width, eps = self._vector(node.weights["w"]), x.width, node.options["eps"]
        kernel = self.variant("add_rms_norm", VX_VEC=vector_width(width))
        coded = self._coded("add_rms_norm_codes", node)
        copies = total not in self.in_place

        def enqueue(sizes: StepSizes, step: StepMemory) -> None:
            if copies:
                self.device.copy(after, before.at(0, sizes.tokens * self._item(width)))
            shape, norm = {"rows": sizes.tokens, "width": width}, coded(sizes.tokens)
            if norm is None:
                self.device.launch(kernel, shape, (source, after, weight, y, width, eps))
                return
            written = self.products.codes, self.products.scales
            fixed, pitch = norm.codes.scale, norm.codes.pitch(sizes.tokens)
            arguments = (source, after, weight, *written, width, eps, fixed, pitch)
            self.device.launch(norm.kernel, shape, arguments)

        return enqueue

    def _coded(self, entry: str, node: Node) -> Callable[[int], CodedNorm | None]:
        """What writes a norm's result as the codes that the product behind it wants for so many
        rows, and into its scratch; None: it wants the values."""
        product, vec = self.fed.get(node.writes[0]), vector_width(node.writes[0].width)
        if product is None:
            return lambda m: None
        kernels = {
            codes: CodedNorm(
                self.variant(
                    entry, VX_VEC=vec, VX_CODE=CODES[codes.kind], VX_GROUPS=int(codes.groups)
                ),
                codes,
            )
            for codes in product.quantise
            if codes.kind in CODES
        }

        def chosen(m: int) -> CodedNorm | None:
            codes = product.codes(m)
            return None if codes is None else kernels.get(codes)

        return chosen

    def _layer_norm(self, node: Node) -> Enqueue:
        x, y = node.reads[0], self.place(node.writes[0])
        source, width, eps = self.place(x), x.width, node.options["eps"]
        weight, bias = self._vector(node.weights["w"]), self._vector(node.weights.get("bias"))
        kernel = self.variant("layer_norm", VX_VEC=vector_width(width))

        def enqueue(sizes: StepSizes, step: StepMemory) -> None:
            shape = {"rows": sizes.tokens, "width": width}
            self.device.launch(kernel, shape, (source, weight, bias, y, width, eps))

        return enqueue

    def _linear(self, node: Node) -> Enqueue:
        if node.writes[0].rows == "L":
            return self._head(node)
        product, fed = self.fed.get(node.reads[0]) or self._product(node), node.reads[0] in self.fed

        def enqueue(sizes: StepSizes, step: StepMemory) -> None:
            ready = product.codes(sizes.tokens) if fed else None
            by_norm = ready is not None and ready.kind in CODES
            product.enqueue(sizes.tokens, ready if by_norm else None)

        return enqueue

    def _product(self, node: Node) -> MatrixProduct:
        x, y = self.place(node.reads[0]), self.place(node.writes[0])
        matrix = self._matrix(node.weights["w"])
        product = matrix.product(self, x, y, self.dtype)
        self.shapes.setdefault(("T", *matrix.shape), ("T", product.enqueue))
        return product

    def _head(self, node: Node) -> Enqueue:
        matrix, cap = self._matrix(node.weights["w"]), node.options["softcap"]
        x, y, rows = self.place(node.reads[0]), self.place(node.writes[0]), self.scratch.rows
        gather = self.variant("gather_rows", VX_VEC=vector_width(matrix.cols))
        product = matrix.product(self, rows, y, "f32")
        self.shapes.setdefault(("L", *matrix.shape), ("L", product.enqueue))
        softcap = self.variant("softcap", VX_VEC=vector_width(matrix.rows)) if cap else None

        def enqueue(sizes: StepSizes, step: StepMemory) -> None:
            count = sizes.logit_rows
            if not count:
                return
            shape = {"rows": count, "width": matrix.cols}
            self.device.launch(gather, shape, (step.logit_rows, x, rows, matrix.cols))
            product.enqueue(count)
            if softcap is not None:
                values = count * matrix.rows
                self.device.launch(softcap, {"count": values}, (y, values, cap))

        return enqueue

    def _attention(self, node: Node) -> Enqueue:
        """Items first: where tokens have none, their combination writes zeros, and tiles then the
        answers."""
        store, decode = self._store(node), self._decode(node)
        spec: AttentionSpec = node.options["spec"]
        kernel = prefill_kernel(spec, self.dtype, self.kv, self.device.info.arch, wgmma=self.wgmma)
        prefill = self._prefill(node, kernel) if kernel else None

        def enqueue(sizes: StepSizes, step: StepMemory) -> None:
            store(sizes, step)
            if sizes.items:
                decode(sizes, step)
            if prefill is not None and any(sizes.tiles):
                prefill(sizes, step)

        return enqueue

    def _store(self, node: Node) -> Enqueue:
        spec: AttentionSpec = node.options["spec"]
        qkv, pages = self.place(node.reads[0]), self.pages[spec.layer]
        rope, q_norm, k_norm = (
            self._vector(node.weights.get(name)) for name in ("rope", "q_norm", "k_norm")
        )
        kernel = self.variant(
            "kv_store", VX_HEAD=spec.head_size, VX_KV=self.kv, VX_VEC=store_vector(spec.head_size)
        )
        heads = {"heads": spec.num_heads, "kv_heads": spec.num_kv_heads}
        values = (
            *heads.values(), spec.rotary_dim, int(spec.interleaved), self._page_shift,
            spec.norm_eps,
        )  # fmt: skip

        def enqueue(sizes: StepSizes, step: StepMemory) -> None:
            self.device.launch(
                kernel, {"tokens": sizes.tokens, **heads},
                (
                    qkv, step.positions, step.slots, q_norm, k_norm, rope, self.scratch.queries,
                    pages.k, pages.v, pages.k_scales, pages.v_scales, *values,
                ),
            )  # fmt: skip

        return enqueue

    def _decode(self, node: Node) -> Enqueue:
        spec: AttentionSpec = node.options["spec"]
        y, pages, scratch = self.place(node.writes[0]), self.pages[spec.layer], self.scratch
        sinks, seen = self._vector(node.weights.get("sinks")), visibility(spec)
        options = {
            "VX_HEAD": spec.head_size, "VX_KV": self.kv,
            "VX_VEC": decode_vector(spec.head_size),
            "VX_GROUP": group_tile(spec.num_heads // spec.num_kv_heads),
        }  # fmt: skip
        combine = self.variant("paged_combine", **options)
        if decodes_on_tensor_cores(spec, self.dtype, self.device.info.arch):
            group = decode_group(spec.num_heads // spec.num_kv_heads, spec.head_size)
            decode = self.variant(
                "paged_decode_mma", VX_HEAD=spec.head_size, VX_KV=self.kv, VX_GROUP=group
            )
        else:
            decode = self.variant("paged_decode", **options)
        heads = {"heads": spec.num_heads, "kv_heads": spec.num_kv_heads}
        window, softcap = spec.window or 0, spec.softcap or 0.0

        def enqueue(sizes: StepSizes, step: StepMemory) -> None:
            items, first_item = step.items[seen], step.first_item[seen]
            self.device.launch(
                decode, {"items": sizes.items, **heads},
                (
                    scratch.queries, pages.k, pages.v, pages.k_scales, pages.v_scales, items,
                    first_item, step.positions, step.block_table, sinks, y, scratch.partial,
                    scratch.weights, *heads.values(), step.table_stride, self._page_shift,
                    window, spec.scale, softcap,
                ),
            )  # fmt: skip
            self.device.launch(
                combine, {"tokens": sizes.tokens, "heads": spec.num_heads},
                (scratch.partial, scratch.weights, first_item, sinks, y, spec.num_heads),
            )  # fmt: skip

        return enqueue

    def _prefill(self, node: Node, chosen: PrefillKernel) -> Enqueue:
        spec: AttentionSpec = node.options["spec"]
        y, pages = self.place(node.writes[0]), self.pages[spec.layer]
        sinks, kernel = (
            self._vector(node.weights.get("sinks")),
            self.variant(chosen.entry, **chosen.options),
        )
        heads = {"heads": spec.num_heads, "kv_heads": spec.num_kv_heads}
        values = (spec.window or 0, int(spec.causal), spec.scale, spec.softcap or 0.0)

        def enqueue(sizes: StepSizes, step: StepMemory) -> None:
            tiles = step.tiles[chosen.tile_tokens]
            self.device.launch(
                kernel, {"tiles": tiles.num_bytes // 16, **heads},
                (
                    self.scratch.queries, pages.k, pages.v, pages.k_scales, pages.v_scales, tiles,
                    step.context_len, step.block_table, sinks, y, *heads.values(),
                    step.table_stride, self._page_shift, *values,
                ),
            )  # fmt: skip

        return enqueue

    @property
    def _page_shift(self) -> int:
        return self.block_size.bit_length() - 1

    def _gated_act(self, node: Node) -> Enqueue:
        x, y, width = self.place(node.reads[0]), self.place(node.writes[0]), node.writes[0].width
        act = ACTIVATIONS[node.options["kind"]]
        kernel = self.variant("gated_act", VX_VEC=vector_width(width), VX_ACT=act)

        def enqueue(sizes: StepSizes, step: StepMemory) -> None:
            self.device.launch(kernel, {"rows": sizes.tokens, "width": width}, (x, y, width))

        return enqueue

    def _activation(self, node: Node) -> Enqueue:
        x, y, width = self.place(node.reads[0]), self.place(node.writes[0]), node.writes[0].width
        act = ACTIVATIONS[node.options["kind"]]
        kernel = self.variant("activation", VX_VEC=vector_width(width), VX_ACT=act)

        def enqueue(sizes: StepSizes, step: StepMemory) -> None:
            self.device.launch(kernel, {"rows": sizes.tokens, "width": width}, (x, y, width))

        return enqueue

    def _add(self, node: Node) -> Enqueue:
        return self._flat(node, "add")

    def _scale(self, node: Node) -> Enqueue:
        return self._flat(node, "scale", node.options["factor"])

    def _flat(self, node: Node, entry: str, *values: float) -> Enqueue:
        """An op over all elements alike."""
        inputs, y = [self.place(value) for value in node.reads], self.place(node.writes[0])
        width = node.writes[0].width
        kernel = self.variant(entry, VX_VEC=vector_width(width))

        def enqueue(sizes: StepSizes, step: StepMemory) -> None:
            count = sizes.tokens * width
            self.device.launch(kernel, {"count": count}, (*inputs, y, count, *values))

        return enqueue
