"""``values``, ``replace`` and ``cut``; in partitioned and rebatched models too."""

from __future__ import annotations

import operator
import pickle
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import optax
import pytest
from onnx import TensorProto, helper

import onnx2jax
from onnx2jax import Model, errors


def model_of(text: str) -> Model:
    message = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 22]>\n{text}')
    return onnx2jax.convert(message)


@pytest.fixture(scope="module")
def plain() -> Model:
    return model_of(
        "g (float[n, 3] x) => (float[n, 3] y) <float[3, 3] w = {2, 0, 0, 0, 3, 0, 0, 0, 4}>\n"
        "{ h = MatMul(x, w)\n r = Relu(h)\n s = Shape(r)\n y = Add(r, x) }"
    )


@pytest.fixture(scope="module")
def staged() -> Model:
    """A partitioned model: NonZero determines a shape."""
    return model_of(
        "g (float[n] x) => (float[m] y) <int64[1] flat = {-1}>\n"
        "{ big = Mul(x, x)\n at = NonZero(big)\n i = Reshape(at, flat)\n some = Gather(x, i)\n y = Exp(some) }"
    )


X = np.float32([[1, -1, 2], [0.5, 1, -3]])
W = np.diag(np.float32([2, 3, 4]))


def test_values_returns_node_outputs_in_graph_order(plain: Model) -> None:
    values = plain.values(X)
    assert list(values) == ["h", "r", "s", "y"]
    np.testing.assert_array_equal(values["h"], X @ W)
    np.testing.assert_array_equal(values["s"], [2, 3])
    np.testing.assert_array_equal(values["y"], plain(X))


@pytest.mark.parametrize("names, found", [("h", ["h"]), (["[ry]"], ["r", "y"]), (["?", "h"], ["h", "r", "s", "y"])])
def test_values_are_selected_by_patterns(plain: Model, names: Any, found: list[str]) -> None:
    assert list(plain.values(x=X, names=names)) == found


def test_repeated_values_are_not_recompiled(plain: Model) -> None:
    plain.values(X, names="r")
    (shown,) = plain._runtime.inner_models.values()
    plain.values(X + 1, names="r")
    assert list(plain._runtime.inner_models.values()) == [shown]
    assert shown.compilations == 1


def test_values_use_new_weights(plain: Model) -> None:
    plain.values(X, names="h")
    np.testing.assert_array_equal(plain.with_params({"w": 2 * W}).values(X, names="h")["h"], 2 * X @ W)


def test_values_of_a_partitioned_model(staged: Model) -> None:
    values = staged.values(np.float32([0, 2, 0, 1]))
    np.testing.assert_array_equal(values["at"], [[1, 3]])
    np.testing.assert_array_equal(values["some"], [2, 1])
    np.testing.assert_allclose(values["y"], np.exp([2, 1]), rtol=1e-6)


def test_values_inside_a_callers_jit(plain: Model) -> None:
    norms = jax.jit(lambda x: {n: jnp.abs(v).sum() for n, v in plain.values(x, names=["h", "r"]).items()})(X)
    assert (float(norms["h"]), float(norms["r"])) == (np.abs(X @ W).sum(), np.maximum(X @ W, 0).sum())


def test_values_with_max_size_include_counts() -> None:
    file = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 22]> g (float[n] x) => (int64[1, m] y) { [nz] y = NonZero(x)\n}'
    )
    model = onnx2jax.convert(file, max_size={"nz": 2})
    np.testing.assert_array_equal(model.values(np.float32([0, 1, 1]), names="y")["y"], [[1, 2]])
    with pytest.raises(errors.InputShapeError, match="3 results, more than its max_size"):
        model.values(np.float32([1, 1, 1]), names="y")


@pytest.mark.parametrize("ask", [lambda m: m.values(X, names=["h", "q*"]), lambda m: m.replace({"q*": jnp.abs})])
def test_a_pattern_without_match_raises(plain: Model, ask: Any) -> None:
    with pytest.raises(errors.InputNameError, match=r"matches 'q\*'; the outputs are 'h', 'r'"):
        ask(plain)


def test_a_name_with_brackets_matches_itself() -> None:
    node = helper.make_node("Neg", ["x"], ["y[0]"])
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [1]) for n in ("x", "y[0]"))
    model = onnx2jax.convert(helper.make_model(helper.make_graph([node], "g", [x], [y]), ir_version=10))
    assert list(model.values(np.ones(1, np.float32), names="y[0]")) == ["y[0]"]


