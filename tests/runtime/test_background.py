"""Background compilation: which calls NumPy evaluates, when a program takes over, and that results stay right."""

from __future__ import annotations

import itertools
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

import onnx2jax
from onnx2jax.errors import InputError, OperatorError
from onnx2jax.runtime import background

pytestmark = pytest.mark.usefixtures("standard_promotion")  # the thread has the process's configuration

IMAGES = np.random.default_rng(0).random((2, 1, 8, 8)).astype(np.float32)
X = np.arange(8, dtype=np.float32).reshape(2, 4)
W = np.arange(12, dtype=np.float32).reshape(4, 3)


def made(body: str, header: str = "float[n, 4] x) => (float[n, m] y", **initializers: Any) -> onnx.ModelProto:
    file = parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g ({header}) {{ {body} }}')
    file.graph.initializer.extend(numpy_helper.from_array(np.asarray(v), n) for n, v in initializers.items())
    return file


def converted(file: Any = None, **options: Any) -> onnx2jax.Model:
    return onnx2jax.convert(file or onnx2jax.demo_model(), background_compile=True, **options)


def until_compiled(model: onnx2jax.Model, *args: Any) -> np.ndarray:
    """The result of the first call that its program makes, which the thread compiled."""
    model(*args)
    model(*args)
    idle()
    assert model.compilations
    assert "background_compile" not in model.explain_call(*args)
    return np.asarray(model(*args))


def idle() -> None:
    """Wait until the thread has compiled what it was given."""
    background._thread(os.getpid()).submit(lambda: None).result()


def test_one_call_compiles_nothing() -> None:
    model = converted()
    compiled = onnx2jax.convert(onnx2jax.demo_model())(IMAGES)
    np.testing.assert_allclose(model(IMAGES), compiled, rtol=1e-5, atol=1e-6)
    (run,) = converted().run(None, {"image": IMAGES})
    np.testing.assert_allclose(run, compiled, rtol=1e-5, atol=1e-6)
    assert model.compilations == 0


def test_after_the_second_call_a_thread_compiles_the_program_of_later_ones() -> None:
    model = converted()
    first = model(IMAGES)
    later = until_compiled(model, IMAGES)
    assert model.compilations == 1
    assert "compiled" in model.explain_call(IMAGES)
    np.testing.assert_allclose(first, later, rtol=1e-5, atol=1e-6)


def test_a_fork_compiles_with_a_thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what the parent's thread was compiling."""
    stop = threading.Event()
    background._thread(os.getpid()).submit(stop.wait)  # as a thread that a fork does not have
    model = converted()
    model(IMAGES)
    model(IMAGES)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    until_compiled(model, IMAGES)
    assert model.compilations == 1
    stop.set()


def test_results_share_no_memory() -> None:
    text = """<ir_version: 10, opset_import: ["": 21]> g (float[n] x) => (float[n] y, float[n] z, seq(float[n]) s)
        { y = Relu (x)  z = Identity (y)  s = SequenceConstruct (y, z) }"""
    results = converted(parser.parse_model(text)).run(None, {"x": np.ones(3, np.float32)})
    arrays = [*results[:2], *results[2]]
    assert not any(np.shares_memory(a, b) for a, b in itertools.combinations(arrays, 2))


def test_each_shape_is_compiled_for_itself() -> None:
    model = converted()
    until_compiled(model, IMAGES)
    model(IMAGES[:1])
    assert model.compilations == 1


def test_compile_waits() -> None:
    model = converted().compile(dims={"batch": 2})
    assert model.compilations == 1
    model.run(None, {"image": IMAGES})
    assert "background_compile" not in model.explain_call(IMAGES)


def test_a_long_first_call_compiles_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "WAIT_SECONDS", -1.0)
    model = converted()
    model(IMAGES)
    idle()
    assert model.compilations == 1


def test_operators_without_a_numpy_form_compile_with_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "MOST_IN_XLA", 0.0)
    model = converted(made("y = LpNormalization (z) z = LRN <size = 3> (x)", "float[1, 4, n] x) => (float[1, 4, n] y"))
    model(np.ones((1, 4, 3), np.float32))
    assert model.compilations == 1


