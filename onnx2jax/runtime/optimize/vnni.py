"""Products and convolutions of 8-bit integers by oneDNN, whose kernels lie in jaxlib beside those of XLA:CPU.

Before, x and w in int8:                           After:

    y:i32[196,256] = dot_general[([1], [0])] x w       y:i32[196,256] = ffi_call[__onednn$matmul] x w

In jaxlib 0.10 XLA's kernels for int8 do without VNNI. A core of an AMD EPYC (Zen 4) reaches with them 140 GOP/s where
oneDNN's reach 350 in products, and 130 beside 270 in convolutions of 56x56 and 28x28 pixels. XLA of jaxlib 0.12 has
such kernels of its own (300), and its oneDNN is called in another way: there, and wherever else this was not tried,
programs stay as they are. So they do where JAX keeps compiled programs: it cannot keep these.

Convolutions of floats over images of few channels go the same way (see ``convolution``).
"""

from __future__ import annotations

import functools
import math
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr

from ... import compat
from .inline import written

MANY_PRODUCTS: Final = 2**18
"""Smaller ones take as long by XLA's kernels: 64x64 by 64x64 takes 16 us either way, 16x64 by 64x64 20 us."""
FEW_ROWS, MANY_OF_FEW_ROWS = 8, 2**20
"""So do those of fewer rows up to so many products: a row by 256x1024 takes 17 us in a loop rather than 22; but a row
by 768x3072 122 rather than 198, two 124 rather than 181."""


def with_vnni(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The program with oneDNN's kernels in the place of products and convolutions of int8; only where ``is_served``."""
    equations: list[Any] = []
    for equation in closed.jaxpr.eqns:
        if equation.primitive.name == "scan":
            body = with_vnni(equation.params["jaxpr"])
            equation = equation.replace(params={**equation.params, "jaxpr": body})
        kernel = _kernel(equation)
        equations += [equation] if kernel is None else written(kernel, equation, equation.invars, {})
    return ClosedJaxpr(closed.jaxpr.replace(eqns=equations), closed.consts)


def is_served() -> bool:
    """Whether this jaxlib on this processor has the kernels, and JAX is not to keep compiled programs."""
    return not compat.keeps_programs() and _is_exact()


def _kernel(equation: Any) -> Callable[..., Any] | None:
    """The function of the operands that takes an equation's place; None where it stays."""
    avals = [v.aval for v in (*equation.invars, *equation.outvars)]
    if equation.primitive.name not in ("dot_general", "conv_general_dilated"):
        return None
    if [a.dtype for a in avals] != [np.int8, np.int8, np.int32] or not all(a.size for a in avals):
        return None
    x, w, y = avals
    many = MANY_OF_FEW_ROWS if y.size < FEW_ROWS * w.shape[-1] else MANY_PRODUCTS
    if y.size * math.prod(w.shape[:-1]) < many:
        return None
    given = equation.params
    if equation.primitive.name == "dot_general":
        plain = (((x.ndim - 1,), (0,)), ((), ()))
        is_plain = w.ndim == 2 and tuple(tuple(map(tuple, pair)) for pair in given["dimension_numbers"]) == plain
        return product if is_plain else None
    numbers = given["dimension_numbers"]
    last = (0, x.ndim - 1, *range(1, x.ndim - 1))
    lies = (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec) == (last, (3, 2, 0, 1), last)
    whole = given["feature_group_count"] == given["batch_group_count"] == 1 and set(given["lhs_dilation"]) == {1}
    unpadded = all(tuple(p) == (0, 0) for p in given["padding"]) and set(given["rhs_dilation"]) == {1}
    if not (x.ndim == 4 and lies and whole and unpadded):
        return None
    return functools.partial(convolution, strides=tuple(given["window_strides"]))


def product(x: Any, w: Any) -> Any:
    """x (..., K) by w (K, N), in int32."""
    rows = lax.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))
    y = compat.onednn("__onednn$matmul", {"onednn_matmul_config": {}}, (rows.shape[0], w.shape[1]), rows, w)
    return lax.reshape(y, (*x.shape[:-1], w.shape[1]))


def convolution(x: Any, w: Any, strides: Sequence[int], pads: Sequence[tuple[int, int]] = ((0, 0), (0, 0))) -> Any:
    """x (N, H, W, C) by w (kernel..., C, O), in int32 where they are int8."""
    rows = zip(x.shape[1:3], w.shape, strides, pads, strict=False)
    spatial = [(n + sum(pad) - k) // s + 1 for n, k, s, pad in rows]
    before, after = zip(*pads, strict=True)
    image = {"dims": 4, "data": {"batch_dim": 0, "feature_dim": 3, "spatial_dims": [1, 2]}}
    kernel = {"input_feature_dim": 2, "output_feature_dim": 3, "spatial_dims": [0, 1]}
    window = {
        "size": w.shape[:2], "pad_left": before, "pad_right": after, "strides": strides, "window_dilations": [1, 1],
    }  # fmt: skip
    given = {
        "dims": 4, "input": image, "kernel": {"dims": 4, "filter": kernel}, "output": image, "window": window,
        "feature_groups": 1,
    }  # fmt: skip
    return compat.onednn(
        "__onednn$convolution", {"onednn_conv_config": given}, (x.shape[0], *spatial, w.shape[-1]), x, w
    )


@functools.cache
def _is_exact() -> bool:
    """Whether oneDNN gives exact sums here: without VNNI its kernels sum pairs of products in 16 bits."""
    if not (compat.has_onednn() and sys.platform == "linux" and platform.machine() == "x86_64"):
        return False
    cpu = Path("/proc/cpuinfo")
    flags = cpu.read_text().split() if cpu.exists() else []
    if "avx512_vnni" not in flags or "amx_int8" in flags:  # where XLA has kernels for int8
        return False
    x, w = np.full((64, 64), -128, np.int8), np.full((64, 64), 127, np.int8)
    try:
        with compat.outside(), jax.default_device(jax.local_devices(backend="cpu")[0]):
            return bool((np.asarray(jax.jit(product)(x, w)) == -128 * 127 * 64).all())
    except (RuntimeError, ValueError):
        return False
