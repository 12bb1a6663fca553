"""The peephole over a recorded step: fewer ops, fewer passes over memory, the same bits.

One rewrite pays so far: a gated activation moves into the linear that feeds it. Its weight is then
packed with gate and up rows side by side (native/linear_run.h), and (T, 2F) is never written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from vllmx_core.tape import Node, Value


def gated_weights(nodes: Sequence[Node]) -> frozenset[str]:
    """Names of the weights whose every use is a linear that feeds nothing but a gated activation:
    these can be packed gated."""
    uses = Counter(value for node in nodes for value in node.reads)
    feeders = {value: node for node in nodes if node.op == "linear" for value in node.writes}
    gated: Counter[str] = Counter()
    for node in nodes:
        feeder = feeders.get(node.reads[0]) if node.op == "gated_act" else None
        if feeder is not None and uses[node.reads[0]] == 1:
            gated[feeder.weights["w"].name] += 1
    total = Counter(ref.name for node in nodes for ref in node.weights.values())
    return frozenset(name for name, count in gated.items() if count == total[name])


def fuse(nodes: Sequence[Node]) -> list[Node]:
    """The recorded step with gated activations moved into their linears."""
    gated = gated_weights(nodes)
    feeders: dict[Value, int] = {}
    fused: list[Node] = []
    for node in nodes:
        if node.op == "gated_act" and (at := feeders.get(node.reads[0])) is not None:
            options = {**fused[at].options, "activation": node.options["kind"]}
            fused[at] = replace(fused[at], writes=node.writes, options=options)
            continue
        if node.op == "linear" and node.weights["w"].name in gated:
            feeders[node.writes[0]] = len(fused)
        fused.append(node)
    return fused
