"""NonZero of a traced mask whose results scatters alone read, as jax2onnx writes ``mode="drop"``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import onnx2jax
from onnx2jax.errors import KnownValueError

X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
UPDATES = np.random.default_rng(1).normal(size=(5, 3)).astype(np.float32)
INDEX = np.int64([0, 9, -1, 2, 0])
"""0 twice, 2, and two that are dropped."""
CONSTANTS = {"zero": np.int64(0), "four": np.int64(4), "first": np.int64([0]), "last": np.int64([1])}
CONSTANTS |= {"three": np.int64([3]), "one": np.float32(1), "low_limit": np.float32(0.1)}


def node(op_type: str, inputs: str, output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op_type, inputs.split(), [output], output, **attributes)


def converted(*nodes: onnx.NodeProto) -> onnx2jax.Model:
    """A model of x [4, 3], index [5] and updates [5, 3], with a mask of the valid indices and their positions."""
    mask = [
        node("GreaterOrEqual", "index zero", "low"),
        node("Less", "index four", "high"),
        node("And", "low high", "mask"),
        node("NonZero", "mask", "nz"),
    ]
    types = {
        "x": (TensorProto.FLOAT, [4, 3]),
        "index": (TensorProto.INT64, [5]),
        "updates": (TensorProto.FLOAT, [5, 3]),
    }
    inputs = [helper.make_tensor_value_info(name, *type) for name, type in types.items()]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    constants = [onnx.numpy_helper.from_array(v, n) for n, v in CONSTANTS.items()]
    graph = helper.make_graph([*mask, *nodes], "g", inputs, outputs, constants)
    return onnx2jax.convert(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9))


def rows(scatter: onnx.NodeProto) -> list[onnx.NodeProto]:
    return [
        node("Transpose", "nz", "nz_t", perm=[1, 0]),
        node("Squeeze", "nz_t last", "at"),
        node("Gather", "index at", "valid"),
        node("Unsqueeze", "valid last", "where"),
        node("Gather", "updates at", "values"),
        scatter,
    ]


@pytest.mark.parametrize("reduction", ["none", "add", "mul", "max"])
def test_dropped_updates_under_jit_vmap_and_grad(reduction: str) -> None:
    model = converted(*rows(node("ScatterND", "x where values", "y", reduction=reduction)))
    several = np.stack([INDEX, np.int64([3, 3, 3, -5, 7]), np.int64([5] * 5)])
    with jax.enable_x64(True):
        plain = [model(X, index, UPDATES) for index in several]
        np.testing.assert_array_equal(jax.jit(model.apply)(model.params, X, INDEX, UPDATES), plain[0])
        mapped = jax.jit(jax.vmap(lambda index: model.apply(model.params, X, index, UPDATES)))
        np.testing.assert_array_equal(mapped(several), plain)
    if reduction == "max":
        return

    def expected(x: Any, u: Any) -> Any:
        twice = {"none": u[4], "add": x[0] + u[0] + u[4], "mul": x[0] * u[0] * u[4]}[reduction]
        once = {"none": u[3], "add": x[2] + u[3], "mul": x[2] * u[3]}[reduction]
        return jnp.sum(jnp.stack([twice, x[1], once, x[3]]) ** 2)

    found = jax.grad(lambda x, u: jnp.sum(model.apply(model.params, x, INDEX, u) ** 2), (0, 1))
    for ours, theirs in zip(jax.jit(found)(X, UPDATES), jax.grad(expected, (0, 1))(X, UPDATES), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_counts_that_shape_rows() -> None:
    """As jax2onnx writes it: the number of valid indices is in the shapes of rows alone."""
    model = converted(
        *rows(node("Shape", "at", "count"))[:5],
        node("Shape", "at", "count"),
        node("Gather", "count first", "n"),
        node("Concat", "n three", "shape", axis=0),
        node("Expand", "one shape", "ones"),
        node("Reshape", "values shape", "same"),
        node("Add", "same ones", "more"),
        node("ScatterND", "x where more", "y", reduction="add"),
    )
    expected = X.copy()
    np.add.at(expected, [0, 2, 0], UPDATES[[0, 3, 4]] + 1)
    with jax.enable_x64(True):
        y = jax.jit(model.apply)(model.params, X, INDEX, UPDATES)
    np.testing.assert_allclose(y, expected, rtol=1e-6)


def test_positions_in_a_mask_of_several_axes() -> None:
    model = converted(
        node("Greater", "x low_limit", "many"),
        node("NonZero", "many", "at"),
        node("Transpose", "at", "where", perm=[1, 0]),
        node("GatherND", "x where", "values"),
        node("Neg", "values", "negated"),
        node("ScatterND", "x where negated", "y"),
    )
    with jax.enable_x64(True):
        y = jax.jit(model.apply)(model.params, X, INDEX, UPDATES)
    np.testing.assert_array_equal(y, np.where(X > 0.1, -X, X))


@pytest.mark.parametrize(
    ("nodes", "reader"),
    [
        ([node("Gather", "updates at", "values"), node("ReduceSum", "values", "y")], "node 'y' (ReduceSum"),
        ([node("Gather", "updates at", "y")], "output 'y'"),
        ([node("Shape", "at", "count"), node("Cast", "count", "y", to=TensorProto.FLOAT)], "output 'y'"),
        (
            [node("Gather", "index at", "i"), node("Mul", "i four", "j"), node("Unsqueeze", "j last", "k"),
             node("Gather", "updates at", "v"), node("ScatterND", "x k v", "y")],
            "node 'j' (Mul",
        ),
    ],
)  # fmt: skip
def test_other_readers_are_named(nodes: list[onnx.NodeProto], reader: str) -> None:
    model = converted(node("Squeeze", "nz first", "at"), *nodes)
    with pytest.raises(KnownValueError, match="'X'") as caught:
        jax.jit(model.apply)(model.params, X, INDEX, UPDATES)
    assert any(note.startswith(reader) for note in caught.value.__notes__)
