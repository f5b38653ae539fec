"""Calls oneDNN, which jaxlib contains beside XLA:CPU's own kernels, for products and convolutions of int8.

Before, x and w in int8:                           After:

    y:i32[196,256] = dot_general[([1], [0])] x w       y:i32[196,256] = ffi_call[__onednn$matmul] x w

In jaxlib 0.10 XLA's kernels for int8 use no VNNI. On a core of an AMD EPYC (Zen 4) they reach 140 GOP/s where oneDNN's
reach 350 in products, and 130 against 270 in convolutions of 56x56 and 28x28 pixels. XLA of jaxlib 0.12 has VNNI
kernels (300), and its oneDNN gives wrong sums at times, where several calls run at once: there, and wherever else this
was not measured, the pass does not run; nor where JAX's persistent cache is on, which cannot serialise such calls.

A loop over time multiplies few rows by the same weight in each step. oneDNN packs weights into a layout of its own in
every call; here they are packed once, outside (``packed``). Microseconds of one core:

    rows by weight      XLA   oneDNN   packed
    1 by 256x1024      14.4     15.8     10.0
    1 by 512x2048        67       58       25
    2 by 768x3072       176      108       51
    8 by 256x1024        36       24       18

128 rows by 384x1536 take 370 rather than 390, for which no memory is spent. Nor is it for a row by 256x1024: two loops
at once, one for each direction of a layer, take 2.1 ms for 33 steps rather than 1.2, because oneDNN takes both threads.

Layout assignment calls oneDNN for float convolutions, too (see ``conv_lowering``).
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .... import compat, limits
from ....ops.conv_rules import has_onednn
from ...program import Equation, Program, expand, is_literal, new_variable, substitute, variables
from ..any.hoist_params import parameter_only

PRODUCTS: Final = frozenset({"dot_general", "conv_general_dilated"})
BLOCK: Final = 64
"""Adjacent columns of a packed weight, each with four elements."""


def multiplies_bytes(program: Program) -> bool:
    """Whether a program has products or convolutions of int8, which loops may hold; to rewrite without takes longer."""
    return program.any(lambda e: e.name in PRODUCTS and all(v.aval.dtype == np.int8 for v in e.inputs))


def call_onednn(program: Program) -> Program:
    """The program with products and convolutions of int8 as calls of oneDNN; only where ``is_available``."""
    if not multiplies_bytes(program):
        return program
    names, constants = dict[Any, Any](), dict(program.constants)
    known = {*program.inputs[: program.parameters]}
    equations: list[Equation] = []
    for equation, is_early in parameter_only(program, names, constants):
        if is_early:
            known.update(equation.outputs)
        if equation.name == "scan":
            *before, equation = _with_packed(equation, known, constants)
            equations += before
            body = call_onednn(Program.of(equation.params["jaxpr"]))
            equation = equation.replace(jaxpr=body.closed())
        kernel = _kernel(equation)
        equations += [equation] if kernel is None else expand(kernel, equation, equation.inputs, {})
    outputs = [substitute(v, names) for v in program.outputs]
    return program.replace(equations=equations, outputs=outputs, constants=constants)


def _with_packed(scan: Equation, known: Collection[Any], constants: dict[Any, Any]) -> list[Equation]:
    """The equations that pack the weights which a loop multiplies rows by, and the loop over those."""
    body, count = Program.of(scan.params["jaxpr"]).inlined(), compat.scan_constants(scan)
    read = Counter(variables([*(v for e in body.equations for v in e.inputs), *body.outputs]))
    before, outside, inside, equations = list[Equation](), [*scan.inputs], [*body.inputs], [*body.equations]
    for place, (w, inner) in enumerate(zip(scan.inputs[:count], body.inputs, strict=False)):
        at = [i for i, e in enumerate(equations) if _is_product(e) and e.inputs[1] is inner]
        if is_literal(w) or w not in known or read[inner] != 1 or not at:
            continue
        equation = equations[at[0]]
        rows, columns = equation.outputs[0].aval.size // w.aval.shape[1], w.aval.shape[1]
        if rows * w.aval.size < limits.ONEDNN_INT8_ROW_PRODUCTS or not _packs(rows, *w.aval.shape):
            continue
        shape = (w.aval.size + 4 * columns,)
        outside[place], inside[place] = new_variable(w, shape), new_variable(w, shape)
        before += expand(packed, scan.replace(outputs=[outside[place]]), [w], constants)
        kernel = functools.partial(product, columns=columns)
        equations[at[0] : at[0] + 1] = expand(kernel, equation, [equation.inputs[0], inside[place]], constants)
    closed = body.replace(inputs=inside, equations=equations).closed()
    return [*before, scan.replace(outside, jaxpr=closed)]


def _is_product(equation: Equation) -> bool:
    """Whether it is a product of rows of int8 by a matrix, in int32."""
    if equation.name != "dot_general":
        return False
    x, w, y = (v.aval for v in (*equation.inputs, *equation.outputs))
    plain = (((x.ndim - 1,), (0,)), ((), ()))
    in_bytes = [a.dtype for a in (x, w, y)] == [np.int8, np.int8, np.int32] and w.ndim == 2 and y.size > 0 < x.size
    return in_bytes and tuple(tuple(map(tuple, pair)) for pair in equation.params["dimension_numbers"]) == plain


def is_available() -> bool:
    """Whether this jaxlib on this processor has the kernels, and JAX's persistent cache is off."""
    return not compat.keeps_programs() and _is_exact()


