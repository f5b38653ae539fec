"""Neighbouring operators with constants give the numbers of one after the other, as onnxruntime computes them."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any, Final

import jax
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

import onnx2jax

F = np.float32
X = F([0.3, 1.7, -2.6, 100.4, 1e-3, 3e7, 1e20, 1e-20])
SUMS: Final = (F(1.5 * 2**23), F(-1.5 * 2**23), F(0.75))
PRODUCTS: Final = (F(1e30), F(1e-30), F(3))
STEPS: Final[dict[str, tuple[tuple[F, ...], Callable[[Any, Any], Any]]]] = {
    "x + c": (SUMS, lambda x, c: x + c),
    "c + x": (SUMS, lambda x, c: c + x),
    "x - c": (SUMS, lambda x, c: x - c),
    "c - x": (SUMS, lambda x, c: c - x),
    "x * c": (PRODUCTS, lambda x, c: x * c),
    "c * x": (PRODUCTS, lambda x, c: c * x),
    "x / c": (PRODUCTS, lambda x, c: x / c),
    "c / x": (PRODUCTS, lambda x, c: c / x),
}
OPERATORS: Final = {"+": "Add", "-": "Sub", "*": "Mul", "/": "Div"}
SHAPING: Final = (None, None, None, "Identity", "Transpose", "Neg")
Chain = list[tuple[str, F, str | None, bool]]
"""Steps, each with its constant, an operator after it, and whether the constant is a vector."""


def chains(count: int, seed: int) -> list[Chain]:
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        kind = rng.choice([SUMS, PRODUCTS])
        steps = [name for name, (constants, _) in STEPS.items() if constants is kind]
        length = rng.choice([2, 2, 3, 4])
        found.append(
            [(rng.choice(steps), rng.choice(kind), rng.choice(SHAPING), rng.random() < 0.3) for _ in range(length)]
        )
    return found


def model(some: list[Chain], as_nodes: bool) -> onnx.ModelProto:
    """A model whose outputs are the chains of x; constants are nodes or initializers."""
    nodes, constants = [], {}
    for i, chain in enumerate(some):
        x = "x"
        for k, (step, c, after, is_vector) in enumerate(chain):
            name, y = f"c{i}_{k}", f"y{i}_{k}"
            constants[name] = np.full(X.shape, c) if is_vector else np.asarray(c)
            left, operator, right = (x if part == "x" else name if part == "c" else part for part in step.split())
            nodes.append(helper.make_node(OPERATORS[operator], [left, right], [y]))
            if after:
                nodes.append(helper.make_node(after, [y], [y := f"{y}'"]))
            x = y
        nodes.append(helper.make_node("Identity", [x], [f"out{i}"]))
    tensors = [numpy_helper.from_array(v, n) for n, v in constants.items()]
    if as_nodes:
        nodes = [*(helper.make_node("Constant", [], [t.name], value=t) for t in tensors), *nodes]
    ends = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, [8]) for n in ("x", *(f"out{i}" for i in range(len(some))))
    ]
    graph = helper.make_graph(nodes, "chains", ends[:1], ends[1:], [] if as_nodes else tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def one_after_the_other(chain: Chain, x: np.ndarray) -> np.ndarray:
    for step, c, after, _ in chain:
        with np.errstate(all="ignore"):
            x = STEPS[step][1](x, c)
        x = -x if after == "Neg" else x
        x = np.where(np.abs(x) < np.finfo(F).tiny, np.copysign(F(0), x), x)  # XLA flushes subnormal numbers
    return x


def slope(chain: Chain) -> np.float32:
    """The derivative of a chain of products by constants, multiplied from its end."""
    found = F(1)
    for step, c, after, _ in reversed(chain):
        with np.errstate(all="ignore"):
            found = found / c if step == "x / c" else found * c if "*" in step else -found if step == "c - x" else found
        found = F(0) if abs(found) < np.finfo(F).tiny else -found if after == "Neg" else found
    return found


@pytest.mark.parametrize("as_nodes", [False, True])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.extended)])
def test_constants_are_not_merged(seed: int, as_nodes: bool) -> None:
    """By ``run``, a call, and a caller's jit."""
    some = chains(60, seed)
    m = onnx2jax.convert(model(some, as_nodes))
    wanted = [one_after_the_other(chain, X) for chain in some]
    lanes = {"run": m.run(None, {"x": X}), "call": m(X), "jit": jax.jit(m.apply)(m.params, X)}
    differ = [
        f"{lane} of {chain}: {y}, not {w}"
        for lane, results in lanes.items()
        for chain, y, w in zip(some, results, wanted, strict=True)
        if not np.allclose(y, w, rtol=1e-6, atol=0, equal_nan=True)
    ]
    assert not differ, "\n".join(differ)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.extended)])
def test_derivatives_of_products_are_multiplied_one_after_the_other(seed: int) -> None:
    some = [chain for chain in chains(60, seed) if all(step != "c / x" for step, *_ in chain)]
    m = onnx2jax.convert(model(some, as_nodes=True))

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(None, None, 0))
    def gradient(params: Any, x: Any, of: Any) -> Any:
        return jax.grad(lambda x: sum(o * y.sum() for o, y in zip(of, m.apply(params, x), strict=True)))(x)

    found = gradient(m.params, X, np.eye(len(some), dtype=F))
    for chain, by_x in zip(some, found, strict=True):
        np.testing.assert_allclose(by_x, np.full(8, slope(chain)), rtol=1e-6, err_msg=str(chain))


def test_constants_of_functions_are_not_merged_with_those_of_their_callers() -> None:
    proto = parser.parse_model("""<ir_version: 10, opset_import: ["": 21, "l": 1]>
        g (float[8] x) => (float[8] y) { a = l.up (x)  c = Constant <value = float {12582912}> ()  y = Sub (a, c) }
        <domain: "l", opset_import: ["": 21]> up (a) => (b)
        { c = Constant <value = float {12582912}> ()  b = Add (a, c) }""")
    np.testing.assert_array_equal(onnx2jax.convert(proto)(X)[:4], np.rint(X[:4]))


def test_networks_have_no_barriers() -> None:
    """Nor do operators without constants, or with those of another kind beside them."""
    proto = parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (float[8] x, float[8] z) => (float[8] y) { c = Constant <value = float {3}> ()
        a = Add (x, z)  b = Add (a, z)  d = Mul (b, c)  e = Sub (d, c)  f = Div (e, z)  y = Div (f, z) }""")
    m = onnx2jax.convert(proto)
    assert "optimization_barrier" not in str(jax.make_jaxpr(m.apply)(m.params, X, X))
