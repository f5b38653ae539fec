"""``join``: the composition of two models, in a file that onnxruntime runs too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

import onnx2jax
from onnx2jax import join
from onnx2jax.errors import InputNameError, InputShapeError, InputTypeError, ModelError, OnnxError, UnsupportedError
from tests.support.models import mlp, model, value

F = np.float32


def layer(seed: int = 0, **names: str) -> onnx.ModelProto:
    """x [n, 4] -> y [n, 4]: tanh(x w) in a branch that is always taken, and a function; other names by keyword."""
    n = {"x": "x", "y": "y", "n": "n", "w": "w", **names}
    inner = helper.make_node("Tanh", ["h"], ["t"], name="act")  # h is captured
    then, other = (helper.make_graph([inner], g, [], [value("t", F, None)]) for g in ("then", "else"))
    nodes = [
        helper.make_node("MatMul", [n["x"], n["w"]], ["h"], name="product"),
        helper.make_node("If", ["yes"], ["t_out"], name="if", then_branch=then, else_branch=other),
        helper.make_node("Scaled", ["t_out"], [n["y"]], domain="local", name="scaled"),
    ]
    scaled = helper.make_function(
        "local",
        "Scaled",
        ["a"],
        ["b"],
        [
            helper.make_node("Constant", [], ["c"], value_float=float(seed + 1)),
            helper.make_node("Mul", ["a", "c"], ["b"]),
        ],
        [helper.make_opsetid("", 21)],
    )
    weights = {n["w"]: np.random.default_rng(seed).normal(size=(4, 4)).astype(F), "yes": np.array(True)}
    ends = [value(n["x"], F, [n["n"], 4])], [value(n["y"], F, [n["n"], 4])]
    return model(nodes, *ends, weights, opsets={"local": 1}, functions=[scaled])


def plain(kind: str, inputs: list[Any], outputs: list[Any], **more: Any) -> onnx.ModelProto:
    nodes = [helper.make_node(kind, [v.name for v in inputs], [outputs[0].name], name=kind)]
    return model(nodes, inputs, outputs, **more)


X = np.random.default_rng(1).normal(size=(3, 4)).astype(F)


@pytest.mark.parametrize("seeds", [(0, 0), (0, 1)], ids=["the same function", "another of the same name"])
def test_clashing_names_are_prefixed(tmp_path: Path, seeds: tuple[int, int]) -> None:
    first, second = map(layer, seeds)
    both = join(first, second, {"y": "x"})
    assert [v.name for v in both.inputs] == ["x"]
    assert [str(v) for v in both.outputs] == ["second/y: float32[n, 4]"]
    assert both.params.keys() == {"w", "second/w"}
    want = np.asarray(onnx2jax.convert(second)(onnx2jax.convert(first)(X)))
    np.testing.assert_allclose(both(X), want, rtol=1e-5)
    path = onnx2jax.save(both, tmp_path / "both.onnx")
    onnx.checker.check_model(path, full_check=True)
    assert onnx2jax.check(path).ok
    assert len(onnx.load(path).functions) == len(set(seeds))
    np.testing.assert_allclose(onnxruntime.InferenceSession(path).run(None, {"x": X})[0], want, rtol=1e-5)


def test_gradients_and_weights_go_through_both() -> None:
    first = onnx2jax.convert(layer()).with_params({"w": np.eye(4, dtype=F)})
    both = join(first, layer(1), {"y": "x"})
    np.testing.assert_array_equal(both.params["w"], np.eye(4))
    grads = jax.grad(lambda p: both.apply(p, X).sum())(both.params)
    assert all(float(jnp.abs(g).max()) > 0 for g in grads.values())


def test_unjoined_inputs_and_outputs_are_kept() -> None:
    first = model(
        [helper.make_node("Split", ["x"], ["a", "b"], num_outputs=2, axis=1)],
        [value("x", F, ["n", 4])],
        [value("a", F, ["n", 2]), value("b", F, ["n", 2])],
    )
    second = plain("Add", [value("l", F, ["m", 2]), value("r", F, ["m", 2])], [value("s", F, ["m", 2])])
    both = join(first, second, {"a": "r"})
    assert [str(v) for v in both.inputs] == ["x: float32[n, 4]", "l: float32[n, 2]"]  # m has become n
    assert [v.name for v in both.outputs] == ["b", "s"]
    b, s = both(X, X[:, :2])
    np.testing.assert_array_equal(b, X[:, 2:])
    np.testing.assert_array_equal(s, X[:, :2] * 2)
    twice = join(first, second, {"a": ["l", "r"]})
    np.testing.assert_array_equal(twice(X)[1], X[:, :2] * 2)


def test_an_input_that_is_also_an_output() -> None:
    both_ways = model(
        [helper.make_node("Neg", ["x"], ["z"])], [value("x", F, [2])], [value("x", F, [2]), value("z", F, [2])]
    )
    both = join(plain("Abs", [value("x", F, [2])], [value("y", F, [2])]), both_ways, {"y": "x"})
    assert [v.name for v in both.outputs] == ["second/x", "z"]
    np.testing.assert_array_equal(np.stack(both(F([-1, 2]))), [[1, 2], [-1, -2]])


def test_a_joined_input_replaces_its_default() -> None:
    """r has a default in the file; the joined output replaces it."""
    ends = [value("l", F, [2]), value("r", F, [2])], [value("s", F, [2])]
    second = plain("Add", *ends, initializers={"r": F([5, 5])})
    both = join(plain("Abs", [value("x", F, [2])], [value("y", F, [2])]), second, {"y": "r"})
    np.testing.assert_array_equal(both(F([-1, 2]), F([0, 0])), [1, 2])


def test_joined_dimensions_are_unified() -> None:
    """An extent on either side is unified; a variable name of both models that is not joined stays two variables."""
    first = plain("Relu", [value("x", F, ["n", "k"])], [value("y", F, ["n", "k"])])
    second = plain("MatMul", [value("a", F, ["k", 4]), value("w", F, [4, "n"])], [value("z", F, ["k", "n"])])
    both = join(first, second, {"y": "a"})
    assert [str(v) for v in (*both.inputs, *both.outputs)] == [
        "x: float32[n, 4]",
        "w: float32[4, second/n]",
        "z: float32[n, second/n]",
    ]
    assert both(X, np.ones((4, 2), F)).shape == (3, 2)


def test_external_data_of_both_models_is_kept(tmp_path: Path) -> None:
    """The data files are in two folders and have the same name."""
    paths = []
    for seed, folder in enumerate(("one", "two")):
        (tmp_path / folder).mkdir()
        paths.append(onnx2jax.save(layer(seed), tmp_path / folder / "m.onnx", external_data="w", size_threshold=1))
    both = join(*paths, {"y": "x"})
    want = both(X)
    np.testing.assert_allclose(want, join(layer(0), layer(1), {"y": "x"})(X), rtol=1e-6)
    again = onnx2jax.convert(onnx2jax.save(both, tmp_path / "both.onnx"))
    assert (tmp_path / "both.onnx.data").stat().st_size >= 2 * 64
    np.testing.assert_array_equal(again(X), want)


def test_initializers_listed_as_inputs_below_ir_4() -> None:
    old = plain("Add", [value("x", F, [2]), value("w", F, [2])], [value("y", F, [2])], initializers={"w": F([1, 2])})
    old.ir_version, old.opset_import[0].version = 3, 8
    new = plain("Abs", [value("x", F, [2])], [value("y", F, [2])], opset=8)
    for both in (join(old, new, {"y": "x"}), join(new, old, {"y": "x"})):
        assert [v.name for v in both.inputs] == ["x"]
        assert not both.optional
        assert both(F([-4, 1])).shape == (2,)


def test_a_function_does_not_shadow_the_other_models_operator() -> None:
    """The first model has a function with the name of an operator that the second uses."""
    body = [helper.make_node("Neg", ["a"], ["b"])]
    own = helper.make_function("com.microsoft", "QuickGelu", ["a"], ["b"], body, [helper.make_opsetid("", 21)])

    def made(functions: list[Any]) -> onnx.ModelProto:
        nodes = [helper.make_node("QuickGelu", ["x"], ["y"], domain="com.microsoft")]
        ends = [value("x", F, [2])], [value("y", F, [2])]
        return model(nodes, *ends, opsets={"com.microsoft": 1}, functions=functions)

    x = F([1, 2])
    for first, second in ((made([own]), made([])), (made([]), made([own]))):
        want = onnx2jax.convert(second)(onnx2jax.convert(first)(x))
        np.testing.assert_allclose(join(first, second, {"y": "x"})(x), want, rtol=1e-6)


REFUSED: list[tuple[Any, Any, dict[str, Any], type[OnnxError], str]] = [
    (mlp(), layer(), {}, InputNameError, "nothing is joined: map"),
    (mlp(), layer(), {"z": "x"}, InputNameError, r"the first model has no output 'z'; it has \['y'\]"),
    (layer(), layer(), {"y": "w"}, InputNameError, r"the second model has no input 'w'; it has \['x'\]"),
    (mlp(), layer(), {"y": "x"}, InputShapeError, r"y: float32\[batch, 2\] .* x: float32\[n, 4\] .*: 2 is not 4"),
    (layer(), plain("Abs", [value("x", F, [4])], [value("z", F, [4])]), {"y": "x"}, InputShapeError, "rank 2 is not 1"),
    (
        layer(),
        plain("Abs", [value("x", np.int32, ["n", 4])], [value("z", np.int32, None)]),
        {"y": "x"},
        InputTypeError,
        "float32 is not int32",
    ),
    (
        layer(),
        plain("Abs", [value("x", F, ["n", 4])], [value("z", F, None)], opset=13),
        {"y": "x"},
        ModelError,
        "the first model imports version 21 of ai.onnx and the second 13",
    ),
    (
        plain("Abs", [value("x", F, [2, 3])], [value("y", F, [2, 3])]),
        plain("Det", [value("x", F, ["n", "n"])], [value("z", F, [])]),
        {"y": "x"},
        InputShapeError,
        "3 is not 2",
    ),
    (onnx2jax.demo_training_model(), layer(), {"logits": "x"}, UnsupportedError, "the first model has training_info"),
]


@pytest.mark.parametrize(("first", "second", "names", "error", "match"), REFUSED)
def test_invalid_arguments_are_rejected(
    first: Any, second: Any, names: dict[str, Any], error: type[OnnxError], match: str
) -> None:
    with pytest.raises(error, match=match):
        join(first, second, names)


def test_models_changed_by_convert_are_rejected() -> None:
    fixed = onnx2jax.convert(mlp(), static={"x": np.zeros((1, 4), F)})
    with pytest.raises(UnsupportedError, match=r"the first model was converted with static=.*join\(..., static=...\)"):
        join(fixed, layer(), {"y": "x"})
    twice = plain("Add", [value("a", F, [2]), value("b", F, [2])], [value("s", F, [2])])
    with pytest.raises(InputNameError, match="would be 'a' and 'b'"):
        join(twice_out(), twice, {"a": "a", "b": "a"})


def twice_out() -> onnx.ModelProto:
    nodes = [helper.make_node("Abs", ["x"], ["a"]), helper.make_node("Neg", ["x"], ["b"])]
    return model(nodes, [value("x", F, [2])], [value("a", F, [2]), value("b", F, [2])])


def test_the_newer_ir_version_of_both_is_kept(tmp_path: Path) -> None:
    files = [plain("Neg", [value("x", F, ["n"])], [value("y", F, ["n"])]) for _ in range(2)]
    for own, version in zip(files, (8, 11), strict=True):
        own.ir_version = version
    for first, second in (files, files[::-1]):
        path = onnx2jax.save(join(first, second, {"y": "x"}), tmp_path / "both.onnx")
        assert onnx.load(path).ir_version == 11
