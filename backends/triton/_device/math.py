"""Exponentials and functions based on them, by the GPU's approximate instructions.

The error of these instructions is at most two units in the last place, and they flush numbers below
1e-38 to 0. FINE, for float32 tensors, also corrects the error of the change to base 2. Triton's
interpreter runs no inline assembly and uses the plain formulas.
"""

import triton
import triton.language as tl

from .common import IN_INTERPRETER

_LOG2_E = tl.constexpr(1.4426950408889634)
_SQRT_8_OVER_PI = tl.constexpr(1.5957691216057308)
_SERIES_FROM = tl.constexpr(-0.35)  # from here to 0, 1 - exp(z) is computed by its series


@triton.jit
def _exp2(z):
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [z], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def reciprocal_root(z):
    """1 / sqrt(z), correctly rounded; 0 where z is 0."""
    return tl.where(z == 0, 0.0, tl.div_rn(1.0, tl.sqrt_rn(tl.where(z == 0, 1.0, z))))


@triton.jit
def exp(z, FINE: tl.constexpr):
    """exp(z), by the instruction for powers of 2."""
    if IN_INTERPRETER:
        e = tl.exp(z)
    else:
        if FINE:
            # -inf would become NaN below; exp(-100) is 0, too. NaN stays NaN.
            z = tl.maximum(z, -100.0, propagate_nan=tl.PropagateNan.ALL)
        power = z * _LOG2_E
        e = _exp2(power)
        if FINE:
            remainder = tl.fma(z, _LOG2_E, -power)
            remainder = tl.fma(z, 1.925963033500779e-08, remainder)
            e = tl.fma(e * remainder, 0.6931471805599453, e)
    return e


@triton.jit
def exp_keeping_nan(z, FINE: tl.constexpr):
    """exp(z), with NaN for NaN: if FINE, `exp` may turn NaN into a number."""
    e = exp(z, FINE)
    if FINE:
        e = tl.where(z == z, e, z)
    return e


@triton.jit
def exp_of_difference(z, origin, FINE: tl.constexpr):
    """exp(z - origin); unless FINE, one instruction subtracts and changes the base."""
    if IN_INTERPRETER or FINE:
        e = exp(z - origin, FINE)
    else:
        power = tl.fma(z, _LOG2_E, origin * -_LOG2_E)
        e = _exp2(power)
    return e


@triton.jit
def reciprocal(z):
    if IN_INTERPRETER:
        r = 1.0 / z
    else:
        r = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [z], dtype=tl.float32, is_pure=True, pack=1
        )
    return r


@triton.jit
def sigmoid(z, FINE: tl.constexpr):
    """σ(z) and σ(-z), both without cancellation."""
    # Up to 87, the reciprocal of 1 + e is a normal number.
    e = exp(tl.minimum(-z, 87.0, propagate_nan=tl.PropagateNan.ALL), FINE)
    s = reciprocal(1.0 + e)
    return s, e * s


@triton.jit
def tanh(z, FINE: tl.constexpr):
    """(1 - e) / (1 + e) with e = exp(-2 |z|); a series near 0, where 1 - e would cancel."""
    e = exp(-2.0 * tl.abs(z), FINE)
    far = (1.0 - e) * reciprocal(1.0 + e)
    square = z * z
    series = square * (-1382.0 / 155925) + 62.0 / 2835
    series = series * square - 17.0 / 315
    series = series * square + 2.0 / 15
    series = series * square - 1.0 / 3
    near = z + z * square * series
    return tl.where(tl.abs(z) < 0.35, near, tl.where(z < 0.0, -far, far))


@triton.jit
def silu(z):
    return z * tl.where(z < -80.0, 0.0, sigmoid(z, True)[0])


@triton.jit
def gelu(z):
    """The tanh approximation: z σ(2 sqrt(2 / π) (z + 0.044715 z³)), whose σ is 0 or 1 beyond 10."""
    near = tl.where(tl.abs(z) > 10.0, tl.where(z > 0.0, 10.0, -10.0), z)
    u = (near + 0.044715 * near * near * near) * _SQRT_8_OVER_PI
    return z * tl.where(u < -80.0, 0.0, sigmoid(u, True)[0])


@triton.jit
def log1p(e, FINE: tl.constexpr):
    """log(1 + e) for e from 0 to 1.

    FINE: the series of 2 artanh(y), y = e / (2 + e). Its first term is written as e - e y, so only
    the correction of e is rounded. Otherwise a polynomial with an error of at most three units in
    the last place.
    """
    if FINE:
        y = e / (2.0 + e)
        y2 = y * y
        tail = y * 0.0 + 1.0 / 17
        for n in tl.static_range(7):
            tail = tail * y2 + 1.0 / (15 - 2 * n)
        log = e - y * (e - 2.0 * y2 * tail)
    else:
        series = e * -0.008574676 + 0.044214193
        series = series * e - 0.10785368
        series = series * e + 0.17757024
        series = series * e - 0.24499612
        series = series * e + 0.33276176
        series = series * e - 0.49997449
        log = e * (series * e + 0.99999981)
    return log


@triton.jit
def softplus(z):
    """log(1 + exp(z)) = max(z, 0) + log(1 + e)."""
    return tl.maximum(z, 0.0) + log1p(exp(-tl.abs(z), True), True)


@triton.jit
def _one_minus_exp_near_0(z):
    """1 - exp(z) by its series, for z from _SERIES_FROM to 0."""
    z = tl.maximum(z, _SERIES_FROM)
    series = z * (1.0 / 5040) + 1.0 / 720
    series = series * z + 1.0 / 120
    series = series * z + 1.0 / 24
    series = series * z + 1.0 / 6
    series = series * z + 0.5
    series = series * z + 1.0
    return -z * series


@triton.jit
def one_minus_exp(z, FINE: tl.constexpr):
    """1 - exp(z) for z <= 0, without cancellation where exp(z) is near 1."""
    return tl.where(z > _SERIES_FROM, _one_minus_exp_near_0(z), 1.0 - exp(z, FINE))


@triton.jit
def exp_of_decays(z, FINE: tl.constexpr):
    """exp(z) for z <= 0. FINE: a series near 0, for the reason given in `decay`."""
    e = exp(z, FINE)
    if FINE:
        e = tl.where(z > _SERIES_FROM, 1.0 - _one_minus_exp_near_0(z), e)
    return e


@triton.jit
def decay(log_a, FINE: tl.constexpr):
    """a = exp(log_a) and 1 - a² = (1 - a)(1 + a).

    If a is near 1, the difference would cancel, and 1 - a is a series in log_a. With FINE, a is
    computed from that series, too: such decays multiply over many tokens, and a small bias of the
    instruction would accumulate.
    """
    near_1 = log_a > _SERIES_FROM
    difference = _one_minus_exp_near_0(log_a)
    a = exp(log_a, FINE)
    if FINE:
        a = tl.where(near_1, 1.0 - difference, a)
    return a, tl.where(near_1, difference * (2.0 - difference), 1.0 - a * a)
