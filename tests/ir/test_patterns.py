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
from tests.support import emitters

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
BETWEEN: Final = (
    *(None,) * 8, "Identity", "Transpose", "Neg", "Min inf", "Max -inf", "Add 0", "Sub 0", "Mul 1", "Div 1", "Sum",
)  # fmt: skip
"""Operators between two steps, with their constant; most of them XLA removes."""
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
            [(rng.choice(steps), rng.choice(kind), rng.choice(BETWEEN), rng.random() < 0.3) for _ in range(length)]
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
                op, _, constant = after.partition(" ")
                if constant:
                    constants[f"{y}c"] = np.asarray(F(constant))
                nodes.append(helper.make_node(op, [y, f"{y}c"] if constant else [y], [y := f"{y}'"]))
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
    left_out = {"c / x", "Min inf", "Max -inf"}  # the last two share a gradient with an infinite operand
    some = [chain for chain in chains(60, seed) if all(left_out.isdisjoint(step[::2]) for step in chain)]
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
        a = Add (x, z)  b = Add (a, z)  d = Mul (b, c)  e = Sub (d, c)  f = Div (e, z)  y = Add (f, z) }""")
    m = onnx2jax.convert(proto)
    assert "optimization_barrier" not in str(jax.make_jaxpr(m.apply)(m.params, X, X))


PAIRS: Final[dict[str, tuple[str, Callable[..., Any]]]] = {
    "log of exp": ("t = Exp(x)\n y = Log(t)", lambda x, _z: np.log(np.exp(x))),
    "log of a root": ("t = Sqrt(x)\n y = Log(t)", lambda x, _z: np.log(np.sqrt(x))),
    "log of a power": ("t = Pow(x, z)\n y = Log(t)", lambda x, z: np.log(np.power(x, z))),
    "root of a square": ("t = Mul(x, x)\n y = Sqrt(t)", lambda x, _z: np.sqrt(x * x)),
    "root of a power": (
        "two = Constant<value_float = 2.0>()\n t = Pow(x, two)\n y = Sqrt(t)",
        lambda x, _z: np.sqrt(x * x),
    ),
    "power of exp": (
        "h = Constant<value_float = 0.5>()\n t = Exp(x)\n y = Pow(t, h)",
        lambda x, _z: np.exp(x) ** F(0.5),
    ),
    "square of a quotient": ("t = Div(x, x)\n y = Mul(t, t)", lambda x, _z: (x / x) * (x / x)),
    "power of a quotient": (
        "two = Constant<value_float = 2.0>()\n t = Div(x, x)\n y = Pow(t, two)",
        lambda x, _z: (x / x) ** 2,
    ),
    "product and quotient": ("t = Mul(x, z)\n y = Div(t, z)", lambda x, z: x * z / z),
    "two quotients": ("t = Div(x, z)\n y = Div(t, z)", lambda x, z: x / z / z),
    "two reciprocals": ("t = Reciprocal(x)\n y = Reciprocal(t)", lambda x, _z: 1 / (1 / x)),
}
"""Operators that XLA rewrites as if numbers were real, and what they give one after the other."""


@pytest.mark.parametrize("jit", [False, True], ids=["call", "jit"])
def test_pairs_that_are_equal_for_real_numbers(jit: bool) -> None:
    nodes, outputs = [], []
    for i, (text, _) in enumerate(PAIRS.values()):
        graph = parser.parse_graph(f"g (float[8] x, float[8] z) => (float[8] y) {{ {text} }}")
        for node in graph.node:
            for names in (node.input, node.output):
                names[:] = [n if n in ("x", "z") else f"{n}{i}" for n in names]
        nodes += graph.node
        outputs.append(helper.make_tensor_value_info(f"y{i}", TensorProto.FLOAT, [8]))
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [8]) for n in "xz"]
    proto = helper.make_model(
        helper.make_graph(nodes, "pairs", ends, outputs), opset_imports=[helper.make_opsetid("", 21)], ir_version=10
    )
    x, z = F([0.3, 2.5, -2.5, 1000, 1e30, -1e30, 90, 5]), F([0.5, 3, 0.5, 2, 1e30, 1e30, 2, 1e20])
    m = onnx2jax.convert(proto)
    with emitters.newer():  # the older ones rewrite such pairs, too
        results = jax.jit(m.apply, compiler_options=emitters.NEWER)(m.params, x, z) if jit else m(x, z)
    with np.errstate(all="ignore"):
        for name, (_, wanted), got in zip(PAIRS, PAIRS.values(), results, strict=True):
            np.testing.assert_allclose(got, wanted(x, z), 1e-5, 1e-37, err_msg=name)
