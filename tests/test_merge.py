"""The equations of merging, against closed forms, exact sums and numpy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from reasonlab.methods import merge
from reasonlab.methods.merge import cosine, linear, slerp, task_arithmetic, ties, trim

SHAPE = (37, 53)


def noise(seed: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (scale * torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))).to(dtype)


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def arc(a: Tensor, b: Tensor, t: float) -> Tensor:
    return slerp(a, b, t, cosine(a, b))


def whole_ties(
    base: Tensor, models: Sequence[Tensor], weights: Sequence[float], density: float, scale: float
) -> Tensor:
    return ties(base, models, weights, [trim(base, model, density).threshold for model in models], scale)


def test_linear_is_the_average_bit_for_bit() -> None:
    a, b = noise(1), noise(2)
    assert bits(linear([a, b], [1, 1])) == bits((a + b) / 2)
    low, other = a.bfloat16(), b.bfloat16()
    assert bits(linear([low, other], [3, 3])) == bits(((low.float() + other.float()) / 2).bfloat16())


def test_linear_rounds_an_exact_sum_once() -> None:
    """Weights without a common measure: with such as 0.2 and 0.7, many exact sums lie halfway between two floats."""
    models, weights = [noise(seed) for seed in range(3)], [1 / math.pi, 1 / math.e, -0.1 * math.sqrt(2)]
    rows = zip(*(model.flatten().tolist() for model in models), strict=True)
    exact = [
        sum(Fraction(w) * Fraction(x) for w, x in zip(weights, row, strict=True)) / sum(map(Fraction, weights))
        for row in rows
    ]
    expected = np.array([float(x) for x in exact]).astype(np.float32)
    assert linear(models, weights).numpy().tobytes() == expected.tobytes()


def test_the_result_has_the_dtype_of_the_first_model() -> None:
    a, b = noise(1, dtype=torch.bfloat16), noise(2)
    assert linear([a, b], [1, 1]).dtype == torch.bfloat16
    assert linear([b, a], [1, 1]).dtype == torch.float32
    assert task_arithmetic(b, [a, b], [1, 1], 1.0).dtype == torch.bfloat16
    assert bits(linear([b, a], [1, 1])) == bits((a.float() + b) / 2)


@pytest.mark.parametrize("degrees", [10.0, 90.0, 150.0])
def test_slerp_walks_the_circle(degrees: float) -> None:
    angle = math.radians(degrees)
    a, b = torch.tensor([1.0, 0.0]), torch.tensor([math.cos(angle), math.sin(angle)])
    for t in (0.25, 0.5, 0.9):
        expected = torch.tensor([math.cos(t * angle), math.sin(t * angle)])
        torch.testing.assert_close(arc(a, b, t), expected, rtol=0, atol=1e-6)
        # The coefficients multiply the tensors as they are, so a longer tensor weighs more.
        scaled = (math.sin((1 - t) * angle) * 3 * a + math.sin(t * angle) * b) / math.sin(angle)
        torch.testing.assert_close(arc(3 * a, b, t), scaled, rtol=0, atol=1e-6)


def test_slerp_ends_exactly_and_is_linear_between_nearly_parallel_tensors() -> None:
    a, b = noise(1), noise(2)
    assert bits(arc(a, b, 0.0)) == bits(a)
    assert bits(arc(a, b, 1.0)) == bits(b)
    near = a + noise(3, 0.01)
    assert cosine(a, near) > merge.NEARLY_PARALLEL
    assert bits(arc(a, near, 0.25)) == bits(linear([a, near], [0.75, 0.25]))
    assert bits(arc(a, -a, 0.25)) == bits(a / 2)
    zero = torch.zeros(SHAPE)
    assert bits(arc(a, zero, 0.5)) == bits(a / 2)
    assert torch.equal(arc(zero, zero, 0.3), zero)


def test_task_arithmetic_adds_and_subtracts_changes() -> None:
    base = torch.tensor([1.0, 2.0, 3.0])
    a, b = torch.tensor([2.0, 2.0, 3.0]), torch.tensor([1.0, 4.0, 7.0])
    assert task_arithmetic(base, [a, b], [1, 1], 1.0).tolist() == [2, 4, 7]
    assert task_arithmetic(base, [a, b], [0.5, -1], 2.0).tolist() == [2, -2, -5]


def test_ties_by_hand() -> None:
    base = torch.full((5,), 10.0)
    a = base + torch.tensor([4.0, -3.0, 1.0, 2.0, 0.0])
    b = base + torch.tensor([2.0, 5.0, -1.5, -2.0, 0.0])
    # Everything kept. Signs: +, +, −, + (a draw), none agrees.
    assert whole_ties(base, [a, b], [1, 1], 1.0, 1.0).tolist() == [13, 15, 8.5, 12, 10]
    # The three largest of each: a loses its third entry, b too (1.5 < 2).
    assert whole_ties(base, [a, b], [1, 1], 0.6, 1.0).tolist() == [13, 15, 10, 12, 10]
    # a counts three times: its −3 outweighs 5, its mean with b's 2 is (3·4 + 2) / 4, and λ halves every change.
    assert whole_ties(base, [a, b], [3, 1], 1.0, 0.5).tolist() == [11.75, 8.5, 10.5, 11, 10]


def numpy_ties(
    base: Tensor, models: Sequence[Tensor], weights: Sequence[float], density: float, scale: float
) -> np.ndarray:
    """One entry after the other, in the words of the paper."""
    start = base.double().numpy().ravel()
    changes = [model.double().numpy().ravel() - start for model in models]
    for change in changes:
        order = np.argsort(-np.abs(change), kind="stable")
        change[order[max(1, int(density * len(order))) :]] = 0
    result = start.copy()
    for i in range(len(start)):
        mass = {
            sign: sum(w * c[i] * sign for w, c in zip(weights, changes, strict=True) if c[i] * sign > 0)
            for sign in (1, -1)
        }
        sign = 1 if mass[1] >= mass[-1] else -1
        agreeing = [(w, c[i]) for w, c in zip(weights, changes, strict=True) if c[i] * sign > 0]
        if agreeing:
            result[i] += scale * sum(w * x for w, x in agreeing) / sum(w for w, _ in agreeing)
    return result.reshape(base.shape)


@pytest.mark.parametrize("density", [1e-9, 0.2, 0.55, 1.0])
def test_ties_against_numpy(density: float) -> None:
    base = noise(0)
    models, weights = [base + noise(seed, 0.1) for seed in (1, 2, 3)], [0.5, 1.0, 0.3]
    expected = torch.from_numpy(numpy_ties(base, models, weights, density, 0.7)).float()
    assert bits(whole_ties(base, models, weights, density, 0.7)) == bits(expected)


def test_trim_keeps_all_of_equal_magnitude_and_counts_them() -> None:
    base, model = torch.zeros(10), torch.tensor([3.0, -1, 1, 1, -1, 0, 0, 0, 0, 0])
    assert trim(base, model, 0.1) == (3.0, 1)
    assert trim(base, model, 0.2) == (1.0, 5)
    assert trim(base, model, 0.9) == (0.0, 5)
    assert trim(torch.zeros(0), torch.zeros(0), 0.5) == (0.0, 0)


def test_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    base, a, b = noise(0), noise(1), noise(2)

    def everything() -> list[bytes]:
        found = [linear([a, b], [1, 2]), task_arithmetic(base, [a, b], [1, 2], 0.3), arc(a, b, 0.0)]
        return [bits(x) for x in (*found, whole_ties(base, [a, b], [1, 2], 0.3, 1.0))]

    whole, whole_arc = everything(), arc(a, b, 0.3)
    monkeypatch.setattr(merge, "BLOCK", 100)
    assert everything() == whole
    torch.testing.assert_close(arc(a, b, 0.3), whole_arc)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_model_merged_with_itself_is_itself(dtype: torch.dtype) -> None:
    a, base = noise(1, dtype=dtype), noise(2, dtype=dtype)
    a[0, :2] = torch.tensor([-0.0, 0.0])
    weights = [0.1, 0.2, 0.7]
    for merged in (
        linear([a] * 3, weights),
        arc(a, a, 0.3),
        task_arithmetic(a, [a] * 3, weights, 0.7),
        whole_ties(a, [a] * 3, weights, 0.2, 0.7),
    ):
        assert bits(merged) == bits(a)
    # Over another base, too, when the weights sum to one and when nothing is trimmed; but x + −x is +0.
    assert torch.equal(task_arithmetic(base, [a] * 3, weights, 1.0), a)
    assert torch.equal(whole_ties(base, [a] * 3, weights, 1.0, 1.0), a)
