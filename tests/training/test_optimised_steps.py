"""Training steps optimised for a CPU match unoptimised ones."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from onnx import helper

import onnx2jax
from onnx2jax.jaxpr import pipeline
from onnx2jax.ops.conv import conv
from onnx2jax.ops.window import window_of
from tests.support.models import model, value

pytestmark = pytest.mark.usefixtures("standard_promotion")  # optax

RNG = np.random.default_rng(0)


SGD, MOMENTUM = optax.sgd(1e-2), optax.sgd(1e-2, 0.9)


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def sequence_model() -> Any:
    """Two matrices over a batch of sequences."""
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["h"], name="first"),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("MatMul", ["r", "b"], ["y"], name="second"),
    ]
    weights = {"a": normal(4, 6), "b": normal(6, 3)}
    return model(nodes, [value("x", np.float32, ["n", 5, 4])], [value("y", np.float32, None)], weights)


def squares(y: Any, batch: dict[str, Any]) -> Any:
    return ((y - batch["target"]) ** 2).mean()


def steps(
    proto: Any, batch: dict[str, Any], optimize: Any, count: int = 3, loss: Any = squares, optimizer: Any = MOMENTUM
) -> tuple[Any, Any]:
    """State and metrics after ``count`` steps."""
    tuned = onnx2jax.finetune(onnx2jax.convert(proto, optimize=optimize), loss, optimizer)
    state = tuned.init()
    for _ in range(count):
        state, metrics = tuned.step(state, batch)
    return state, metrics


def test_passes_that_are_skipped_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = list[frozenset[str]]()
    run_training = pipeline.run_training

    def recorded(closed: Any, state: int, options: Any) -> Any:
        ran.append(options.skip)
        return run_training(closed, state, options)

    monkeypatch.setattr(pipeline, "run_training", recorded)
    batch = {"x": normal(2, 5, 4), "target": normal(2, 5, 3)}
    steps(sequence_model(), batch, {"skip": ["dot_transpose"]}, count=1)
    assert ran == [frozenset({"dot_transpose"})]


def is_close(ours: Any, theirs: Any) -> bool:
    """Whether two arrays of one kind differ by at most 1e-5 of the largest element."""
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    return np.allclose(ours, theirs, rtol=0, atol=1e-5 * max(1e-3, float(np.abs(theirs).max(initial=0))))


def assert_close(ours: Any, theirs: Any) -> None:
    assert jax.tree.all(jax.tree.map(is_close, ours, theirs)), (ours, theirs)


def test_products() -> None:
    batch = {"x": normal(2, 5, 4), "target": normal(2, 5, 3)}
    proto = sequence_model()
    (state, metrics), (plain, expected) = (steps(proto, batch, optimize) for optimize in (True, False))
    assert_close(state.params, plain.params)
    assert_close(state.opt_state, plain.opt_state)
    assert_close(metrics, expected)


IMAGES: dict[str, Any] = {
    "3x3": ("Conv", (5, 4, 3, 3), {"pads": [1] * 4}),
    "strides that skip pixels": ("Conv", (5, 4, 3, 2), {"strides": [2, 3], "pads": [1, 0, 0, 1]}),
    "dilated": ("Conv", (5, 4, 2, 3), {"dilations": [2, 1]}),
    "1x1 with strides": ("Conv", (5, 4, 1, 1), {"strides": [2, 2]}),
    "groups": ("Conv", (6, 2, 3, 3), {"group": 2, "strides": [1, 2]}),
    "depthwise": ("Conv", (4, 1, 3, 3), {"group": 4, "pads": [1] * 4}),
    "depthwise with strides, multiplier 2": ("Conv", (8, 1, 3, 3), {"group": 4, "strides": [2, 2], "pads": [1] * 4}),
    "transposed": ("ConvTranspose", (4, 5, 3, 3), {"strides": [2, 2], "pads": [1] * 4}),
    "transposed in groups": ("ConvTranspose", (4, 2, 2, 2), {"strides": [2, 1], "group": 2}),
}


def image_model() -> Any:
    """Convolutions of the result of another; one of them is followed by a pool and a third."""
    nodes = [
        helper.make_node("Conv", ["x", "first"], ["h"], kernel_shape=[1, 1]),
        helper.make_node("Tanh", ["h"], ["t"]),
    ]
    weights = {"first": normal(4, 2, 1, 1)}
    for name, (op_type, shape, attributes) in IMAGES.items():
        out = shape[1] * attributes.get("group", 1) if op_type == "ConvTranspose" else shape[0]
        weights |= {name: normal(*shape), f"{name}, bias": normal(out)}
        nodes += [
            helper.make_node(op_type, ["t", name, f"{name}, bias"], [f"{name}, c"], **attributes),
            helper.make_node("Relu", [f"{name}, c"], [f"{name}, y"]),
        ]
    nodes += [
        helper.make_node("MaxPool", ["3x3, y"], ["p"], kernel_shape=[2, 2], strides=[1, 1]),
        helper.make_node("Conv", ["p", "last"], ["y"], kernel_shape=[3, 3], pads=[1] * 4),
    ]
    weights["last"] = normal(3, 5, 3, 3)
    outputs = [value(name, np.float32, None) for name in ("y", *(f"{name}, y" for name in IMAGES))]
    return model(nodes, [value("x", np.float32, ["n", 2, 7, 6])], outputs, weights)


def test_images() -> None:
    """All of them in one program; the names of parameters tell which differ."""
    proto, batch = image_model(), {"x": normal(3, 2, 7, 6), "target": np.float32(0.5)}

    def loss(outputs: Any, batch: Any) -> Any:
        return sum(squares(y, batch) for y in outputs)

    (state, metrics), (plain, expected) = (steps(proto, batch, optimize, 2, loss, SGD) for optimize in (True, False))
    assert state.params.keys() == {n.name for n in proto.graph.initializer}
    assert [name for name, value in state.params.items() if not is_close(value, plain.params[name])] == []
    assert_close(metrics, expected)


def test_images_of_one_axis() -> None:
    nodes = [
        helper.make_node("Conv", ["x", "a"], ["h"], pads=[1, 1], strides=[2]),
        helper.make_node("Conv", ["h", "b"], ["y"], group=4),
    ]
    weights = {"a": normal(4, 2, 3), "b": normal(4, 1, 2)}
    proto = model(nodes, [value("x", np.float32, ["n", 2, 9])], [value("y", np.float32, None)], weights)
    batch = {"x": normal(20, 2, 9), "target": normal(20, 4, 4)}
    (state, metrics), (plain, expected) = (steps(proto, batch, optimize, 2) for optimize in (True, False))
    assert_close(state.params, plain.params)
    assert_close(metrics, expected)


@pytest.mark.parametrize(
    "policy", ["nothing_saveable", pytest.param("everything_saveable", marks=pytest.mark.extended)]
)
def test_convolutions_that_a_checkpoint_recomputes(policy: str) -> None:
    """They have no images channels first, for which XLA:CPU has no fast kernel."""
    x, w = normal(1, 2, 9, 9), normal(2, 2, 3, 3)

    def gradient(w: Any, x: Any) -> Any:
        @partial(jax.checkpoint, policy=getattr(jax.checkpoint_policies, policy))
        def loss(w: Any, x: Any) -> Any:
            return jnp.sin(conv(x, w, window_of((9, 9), (3, 3)))).sum()

        return jax.grad(loss)(w, x)

    step = jax.jit(pipeline.with_passes(gradient))
    assert_close(step(w, x), jax.jit(gradient)(w, x))
    assert "[b, f, 0, 1]" not in step.lower(w, x).as_text()


@pytest.mark.parametrize(("skip", "times"), [((), 2), (("layout_assignment",), 1)])
def test_a_function_is_traced_again_only_where_layouts_do_not_pay(skip: tuple[str, ...], times: int) -> None:
    """Two pixels by so many weights; without convolutions once, with effects too."""
    traces = list[str]()

    def convolved(w: Any, x: Any) -> Any:
        traces.append("convolution")
        return conv(x, w, window_of((3, 3), (3, 3))).sum()

    def printed(w: Any, x: Any) -> Any:
        traces.append("effect")
        jax.debug.callback(lambda _: None, x)
        return (x * w).sum()

    types = jax.ShapeDtypeStruct((8, 8, 3, 3), np.float32), jax.ShapeDtypeStruct((2, 8, 3, 3), np.float32)
    jax.jit(pipeline.with_passes(convolved, skip)).trace(*types)
    jax.jit(pipeline.with_passes(printed, skip)).trace(types[0], types[0])
    assert (traces.count("convolution"), traces.count("effect")) == (times, 1)


def test_a_transformed_call_is_not_optimised(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    run = pipeline.run_training
    monkeypatch.setattr(pipeline, "run_training", lambda *args: seen.append(args) or run(*args))
    batch = {"x": normal(2, 5, 4), "target": normal(2, 5, 3)}
    tuned = onnx2jax.finetune(onnx2jax.convert(sequence_model()), squares, optax.sgd(0.1))
    _, metrics = jax.jit(tuned.step)(tuned.init(), batch)
    assert not seen
    _, own = tuned.step(tuned.init(), batch)
    assert seen
    assert_close(own, metrics)
