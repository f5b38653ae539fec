"""Activation functions and the softmax family."""

from __future__ import annotations

import math
from typing import Any, Literal

import jax
import numpy as np
from jax import lax

from .arrays import argmax, axis_of, check_shape, is_known, widen, xp
from .cast import cast_to, is_float
from .elementwise import WITHDRAWN, clip, erf, limited_broadcast
from .registry import op, taking


def _below(x):
    """min(x, 0): an exp that overflows in the branch not selected would make the gradient NaN."""
    return xp.minimum(x, 0)


@op("Relu")
def relu(X):
    """max(X, 0); the derivative at 0 is 0."""
    return np.maximum(X, X.dtype.type(0)) if is_known(X) else jax.nn.relu(X)


@op("PRelu", since=7, broadcasts=True, half="float32")
def p_relu(X, slope):
    if lax.broadcast_shapes(X.shape, slope.shape) != X.shape:
        raise ValueError(f"slope of shape {slope.shape} does not broadcast to X of shape {X.shape}")
    return xp.where(X < 0, slope * X, X)


@op("PRelu", half="float32")
def p_relu_1(X, slope):
    """PRelu up to opset 6: the slope is a scalar, or one value per channel (axis 1)."""
    return p_relu(X, limited_broadcast(X, slope, 1 if slope.ndim == 1 else None, broadcast=1))


def sigmoid(X):
    return 1 / (1 + np.exp(-X)) if is_known(X) else lax.logistic(X)


def leaky_relu(X, *, alpha=0.009999999776482582):
    return xp.where(X < 0, alpha * X, X)


def hard_sigmoid(X, *, alpha=0.20000000298023224, beta=0.5):
    return clip(alpha * X + beta, *np.array([0, 1], X.dtype))


def softplus(X):
    return xp.logaddexp(X, 0)


def swish(X, *, alpha=1.0):
    return X * sigmoid(alpha * X)


def selu(X, *, alpha=1.6732631921768188, gamma=1.0507010221481323):
    return gamma * xp.where(X <= 0, alpha * xp.expm1(_below(X)), X)


ACTIVATIONS: dict[tuple[str, int], Any] = {  # (name, since): function
    ("Sigmoid", 1): sigmoid,
    ("LeakyRelu", 1): leaky_relu,
    ("ThresholdedRelu", 1): lambda X, *, alpha=1.0: xp.where(alpha < X, X, 0),
    ("Elu", 1): lambda X, *, alpha=1.0: xp.where(X < 0, alpha * xp.expm1(_below(X)), X),
    ("Celu", 12): lambda X, *, alpha=1.0: xp.where(X < 0, alpha * xp.expm1(_below(X) / alpha), X),
    ("Selu", 1): taking(alpha=1.673200011253357, gamma=1.0506999492645264)(selu),
    ("Selu", 6): selu,
    ("HardSigmoid", 1): hard_sigmoid,
    ("HardSwish", 14): lambda X: X * hard_sigmoid(X, alpha=1 / 6),
    ("Softplus", 1): softplus,
    ("Softsign", 1): lambda input: input / (1 + abs(input)),
    ("Mish", 18): lambda X: X * xp.tanh(softplus(X)),
    ("Swish", 24): swish,
}
for (_name, _since), _function in ACTIVATIONS.items():
    op(_name, since=_since, half="float32", wide=_name == "Softplus")(_function)


op("ScaledTanh", half="float32", limits=WITHDRAWN)(lambda input, *, alpha, beta: alpha * xp.tanh(beta * input))
op("ParametricSoftplus", half="float32", limits=WITHDRAWN)(lambda X, *, alpha, beta: alpha * softplus(beta * X))


@op("Gelu", since=20, half="float32")
def gelu(X, *, approximate: Literal["none", "tanh"] = "none"):
    if approximate == "none":
        return 0.5 * X * (1 + erf(X * math.sqrt(0.5)))
    return 0.5 * X * (1 + xp.tanh(math.sqrt(2 / math.pi) * (X + 0.044715 * X * X * X)))


