"""Activation functions, and the softmax family."""

from __future__ import annotations

import math
from functools import wraps

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .arrays import argmax, axis_of, is_known, xp
from .cast import cast_to, is_float
from .math import clip, erf, limited_broadcast
from .registry import op


def in_float32(function):
    """Compute on float16 and bfloat16 in float32 and round once, at the end; let NumPy be silent about infinities."""

    @wraps(function)
    def widened(X, *inputs, **attributes):
        with np.errstate(all="ignore"):
            if not is_float(X.dtype) or X.dtype.itemsize >= 4:
                return function(X, *inputs, **attributes)
            wide = (v.astype(np.float32) for v in (X, *inputs))
            return function(*wide, **attributes).astype(X.dtype)

    return widened


def _below(x):
    """min(x, 0): the argument of an exp that overflows in the other branch would poison gradients."""
    return xp(x).minimum(x, x.dtype.type(0))


@op("Relu")
def relu(X):
    """Its derivative at 0 is 0."""
    return np.maximum(X, X.dtype.type(0)) if is_known(X) else jax.nn.relu(X)


@op("Sigmoid")
@in_float32
def sigmoid(X):
    return X.dtype.type(1) / (X.dtype.type(1) + np.exp(-X)) if is_known(X) else lax.logistic(X)


@op("LeakyRelu")
@in_float32
def leaky_relu(X, *, alpha=0.009999999776482582):
    return xp(X).where(X < 0, X.dtype.type(alpha) * X, X)


@op("PRelu", since=7)
@in_float32
def p_relu(X, slope):
    shape = lax.broadcast_shapes(X.shape, slope.shape)
    if shape != X.shape:
        raise ValueError(f"slope of shape {slope.shape} does not broadcast to X of shape {X.shape}")
    return xp(X, slope).where(X < 0, slope * X, X)


@op("PRelu")
def p_relu_1(X, slope):
    """Until opset 6 a slope is one number, or one number a channel (axis 1)."""
    return p_relu(X, limited_broadcast(X, slope, 1 if slope.ndim == 1 else None, broadcast=1))


@op("ThresholdedRelu")
@in_float32
def thresholded_relu(X, *, alpha=1.0):
    return xp(X).where(X.dtype.type(alpha) < X, X, X.dtype.type(0))


@op("Elu")
@in_float32
def elu(X, *, alpha=1.0):
    return xp(X).where(X < 0, X.dtype.type(alpha) * xp(X).expm1(_below(X)), X)


@op("Celu", since=12)
@in_float32
def celu(X, *, alpha=1.0):
    alpha = X.dtype.type(alpha)
    return xp(X).where(X < 0, alpha * xp(X).expm1(_below(X) / alpha), X)


def _selu(X, alpha, gamma):
    alpha, gamma = X.dtype.type(alpha), X.dtype.type(gamma)
    return gamma * xp(X).where(X <= 0, alpha * xp(X).expm1(_below(X)), X)


@op("Selu")
@in_float32
def selu_1(X, *, alpha=1.673200011253357, gamma=1.0506999492645264):
    return _selu(X, alpha, gamma)


@op("Selu", since=6)
@in_float32
def selu(X, *, alpha=1.6732631921768188, gamma=1.0507010221481323):
    return _selu(X, alpha, gamma)


@op("HardSigmoid")
@in_float32
def hard_sigmoid(X, *, alpha=0.20000000298023224, beta=0.5):
    zero, one = np.asarray(0, X.dtype), np.asarray(1, X.dtype)
    return clip(X.dtype.type(alpha) * X + X.dtype.type(beta), zero, one)


@op("HardSwish", since=14)
@in_float32
def hard_swish(X):
    return X * hard_sigmoid(X, alpha=1 / 6)


@op("Softplus")
@in_float32
def softplus(X):
    return xp(X).logaddexp(X, X.dtype.type(0))


@op("Softsign")
@in_float32
def softsign(input):
    return input / (input.dtype.type(1) + abs(input))


@op("Mish", since=18)
@in_float32
def mish(X):
    return X * xp(X).tanh(softplus(X))