def test_replace_applies_to_all_readers(plain: Model) -> None:
    patched = plain.replace({"r": lambda v: v.at[:, 0].set(0)})
    want = np.maximum(X @ W, 0) * np.float32([0, 1, 1]) + X
    np.testing.assert_array_equal(patched(X), want)
    np.testing.assert_array_equal(jax.jit(patched)(X), want)
    np.testing.assert_array_equal(patched.values(X, names="r")["r"], want - X)
    np.testing.assert_array_equal(plain(X), np.maximum(X @ W, 0) + X)  # unchanged


def test_several_patterns_apply_in_order(plain: Model) -> None:
    patched = plain.replace({"h": lambda v: v + 1, "[hr]": lambda v: 2 * v})
    np.testing.assert_array_equal(patched(X), 2 * np.maximum(2 * (X @ W + 1), 0) + X)


def test_gradients_flow_through_a_replacement(plain: Model) -> None:
    patched = plain.replace({"h": jnp.sin})
    gradient = jax.grad(lambda x: patched(x).sum())(X)
    np.testing.assert_allclose(gradient, 1 + (np.cos(X @ W) * (np.sin(X @ W) > 0)) @ W, rtol=1e-5)


def test_a_replacement_may_close_over_tracers(plain: Model) -> None:
    def scaled(s: Any) -> Any:
        return plain.replace({"h": lambda v: v * s}).apply(plain.params, X).sum()

    scales = jnp.float32([1, -2])
    want = [np.maximum(X @ W * s, 0).sum() + X.sum() for s in (1, -2)]
    np.testing.assert_allclose(jax.jit(jax.vmap(scaled))(scales), want, rtol=1e-5)
    np.testing.assert_allclose(jax.jit(jax.grad(scaled))(scales[0]), np.maximum(X @ W, 0).sum(), rtol=1e-5)


CALLS = {
    "call": lambda model: model(X),
    "apply": lambda model: model.apply(model.params, X),
    "jit": lambda model: jax.jit(lambda: model(X))(),
    "run": lambda model: model.run(None, {"x": X})[0],
    "values": lambda model: model.values(X, names="y")["y"],
    "cut": lambda model: model.cut(outputs="y")(X),
    "unoptimised": lambda model: model.with_options(optimize=False)(X),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_function_may_hold_what_the_caller_traces(plain: Model, call: str) -> None:
    """Though nothing that the model is given is traced."""

    def loss(s: Any) -> Any:
        return (CALLS[call](plain.replace({"r": lambda v: v + s * s})) * X).sum()

    ones = jnp.ones((2, 3))
    np.testing.assert_allclose(jax.grad(loss)(ones), 2 * X, rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(jax.grad(loss))(ones[None])[0], 2 * X, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(loss)(ones), loss(ones), rtol=1e-6)


def test_a_replacement_on_the_host_gets_numpy(staged: Model) -> None:
    seen: list[Any] = []
    patched = staged.replace({"at": lambda v: seen.append(type(v)) or v[:, ::-1], "some": lambda v: v - 1})
    np.testing.assert_allclose(patched(np.float32([0, 2, 0, 1])), np.exp([0, 1]), rtol=1e-6)
    assert np.ndarray in seen


def test_replace_in_a_rebatched_model() -> None:
    file = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 22]>\ng (float[1, 3] x) => (float[1, 3] y) { h = Neg(x)\n y = Relu(h) }'
    )
    patched = onnx2jax.convert(file, rebatch=True).replace({"h": lambda v: v - v.mean()})
    np.testing.assert_allclose(patched(X), np.maximum(X.mean(1, keepdims=True) - X, 0), rtol=1e-6)


@pytest.mark.parametrize(
    "function, said",
    [
        (lambda _: None, "returned None"),
        (lambda v: v.sum(), r"turned float32\[2, 3\] into float32\[\]"),
        (lambda v: v.astype(jnp.float16), r"into float16\[2, 3\]"),
    ],
)
def test_invalid_replacements_raise(plain: Model, function: Any, said: str) -> None:
    with pytest.raises(errors.OperatorError, match=f"'h/before'.*{said}"):
        plain.replace({"h": function})(X)


def test_a_replaced_model_can_be_pickled(plain: Model) -> None:
    patched = plain.replace({"h": operator.neg})
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(patched))(X), patched(X))


def test_a_replaced_sequence_must_stay_a_list() -> None:
    model = model_of("g (float[n] x) => (seq(float[m]) s) { p = SequenceConstruct(x, x)\n s = SequenceInsert(p, x) }")
    x = np.float32([1, 2])
    doubled = model.replace({"p": lambda parts: [2 * part for part in parts]})
    np.testing.assert_array_equal(np.array(doubled(x)), [2 * x, 2 * x, x])
    with pytest.raises(errors.OperatorError, match=r"turned a sequence into .*; a sequence stays a list"):
        model.replace({"p": lambda parts: parts[0]})(x)