@op("SwiGLU", since=28, half="float32")
def swi_glu(A, B, *, alpha=1.0):
    check_shape("B, which does not broadcast,", B, *A.shape)
    return swish(A, alpha=alpha) * B


@op("Shrink", since=9)
def shrink(input, *, bias=0.0, lambd=0.5):
    """Shrink; integers are computed in floating point and truncated."""
    x = input.astype(np.promote_types(input.dtype, np.float32) if is_float(input.dtype) else np.float64)
    return cast_to(xp.where(x < -lambd, x + bias, xp.where(x > lambd, x - bias, 0)), input.dtype)


def softmax(x, *, axes, empty=False):
    """Softmax of ``x`` over ``axes``, in the dtype of x.

    float16 is rounded to float16's precision after each step, as ONNX's function body does, but keeps float32's range,
    which long rows need; bfloat16 is computed in float32. With ``empty``, rows of only -inf yield zeros instead of NaN:
    by bounds, with which XLA computes all of it in one kernel on CUDA, and with selections in three.
    """
    dtype = x.dtype
    step = _to_11_bits if dtype == np.float16 else lambda v: v
    x = widen(x)
    peak = _peak(x, axes)
    exponent = step(xp.exp(step(x - (xp.maximum(peak, np.finfo(x.dtype).min) if empty else peak))))
    total = step(exponent.sum(axis=axes, keepdims=True))
    return (exponent / (xp.maximum(total, 0.5) if empty else total)).astype(dtype)  # of others the total is 1 or more


def _to_11_bits(x):
    """float32 rounded to the 11 significant bits of float16."""
    if not is_known(x):
        return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=10)
    significand, exponent = np.frexp(x)
    return np.ldexp(np.rint(significand * np.float32(2**11)), exponent - 11)


def log_softmax(x, *, axes):
    shifted = x - _peak(x, axes)
    return shifted - xp.log(xp.sum(xp.exp(shifted), axis=axes, keepdims=True))


def _peak(x, axes):
    """The maximum along the axes, to subtract for stability; it cancels out, so it carries no gradient."""
    peak = x.max(axis=axes, keepdims=True, initial=-np.inf)
    return peak if is_known(x) else lax.stop_gradient(peak)


def _hardmax(x, *, axes):
    """1 at the first maximum over the axes jointly, else 0; the axes are adjacent."""
    extent = math.prod(x.shape[a] for a in axes)
    if extent == 0:
        return x
    flat = x.reshape(*x.shape[: axes[0]], extent, *x.shape[axes[-1] + 1 :])
    index = xp.expand_dims(argmax(flat, axes[0]), axes[0])
    count = np.arange(extent).reshape(-1, *(1,) * (flat.ndim - axes[0] - 1))
    return (index == count).astype(x.dtype).reshape(x.shape)


def _along(body, default, *, rows):
    """The operator that applies ``body`` along one axis; with ``rows`` (before opset 13) along all axes from it on."""

    def along_axis(input, *, axis=default):
        if input.ndim == 0 and not rows:
            return body(input[None], axes=(0,))[0]
        start = axis_of(axis, input.ndim)
        return body(input, axes=tuple(range(start, input.ndim if rows else start + 1)))

    return along_axis


ALONG_AXES: dict[str, tuple[Any, Any]] = {  # softmax handles half precision itself
    "Softmax": (softmax, {"wide": True}), "LogSoftmax": (log_softmax, {"half": "float32", "wide": True}),
    "Hardmax": (_hardmax, {"exact": ("input",)}),
}  # fmt: skip
for _name, (_body, _options) in ALONG_AXES.items():
    op(_name, **_options)(_along(_body, 1, rows=True))
    op(_name, since=13, **_options)(_along(_body, -1, rows=False))
