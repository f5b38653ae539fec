"""Transformations by the caller without x64, of models with 64-bit values inside."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import onnx2jax
from onnx2jax.compat import x64
from tests.support.models import model, text_model, value

X = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)


def model_proto(nodes: list[Any], constants: dict[str, np.ndarray], shape: tuple[int, ...] = (3, 4)) -> onnx.ModelProto:
    return model(nodes, [value("x", np.float32, list(shape))], [value("y", np.float32, None)], constants)


def chain(*nodes: tuple[str, list[str], dict[str, Any]], **constants: Any) -> onnx.ModelProto:
    """A chain of nodes: "_" is the previous node's result, at first ``x``."""
    last, built = "x", []
    for i, (op_type, inputs, attributes) in enumerate(nodes):
        name = "y" if i == len(nodes) - 1 else f"v{i}"
        built.append(helper.make_node(op_type, [last if n == "_" else n for n in inputs], [name], **attributes))
        last = name
    return model_proto(built, {n: np.asarray(v) for n, v in constants.items()})


def scan() -> onnx.ModelProto:
    body = helper.make_graph(
        [helper.make_node("Mul", ["s", "e"], ["t"]), helper.make_node("Tanh", ["t"], ["o"])],
        "body",
        [value("s", np.float32, [4]), value("e", np.float32, [4])],
        [value("t", np.float32, [4]), value("o", np.float32, [4])],
    )
    node = helper.make_node("Scan", ["first", "x"], ["last", "y"], body=body, num_scan_inputs=1)
    return model_proto([node], {"first": np.ones(4, np.float32)})


def scaled_by_argmax(dtype: int) -> onnx.ModelProto:
    cast = ("Cast", ["_"], {"to": dtype})
    found = [("ArgMax", ["_"], {"axis": 1, "keepdims": 1}), ("Cast", ["_"], {"to": TensorProto.FLOAT})]
    return chain(cast, *found, ("Mul", ["_", "x"], {}))


MODELS: dict[str, Callable[[], onnx.ModelProto]] = {
    "Gather": lambda: chain(("Gather", ["_", "i"], {"axis": 0}), ("Sin", ["_"], {}), i=np.array([2, 0, -1])),
    "Gather of one": lambda: chain(("Gather", ["_", "i"], {"axis": 1}), ("Sin", ["_"], {}), i=np.array(1)),
    "GatherElements": lambda: chain(
        ("GatherElements", ["_", "i"], {}), ("Sin", ["_"], {}), i=np.array([[0, 2, 1, -1]])
    ),
    "GatherND": lambda: chain(("GatherND", ["_", "i"], {}), ("Sin", ["_"], {}), i=np.array([[0, 1], [2, 3]])),
    "ScatterND": lambda: chain(
        *[("ScatterND", ["_", "i", "u"], {}), ("Sin", ["_"], {})], i=np.array([[1]]), u=np.ones((1, 4), np.float32)
    ),
    "Compress": lambda: chain(
        ("Compress", ["_", "c"], {"axis": 0}), ("Sin", ["_"], {}), c=np.array([True, False, True])
    ),
    "Slice": lambda: chain(
        *[("Slice", ["_", "s", "e", "a"], {}), ("Sin", ["_"], {})],
        s=np.array([0]),
        e=np.array([2**62]),
        a=np.array([1]),
    ),
    "TopK": lambda: chain(("TopK", ["_", "k"], {"axis": 1}), ("Sin", ["_"], {}), k=np.array([2])),
    "ArgMax of double": lambda: scaled_by_argmax(TensorProto.DOUBLE),
    "ArgMax of int64": lambda: scaled_by_argmax(TensorProto.INT64),
    "ReduceProd": lambda: chain(("ReduceProd", ["_", "a"], {}), ("Sin", ["_"], {}), a=np.array([1])),
    "double inside": lambda: chain(
        *[
            ("Cast", ["_"], {"to": TensorProto.DOUBLE}),
            ("Mul", ["_", "w"], {}),
            ("Cast", ["_"], {"to": TensorProto.FLOAT}),
        ],
        w=np.float64([1.5]),
    ),
    "MaxPool": lambda: chain(
        *[("Unsqueeze", ["_", "a"], {}), ("MaxPool", ["_"], {"kernel_shape": [2]}), ("Sin", ["_"], {})], a=np.array([0])
    ),
    "Clip by weights": lambda: chain(
        ("Clip", ["_", "l", "h"], {}), ("Sin", ["_"], {}), l=np.float32(-1), h=np.float32(1)
    ),
    "CumSum": lambda: chain(("CumSum", ["_", "a"], {}), ("Sin", ["_"], {}), a=np.array(1)),
    "Scan": scan,
}


def total(f: Any) -> Any:
    return lambda *args: (f(*args) ** 2).sum()


TRANSFORMATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "jit": lambda f, x: jax.jit(f)(x),
    "grad": lambda f, x: jax.grad(total(f))(x),
    "vjp": lambda f, x: jax.vjp(f, x)[1](jnp.ones_like(f(x))),
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,)),
    "vmap(grad)": lambda f, x: jax.vmap(jax.grad(total(f)))(jnp.stack([x, 2 * x])),
    "grad(grad)": lambda f, x: jax.grad(total(jax.grad(total(f))))(x),
    "jit(grad)": lambda f, x: jax.jit(jax.grad(total(f)))(x),
    "grad(jit)": lambda f, x: jax.grad(jax.jit(total(f)))(x),
    "jvp(grad)": lambda f, x: jax.jvp(jax.grad(total(f)), (x,), (x,)),
    "jit(vmap(grad))": lambda f, x: jax.jit(jax.vmap(jax.grad(total(f))))(jnp.stack([x, 2 * x])),
    "jacfwd": lambda f, x: jax.jacfwd(f)(x),
    "remat": lambda f, x: jax.grad(total(jax.checkpoint(f)))(x),
    "scan": lambda f, x: jax.lax.scan(lambda c, _: (c - 0.1 * jax.grad(total(f))(c), None), x, None, length=2)[0],
}


COMPILED = ("grad", "jvp", "vmap(grad)", "grad(grad)", "scan")
"""Transformations that the main tests compile together; the extended ones call all of them without a jit."""


@cache
def converted(name: str) -> onnx2jax.Model:
    return onnx2jax.convert(MODELS[name]())


@cache
def compiled(name: str, x64: bool, transformations: tuple[str, ...]) -> dict[str, Any]:
    with jax.enable_x64(x64):
        return jax.jit(lambda x: {t: TRANSFORMATIONS[t](converted(name), x) for t in transformations})(X)


def assert_float32_and_close(found: Any, expected: Any) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == np.float32
        np.testing.assert_allclose(a, b, 1e-5, 1e-5)


@pytest.fixture
def without_x64() -> Iterator[None]:
    with jax.enable_x64(False), warnings.catch_warnings():
        warnings.simplefilter("error")  # such as that a type "will be truncated"
        yield


@pytest.mark.usefixtures("without_x64")
@pytest.mark.parametrize("name", MODELS)
def test_transformations_agree_with_and_without_x64(name: str) -> None:
    expected = compiled(name, True, COMPILED)
    assert_float32_and_close(compiled(name, False, COMPILED), expected)
    assert_float32_and_close(TRANSFORMATIONS["grad"](converted(name), X), expected["grad"])


@pytest.mark.extended
@pytest.mark.usefixtures("without_x64")
@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
@pytest.mark.parametrize("name", MODELS)
def test_each_transformation_agrees_without_a_jit(name: str, transformation: str) -> None:
    found = TRANSFORMATIONS[transformation](converted(name), X)
    assert_float32_and_close(found, compiled(name, True, tuple(TRANSFORMATIONS))[transformation])


@pytest.mark.usefixtures("without_x64")
@pytest.mark.parametrize("name", ["ScatterND", "Clip by weights", "Scan"])
def test_gradients_with_respect_to_parameters(name: str) -> None:
    model = converted(name)

    def loss(params: Any) -> Any:
        return (model.apply(params, X) ** 2).sum()

    floating = {n: v for n, v in model.params.items() if v.dtype == np.float32}
    assert floating
    with jax.enable_x64(True):
        expected = jax.jit(jax.grad(loss))(floating)
    for gradient in (jax.grad(loss), jax.jit(jax.grad(loss))):
        assert_float32_and_close(gradient(floating), expected)


@pytest.mark.usefixtures("in_32_bits")
def test_inputs_of_a_bound_call_are_arguments_of_a_32_bit_jit() -> None:
    nodes = [helper.make_node("Reshape", ["x", "shape"], ["r"]), helper.make_node("Mul", ["r", "c"], ["y"])]
    nodes.append(helper.make_node("Mul", ["shape", "k"], ["z"]))
    inputs = [value("x", np.float64, [6]), value("shape", np.int64, [2]), value("k", np.int64, [2])]
    outputs = [value("y", np.float64, None), value("z", np.int64, None)]
    m = onnx2jax.convert(model(nodes, inputs, outputs, {"c": np.array(3.0)}))
    shape = np.array([3, 2])
    m(np.ones(6), shape, shape)
    assert jax.jit(lambda n: n + 1)(shape).tolist() == [4, 3]
    y, _ = jax.jit(lambda params, x: m.apply(params, x, shape, shape))(m.params, np.ones(6))
    assert y.tolist() == [[3, 3]] * 3


@pytest.mark.usefixtures("in_32_bits")
def test_an_eager_gradient_is_compiled_once(caplog: pytest.LogCaptureFixture) -> None:
    gradient = jax.grad(total(onnx2jax.convert(MODELS["Gather"]())))
    counts = []
    with jax.log_compiles():
        for scale in (1, 2, 3):
            caplog.clear()
            gradient(np.float32(scale) * X)
            counts.append(sum("Compiling" in record.message for record in caplog.records))
    assert counts[0] > 0 and counts[1:] == [0, 0]