def test_cut_at_one_of_several_outputs_of_a_node() -> None:
    m = model_of("g (float[4] x) => (float[2] y) { a, b = Split <num_outputs = 2> (x)  y = Sub(a, b) }")
    part = m.cut(inputs=["a"])
    assert [v.name for v in part.inputs] == ["a", "x"]
    given = np.float32([10, 20]), np.float32([1, 2, 3, 4])
    feeds = dict(zip("ax", given, strict=True))
    for result in (part(*given), jax.jit(part.apply)({}, *given), part.run(None, feeds)[0]):
        np.testing.assert_array_equal(result, [7, 16])
    np.testing.assert_array_equal(m.cut(inputs=["a", "b"])(given[0], given[0] + 1), [-1, -1])


def test_inner_values_become_inputs_of_inferred_types(tmp_path: Path) -> None:
    text = (
        "g (float[n, 3] x) => (float[k] y) { h = Concat <axis = 0> (x, x)  s = Relu(h)  u, i = Unique (s)  y = Neg(i) }"
    )
    m = model_of(text)
    for name, kind in (("h", "float32[2*n, 3]"), ("s", "float32[2*n, 3]"), ("i", "None")):
        part = m.cut(inputs=name)
        assert [str(v.type) for v in part.inputs] == [kind]
        assert onnx2jax.convert(part.save(tmp_path / "part.onnx")).inputs == part.inputs
    with pytest.raises(errors.InputTypeError, match=r"s: float32\[2\*n, 3\]"):
        m.cut(inputs="s")(np.ones((2, 3), np.int32))


def test_errors_of_a_replacement_name_the_function_and_not_the_inputs(plain: Model) -> None:
    def by_name(value: Any) -> Any:
        return value["a"]

    with pytest.raises(errors.OperatorError, match=r"'h/before'(.|\n)*by_name \(test_probing\.py, line \d+\)") as e:
        plain.replace({"h": by_name})(X)
    assert "inputs" not in str(e.value)
    clipped = plain.replace({"h": lambda value: np.maximum(np.asarray(value), 0)})
    with pytest.raises(errors.KnownValueError, match=r"jnp\.maximum for np\.maximum") as known:
        jax.jit(clipped)(X)
    assert "static" not in str(known.value) and not isinstance(known.value.__cause__, errors.OnnxError)
    fixed = plain.replace({"h": lambda value: jnp.maximum(jnp.asarray(value), 0)})
    np.testing.assert_array_equal(jax.jit(fixed)(X), clipped(X))  # which runs on the host


def test_replace_takes_functions_of_the_value_alone(plain: Model) -> None:
    array = np.zeros((1, 3))
    with pytest.raises(errors.InputTypeError, match="'h': ndarray; give a function") as e:
        plain.replace({"h": array})  # type: ignore[dict-item]
    advice = eval(str(e.value)[str(e.value).index("{") :], {"jnp": jnp, "array": array})
    np.testing.assert_array_equal(plain.replace(advice)(X), X)
    with pytest.raises(errors.InputTypeError, match=r"'h': power\(.*lambda value: power\(value, \.\.\.\)"):
        plain.replace({"h": jnp.power})
    plain.replace({"h": np.negative, "r": jnp.sin})  # of which one has no signature


ASKS: dict[str, Any] = {
    "replace": lambda m, name: m.replace({name: jnp.sin}),
    "values": lambda m, name: m.values(X, names=name),
    "finetune": lambda m, name: onnx2jax.finetune(m, lambda y: y.sum(), optax.sgd(0.1), outputs=[name]),
}


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
def test_names_of_nodes_inputs_and_weights_are_explained(ask: Any) -> None:
    model = model_of(
        "g (float[n, 3] h) => (float[n, 3] y) <float[3, 3] hw = {2, 0, 0, 0, 3, 0, 0, 0, 4}>\n"
        "{ [hn] head = MatMul(h, hw)\n y = Relu(head) }"
    )
    said = {
        "h": r"'h' is an input: read or change it before the call, model\(f\(h\)\)$",
        "hw": r"'hw' is a weight: model\.params\['hw'\], and model\.with_params\(\{'hw': array\}\) for another$",
        "hn": r"'hn' is a node, whose outputs are \['head'\]$",
        "haed": "did you mean 'head'",
    }
    for name, text in said.items():
        with pytest.raises(errors.InputNameError, match=text):
            ask(model, name)
