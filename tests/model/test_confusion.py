"""Attempts to confuse calls: other parameter shapes, arrays that the caller writes to, stale programs."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import jax
import numpy as np
import onnx
import onnxruntime
import optax
import pytest

import onnx2jax
from onnx2jax.errors import BucketError, InputShapeError, OperatorError
from onnx2jax.ops import registry
from tests.support.models import mlp, text_model

F = np.float32
ADD = "g (float[3] x) => (float[3] y) { y = Add(x, W) }"
ZEROS = np.zeros(3, F)


def aligned(shape: tuple[int, ...], number: float) -> np.ndarray:
    """An aligned array, which JAX on a CPU uses without a copy."""
    size = int(np.prod(shape)) * 4
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    array = memory[start : start + size].view(F).reshape(shape)
    array[...] = number
    return array


# --------------------------------------------------------------------------------------- 1. shapes of parameters


def scaled_by_a_mean() -> onnx.ModelProto:
    return text_model("g (float[n] x) => (float[n] y) { m = ReduceMean<keepdims = 0>(W)  y = Mul(x, m) }", W=EIGHT[:4])


EIGHT = np.arange(8, dtype=F)
CALLS: dict[str, Callable[[Any], Any]] = {
    "with_params": lambda m: m.with_params({"W": EIGHT}),
    "apply": lambda m: m.apply({"W": EIGHT}, ZEROS),
    "apply in a jit": lambda m: jax.jit(m.apply)({"W": EIGHT}, ZEROS),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_parameters_of_another_shape_are_rejected(call: Callable[[Any], Any]) -> None:
    m = onnx2jax.convert(scaled_by_a_mean())
    with pytest.raises(InputShapeError, match=r"'W'(.|\n)*\[4\](.|\n)*\[8\](.|\n)*new_shapes=True"):
        call(m)
    np.testing.assert_array_equal(m(ZEROS + 1), [1.5, 1.5, 1.5])


@pytest.mark.parametrize("first", ["the model", "the copy"])
def test_new_shapes_share_no_hoisted_values(first: str) -> None:
    m = onnx2jax.convert(scaled_by_a_mean())
    other = m.with_params({"W": EIGHT}, new_shapes=True)
    x = ZEROS + 1
    for each, mean in [(m, 1.5), (other, 3.5)][:: 1 if first == "the model" else -1]:
        for result in (each(x), each.run(None, {"x": x})[0], each.apply(each.params, x), each(x)):
            np.testing.assert_array_equal(result, [mean] * 3)


def test_new_shapes_in_a_network_that_takes_no_tiny_images() -> None:
    """Extents of 2 for free axes are too small for its pool."""
    source = text_model(
        "g (float[n, 1, h, w] x) => (float[n, 2] y) { p = MaxPool <kernel_shape = [8, 8], strides = [8, 8]> (x)"
        " m = GlobalAveragePool (p)  f = Flatten (m)  y = MatMul (f, w1) }",
        w1=np.ones((1, 2), F),
    )
    other = onnx2jax.convert(source).with_params({"w1": np.ones((1, 5), F)}, new_shapes=True)
    assert other.outputs[0].shape == ("n", 5)
    assert other(np.ones((2, 1, 16, 16), F)).shape == (2, 5)
    with pytest.raises(InputShapeError, match=r"cannot compute with parameters of these shapes \(w1 \[4, 5\]\)"):
        onnx2jax.convert(source).with_params({"w1": np.ones((4, 5), F)}, new_shapes=True)


def test_the_bias_beside_a_new_head_is_named() -> None:
    source = text_model(
        "g (float[n, 2] x) => (float[n, 3] y) { h = MatMul (x, w)  y = Add (h, b) }",
        w=np.ones((2, 3), F),
        b=np.ones(3, F),
    )
    head = {"w": np.ones((2, 5), F)}
    with pytest.raises(InputShapeError, match=r"Give 'b' a new shape as well: with_params\(") as caught:
        onnx2jax.convert(source).with_params(head, new_shapes=True)
    assert "If the model runs elsewhere" not in str(caught.value)
    other = onnx2jax.convert(source).with_params({**head, "b": np.ones(5, F)}, new_shapes=True)
    assert other.outputs[0].shape == ("n", 5)


def test_with_params_changes_the_number_of_classes(tmp_path: Path) -> None:
    m, x = onnx2jax.convert(mlp()), np.random.default_rng(0).normal(size=(3, 4)).astype(F)
    m(x)
    rng = np.random.default_rng(1)
    head = {"w2": rng.normal(size=(8, 5)).astype(F), "b2": rng.normal(size=5).astype(F)}
    other = m.with_params(head, new_shapes=True)
    assert other.outputs[0].shape == ("batch", 5) and m.outputs[0].shape == ("batch", 2)
    hidden = np.maximum(x @ m.params["w1"] + m.params["b1"], 0)
    expected = hidden @ head["w2"] + head["b2"]
    path = onnx2jax.save(other, tmp_path / "m.onnx")
    onnx.checker.check_model(onnx.load(path), full_check=True)
    session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    for result in (
        other(x),
        other.run(None, {"x": x})[0],
        other.apply(other.params, x),
        jax.jit(other.apply)(other.params, x),
        onnx2jax.convert(path)(x),
        session.run(None, {"x": x})[0],
    ):
        np.testing.assert_allclose(result, expected, rtol=1e-5)
    assert m(x).shape == (3, 2)


# ------------------------------------------------------------------------------- 2 to 5. arrays that are written into


@pytest.mark.parametrize("recompile", [pytest.param("clear_caches", marks=pytest.mark.extended), "precision"])
def test_writing_to_a_shape_input_after_the_call_has_no_effect(recompile: str) -> None:
    text = "g (float[n] x, int64[k] s) => (float[a] y) { r = Reshape(x, s)  y = ReduceSum<keepdims = 0>(r, axis) }"
    m = onnx2jax.convert(text_model(text, axis=[1]))
    x, shape = np.arange(6, dtype=F), np.array([2, 3])
    np.testing.assert_array_equal(m(x, shape), [3, 12])
    shape[:] = [3, 2]
    if recompile == "clear_caches":
        jax.clear_caches()
    with jax.default_matmul_precision("highest" if recompile == "precision" else None):
        np.testing.assert_array_equal(m(x, np.array([2, 3])), [3, 12])
        np.testing.assert_array_equal(m(x, shape), [1, 5, 9])


def with_static(static: np.ndarray) -> onnx2jax.Model:
    text = "g (float[n] x, float[2] s) => (float[n] y) { t = ReduceSum<keepdims = 0>(s)  y = Add(x, t) }"
    return onnx2jax.convert(text_model(text), static={"s": static})


def test_static_arrays_are_copied() -> None:
    static = F([0.5, 0.5])
    m = with_static(static)
    m(np.zeros(2, F))
    static[:] = 50
    for n in (2, 3):
        np.testing.assert_array_equal(m(np.zeros(n, F)), np.ones(n))
        np.testing.assert_array_equal(m.apply({}, np.zeros(n, F)), np.ones(n))


def test_static_arrays_are_read_only() -> None:
    with pytest.raises(ValueError, match="read-only"):
        with_static(F([0.5, 0.5])).static["s"][...] = 7


def test_parameters_given_as_views_are_copied() -> None:
    memory = np.ones(1, F)
    m = onnx2jax.convert(text_model(ADD, W=ZEROS)).with_params({"W": np.broadcast_to(memory, 3)})
    memory[:] = 50
    for result in (m(ZEROS), m.params["W"], m.run(None, {"x": ZEROS})[0], m.apply(m.params, ZEROS)):
        np.testing.assert_array_equal(result, [1, 1, 1])


def test_parameters_made_writable_again_are_copied() -> None:
    w = np.ones(3, F)
    w.flags.writeable = False
    m = onnx2jax.convert(text_model(ADD, W=ZEROS)).with_params({"W": w})
    w.flags.writeable = True
    w[:] = 50
    for result in (m(ZEROS), m.params["W"], m.run(None, {"x": ZEROS})[0], m.apply(m.params, ZEROS)):
        np.testing.assert_array_equal(result, [1, 1, 1])


def test_buffers_are_copied(tmp_path: Path) -> None:
    proto = text_model(ADD)
    tensor = proto.graph.initializer.add(name="W", data_type=1, dims=[3], data_location=onnx.TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="w")
    memory = bytearray(np.ones(3, F).tobytes())
    m = onnx2jax.convert(proto.SerializeToString(), buffers={"w": memoryview(memory).toreadonly()})
    memory[:] = np.full(3, 50, F).tobytes()
    saved = onnx2jax.convert(onnx2jax.save(m, tmp_path / "m.onnx"))
    for result in (m(ZEROS), m.params["W"], m.apply(m.params, ZEROS), saved(ZEROS)):
        np.testing.assert_array_equal(result, [1, 1, 1])


BODIES = {
    "compiled": "m = MatMul(x, x)  z = Mul(m, zero)  y = Add(z, x)",  # x is read once more behind a product
    "an input as output": "y = Identity(x)",
    "a view": "y = Transpose(x)",
    "on the host": "i = NonZero(x)  s = ReduceSum(i)  f = Cast<to = 1>(s)  z = Mul(f, zero)  y = Add(x, z)",
}
CASES = [pytest.param(body, size, id=f"{name}, {size}") for name, body in BODIES.items() for size in (4, 1200)]


@pytest.mark.parametrize(("body", "size"), CASES)
def test_writing_to_an_input_after_the_call_has_no_effect(body: str, size: int) -> None:
    m = onnx2jax.convert(text_model(f"g (float[n, n] x) => (float[n, n] y) {{ {body} }}", zero=F(0)))
    for _ in range(3):
        for x in (aligned((size, size), 2), np.full((size, size), 2, F)):
            y, z = m(x), m.apply(m.params, x)
            x[:] = 5
            assert {*np.unique(y), *np.unique(z)} == {2}


def test_writing_to_parameters_after_apply_has_no_effect() -> None:
    m = onnx2jax.convert(
        text_model("g (float[n, n] x) => (float[n, n] y) { y = MatMul(x, W) }", W=np.eye(1200, dtype=F))
    )
    x = np.ones((1200, 1200), F)
    for _ in range(3):
        w = aligned((1200, 1200), 1)
        y = m.apply({"W": w}, x)
        w[:] = 5
        assert {*np.unique(y)} == {1200}


def made_writable(array: np.ndarray) -> np.ndarray:
    """The array made writable, if its owner permits that."""
    with contextlib.suppress(ValueError):
        array.flags.writeable = True
        array[...] = 9
    return array


def test_parameters_cannot_be_made_writable() -> None:
    m = onnx2jax.convert(text_model(ADD, W=ZEROS)).with_params({"W": np.ones(3, F)})
    made_writable(m.params["W"])
    np.testing.assert_array_equal(m(ZEROS), [1, 1, 1])


def test_constant_results_cannot_be_made_writable() -> None:
    m = onnx2jax.convert(text_model("g (float[n] x) => (int64[1] s, float[n] y) { s = Shape(x)  y = Neg(x) }"))
    for _ in range(3):
        s, _ = m.run(None, {"x": ZEROS})
        np.testing.assert_array_equal(s, [3])
        made_writable(s)


@pytest.mark.parametrize("node", ["Identity", "Transpose"])
def test_results_of_run_without_jit_do_not_share_the_memory_of_inputs(node: str) -> None:
    m = onnx2jax.convert(text_model(f"g (float[n, n] x) => (float[n, n] y) {{ y = {node}(x) }}"))
    x = np.full((3, 3), 2, F)
    with jax.disable_jit():
        (y,) = m.run(None, {"x": x})
    x[:] = 5
    assert {*np.unique(y)} == {2}


def test_disable_jit_counts_no_compilations() -> None:
    m = onnx2jax.convert(text_model(ADD, W=ZEROS))
    with jax.disable_jit():
        for _ in range(20):
            m(ZEROS)


@pytest.mark.parametrize("size", [100_000, 1_000_000])
def test_fit_copies_batches_of_a_reused_buffer(size: int) -> None:
    m = onnx2jax.convert(text_model("g (float[n] x) => (float[n] y) { y = Mul(x, W) }", W=np.ones(1, F)))
    tuned = onnx2jax.finetune(m, lambda y, _: (y**2).mean(), optax.sgd(0.0), trainable="*")

    def batches() -> Iterator[dict[str, np.ndarray]]:
        x = aligned((size,), 0)
        for number in range(1, 6):
            x[:] = number
            yield {"x": x}

    losses = [float(metrics["loss"]) for _, metrics in list(tuned.fit(batches()))]
    np.testing.assert_allclose(losses, [1, 4, 9, 16, 25], rtol=1e-5)


# --------------------------------------------------------------------------------------- 6 to 8. programs told apart


@pytest.mark.parametrize("optimize", [True, False])
def test_the_sign_of_zero_is_part_of_a_function_signature(optimize: bool) -> None:
    proto = text_model(
        """g (float[n] x) => (float[n] y, float[n] z) { y = l.f<a: float = 0.0>(x)  z = l.f<a: float = -0.0>(x) }
        <domain: "l", opset_import: ["" : 21]>
        f <a> (x) => (y) { c = Constant<value_float: float = @a>()  y = Div(x, c) }"""
    )
    y, z = onnx2jax.convert(proto, optimize=optimize)(np.ones(2, F))
    np.testing.assert_array_equal(y, [np.inf, np.inf])
    np.testing.assert_array_equal(z, [-np.inf, -np.inf])


def test_with_params_verifies_buckets_again() -> None:
    text = "g (float[n, 2] x) => (float[2] y) { s = Add(x, W)  y = ReduceSum<keepdims = 0>(s, axis) }"
    m = onnx2jax.convert(text_model(text, W=np.zeros(2, F), axis=[0]), bucket={"n": [8]})
    x = np.arange(6, dtype=F).reshape(3, 2)
    np.testing.assert_array_equal(m(x), [6, 9])
    with pytest.raises(BucketError, match="'y' differs without padding"):
        m.with_params({"W": np.ones(2, F)})(x)


DOUBLED = """d = Loop(k, , x) <body = b (int64 i, bool c, float[n] v) => (bool d, float[n] w)
    { d = Identity(c)  w = Add(v, v) }>  y = Relu(d)"""


@pytest.mark.usefixtures("one_cpu")
def test_max_trips_applies_to_cached_programs(tmp_path: Path) -> None:
    proto = text_model(f"g (float[n] x) => (float[n] y) {{ {DOUBLED} }}", k=np.int64(10))
    np.testing.assert_array_equal(onnx2jax.convert(proto, cache_dir=tmp_path)(ZEROS + 1), [1024] * 3)
    assert list(tmp_path.glob("*.program"))
    with pytest.raises(OperatorError, match=r"max_trips \(3\)"):
        onnx2jax.convert(proto, cache_dir=tmp_path, max_trips=3)(ZEROS + 1)


@pytest.mark.usefixtures("one_cpu")
def test_wrapped_operators_have_their_own_cached_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_OPERATORS", {**registry._OPERATORS})
    proto = text_model("g (float[n] x) => (float[n] y) { y = l.Own(x) }")
    built_in = registry.resolve("", "Relu")
    assert built_in is not None and built_in.function is not None
    for own in (lambda X: X + X, lambda X: X * X):
        onnx2jax.ops.op("Own", domain="l", replace=True)(wraps(built_in.function)(own))
        np.testing.assert_array_equal(onnx2jax.convert(proto, cache_dir=tmp_path)(ZEROS + 3), own(ZEROS + 3))


@pytest.mark.filterwarnings("ignore:.*cache_dir")
@pytest.mark.usefixtures("one_cpu")
def test_swapped_cache_files_are_detected(tmp_path: Path) -> None:
    protos = [text_model(f"g (float[n] x) => (float[n] y) {{ y = {op}(x, x) }}") for op in ("Add", "Mul")]
    for proto in protos:
        onnx2jax.convert(proto, cache_dir=tmp_path)(ZEROS + 3)
    one, other = tmp_path.glob("*.program")
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)
    results = [onnx2jax.convert(proto, cache_dir=tmp_path)(ZEROS + 3).tolist() for proto in protos]
    assert results == [[6] * 3, [9] * 3]


@pytest.mark.usefixtures("one_cpu")
def test_models_with_functions_are_cached_or_warn(tmp_path: Path) -> None:
    proto = text_model(
        """g (float[n] x) => (float[n] y) { y = l.f(x) }
        <domain: "l", opset_import: ["" : 21]> f (x) => (y) { y = Add(x, x) }"""
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        onnx2jax.convert(proto, cache_dir=tmp_path)(ZEROS)
    assert list(tmp_path.glob("*.program")) or any("cache_dir" in str(w.message) for w in said)
