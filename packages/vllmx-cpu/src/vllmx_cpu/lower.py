"""From nodes to what the native team runs: a function pointer and a struct of arguments each."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from vllmx_core.model import AttentionSpec
from vllmx_core.tape import Node, Value

from vllmx_cpu.kv_cache import LayerPages
from vllmx_cpu.memory import Bytes
from vllmx_cpu.packing import LoadedWeights
from vllmx_cpu.structs import (
    ACTIVATIONS,
    KV_DTYPES,
    NO_ACTIVATION,
    VX_DTYPES,
    VxAttention,
    VxElementwise,
    VxEmbedding,
    VxKernels,
    VxLinear,
    VxNorm,
    VxRecord,
)

Address = Callable[[Value], int]


@dataclass(frozen=True, slots=True)
class Lowering:
    """What the ops of one loaded model point to."""

    kernels: VxKernels
    weights: LoadedWeights
    segments: Mapping[str, Sequence[str]]
    """Names of the matrices that make up a weight, one below the other."""
    pages: tuple[LayerPages, ...]
    block_size: int
    kv_dtype: str
    panels: Bytes
    """Packed activations of the largest linear; in use only inside one op."""
    workspace: Bytes
    """The attention's; in use only inside one op."""

    def lower(self, node: Node, address: Address) -> list[tuple[int, ctypes.Structure]]:
        """(function, arguments) of a node whose values lie at `address(value)`; more than one where
        its weight has several segments."""
        function = getattr(self.kernels, node.op)
        if node.op == "linear":
            return [(function, arguments) for arguments in self._linears(node, address)]
        build = {
            "embedding": self._embedding, "rms_norm": self._norm, "layer_norm": self._norm,
            "attention": self._attention,
        }.get(node.op, self._elementwise)  # fmt: skip
        return [(function, build(node, address))]

    def _embedding(self, node: Node, address: Address) -> VxEmbedding:
        matrix = self.weights.matrices[node.weights["w"].name]
        return VxEmbedding(matrix.struct(), address(node.writes[0]))

    def _linears(self, node: Node, address: Address) -> list[VxLinear]:
        kind = node.options.get("activation")
        arguments: list[VxLinear] = []
        column = 0
        for name in self.segments[node.weights["w"].name]:
            matrix = self.weights.matrices[name]
            one = VxLinear(
                w=matrix.struct(),
                x=address(node.reads[0]),
                y=address(node.writes[0]) + column * 4,
                panels=self.panels.ctypes.data,
                activation=NO_ACTIVATION if kind is None else ACTIVATIONS[kind],
                logit_rows=int(node.writes[0].rows == "L"),
                softcap=node.options.get("softcap", 0.0),
                stride=node.writes[0].width,
            )
            arguments.append(one)
            column += matrix.shape.rows
        return arguments

    def _norm(self, node: Node, address: Address) -> VxNorm:
        residual = node.reads[1] if len(node.reads) > 1 else None
        total = node.writes[1] if len(node.writes) > 1 else None
        return VxNorm(
            x=address(node.reads[0]),
            residual=None if residual is None else address(residual),
            weight=self._vector(node, "w"),
            bias=self._vector(node, "bias"),
            sum=None if total is None else address(total),
            y=address(node.writes[0]),
            width=node.writes[0].width,
            eps=node.options["eps"],
        )

    def _elementwise(self, node: Node, address: Address) -> VxElementwise:
        kind = node.options.get("kind")
        return VxElementwise(
            x=address(node.reads[0]),
            other=address(node.reads[1]) if len(node.reads) > 1 else None,
            y=address(node.writes[0]),
            width=node.writes[0].width,
            activation=NO_ACTIVATION if kind is None else ACTIVATIONS[kind],
            factor=node.options.get("factor", 0.0),
        )

    def _attention(self, node: Node, address: Address) -> VxAttention:
        spec: AttentionSpec = node.options["spec"]
        pages = self.pages[spec.layer]
        return VxAttention(
            qkv=address(node.reads[0]),
            out=address(node.writes[0]),
            out_dtype=VX_DTYPES["f32"],
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            rotary_dim=spec.rotary_dim if spec.rope is not None else 0,
            interleaved=int(spec.interleaved),
            block_size=self.block_size,
            kv_dtype=KV_DTYPES[self.kv_dtype],
            window=spec.window or 0,
            causal=int(spec.causal),
            scale=spec.scale,
            softcap=spec.softcap or 0.0,
            norm_eps=spec.norm_eps,
            rope=self._vector(node, "rope"),
            q_norm=self._vector(node, "q_norm"),
            k_norm=self._vector(node, "k_norm"),
            sinks=self._vector(node, "sinks"),
            k_pages=pages.k.ctypes.data,
            v_pages=pages.v.ctypes.data,
            workspace=self.workspace.ctypes.data,
            workspace_bytes=self.workspace.nbytes,
        )

    def _vector(self, node: Node, role: str) -> int | None:
        ref = node.weights.get(role)
        return None if ref is None else int(self.weights.vectors[ref.name].ctypes.data)


@dataclass(frozen=True, slots=True)
class Tape:
    """Lowered ops in a C array; `arguments` keeps the structs alive."""

    records: ctypes.Array[VxRecord]
    arguments: Sequence[ctypes.Structure]
    names: Sequence[str]


def make_tape(ops: Sequence[tuple[str, int, ctypes.Structure]]) -> Tape:
    """From (name, function, arguments)."""
    records = (VxRecord * len(ops))(
        *(VxRecord(function, ctypes.addressof(arguments)) for _, function, arguments in ops)
    )
    return Tape(records, [arguments for _, _, arguments in ops], [name for name, _, _ in ops])


def lower_all(
    lowering: Lowering, nodes: Sequence[Node], offsets: Mapping[Value, int], base: int
) -> list[tuple[str, int, ctypes.Structure]]:
    """The recorded step over one buffer at address `base`."""
    return [
        (node.op, function, arguments)
        for node in nodes
        for function, arguments in lowering.lower(node, lambda value: base + offsets[value])
    ]