def _kernel(equation: Equation) -> Callable[..., Any] | None:
    """The function of the operands that replaces an equation; None where it stays."""
    avals = [v.aval for v in (*equation.inputs, *equation.outputs)]
    if equation.name not in PRODUCTS:
        return None
    if [a.dtype for a in avals] != [np.int8, np.int8, np.int32] or not all(a.size for a in avals):
        return None
    _, w, y = avals
    few_rows = y.size < limits.ONEDNN_INT8_ROWS * w.shape[-1]
    least = limits.ONEDNN_INT8_ROW_PRODUCTS if few_rows else limits.ONEDNN_INT8_PRODUCTS
    if y.size * math.prod(w.shape[:-1]) < least:
        return None
    if equation.name == "dot_general":
        return product if _is_product(equation) else None
    problem, numbers, last = equation.convolution, equation.params["dimension_numbers"], (0, 3, 1, 2)
    is_nhwc = (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec) == (last, (3, 2, 0, 1), last)
    if not (is_nhwc and problem.is_unpadded and has_onednn(problem)):
        return None
    return functools.partial(convolution, strides=problem.window.strides)


def product(x: Any, w: Any, columns: int | None = None) -> Any:
    """x (..., K) by w (K, N), in int32; w ``packed`` where the columns are given."""
    rows = lax.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))
    config = {} if columns is None else {"optimization_config": {"weights_prepacked": True}}
    columns = w.shape[1] if columns is None else columns
    y = compat.onednn("__onednn$matmul", {"onednn_matmul_config": config}, (rows.shape[0], columns), rows, w)
    return lax.reshape(y, (*x.shape[:-1], columns))


def packed(w: Any) -> Any:
    """w (K, N) in the layout of oneDNN's kernels: four rows of a column adjacent, blocks of 64 columns.

    After it -128 times the sums of columns, in bytes: VNNI multiplies unsigned by signed, so the kernels add 128
    to x.
    """
    k, n = w.shape
    blocks = lax.transpose(lax.reshape(w, (k // 4, 4, n // BLOCK, BLOCK)), (2, 0, 3, 1))
    sums = lax.bitcast_convert_type(np.int32(-128) * jnp.sum(w, axis=0, dtype=np.int32), np.uint32)
    parts = [((sums >> np.uint32(8 * i)) & np.uint32(255)).astype(np.uint8) for i in range(4)]
    behind = lax.bitcast_convert_type(jnp.stack(parts, axis=1), np.int8)
    return lax.concatenate([lax.reshape(v, (v.size,)) for v in (blocks, behind)], 0)


@functools.cache
def _packs(rows: int, k: int, n: int) -> bool:
    """Whether oneDNN reads a weight of that shape as ``packed`` writes it; its layout is internal, so this runs it."""
    if k % BLOCK or n % BLOCK or not is_available():
        return False
    x, w = (np.random.default_rng(0).integers(-128, 128, shape, np.int8) for shape in ((rows, k), (k, n)))
    return _is_product_of(lambda x, w: product(x, packed(w), n), x, w)


def _is_product_of(function: Callable[..., Any], x: np.ndarray, w: np.ndarray) -> bool:
    """Whether a function, compiled for this processor, gives the exact product of matrices of int8."""
    try:
        with compat.outside(), jax.default_device(jax.local_devices(backend="cpu")[0]):
            return bool((np.asarray(jax.jit(function)(x, w)) == x.astype(np.int32) @ w.astype(np.int32)).all())
    except (RuntimeError, ValueError):
        return False


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
    config = {
        "dims": 4, "input": image, "kernel": {"dims": 4, "filter": kernel}, "output": image, "window": window,
        "feature_groups": 1,
    }  # fmt: skip
    return compat.onednn(
        "__onednn$convolution", {"onednn_conv_config": config}, (x.shape[0], *spatial, w.shape[-1]), x, w
    )


@functools.cache
def _is_exact() -> bool:
    """Whether oneDNN gives exact sums here: without VNNI its kernels sum pairs of products in 16 bits."""
    features = compat.x86_features()
    if not compat.has_onednn() or "avx512_vnni" not in features or "amx_int8" in features:  # XLA has kernels for AMX
        return False
    return _is_product_of(product, np.full((64, 64), -128, np.int8), np.full((64, 64), 127, np.int8))
