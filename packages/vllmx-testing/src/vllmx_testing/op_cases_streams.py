"""Cases of hyper-connections and of products in groups."""

from __future__ import annotations

from collections.abc import Iterator

from vllmx_core.ops.grouped_linear import GroupedLinear
from vllmx_core.ops.hyper_connections import HyperRead, HyperSpec, HyperStreams, HyperWrite
from vllmx_core.ops.recorder import Ops
from vllmx_core.ops.values import Value

from vllmx_testing.op_case import Case, Weights, cases_of
from vllmx_testing.synthetic import Builder


@cases_of(GroupedLinear)
def _grouped_cases() -> Iterator[Case]:
    return (_grouped_case(*sizes) for sizes in ((1, 24, 8), (3, 10, 33), (8, 16, 12), (2, 70, 5)))


def _grouped_case(groups: int, cols: int, rows: int) -> Case:
    return Case.between(
        f"{groups} groups, {cols} to {rows}",
        groups * cols,
        lambda ops, w, x: ops.linear(ops.grouped_linear(x, w["groups"]), w["back"]),
        lambda b: b.head_stack("groups", groups, rows, cols).linear(
            "back", groups * cols, groups * rows
        ),
    )


@cases_of(HyperStreams)
@cases_of(HyperRead)
@cases_of(HyperWrite)
def _hyper_cases() -> Iterator[Case]:
    for streams, width, iterations in ((2, 24, 1), (4, 33, 20), (3, 16, 3)):
        yield _hyper_case(HyperSpec(streams, iterations, 1e-6, 1e-6), width)
    yield _hyper_case(HyperSpec(4, 2, 0.1, 0.5), 20)


def _hyper_case(spec: HyperSpec, width: int) -> Case:
    """A block whose output goes to all streams, then what a last norm would read."""

    def build(builder: Builder) -> None:
        builder.linear("block", width, width)
        for name, count in (("mid", spec.num_mixes), ("last", spec.streams)):
            builder.linear(f"{name}.mixes", count, spec.streams * width)
            builder.vector(f"{name}.scale", 3 if name == "mid" else 1, centre=2.0)
            builder.vector(f"{name}.bias", count, centre=0.0)

    def middle(ops: Ops, w: Weights, x: Value) -> Value:
        streams = ops.hyper_streams(x, spec.streams)
        for _ in range(2):  # the first time all streams are alike
            mixes = ops.linear(streams, w["mid.mixes"])
            weights = {"scale": w["mid.scale"], "bias": w["mid.bias"]}
            y = ops.linear(ops.hyper_read(streams, mixes, spec, **weights), w["block"])
            streams = ops.hyper_write(streams, y, mixes, spec, **weights)
        mixes = ops.linear(streams, w["last.mixes"])
        return ops.hyper_read(streams, mixes, spec, scale=w["last.scale"], bias=w["last.bias"])

    return Case.between(f"{spec.streams} of {width}, eps {spec.eps}", width, middle, build)