@pytest.mark.usefixtures("in_32_bits")
def test_gradients_trace_no_tangents(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward pass is the program whose transpose the tangents are."""
    nodes = [helper.make_node("Sin", ["x"], ["s"]), helper.make_node("Mul", ["s", "x"], ["m"])]
    proto = model(nodes, [value("x", np.float32, [3, 4])], [value(n, np.float32, None) for n in ("s", "m")])
    converted, traced = onnx2jax.convert(proto), list[Any]()
    tangent = x64._Tangent._closed.func
    monkeypatch.setattr(x64._Tangent, "_closed", property(lambda self: traced.append(self) or tangent(self)))

    def loss(x: Any, *names: str) -> Any:
        values = dict(zip(("s", "m"), converted(x), strict=True))
        return sum(jnp.cos(values[n]).sum() for n in names)

    def wanted(x: Any, *names: str) -> Any:
        values = {"s": jnp.sin(x), "m": jnp.sin(x) * x}
        return sum(jnp.cos(values[n]).sum() for n in names)

    for names in (("s", "m"), ("m",)):
        ours, other = (jax.jit(jax.grad(lambda x, f=f: f(x, *names)))(X) for f in (loss, wanted))  # noqa: B023
        np.testing.assert_allclose(ours, other, rtol=1e-5, atol=1e-6)
    assert not traced
    moved, other = jax.jit(lambda x: [jax.jvp(lambda x, f=f: f(x, "s", "m"), (x,), (x,)) for f in (loss, wanted)])(X)
    assert traced
    np.testing.assert_allclose(moved, other, rtol=1e-5)


@pytest.mark.usefixtures("in_32_bits")
def test_a_gradient_of_a_scans_state_alone() -> None:
    """JAX 0.10 takes no symbolic zeros as the cotangents of what its steps return."""
    body = "body = b (float[4] s, float[4] e) => (float[4] t, float[4] o) { t = Mul(s, e) o = Sin(t) }"
    scan = f"z, r = Scan<num_scan_inputs = 1, {body}>(one, x)"
    proto = text_model(f"main (float[3, 4] x) => (float[4] z, float[3, 4] r) {{ {scan} }}", one=np.ones(4, np.float32))
    converted = onnx2jax.convert(proto)
    ours = jax.jit(jax.grad(lambda x: converted(x)[0].sum()))(X)
    np.testing.assert_allclose(ours, X.prod(0) / X, rtol=1e-5)


@pytest.mark.usefixtures("in_32_bits")
def test_a_32_bit_jit_returns_64_bit_results() -> None:
    node = helper.make_node("Gather", ["big", "i"], ["y"])
    big = np.array([2**40, 2**41 + 1])
    m = onnx2jax.convert(model([node], [value("i", np.int32, [2])], [value("y", np.int64, [2])], {"big": big}))
    y = jax.jit(m)(np.array([1, 0], np.int32))
    assert y.dtype == np.int64
    np.testing.assert_array_equal(y, big[::-1])


@pytest.mark.parametrize("also", ["x", "w"])
def test_a_32_bit_jit_of_a_model_that_returns_an_input_or_a_parameter(also: str) -> None:
    nodes = [helper.make_node("ArgMax", ["x"], ["y"], axis=1, keepdims=0)]
    outputs = [value("y", np.int64, [3]), value(also, np.int64, None)]
    w = np.array([2, 1])
    converted = onnx2jax.convert(model(nodes, [value("x", np.int64, [3, 4])], outputs, {"w": w}))
    x = np.argsort(X)
    y, returned = jax.jit(converted.apply)(converted.params, x)
    np.testing.assert_array_equal(y, x.argmax(1))
    np.testing.assert_array_equal(returned, {"x": x, "w": w}[also])


def test_a_jit_outside_x64_narrows_its_arguments_and_no_more() -> None:
    """By JAX, before the model sees them: docs/limits.md says so."""
    nodes = [helper.make_node("Add", [n, n], [2 * n]) for n in ("x", "i")]
    inputs, outputs = ([value(x, np.float64, [2]), value(i, np.int64, [2])] for x, i in (("x", "i"), ("xx", "ii")))
    doubled = onnx2jax.convert(model(nodes, inputs, outputs))
    x, i = np.array([1 + 1e-12, 2]), np.array([2**40 + 3, 2**31 - 1])
    for found in (doubled(x, i), _in_64_bits(jax.jit(doubled), x, i)):
        np.testing.assert_array_equal(found[0], 2 * x)
        np.testing.assert_array_equal(found[1], 2 * i)
    narrow = jax.jit(doubled)(x, i)
    assert [v.dtype for v in narrow] == [np.float64, np.int64]
    np.testing.assert_array_equal(narrow[0], 2 * x.astype(np.float32).astype(float))
    np.testing.assert_array_equal(narrow[1], [6, 2**32 - 2])  # wrapped, and doubled in 64 bits


def _in_64_bits(function: Any, *args: Any) -> Any:
    with jax.enable_x64(True):
        return function(*args)
