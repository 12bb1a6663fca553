"""Mixtures of experts in plain torch: their matrices over the tokens that chose them.

How many tokens chose an expert is known on the device alone, and a host that asks waits until all
before is computed. So nothing is read back there: where torch has a grouped product on the device,
it takes the bounds of groups as a tensor, and elsewhere few tokens are multiplied by copies of the
matrices that they chose. Many tokens without a grouped product, and processors, go expert by
expert.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from vllmx_torch.weights import LinearWeight

Activated = Callable[[Tensor], Tensor]
"""(rows, 2F or F) of an expert's first matrix -> (rows, F), in float32."""
_FEW_TOKENS = 8
"""Copying what so many chose takes no longer than the wait that it saves."""


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: LinearWeight,
    down: LinearWeight,
    activated: Activated,
) -> Tensor:
    """x (T, E) float32, ids and weights (T, k) -> (T, E)."""
    return _added(x, _answers(x, ids, gate_up, down, activated), weights)


def _answers(
    x: Tensor, ids: Tensor, gate_up: LinearWeight, down: LinearWeight, activated: Activated
) -> Tensor:
    """(T, k, E) of each slot's expert."""
    says = _one_by_one
    if x.device.type != "cpu":
        if has_grouped_product(gate_up.matrix, down.matrix):
            says = _grouped
        elif len(x) <= _FEW_TOKENS:
            says = _gathered
    return says(x, ids, gate_up, down, activated)


def _added(x: Tensor, said: Tensor, weights: Tensor) -> Tensor:
    """said (T, k, E) -> (T, E), slot by slot."""
    out = torch.zeros_like(x)
    for slot in range(said.shape[1]):
        out.addcmul_(said[:, slot], weights[:, slot, None])
    return out


def some_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: LinearWeight,
    down: LinearWeight,
    activated: Activated,
) -> Tensor:
    """The same where some experts lie elsewhere: their ids are below 0 or beyond the stacks. On
    processors nothing is computed for them; on other devices that would take a wait for their
    number, so the first expert here answers in their place and is not heard."""
    here = (ids >= 0) & (ids < len(down.matrix))  # (T, k)
    if x.device.type != "cpu":
        said = _answers(x, ids.where(here, 0), gate_up, down, activated)
    else:
        tokens, slots = here.nonzero(as_tuple=True)
        said = x.new_zeros(*ids.shape, x.shape[1])
        pairs = ids[tokens, slots][:, None]
        said[tokens, slots] = _one_by_one(x[tokens], pairs, gate_up, down, activated)[:, 0]
    return _added(x, said.masked_fill(~here[..., None], 0.0), weights)


def has_grouped_product(*stacks: Tensor) -> bool:
    """True if the device multiplies groups without asking the host for their bounds. Torch does so
    in bfloat16 on Hopper and later, for rows of whole 16 bytes; elsewhere its grouped product is a
    loop that asks."""
    return (
        hasattr(functional, "grouped_mm")
        and all(
            stack.dtype == torch.bfloat16 and not any(size % 8 for size in stack.shape[1:])
            for stack in stacks
        )
        and stacks[0].device.type == "cuda"
        and torch.cuda.get_device_capability(stacks[0].device) >= (9, 0)
    )


def _one_by_one(
    x: Tensor, ids: Tensor, gate_up: LinearWeight, down: LinearWeight, activated: Activated
) -> Tensor:
    """(T, k, E): each chosen expert is read once. The host asks for the number of their tokens."""
    tokens, slots = ids.shape
    pairs = ids.flatten().argsort(stable=True)  # (T * k,) of token and slot, expert by expert
    counts = ids.flatten().bincount(minlength=len(down.matrix)).tolist()
    said = x.new_empty(tokens * slots, x.shape[1])
    for expert, some in enumerate(pairs.split(counts)):
        if len(some):
            inner = activated(_product(x[some // slots], gate_up, expert))
            said[some] = _product(inner, down, expert)
    return said.view(tokens, slots, x.shape[1])


def _product(x: Tensor, stack: LinearWeight, expert: int) -> Tensor:
    matrix, bias = stack.matrix[expert], None if stack.bias is None else stack.bias[expert]
    return functional.linear(x.to(matrix.dtype), matrix, bias).float()


def _grouped(
    x: Tensor, ids: Tensor, gate_up: LinearWeight, down: LinearWeight, activated: Activated
) -> Tensor:
    """(T, k, E): one product for all experts, over tokens sorted by expert."""
    tokens, slots = ids.shape
    chosen, pairs = ids.flatten().sort(stable=True)  # (T * k,)
    after = torch.arange(1, len(down.matrix) + 1, device=ids.device)
    ends = torch.searchsorted(chosen, after).to(torch.int32)  # (X,) of each expert's tokens

    def product(rows: Tensor, stack: LinearWeight) -> Tensor:
        matrix = stack.matrix.transpose(1, 2)  # (X, in, out)
        out = functional.grouped_mm(rows.to(matrix.dtype), matrix, offs=ends).float()
        return out if stack.bias is None else out + stack.bias[chosen]

    inner = activated(product(x[pairs // slots], gate_up))
    said = x.new_empty(tokens * slots, x.shape[1])
    said[pairs] = product(inner, down)
    return said.view(tokens, slots, -1)


def _gathered(
    x: Tensor, ids: Tensor, gate_up: LinearWeight, down: LinearWeight, activated: Activated
) -> Tensor:
    """(T, k, E): each token times copies of the matrices that it chose, a slot at a time."""

    def product(rows: Tensor, stack: LinearWeight, chosen: Tensor) -> Tensor:
        matrices = stack.matrix[chosen]  # (T, out, in)
        out = (matrices @ rows.to(matrices.dtype)[:, :, None]).squeeze(2).float()
        return out if stack.bias is None else out + stack.bias[chosen]

    said = []
    for chosen in ids.unbind(1):
        said.append(product(activated(product(x, gate_up, chosen)), down, chosen))
    return torch.stack(said, dim=1)
