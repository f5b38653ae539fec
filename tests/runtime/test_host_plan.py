"""Host plans: repeated calls of one signature reuse shape computations, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import onnx2jax
from onnx2jax.errors import OperatorError
from onnx2jax.runtime import host_plan
from tests.support.models import model, one_node, value

X = np.array([[3.0, 0, 5], [0, 2, 0]], np.float32)


def entries() -> onnx.ModelProto:
    """The non-zero entries times a weight; the input's shape plus one; the number of entries."""
    nodes = [
        helper.make_node("Reshape", ["x", "all"], ["flat"]),
        helper.make_node("Cast", ["flat"], ["chosen"], to=onnx.TensorProto.BOOL),
        helper.make_node("Compress", ["flat", "chosen"], ["few"]),
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Add", ["shape", "one"], ["more"]),
        helper.make_node("Shape", ["few"], ["count"]),
        helper.make_node("Mul", ["few", "weight"], ["y"]),
    ]
    constants = {"all": np.array([-1]), "one": np.array([1]), "weight": np.float32([2])}
    ends = [value("y", np.float32, None), value("more", np.int64, [2]), value("count", np.int64, [1])]
    return model(nodes, [value("x", np.float32, ["n", "m"])], ends, constants)


def test_only_shape_computations_are_cached_in_a_host_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    precomputed = host_plan.precomputed

    def noting(*args: Any) -> Any:
        same, rest = precomputed(*args)
        left.append(len(rest))
        return same, rest

    monkeypatch.setattr("onnx2jax.runtime.partition.precomputed", noting)
    m = onnx2jax.convert(entries())
    for x in (X, X, np.float32([[0, 0, 0], [0, 7, 0]]), X.T, X.T):
        y, more, count = m.run(None, {"x": x})
        np.testing.assert_array_equal(y, 2 * x[x != 0])
        np.testing.assert_array_equal(more, [n + 1 for n in x.shape])
        assert count == np.count_nonzero(x)  # data-dependent shapes are not precomputed
    assert left == [5, 5]  # of seven nodes, for each of two shapes


def test_cached_values_are_read_only() -> None:
    m = onnx2jax.convert(entries())
    for _ in range(3):
        more = m.run(None, {"x": X})[1]
        np.testing.assert_array_equal(more, [3, 4])
        if more.flags.writeable:
            more[:] = 0


def test_host_plans_use_the_weights_and_defaults_of_the_call() -> None:
    proto = entries()
    proto.graph.input.append(value("one", np.int64, [1]))
    m = onnx2jax.convert(proto)
    other = m.with_params({"weight": np.float32([3])})
    for _ in range(3):
        np.testing.assert_array_equal(m.run(None, {"x": X})[0], [6, 10, 4])
        np.testing.assert_array_equal(other.run(None, {"x": X})[0], [9, 15, 6])
        np.testing.assert_array_equal(m.run(None, {"x": X, "one": np.array([5])})[1], [7, 8])
        np.testing.assert_array_equal(m(X, one=np.array([6]))[1], [8, 9])
        np.testing.assert_array_equal(m(X)[1], [3, 4])


def test_host_plans_raise_the_errors_of_the_first_call() -> None:
    def message_of(m: onnx2jax.Model) -> str:
        with pytest.raises(OperatorError) as caught:
            m.run(None, {"x": np.array(["many"], object)})
        return str(caught.value)

    cast = one_node("Cast", {"x": (np.object_, ["n"])}, to=onnx.TensorProto.INT64)
    first, second = onnx2jax.convert(cast), onnx2jax.convert(cast)
    assert second.run(None, {"x": np.array(["7"], object)})[0] == [7]
    assert message_of(first) == message_of(second)
