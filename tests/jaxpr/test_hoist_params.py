"""Hoisted parameter-only subexpressions: with XLA's numbers, anew for other parameters, not where that costs more."""

from __future__ import annotations

import pickle
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

import onnx2jax
from onnx2jax import compat
from onnx2jax.jaxpr.const_eval import RULES, Step, can_evaluate
from onnx2jax.jaxpr.program import Equation
from tests.support.helpers import as_weights
from tests.support.models import mlp
from tests.support.programs import hoisted

W = np.arange(-6, 6, dtype=np.float32).reshape(3, 4)
S = np.array([0.5, 2, 3, 4], np.float32)
X = np.array([1, -2, 3, 0.5], np.float32)


def halves(function: Callable[..., Any], *weights: Any, inputs: tuple[Any, ...] = (X,)) -> tuple[Any, list[Any]]:
    """The two halves of a function of weights and inputs, shown to compute what it computes."""
    closed = jax.make_jaxpr(function)(*weights, *inputs)
    parts = hoisted(closed, len(weights))
    arguments = parts.hoisted_arguments(*as_weights([*weights, *inputs]))
    ours, expected = jax.jit(lambda hoisted, *args: (jaxpr_as_fun(parts.main)(*hoisted, *inputs), function(*args)))(
        arguments, *weights, *inputs
    )
    for a, b in zip(ours, jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
        assert a.dtype == b.dtype
    return parts.main, [np.asarray(v) for v in arguments]


def primitives(main: Any) -> list[str]:
    return [e.primitive.name for e in main.jaxpr.eqns]


def test_parameter_only_equations_are_hoisted() -> None:
    main, arguments = halves(lambda w, s, x: (w.astype(jnp.float16).astype(jnp.float32) * s).T.T @ x, W, S)
    assert primitives(main) == ["dot_general"]
    np.testing.assert_array_equal(arguments[0], W * S)


def test_cheap_expansions_stay_in_the_program() -> None:
    main, arguments = halves(lambda w, x: jnp.broadcast_to(-w[0], (500, 4)) + x, W)
    assert [v.shape for v in arguments] == [(4,)]
    assert set(primitives(main)) == {"broadcast_in_dim", "add"}


def test_results_much_larger_than_their_weights_stay_in_the_program() -> None:
    def outer(w: Any, x: Any) -> Any:
        return (w[:, None] * w[None, :] + 1) @ x

    for size, prepared in ((64, True), (512, False)):  # 16 KB are no matter; 1 MB from 2 KB is
        w = np.linspace(0, 1, size, dtype=np.float32)
        _, arguments = halves(outer, w, inputs=(w,))
        assert [v.shape for v in arguments] == [(size, size) if prepared else (size,)]


def test_equations_of_no_parameter_are_not_hoisted() -> None:
    _, arguments = halves(lambda w, x: jnp.arange(4.0, dtype=np.float32) + 1 + x + w[0], W)
    assert [v.shape for v in arguments] == [(3, 4)]


def test_large_matrices_of_one_number_are_handed_to_products() -> None:
    """As ConstantOfShape gives them: XLA would write them anew in every call. Kept programs hold the number alone."""
    x = np.arange(150.0, dtype=np.float32)
    rows = np.broadcast_to(x, (150, 150))
    main, arguments = halves(lambda w, x: (x @ rows, x @ rows.T, x + rows, x[:4] @ rows[:4, :4] + w[0]), W, inputs=(x,))
    assert [v.shape for v in arguments] == [(150, 150), (150, 150), (3, 4)]
    assert [c.shape for c in main.consts] == [(4, 4)]
    plan = hoisted(jax.make_jaxpr(lambda x: x @ rows)(x), 0)
    assert len(pickle.dumps(replace(plan, main=None))) < rows.nbytes / 10


def test_intermediate_values_are_freed() -> None:
    """Of each weight what NumPy made is let go of, once the device has its copy."""
    weights = [np.full((512, 512), i, np.float32) for i in range(12)]

    def function(*arrays: Any) -> list[Any]:
        return [(w * 2).T @ arrays[-1] for w in arrays[:-1]]

    parts = hoisted(jax.make_jaxpr(function)(*weights, weights[0][:, :1]), 12)
    tracemalloc.start()
    arguments = parts.hoisted_arguments(*as_weights(weights))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(arguments) == 12
    assert most < 8 * weights[0].nbytes


def test_an_inner_jit_used_twice() -> None:
    scaled = jax.jit(lambda w, by: (w * by).T)
    main, arguments = halves(lambda w, s, x: (x[:3] @ scaled(w, s).T, x[:3] @ scaled(w, s + 1).T), W, S)
    assert primitives(main).count("dot_general") == 2
    assert len(arguments) == 2


def test_a_choice_by_platform_is_that_for_the_cpu() -> None:
    def function(w: Any, x: Any) -> Any:
        return lax.platform_dependent(w, x, cpu=lambda w, x: (w * 2) @ x, default=lambda w, x: w @ x * 0)

    main, arguments = halves(function, W)
    np.testing.assert_array_equal(arguments[0], W * 2)
    assert "cond" not in primitives(main)


def test_outputs_that_are_weights_or_follow_from_them_alone() -> None:
    halves(lambda w, x: (w, w.T, jnp.float32(1), x), W)


# ------------------------------------------------------------------------------------------------------ models


@pytest.fixture(scope="module")
def model() -> onnx2jax.Model:
    return onnx2jax.convert(mlp())


def test_other_parameters_are_hoisted_anew(model: onnx2jax.Model) -> None:
    x = np.ones((2, model.inputs[0].type.shape[1]), np.float32)
    before = np.asarray(model(x))
    doubled = model.with_params({n: 2 * np.asarray(v) for n, v in model.params.items() if v.ndim == 2})
    plain = onnx2jax.convert(mlp(), optimize=False).with_params(dict(doubled.params))
    np.testing.assert_allclose(doubled(x), plain(x), rtol=1e-6)
    assert not np.allclose(doubled(x), before)
    np.testing.assert_array_equal(model(x), before)


def test_one_compilation_for_each_signature() -> None:
    model = onnx2jax.convert(mlp())
    width = model.inputs[0].type.shape[1]
    for rows, expected in ((2, 1), (2, 1), (3, 2), (2, 2)):
        model(np.ones((rows, width), np.float32))
        model(jnp.ones((rows, width), jnp.float32))
        assert model.compilations == expected


def test_another_precision_of_products_is_traced_anew(model: onnx2jax.Model) -> None:
    x = np.ones((2, model.inputs[0].type.shape[1]), np.float32)
    before, compilations = np.asarray(model(x)), model.compilations
    with jax.default_matmul_precision("float32"):
        np.testing.assert_allclose(model(x), before, rtol=1e-6)
    assert model.compilations == compilations + 1


def test_two_threads_hoist_at_once() -> None:
    model = onnx2jax.convert(mlp())
    x = np.ones((2, model.inputs[0].type.shape[1]), np.float32)
    with ThreadPoolExecutor(2) as threads:
        results = [*threads.map(lambda _: np.asarray(model(x)), range(4))]
    for result in results:
        np.testing.assert_array_equal(result, results[0])


# ------------------------------------------------------------------------------------------------------ NumPy

F = np.array([[-2.5, 0, 3], [1, -0.0, 7]], np.float32)
N = np.array([[5, -7, 0]], np.int32)
U = np.array([[250, 3, 17]], np.uint8)
B = np.array([[True, False, True]])
EXAMPLES: dict[str, list[Callable[[], Any]]] = {
    "abs": [lambda: lax.abs(F), lambda: lax.abs(N)],
    "add": [lambda: lax.add(F, F), lambda: lax.add(U, U)],
    "and": [lambda: lax.bitwise_and(U, U), lambda: lax.bitwise_and(B, B)],
    "div": [lambda: lax.div(F, F)],
    "eq": [lambda: lax.eq(F, F)],
    "ge": [lambda: lax.ge(F, F.T.T)],
    "gt": [lambda: lax.gt(N, -N)],
    "le": [lambda: lax.le(N, -N)],
    "lt": [lambda: lax.lt(F, np.float32(np.nan) * F)],
    "max": [lambda: lax.max(F, np.float32(np.nan) * F), lambda: lax.max(N, -N)],
    "min": [lambda: lax.min(F, np.float32(np.nan) * F)],
    "mul": [lambda: lax.mul(U, U), lambda: lax.mul(F, F)],
    "ne": [lambda: lax.ne(U, U)],
    "neg": [lambda: lax.neg(F), lambda: lax.neg(U)],
    "not": [lambda: lax.bitwise_not(B), lambda: lax.bitwise_not(N)],
    "or": [lambda: lax.bitwise_or(U, U)],
    "rsqrt": [lambda: lax.rsqrt(F * F)],
    "sqrt": [lambda: lax.sqrt(F)],
    "square": [lambda: lax.square(F)],
    "sub": [lambda: lax.sub(U, U + np.uint8(9))],
    "xor": [lambda: lax.bitwise_xor(U, U)],
    "bitcast_convert_type": [
        lambda: lax.bitcast_convert_type(U, np.int8),
        lambda: lax.bitcast_convert_type(F, np.int32),
        lambda: lax.bitcast_convert_type(lax.concatenate([U, U], 1)[:, :4], np.uint32),
    ],
    "broadcast_in_dim": [lambda: lax.broadcast_in_dim(F, (3, 2, 4, 3), (1, 3)), lambda: lax.broadcast(F[0, 0], (2,))],
    "concatenate": [lambda: lax.concatenate([F, F], 1)],
    "convert_element_type": [
        lambda: lax.convert_element_type(lax.neg(F), jnp.bfloat16),
        lambda: lax.convert_element_type(lax.neg(N), np.int8),
        lambda: lax.convert_element_type(lax.neg(U), np.float16),
        lambda: lax.convert_element_type(lax.neg(F), np.bool_),
    ],
    "copy": [lambda: jnp.copy(jnp.asarray(F))],
    "iota": [lambda: lax.broadcasted_iota(np.int32, (2, 3, 2), 1)],
    "pad": [lambda: lax.pad(F, np.float32(7), ((1, 0, 0), (0, 2, 0)))],
    "reduce_sum": [lambda: jnp.sum(U, 1, np.uint8), lambda: jnp.sum(N, (0, 1))],
    "reshape": [lambda: lax.reshape(F, (3, 2))],
    "rev": [lambda: lax.rev(F, (0, 1))],
    "scaled": [lambda: compat.scaled(F, F[1:] - 3, N[0] * np.float32(1), N[0] * np.float32(1))],
    "select_n": [lambda: lax.select_n(B, N, -N)],
    "shift_left": [lambda: lax.shift_left(U, np.array([[1, 4, 0]], np.uint8))],
    "shift_right_logical": [lambda: lax.shift_right_logical(U, np.array([[1, 4, 0]], np.uint8))],
    "slice": [lambda: lax.slice(F, (0, 1), (2, 3), (1, 2)), lambda: lax.slice(F, (1, 0), (2, 2))],
    "split": [lambda: lax.split(F, (1, 2), 1)],
    "squeeze": [lambda: lax.squeeze(N, (0,))],
    "stack": [lambda: jnp.stack([F, F], 1)],
    "transpose": [lambda: lax.transpose(F, (1, 0))],
}


def test_every_rule_has_an_example() -> None:
    assert EXAMPLES.keys() == RULES.keys()


@pytest.mark.parametrize("name", EXAMPLES)
def test_numpy_gives_what_xla_gives(name: str) -> None:
    with compat.enable_x64():
        for example in EXAMPLES[name]:
            closed = jax.make_jaxpr(example)()
            equation = Equation(closed.jaxpr.eqns[-1])
            if (name, equation.name) == ("stack", "concatenate"):
                pytest.skip("JAX 0.10.0 has no such primitive")
            assert equation.name == name
            assert can_evaluate(equation)
            variables = [v for v in (*equation.inputs, *equation.outputs) if not hasattr(v, "val")]
            numbers = {v: i for i, v in enumerate(variables)}
            step = pickle.loads(pickle.dumps(Step.of(equation, numbers)))
            ours = step.evaluate(_values(closed, numbers))
            for result, wanted in zip(step.results, jax.tree.leaves(example()), strict=True):
                np.testing.assert_array_equal(ours[result], wanted)
                assert ours[result].dtype == wanted.dtype


def _values(closed: Any, numbers: Any) -> dict[int, np.ndarray]:
    """The values of what the last equation reads."""
    *before, last = closed.jaxpr.eqns
    variables = [v for v in last.invars if not hasattr(v, "val")]
    inner = closed.jaxpr.replace(eqns=before, outvars=variables)
    values = jaxpr_as_fun(type(closed)(inner, closed.consts))()
    return {numbers[v]: np.asarray(x) for v, x in zip(variables, values, strict=True)}


@pytest.mark.parametrize(
    "function",
    [
        lambda: lax.div(N, N + 2),  # rounds towards zero
        lambda: lax.convert_element_type(lax.neg(F), np.int8),  # saturates
        lambda: lax.convert_element_type(lax.neg(F), jnp.float8_e4m3fn),
        lambda: lax.shift_right_logical(N, N * 0 + 1),
        lambda: lax.exp(F),
        lambda: jnp.sum(F),
        lambda: lax.pad(F, np.float32(7), ((1, -1, 0), (0, 0, 1))),
        lambda: lax.bitcast_convert_type(F, np.int8),
    ],
)
def test_equations_that_numpy_rounds_differently_are_not_evaluated(function: Callable[[], Any]) -> None:
    assert not can_evaluate(Equation(jax.make_jaxpr(function)().jaxpr.eqns[-1]))
