"""Fake quantisation of QONNX, as Brevitas exports it: floats rounded to the grid of an arbitrary bit width.

Rounding has the straight-through estimator's gradient, so that networks can be fine-tuned through it.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import jax
import numpy as np
from jax import lax

from .arrays import is_known, xp
from .quant import quotient
from .registry import Static, op

DOMAINS: Final = ("qonnx.custom_op.general", "onnx.brevitas", "finn.custom_op.general")
"""The domain's present name, and those that older versions of Brevitas and FINN write."""

ROUNDED: Final = frozenset({"BipolarQuant", "FloatQuant", "IntQuant", "Quant", "Trunc"})
"""The operators, all with the gradient of what they round."""

_HALF = "float16 and bfloat16 are computed in float32"


def _registered(name, since=1, limits=_HALF):
    """Registers a function in all the names of the domain; values near ties need float32."""

    def register(function):
        for domain in DOMAINS:
            op(name, domain=domain, since=since, wide=True, limits=limits)(function)
        return function

    return register


def _away(rounds_up):
    """Rounding by magnitude: away from zero where ``rounds_up(fraction)``, else towards it."""

    def rounded(x):
        towards = xp.trunc(x)
        return towards + xp.where(rounds_up(xp.abs(x - towards)), xp.sign(x), xp.zeros_like(x))

    return rounded


ROUNDING: Final = {
    "ROUND": xp.rint,
    "HALF_EVEN": xp.rint,
    "CEIL": xp.ceil,
    "FLOOR": xp.floor,
    "UP": _away(lambda fraction: fraction > 0),
    "DOWN": xp.trunc,
    "ROUND_TO_ZERO": xp.trunc,
    "HALF_UP": _away(lambda fraction: fraction >= 0.5),
    "HALF_DOWN": _away(lambda fraction: fraction > 0.5),
}
"""By the attribute rounding_mode, in either case; ROUND_TO_ZERO is Brevitas' name for DOWN."""


def sign_of(x):
    """1 where x is at least 0, else -1."""
    return xp.where(x >= 0, xp.ones_like(x), -xp.ones_like(x))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _straight(function, x):
    return function(x)


@_straight.defjvp
def _straight_jvp(function: Any, primals: Any, tangents: Any) -> Any:
    return function(*primals), tangents[0]


def straight_through(function, x):
    """``function(x)`` with the derivative 1, the straight-through estimator."""
    return function(x) if is_known(x) else _straight(function, x)


def rounding(mode):
    """The function of a rounding_mode, with the straight-through estimator."""
    if mode.upper() not in ROUNDING:
        raise ValueError(f"rounding_mode ({mode!r}) must be one of {', '.join(ROUNDING)}")
    return functools.partial(straight_through, ROUNDING[mode.upper()])


def leading_power(x):
    """The greatest power of two not above the magnitude of x, by its exponent bits; 0 where x is subnormal.

    >>> leading_power(np.float32([0.7, -9, 0]))
    array([0.5, 8. , 0. ], dtype=float32)
    """
    integers = np.dtype(f"int{8 * x.dtype.itemsize}")
    exponent_bits = np.array(np.inf, x.dtype).view(integers)
    if is_known(x):
        return (x.view(integers) & exponent_bits).view(x.dtype)
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, integers) & exponent_bits, x.dtype)


def clamped(rounded, x, bits, signed, narrow):
    """x in the range of integers of a bit width, which may be fractional, rounded.

    The gradient is zero where the rounded x is outside, as Brevitas has it.
    """
    bits = bits.astype(np.float64)
    count = np.exp2(bits)
    dropped = 1 if narrow else 0
    low, high = (dropped - count / 2, count / 2 - 1) if signed else (0 * bits, count - 1 - dropped)
    low, high, whole = low.astype(x.dtype), high.astype(x.dtype), rounded(x)
    return rounded(xp.where(whole > high, high, xp.where(whole < low, low, x)))


def _floats(*operands):
    """The operands as float32, or float64 if the first is."""
    dtype = np.float64 if operands[0].dtype == np.float64 else np.float32
    return (v.astype(dtype) for v in operands)


