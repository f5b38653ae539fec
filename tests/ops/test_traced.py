"""No gather, scatter or scan over many constants is left to XLA, which evaluates it while it compiles, for seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Literal, jaxprs_in_params

from onnx2jax.ops.traced import XLA_FOLDED, with_unfolded_cotangent
from tests.support.helpers import run_op

RNG = np.random.default_rng(5)
SLOW = [
    "conv_general_dilated",
    "cumsum",
    "cumprod",
    "dot_general",
    "gather",
    "reduce_window",
    "scatter",
    "scatter_",
    "sort",
    "while",
    "scan",
]
"""Beginnings of the names of primitives that are slow to evaluate."""


def foldable(jaxpr: Any, constants: set[Any]) -> Iterator[str]:
    """The slow primitives with many results that depend on nothing but ``constants``, and a barrier hides none."""
    constants = constants | set(jaxpr.constvars)
    for equation in jaxpr.eqns:
        known = [isinstance(v, Literal) or v in constants for v in equation.invars]
        for inner in jaxprs_in_params(equation.params):
            inputs = known[len(known) - len(inner.invars) :]
            yield from foldable(inner, {v for v, is_known in zip(inner.invars, inputs, strict=True) if is_known})
        if all(known) and equation.primitive.name != "optimization_barrier":
            constants.update(equation.outvars)
            size = max(getattr(v.aval, "size", 0) for v in (*equation.invars, *equation.outvars))
            if size >= XLA_FOLDED and equation.primitive.name.startswith(tuple(SLOW)):
                yield f"{equation.primitive.name} {[str(v.aval) for v in equation.outvars]}"


def real(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def below(n: int, *shape: int) -> np.ndarray:
    return RNG.integers(0, n, shape)


IMAGE, GRID, AT = real(1, 2, 128, 128), real(1, 128, 128, 2), below(128, 1, 2, 128, 128)
ROWS, SIZES = real(128, 256), np.array([1, 2, 131, 97])
HALVES = {"kernel_shape": (2, 2), "strides": (2, 2)}
REPEATED = np.broadcast_to(below(128, 1, 2, 128, 1), AT.shape)

# operator, inputs, positions of those that are traced, attributes
TABLE: list[tuple[str, list[Any], tuple[int, ...], dict[str, Any]]] = [
    *(
        ("GridSample", [IMAGE, GRID], (0,), {"mode": mode, "padding_mode": padding})
        for mode in ("linear", "nearest", "cubic")
        for padding in ("zeros", "border", "reflection")
    ),
    ("GridSample", [real(1, 1, 32, 32, 32), real(1, 32, 32, 32, 3)], (0,), {}),
    ("DeformConv", [IMAGE, real(3, 2, 3, 3), real(1, 18, 128, 128)], (0, 1), {"pads": (1, 1, 1, 1)}),
    *(("ScatterElements", [IMAGE, AT, IMAGE], (0, 2), {"axis": 2, "reduction": r}) for r in ("none", "add", "max")),
    *(("ScatterElements", [IMAGE, REPEATED, IMAGE], (2,), {"axis": 2, "reduction": r}) for r in ("none", "mul")),
    *(("ScatterND", [ROWS, below(128, 99, 1), real(99, 256)], (2,), {"reduction": r}) for r in ("none", "min")),
    ("GatherElements", [IMAGE, AT], (0,), {"axis": 3}),
    ("GatherND", [ROWS, below(128, 99, 1)], (0,), {}),
    ("Gather", [ROWS, below(128, 99)], (0,), {}),
    *(("CumSum", [IMAGE, np.array(axis)], (0,), {"exclusive": axis - 2}) for axis in (2, 3)),
    *(("Resize", [IMAGE, None, None, SIZES], (0,), {"mode": mode}) for mode in ("nearest", "linear", "cubic")),
    ("MaxUnpool", [real(1, 1, 128, 128), 4 * np.arange(2**14).reshape(1, 1, 128, 128)], (0,), HALVES),
    ("Col2Im", [real(1, 9, 2**14), np.array([128, 128]), np.array([3, 3])], (0,), {"pads": (1, 1, 1, 1)}),
]  # fmt: skip


@pytest.mark.parametrize("differentiated", [False, True])
def test_constants_are_left_unfolded(differentiated: bool) -> None:
    found = {}
    for place, (name, inputs, traced, attributes) in enumerate(TABLE):

        def total(*xs: Any, case: Any = (name, inputs, traced, attributes)) -> Any:
            name, inputs, traced, attributes = case
            given = dict(zip(traced, xs, strict=True))
            return jnp.sum(run_op(name, *(given.get(i, x) for i, x in enumerate(inputs)), **attributes))

        function: Callable[..., Any] = jax.grad(total, tuple(range(len(traced)))) if differentiated else total
        with jax.enable_x64(True):
            jaxpr = jax.make_jaxpr(function)(*(jnp.asarray(inputs[i]) for i in traced)).jaxpr
        found[f"{name}-{place}"] = list(foldable(jaxpr, set()))
    assert {name: some for name, some in found.items() if some} == {}


def test_what_is_found() -> None:
    """A scan of a constant cotangent is, unless it is behind a barrier."""
    x = jnp.zeros(XLA_FOLDED)
    plain, behind = jnp.cumsum, lambda x: with_unfolded_cotangent(jnp.cumsum(x))
    found = [
        list(foldable(jax.make_jaxpr(jax.grad(lambda x, f=f: f(x).sum()))(x).jaxpr, set())) for f in (plain, behind)
    ]
    assert [len(some) for some in found] == [1, 0]
