"""The forms that experts have on devices whose host must not wait for them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from torch import Tensor  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.nn import functional  # noqa: E402
from vllmx_torch import experts as module  # noqa: E402
from vllmx_torch.weights import LinearWeight  # noqa: E402

TOKENS, SLOTS, COUNT, WIDTH, INNER = 11, 3, 7, 24, 16
TOLERANCE = {"float32": 1e-6, "bfloat16": 1e-2}


def activated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def arguments(dtype: torch.dtype) -> tuple[object, ...]:
    """x, ids, weights and both stacks with biases; nobody chooses expert 2."""
    torch.manual_seed(0)
    known = torch.tensor([expert for expert in range(COUNT) if expert != 2])
    ids = torch.stack([known[torch.randperm(COUNT - 1)[:SLOTS]] for _ in range(TOKENS)])

    def stack(out: int, width: int) -> LinearWeight:
        matrix = torch.randn(COUNT, out, width) * width**-0.5
        return LinearWeight(matrix.to(dtype), torch.randn(COUNT, out).to(dtype))

    x, weights = torch.randn(TOKENS, WIDTH), torch.rand(TOKENS, SLOTS)
    return x, ids, weights, stack(2 * INNER, WIDTH), stack(WIDTH, INNER)


def without_values(dtype: torch.dtype, tokens: int) -> tuple[object, ...]:
    """The same on a device that keeps sizes and no values: whoever reads one gets an error."""

    def empty(*shape: int, of: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    def stack(out: int, width: int) -> LinearWeight:
        return LinearWeight(empty(COUNT, out, width, of=dtype), empty(COUNT, out, of=dtype))

    ids = empty(tokens, SLOTS, of=torch.int64)
    stacks = stack(2 * INNER, WIDTH), stack(WIDTH, INNER)
    return empty(tokens, WIDTH), ids, empty(tokens, SLOTS), *stacks


@pytest.mark.parametrize("form", ["_grouped", "_gathered"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_form_gives_the_same(form: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = arguments(getattr(torch, dtype))
    expected = module.experts(*given, activated)
    monkeypatch.setattr(module, "_one_by_one", getattr(module, form))
    found = module.experts(*given, activated)
    assert (found - expected).abs().max() < TOLERANCE[dtype] * expected.abs().max()


@pytest.mark.parametrize("tokens", [1, 64])
def test_a_grouped_product_reads_nothing_back(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "has_grouped_product", lambda *stacks: True)
    given = without_values(torch.bfloat16, tokens)
    assert module.experts(*given, activated).shape == (tokens, WIDTH)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_few_tokens_read_nothing_back(dtype: torch.dtype) -> None:
    assert module.experts(*without_values(dtype, 4), activated).shape == (4, WIDTH)
    with pytest.raises((NotImplementedError, RuntimeError)):  # many without a grouped product
        module.experts(*without_values(dtype, 64), activated)


@pytest.mark.parametrize(
    ("dtype", "width", "capability", "has"),
    [
        (torch.bfloat16, 24, (9, 0), True),
        (torch.bfloat16, 24, (8, 0), False),
        (torch.float16, 24, (9, 0), False),
        (torch.bfloat16, 20, (9, 0), False),
    ],
)
def test_who_has_a_grouped_product(
    dtype: torch.dtype,
    width: int,
    capability: tuple[int, int],
    has: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    with FakeTensorMode():
        stack = torch.empty(COUNT, 16, width, dtype=dtype, device="cuda")
    assert module.has_grouped_product(stack, stack) == has