@_registered("Quant")
@_registered("IntQuant")
def int_quant(X, scale, zeropt, bitwidth: Static, *, signed=1, narrow=0, rounding_mode="ROUND"):
    """``(round(clamp(X / scale + zeropt)) - zeropt) * scale``; one signed bit is the sign, which has no zero."""
    x, scale, zero = _floats(X, scale, zeropt)
    ratio = quotient(x, scale) + zero
    y = clamped(rounding(rounding_mode), ratio, bitwidth, signed, narrow)
    if signed and (bitwidth == 1).any():
        y = xp.where(bitwidth == 1, straight_through(sign_of, ratio), y)
    return ((y - zero) * scale).astype(X.dtype)


@_registered("BipolarQuant", limits=f"{_HALF}; the gradient is that of `X * scale`, as of Brevitas' BinaryQuant")
def bipolar_quant(X, scale):
    """``scale`` where X is at least 0, else ``-scale``."""
    x, scale = _floats(X, scale)
    return (straight_through(sign_of, x) * scale).astype(X.dtype)


@_registered("Trunc")
def trunc(X, scale, zeropt, in_bitwidth: Static, out_bitwidth: Static, *, rounding_mode="FLOOR"):
    """The integers behind X, divided by 2 for each bit that ``out_bitwidth`` lacks, and rounded."""
    x, scale, zero = _floats(X, scale, zeropt)
    step = np.exp2(in_bitwidth.astype(np.float64) - out_bitwidth).astype(x.dtype)
    y = rounding(rounding_mode)((rounding("ROUND")(quotient(x, scale) + zero)) / step)
    return ((y - zero) * scale).astype(X.dtype)


@_registered("Trunc", since=2)
def trunc_to_scale(
    X, scale, zeropt, in_bitwidth: Static, out_scale, out_bitwidth: Static, *, signed=1, narrow=0,
    rounding_mode="FLOOR",
):  # fmt: skip
    """The integers behind X, divided by the power of two next to ``out_scale / scale``, clamped and rounded."""
    del in_bitwidth  # a fact about X
    x, scale, zero, out_scale = _floats(X, scale, zeropt, out_scale)
    step = leading_power(quotient(out_scale, scale) * x.dtype.type(2**0.5))
    y = rounding("ROUND")(quotient(x, scale) + zero) / step
    y = clamped(rounding(rounding_mode), y, out_bitwidth, signed, narrow)
    return ((y - zero / step) * out_scale).astype(X.dtype)


@_registered("FloatQuant", limits=f"{_HALF}; has_subnormal changes nothing, as QONNX says; an infinite X gives NaN")
def float_quant(
    X, scale, exponent_bitwidth: Static, mantissa_bitwidth: Static, exponent_bias: Static = None,
    max_val: Static = None, *, has_inf=0, has_nan=0, has_subnormal=0, saturation=1, rounding_mode="ROUND",
):  # fmt: skip
    """X / scale rounded to floats of some exponent and mantissa bits, times scale; beyond the greatest it saturates.

    Without saturation it becomes infinite, or NaN if the format has no infinities.
    """
    del has_subnormal
    if not (saturation or has_inf or has_nan):
        raise ValueError("saturation is 0, so has_inf or has_nan must be 1: values beyond the greatest become one")
    x, scale = _floats(X, scale)
    exponent, mantissa = (v.astype(np.float64) for v in (exponent_bitwidth, mantissa_bitwidth))
    bias = np.exp2(exponent - 1) - 1 if exponent_bias is None else exponent_bias
    high = (2 - np.exp2(-mantissa)) * np.exp2(np.exp2(exponent) - 1 - bias)
    high = (high if max_val is None else np.minimum(high, max_val)).astype(x.dtype)
    ratio = quotient(x, scale)
    least, fraction = np.exp2(1 - bias - mantissa).astype(x.dtype), np.exp2(-mantissa).astype(x.dtype)
    spacing = xp.maximum(leading_power(ratio) * fraction, least)
    y = spacing * rounding(rounding_mode)(ratio / spacing)
    beyond = high if saturation else x.dtype.type(np.inf if has_inf else np.nan)
    return (xp.where(y > high, beyond, xp.where(y < -high, -beyond, y)) * scale).astype(X.dtype)
