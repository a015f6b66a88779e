"""The few distributions the statistics need, without scipy: normal, Student's t, and the fair coin."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache
from statistics import NormalDist


def normal_quantile(p: float) -> float:
    """z with P(Z <= z) = p for a standard normal Z."""
    return NormalDist().inv_cdf(p)


@lru_cache(maxsize=1024)
def student_t_quantile(p: float, dof: float) -> float:
    """t with P(T <= t) = p for Student's T, found by bisection on the two-sided tail; 0 < p < 1, dof > 0."""
    if not (0 < p < 1 and dof > 0):
        raise ValueError(f"no Student t quantile for p={p}, dof={dof}")
    tail = 2 * min(p, 1 - p)
    low, high = 0.0, 1.0
    while student_t_tails(high, dof) > tail:
        low, high = high, 2 * high
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if student_t_tails(middle, dof) > tail else (low, middle)
    return math.copysign(low, p - 0.5)


def student_t_tails(t: float, dof: float) -> float:
    """P(|T| >= |t|) = I_x(dof/2, 1/2) with x = dof / (dof + t²)."""
    total = dof + t * t
    return _incomplete_beta(dof / total, t * t / total, dof / 2, 0.5)


def fair_coin_tails(heads: int, tails: int) -> float:
    """The chance that fair tosses fall at least as unevenly as these: min(1, 2 Σ_{i <= min} C(n, i) / 2^n)."""
    n = heads + tails
    ways = sum(math.comb(n, i) for i in range(min(heads, tails) + 1))
    return float(min(Fraction(1), Fraction(2 * ways, 2**n)))


def _incomplete_beta(x: float, y: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I_x(a, b); y = 1 − x is given apart so that no digits are lost.

    I_x(a, b) = x^a y^b / (a B(a, b)) / (1 + d_1/(1 + d_2/(1 + …))), which converges fast for
    x < (a + 1)/(a + b + 2); beyond that, I_x(a, b) = 1 − I_y(b, a).
    """
    if x == 0 or y == 0:
        return float(y == 0)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(y, x, b, a)
    log_front = a * math.log(x) + b * math.log(y) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    return math.exp(log_front) / (a * _beta_fraction(x, a, b))


def _beta_fraction(x: float, a: float, b: float) -> float:
    """1 + d_1/(1 + d_2/(1 + …)) by Lentz's method, until a further term changes nothing, where

    d_2m = m (b − m) x / ((a + 2m − 1)(a + 2m)),   d_2m+1 = −(a + m)(a + b + m) x / ((a + 2m)(a + 2m + 1))
    """
    value = upper = 1.0
    lower = 0.0
    for j in range(1, 10_000):
        m = j // 2
        if j % 2:
            d = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            d = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        lower = 1 / (1 + d * lower)
        upper = 1 + d / upper
        value *= upper * lower
        if abs(upper * lower - 1) < 1e-15:
            return value
    raise ArithmeticError(f"the incomplete beta function did not converge at x={x}, a={a}, b={b}")