@pytest.mark.parametrize(
    ("body", "options"),
    [
        ("y = RandomNormalLike (x)", {}),
        ("y = Relu (x)", {"bucket": {"n": [4]}}),
        ("y = Relu (x)", {"mesh": "one"}),
    ],
)
def test_what_numpy_does_not_evaluate_is_compiled_at_once(body: str, options: dict[str, Any]) -> None:
    if "mesh" in options:
        options = {"mesh": jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])}
    model = converted(made(body, "float[n, 4] x) => (float[n, 4] y"), **options)
    model(X)
    assert model.compilations >= 1


def test_results_belong_to_the_caller() -> None:
    model = converted(
        made(
            "y = Identity (w) z = Identity (x) v = Transpose (w)",
            "float[n, 4] x) => (float[4, 3] y, float[n, 4] z, float[3, 4] v",
            w=W,
        )
    )
    given = X.copy()
    for result in model.run(None, {"x": given}):
        result[...] = -1
    np.testing.assert_array_equal(given, X)
    y, z, v = model.run(None, {"x": X})
    np.testing.assert_array_equal(y, W)
    np.testing.assert_array_equal(z, X)
    np.testing.assert_array_equal(v, W.T)


def test_arrays_written_to_after_a_call_change_no_result() -> None:
    model, given = converted(made("y = MatMul (x, w)", w=W)), X.copy()
    results = [model(given) for _ in range(3)]
    given[...] = 0
    for result in (*results, until_compiled(model, X)):
        np.testing.assert_allclose(result, X @ W)


def test_other_parameters_are_used_while_the_program_is_compiled() -> None:
    model = converted(made("y = MatMul (x, w)", w=W))
    model(X)
    other = model.with_params({"w": 2 * W})
    np.testing.assert_allclose(other(X), 2 * X @ W)
    np.testing.assert_allclose(model(X), X @ W)
    np.testing.assert_allclose(until_compiled(other, X), 2 * X @ W)


def test_errors_are_those_of_compiled_calls() -> None:
    file = made("y = MatMul (x, w)", "float[n, m] x) => (float[n, k] y", w=W)
    wrong = np.ones((2, 5), np.float32)
    with pytest.raises(OperatorError) as expected:
        onnx2jax.convert(file)(wrong)
    model = converted(file)
    for _ in range(3):
        with pytest.raises(OperatorError) as raised:
            model(wrong)
        assert str(raised.value) == str(expected.value)
    with pytest.raises(InputError):
        model(wrong.astype(np.int32))


def test_a_scope_of_the_callers_configuration_compiles_in_its_own_thread() -> None:
    model = converted()
    with jax.default_matmul_precision("highest"):
        model(IMAGES)
        model(IMAGES)
        idle()
        assert model.compilations == 0
        later = model(IMAGES)
    assert model.compilations == 1
    np.testing.assert_allclose(later, onnx2jax.convert(onnx2jax.demo_model())(IMAGES), rtol=1e-5, atol=1e-6)


def test_transformations_trace_the_program() -> None:
    model = converted(made("y = MatMul (x, w)", w=W))
    gradient = jax.grad(lambda x: model(x).sum())(jnp.asarray(X))
    np.testing.assert_allclose(gradient, np.broadcast_to(W.sum(1), X.shape))
    np.testing.assert_allclose(jax.jit(model)(X), X @ W)
    np.testing.assert_allclose(jax.vmap(lambda x: model(x[None])[0])(X), X @ W)


def test_control_flow_strings_and_64_bits() -> None:
    double = made("y = Mul (x, x)", "double[n] x) => (double[n] y")
    value = converted(double)(np.array([1 / 3]))
    assert value.dtype == np.float64 and float(value[0]) == 1 / 9
    text = converted(made("y = StringConcat (x, x)", "string[n] x) => (string[n] y"))
    assert text(np.array(["a"], object)).tolist() == ["aa"]


def test_threads_get_equal_results() -> None:
    model = converted()
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: np.asarray(model(IMAGES)), range(40)))
    idle()
    for result in (*results, model(IMAGES)):
        np.testing.assert_allclose(result, results[0], rtol=1e-5, atol=1e-6)