@op("Gelu", since=20)
@in_float32
def gelu(X, *, approximate="none"):
    half, one, t = X.dtype.type(0.5), X.dtype.type(1), X.dtype.type
    if approximate == "none":
        return half * X * (one + erf(X * t(math.sqrt(0.5))))
    if approximate != "tanh":
        raise ValueError(f"approximate ({approximate!r}) is 'none' or 'tanh'")
    return half * X * (one + xp(X).tanh(t(math.sqrt(2 / math.pi)) * (X + t(0.044715) * X * X * X)))


@op("Swish", since=24)
@in_float32
def swish(X, *, alpha=1.0):
    return X * sigmoid(X.dtype.type(alpha) * X)


@op("SwiGLU", since=28)
@in_float32
def swi_glu(A, B, *, alpha=1.0):
    if A.shape != B.shape:
        raise ValueError(f"the gate has shape {A.shape}, the value {B.shape}; SwiGLU does not broadcast")
    return swish(A, alpha=alpha) * B


@op("Shrink", since=9)
def shrink(input, *, bias=0.0, lambd=0.5):
    """Integers are shrunk as real numbers and truncated."""
    wide = np.float64 if not is_float(input.dtype) else np.promote_types(input.dtype, np.float32)
    x = input.astype(wide)
    t = x.dtype.type
    return cast_to(xp(x).where(x < t(-lambd), x + t(bias), xp(x).where(x > t(lambd), x - t(bias), t(0))), input.dtype)


@op("ScaledTanh")
@in_float32
def scaled_tanh(input, *, alpha, beta):
    """Experimental until ONNX 1.4."""
    return input.dtype.type(alpha) * xp(input).tanh(input.dtype.type(beta) * input)


@op("ParametricSoftplus")
@in_float32
def parametric_softplus(X, *, alpha, beta):
    """Experimental until ONNX 1.4."""
    return X.dtype.type(alpha) * softplus(X.dtype.type(beta) * X)


def softmax(x, *, axes):
    """A float16 softmax has float16's precision in each step, as in ONNX's function and in Attention (where
    softmax_precision asks for more); but float32's range, which long rows need. bfloat16 would lose too much."""
    dtype, m = x.dtype, xp(x)
    step = _to_11_bits if dtype == np.float16 else lambda v: v
    x = x.astype(np.float32) if dtype.itemsize < 4 else x
    with np.errstate(all="ignore"):
        exponent = step(m.exp(step(x - _peak(x, axes))))
        return (exponent / step(m.sum(exponent, axis=axes, keepdims=True))).astype(dtype)


def _to_11_bits(x):
    """float32 rounded to the significant bits of float16."""
    if not is_known(x):
        return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=10)
    significand, exponent = np.frexp(x)
    return np.ldexp(np.rint(significand * np.float32(2**11)), exponent - 11)


@in_float32
def _log_softmax(x, *, axes):
    m = xp(x)
    shifted = x - _peak(x, axes)
    return shifted - m.log(m.sum(m.exp(shifted), axis=axes, keepdims=True))


def _peak(x, axes):
    """The maximum to subtract; it cancels out, so no gradient flows through it."""
    lowest = -np.inf
    if is_known(x):
        return np.max(x, axis=axes, keepdims=True, initial=lowest)
    return lax.stop_gradient(jnp.max(x, axis=axes, keepdims=True, initial=lowest))


def _hardmax(x, *, axes):
    """1 at the first maximum over the axes together (which are the last ones, or one)."""
    if math.prod(x.shape[a] for a in axes) == 0:
        return x
    flat = x.reshape(*x.shape[: axes[0]], -1, *x.shape[axes[-1] + 1 :])
    index = xp(x).expand_dims(argmax(flat, axes[0]), axes[0])
    count = np.arange(flat.shape[axes[0]]).reshape(-1, *(1,) * (flat.ndim - axes[0] - 1))
    return (index == count).astype(x.dtype).reshape(x.shape)


def _modern(body):
    def along_axis(input, *, axis=-1):
        return body(input, axes=(axis_of(axis, input.ndim),)) if input.ndim else body(input[None], axes=(0,))[0]

    return along_axis


def _flattening(body):
    """Before opset 13 the input is seen as a matrix whose rows begin at ``axis``."""

    def along_rows(input, *, axis=1):
        return body(input, axes=tuple(range(axis_of(axis, input.ndim), input.ndim)))

    return along_rows


for _name, _body in {"Softmax": softmax, "LogSoftmax": _log_softmax, "Hardmax": _hardmax}.items():
    op(_name)(_flattening(_body))
    op(_name, since=13)(_modern(_body))
