"""The training rules (TR), each tested on a model of a few nodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest

import onnx2jax
from onnx2jax import TrainingModel
from onnx2jax.errors import (
    CheckpointError,
    InputError,
    InputNameError,
    InputShapeError,
    InputTypeError,
    ModelError,
    UnsupportedError,
)
from tests.support.training import LINEAR, SGD, START, UPDATES, info, linear, parse, training

rule = pytest.mark.rule
RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 2)).astype(np.float32)
Z = X @ np.float32([[1], [2]]) + 3
BATCH = {"x": X, "z": Z}

IDENTITY = "main (float x) => (float y) <float w = {2.0}, float c = {10.0}> { p = Mul(x, w)  y = Add(p, c) }"
DOUBLE = "double () => (float w1) <float two = {2.0}> { w1 = Mul(w, two) }"


def doubling(**fields: Any) -> onnx.ModelProto:
    """Each step doubles w, which starts at 2 and initializes to 5."""
    five = "start () => (float w0) { w0 = Constant <value_float = 5.0> () }"
    return training(IDENTITY, info(DOUBLE, {"w": "w1"}, five, {"w": "w0"}), **fields)


def variables(state: Any) -> dict[str, Any]:
    return {n: np.asarray(v).tolist() for n, v in state.variables.items()}


def after_steps(trainer: TrainingModel, *algorithms: Any) -> dict[str, Any]:
    for algorithm in algorithms:
        trainer.train_step(x=0.0, algorithm=algorithm)
    return variables(trainer.state)


@rule("TR-01")
def test_pure_functions_of_a_state() -> None:
    trainer = TrainingModel(linear(), donate=False)
    state = trainer.initialize(trainer.init(), 3)
    new, outputs = jax.jit(trainer.step)(state, BATCH)
    expected, _ = trainer.step(state, BATCH)
    for one, other in zip(jax.tree.leaves(new.variables), jax.tree.leaves(expected.variables), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    assert set(outputs) == {"y", "loss", "w1", "b1", "t1"}
    first, second = trainer.infer(state, {"x": X}), trainer.infer(state, {"x": X})
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(jax.jit(lambda s: trainer.infer(s, {"x": X}))(state), first, rtol=1e-6)
    assert jax.jit(trainer.initialize)(state, jax.random.key(3)).variables.keys() == state.variables.keys()


@rule("TR-01")
def test_the_object_holds_a_state() -> None:
    trainer = TrainingModel(doubling())
    trainer.train_step(x=1.0)
    assert variables(trainer.state) == {"w": 4}
    assert trainer.infer(x=1.0) == 14
    assert trainer.infer(x=1.0) == 14
    trainer.initialize()
    assert variables(trainer.state) == {"w": 5}


@rule("TR-02")
def test_variables_are_the_initializers_that_bindings_assign() -> None:
    state = TrainingModel(linear()).init()
    assert state.variables.keys() == {"w", "b"}
    assert [own.keys() for own in state.own] == [{"t"}]
    assert TrainingModel(doubling()).init().variables.keys() == {"w"}


@rule("TR-03")
def test_variables_start_with_stored_values() -> None:
    trainer = TrainingModel(doubling())
    assert variables(trainer.state) == {"w": 2}
    assert after_steps(trainer, None) == {"w": 4}


@rule("TR-04", "TR-15")
def test_initialize_is_a_full_reset() -> None:
    trainer = TrainingModel(linear())
    fresh = jax.tree.map(np.asarray, trainer.initialize(trainer.init(), 7).variables)
    for _ in range(5):
        trainer.train_step(BATCH)
    assert int(trainer.state.own[0]["t"]) == 5
    trainer.initialize(rng=7)
    np.testing.assert_array_equal(trainer.state.variables["w"], fresh["w"])
    assert float(trainer.state.variables["b"][0]) == 0.25, "without initialization: the value in the file"
    assert int(trainer.state.own[0]["t"]) == 0
    assert trainer.initialize(trainer.init(), 7).key == trainer.initialize(trainer.state, 7).key


@rule("TR-05")
def test_random_initial_values() -> None:
    trainer = TrainingModel(linear())
    starts = [np.asarray(trainer.initialize(trainer.init(), k).variables["w"]) for k in (1, 1, 2)]
    np.testing.assert_array_equal(starts[0], starts[1])
    assert not np.array_equal(starts[0], starts[2])
    seeded = START.replace("scale = 0.1", "scale = 0.1, seed = 4.0")
    trainer = TrainingModel(training(LINEAR, info(SGD, UPDATES, seeded, {"w": "w0"})))
    starts = [np.asarray(trainer.initialize(trainer.init(), k).variables["w"]) for k in (1, 2)]
    np.testing.assert_array_equal(starts[0], starts[1])
    with pytest.raises(ModelError, match="TR-05"):
        TrainingModel(training(LINEAR, info(SGD, UPDATES, "s (float i) => (float i) { }")))


@rule("TR-06")
def test_later_initializations_see_and_overwrite_earlier_ones() -> None:
    one = "one () => (float a) { a = Constant <value_float = 1.0> () }"
    more = "more () => (float a) { a = Add(w, w) }"
    infos = info(DOUBLE, {"w": "w1"}, one, {"w": "a"}), info("none () => () { }", {}, more, {"w": "a"})
    trainer = TrainingModel(training(IDENTITY, *infos))
    trainer.initialize()
    assert variables(trainer.state) == {"w": 2}


@rule("TR-07")
def test_a_binding_without_its_graph_raises() -> None:
    with pytest.raises(ModelError, match="TR-07"):
        TrainingModel(training(IDENTITY, info(DOUBLE, {"w": "w1"}, None, {"w": "w0"})))
    trainer = TrainingModel(training(IDENTITY, info(DOUBLE, {"w": "w1"})))
    trainer.initialize()
    assert variables(trainer.state) == {"w": 2}


@rule("TR-08")
def test_a_swapped_binding_raises() -> None:
    with pytest.raises(ModelError, match=r"are swapped.*TR-08"):
        TrainingModel(training(IDENTITY, info(DOUBLE, {"w1": "w"})))


@rule("TR-09")
def test_one_assignment_per_binding() -> None:
    twice = info(DOUBLE, {"w": "w1"})
    twice.update_binding.add(key="w", value="w1")
    with pytest.raises(ModelError, match=r"assigned twice.*TR-09"):
        TrainingModel(training(IDENTITY, twice))
    phases = training(IDENTITY, info(DOUBLE, {"w": "w1"}), info(DOUBLE.replace("double", "again"), {"w": "w1"}))
    with pytest.raises(ModelError, match=r"TR-09.*several update bindings"):
        TrainingModel(phases, strict=True)
    assert after_steps(TrainingModel(phases), None) == {"w": 8}


@rule("TR-10")
@pytest.mark.parametrize("key", ["nowhere", "p", "x"])
def test_a_key_that_is_not_an_initializer_raises(key: str) -> None:
    with pytest.raises(ModelError, match=rf"'{key}' is not an initializer.*TR-10"):
        TrainingModel(training(IDENTITY, info(DOUBLE, {key: "w1"})))


@rule("TR-10", "TR-23")
def test_an_initializer_of_another_algorithm_raises() -> None:
    other = "other () => (float r) { r = Identity(w) }"
    with pytest.raises(ModelError, match="TR-10"):
        TrainingModel(training(IDENTITY, info(DOUBLE, {"w": "w1"}), info(other, {"two": "r"})))


@rule("TR-11")
def test_a_value_that_is_not_an_output_raises() -> None:
    inner = DOUBLE.replace("w1 = Mul(w, two)", "h = Mul(w, two)  w1 = Identity(h)")
    with pytest.raises(ModelError, match=r"'h' is not an output.*TR-11"):
        TrainingModel(training(IDENTITY, info(inner, {"w": "h"})))
    trainer = TrainingModel(training(IDENTITY, info("none () => () { }", {"w": "y"})))
    trainer.train_step(x=3.0)
    assert variables(trainer.state) == {"w": 16}, "an output of the main graph"


CALLED = """linear (float[n,2] X, float[2,1] W, float[1] B) => (float[n,1] Y)
    <float[2,1] W = {0.5, -1.0}, float[1] B = {0.25}> { P = MatMul(X, W)  Y = Add(P, B) }"""
CALLING = """sgd (float[n,2] X_1, float[n,1] Z_1) => (float L, float[2,1] W1) <float rate = {0.1}> {
    Y_1 = GraphCall <graph_name = "linear"> (X_1)
    D = Sub(Y_1, Z_1)  Q = Mul(D, D)  L = ReduceMean <keepdims = 0> (Q)
    G = Gradient <xs = ["W"], zs = ["X_1", "Z_1"], y = "L"> (W, X_1, Z_1)
    S = Mul(G, rate)  W1 = Sub(W, S) }"""


def mean_squares(w: Any, b: Any = 0.25, x: Any = X, z: Any = Z) -> Any:
    return jnp.mean((x @ w + b - z) ** 2)


@rule("TR-12", "TR-18", "TR-19")
def test_a_step_that_calls_the_main_graph() -> None:
    trainer = TrainingModel(training(CALLED, info(CALLING, {"W": "W1"})))
    assert [v.name for v in trainer.step_inputs["training_info[0]"]] == ["X_1", "Z_1"], "the main graph runs by call"
    w = np.float32([[0.5], [-1]])
    for _ in range(2):
        loss, slope = jax.value_and_grad(mean_squares)(w)
        outputs = trainer.train_step(X_1=X, Z_1=Z)
        w = w - np.float32(0.1) * slope
        np.testing.assert_allclose(outputs["L"], loss, rtol=1e-5)
        np.testing.assert_allclose(trainer.state.variables["W"], w, rtol=1e-5)


@rule("TR-13")
def test_a_call_with_another_value_for_a_variable() -> None:
    text = """s (float[n,2] X_1) => (float[n,1] Y_1, float[2,1] W1) <float[2,1] V = {1.0, 1.0}> {
        Y_1 = GraphCall <graph_name = "linear"> (X_1, V)  W1 = Identity(W) }"""
    trainer = TrainingModel(training(CALLED, info(text, {"W": "W1"})))
    np.testing.assert_allclose(trainer.train_step(X_1=X)["Y_1"], X.sum(1, keepdims=True) + 0.25, rtol=1e-5)
    np.testing.assert_array_equal(trainer.state.variables["W"], [[0.5], [-1]])


@rule("TR-12")
def test_an_omitted_operand_in_the_middle() -> None:
    text = """s (float[n,2] X_1) => (float[n,1] Y_1) <float[1] C = {100.0}> {
        Y_1 = GraphCall <graph_name = "linear"> (X_1, W, C) }"""
    model = training(CALLED, info(text, {"W": "W"}))
    model.training_info[0].algorithm.node[0].input[1] = ""
    del model.training_info[0].update_binding[:]
    result = TrainingModel(model).train_step(X_1=X)["Y_1"]
    np.testing.assert_allclose(result, X @ np.float32([[0.5], [-1]]) + 100, rtol=1e-5)


@rule("TR-18")
@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (CALLING.replace('"linear"', '"other"'), "graph_name"),
        (CALLING.replace("(X_1)\n", "()\n"), r"omits inputs \['X'\]"),
        (CALLING.replace("(X_1)\n", "(X_1, W, B, B)\n"), "4 inputs"),
    ],
)
def test_invalid_calls_raise(text: str, complaint: str) -> None:
    with pytest.raises(ModelError, match=f"{complaint}.*TR-18"):
        TrainingModel(training(CALLED, info(text, {"W": "W1"})))


@rule("TR-18")
def test_a_call_in_the_main_graph_or_inside_a_node_raises() -> None:
    main = CALLED.replace("Y = Add(P, B)", 'Y = GraphCall <graph_name = "linear"> (P)')
    with pytest.raises(ModelError, match=r"main graph.*TR-18"):
        TrainingModel(training(main, info("none () => () { }")))
    inside = """s (float[n,2] X_1, bool c) => (float[n,1] Y_1) { Y_1 = If (c) <
        then_branch = t () => (float[n,1] a) { a = GraphCall <graph_name = "linear"> (X_1) },
        else_branch = e () => (float[n,1] d) { d = GraphCall <graph_name = "linear"> (X_1) }> }"""
    with pytest.raises(ModelError, match=r"is in a subgraph.*TR-18"):
        TrainingModel(training(CALLED, info(inside)))


@rule("TR-14")
def test_algorithms_read_variables_and_constants() -> None:
    text = "s () => (float w1) { w1 = Mul(w, c) }"
    assert after_steps(TrainingModel(training(IDENTITY, info(text, {"w": "w1"}))), None, None) == {"w": 200}


@rule("TR-16")
def test_an_algorithm_reads_what_the_main_graph_computes() -> None:
    text = "s (float k) => (float w1) { w1 = Mul(p, k) }"  # p is inside the main graph
    trainer = TrainingModel(training(IDENTITY, info(text, {"w": "w1"})))
    assert [v.name for v in trainer.step_inputs["training_info[0]"]] == ["x", "k"]
    outputs = trainer.train_step(x=3.0, k=7.0)
    assert {n: float(v) for n, v in outputs.items()} == {"y": 16, "w1": 42}
    with pytest.raises(ModelError, match="'w1'"):
        TrainingModel(training(IDENTITY.replace("Add(p, c)", "Add(p, w1)"), info(text, {"w": "w1"})))


@rule("TR-17")
@pytest.mark.parametrize("text", ["p = Mul(w, w)  w1 = Identity(p)", "w1 = Mul(w, w)  c = Identity(w)"])
def test_a_name_defined_twice_raises(text: str) -> None:
    with pytest.raises(ModelError, match=r"defined by both the main graph and algorithm 's'.*TR-17"):
        TrainingModel(training(IDENTITY, info(f"s () => (float w1) {{ {text} }}", {"w": "w1"})))


@rule("TR-20")
def test_assignments_are_simultaneous() -> None:
    main = "main (float x) => (float y) <float a = {1.0}, float b = {2.0}> { s = Mul(a, b)  y = Mul(x, s) }"
    swap = "swap () => (float a1, float b1) { a1 = Identity(b)  b1 = Identity(a) }"
    trainer = TrainingModel(training(main, info(swap, {"a": "a1", "b": "b1"})))
    assert after_steps(trainer, None) == {"a": 2, "b": 1}


def two_algorithms() -> onnx.ModelProto:
    add = "add () => (float w2) <float three = {3.0}> { w2 = Add(w, three) }"
    return training(IDENTITY, info(DOUBLE, {"w": "w1"}), info(add, {"w": "w2"}))


@rule("TR-21")
@pytest.mark.parametrize(
    ("order", "w"), [(("double", "double", "add"), 11), (("double", "add", "double"), 14), ((1, 0, 0), 20)]
)
def test_algorithms_in_any_order(order: tuple[Any, ...], w: float) -> None:
    trainer = TrainingModel(two_algorithms())
    assert trainer.algorithms == ("double", "add")
    assert after_steps(trainer, *order) == {"w": w}


@rule("TR-21")
@pytest.mark.parametrize("algorithm", ["nobody", 2, -1])
def test_unknown_algorithms_raise(algorithm: Any) -> None:
    with pytest.raises(InputNameError, match=r"\['double', 'add'\]"):
        TrainingModel(two_algorithms()).train_step(x=0.0, algorithm=algorithm)


@rule("TR-22")
def test_an_iteration_runs_all_algorithms_in_order() -> None:
    assert after_steps(TrainingModel(two_algorithms()), None, None) == {"w": 17}
    trainer = TrainingModel(two_algorithms())
    assert float(trainer.train_step(x=1.0)["y"]) == 14, "y of the last algorithm: it sees what the first assigned"


@rule("TR-23")
def test_own_initializers_of_two_algorithms() -> None:
    count = "{} () => (int64 t1) <int64 t = {{{}}}, int64 one = {{{}}}> {{ t1 = Add(t, one) }}"
    infos = [info(count.format(name, start, by), {"t": "t1"}) for name, start, by in (("a", 0, 1), ("b", 100, 10))]
    trainer = TrainingModel(training(IDENTITY, *infos))
    after_steps(trainer, "a", "b", "b")
    assert [int(own["t"]) for own in trainer.state.own] == [1, 120]


@rule("TR-24")
def test_inference_uses_the_current_variables() -> None:
    trainer = TrainingModel(doubling())
    results = [float(trainer.infer(x=1.0))]
    for _ in range(2):
        trainer.train_step(x=1.0)
        results.append(float(trainer.infer(x=1.0)))
    assert results == [12, 14, 18]
    assert trainer.to_model()(np.float32(1)) == 18


@rule("TR-25")
@pytest.mark.parametrize("text", ["w1 = Cast <to = 11> (w)", "w1 = Unsqueeze(w, axes)", "w1 = SequenceConstruct(w)"])
def test_a_new_value_of_another_dtype_or_shape_raises(text: str) -> None:
    text = f"s () => (float w1) <int64[1] axes = {{0}}> {{ {text} }}"
    with pytest.raises(ModelError, match=r"output 'w1'.*'w', which is float32\[\].*TR-25"):
        TrainingModel(training(IDENTITY, info(text, {"w": "w1"}))).train_step(x=0.0)
    with pytest.raises(ModelError, match="TR-25"):
        TrainingModel(training(IDENTITY, info(DOUBLE, {"w": "w1"}, text, {"w": "w1"}))).initialize()


@rule("TR-26")
def test_an_argument_overrides_the_variable() -> None:
    main = IDENTITY.replace("(float x)", "(float x, float w)")
    trainer = TrainingModel(training(main, info(DOUBLE, {"w": "w1"})))
    assert trainer.infer(x=1.0, w=100.0) == 110
    assert variables(trainer.state) == {"w": 2}
    outputs = trainer.train_step(x=1.0, w=100.0)
    assert float(outputs["y"]) == 110


@rule("TR-27")
def test_without_training_info_raises() -> None:
    with pytest.raises(UnsupportedError, match=r"no training_info.*finetune.*TR-27"):
        TrainingModel(parse(IDENTITY))


@rule("TR-28")
def test_an_empty_algorithm() -> None:
    starts = "s () => (float w0, float unused) { w0 = Constant <value_float = 3.0> ()  unused = Neg(w0) }"
    trainer = TrainingModel(training(IDENTITY, info(None, None, starts, {"w": "w0"})))
    assert after_steps(trainer, None) == {"w": 2}
    trainer.initialize()
    assert after_steps(trainer, None) == {"w": 3}


@rule("TR-29")
def test_sparse_variables_raise() -> None:
    model = doubling()
    values = onnx.helper.make_tensor("s", onnx.TensorProto.FLOAT, [1], [1.0])
    indices = onnx.helper.make_tensor("i", onnx.TensorProto.INT64, [1], [0])
    model.graph.sparse_initializer.append(onnx.helper.make_sparse_tensor(values, indices, [3]))
    model.training_info[0].update_binding.add(key="s", value="w1")
    with pytest.raises(ModelError, match=r"'s' is a sparse initializer.*TR-29"):
        TrainingModel(model)


def test_a_donated_state_raises() -> None:
    trainer = TrainingModel(linear())
    state = trainer.init()
    trainer.step(state, BATCH)
    with pytest.raises(InputError, match="donated to an earlier step"):
        trainer.step(state, BATCH)


def test_a_derivative_keeps_the_state() -> None:
    """Of the loss that a step returns, and through two steps; a scan, too."""
    trainer = TrainingModel(linear())
    state = trainer.init()
    batches = {n: np.stack([v] * 2) for n, v in BATCH.items()}

    def after(state: Any) -> Any:
        new, _ = trainer.step(state, BATCH)
        _, outputs = trainer.step(new, BATCH)
        return outputs["loss"].sum()

    def scanned(state: Any) -> Any:
        return jax.lax.scan(trainer.step, state, batches)[1]["loss"][-1].sum()

    for loss in (after, scanned):
        slopes = jax.tree.leaves(jax.grad(loss, allow_int=True)(state).variables)
        assert all(np.isfinite(v).all() for v in slopes) and any(np.any(v) for v in slopes)
    assert not any(v.is_deleted() for v in jax.tree.leaves(state.variables))


def test_donate_false_keeps_the_state() -> None:
    trainer = TrainingModel(doubling(), donate=False)
    state = trainer.init()
    trainer.step(state, {"x": 1.0})
    assert variables(state) == {"w": 2}


DROP = """main (float[64] x) => (float[64] y) <float w = {1.0}, float half = {0.5}, bool on = {1}> {
    d = Dropout(x, half, on)  y = Mul(d, w) }"""


@rule("TR-42")
def test_each_step_draws_new_random_numbers() -> None:
    trainer = TrainingModel(training(DROP, info(DOUBLE, {"w": "w1"})), rng=5, donate=False)
    state, ones = trainer.init(), {"x": np.ones(64, np.float32)}
    second, first = trainer.step(state, ones)
    third, other = trainer.step(second, ones)
    masks = [np.asarray(o["y"]) != 0 for o in (first, other)]
    assert not np.array_equal(*masks)
    np.testing.assert_array_equal(trainer.step(state, ones)[1]["y"], first["y"])
    again = [np.asarray(trainer.step(s, ones, rng=9)[1]["y"]) != 0 for s in (state, second, third)]
    np.testing.assert_array_equal(again[0], again[1])
    np.testing.assert_array_equal(again[1], again[2])


def test_the_gradient_uses_the_mask_of_the_forward_pass() -> None:
    text = """s () => (float w1, float[64] g, float l) {
        l = ReduceSum <keepdims = 0> (y)  g, gw = Gradient <xs = ["x", "w"], y = "l"> (x, w)  w1 = Sub(w, gw) }"""
    trainer = TrainingModel(training(DROP, info(text, {"w": "w1"})))
    outputs = trainer.train_step(x=np.ones(64, np.float32))
    np.testing.assert_array_equal(outputs["y"], outputs["g"])


@pytest.mark.parametrize(
    ("batch", "error", "complaint"),
    [
        ([X, Z], InputTypeError, "a dict of arrays by name, not list"),
        ({"x": X}, InputNameError, "'z' not given"),
        ({**BATCH, "k": X}, InputNameError, r"\['k'\]; the algorithms take {'sgd': \['x', 'z'\]}"),
        ({"x": X.astype(np.float64), "z": Z}, InputTypeError, "float64"),
        ({"x": X[:, :1], "z": Z}, InputShapeError, "extent 2"),
        ({"x": X[:4], "z": Z}, InputShapeError, "'n' is 4 in input 'x' but 8"),
    ],
)
def test_invalid_batches_raise(batch: Any, error: type[Exception], complaint: str) -> None:
    trainer = TrainingModel(linear())
    with pytest.raises(error, match=complaint):
        trainer.step(trainer.state, batch)


def test_a_checkpoint_of_the_state(tmp_path: Path) -> None:
    trainer, other = TrainingModel(linear(), rng=1), TrainingModel(linear(), rng=2)
    trainer.initialize()
    trainer.train_step(BATCH)
    assert trainer.changed().keys() == {"w", "b", "training_info[0].algorithm/t"}
    path = onnx2jax.training.save_checkpoint(tmp_path / "s", trainer.state)
    other.state, _ = onnx2jax.training.load_checkpoint(path, other.state)
    for model in (trainer, other):
        model.train_step(BATCH)
    assert other.state.key == trainer.state.key
    for name, value in trainer.changed().items():
        np.testing.assert_array_equal(other.changed()[name], value)
    state, (own,) = trainer.state, trainer.state.own
    for entries, complaint in (
        ({"w": state.variables["w"]}, r"variables/b: nothing saved"),
        (
            {**state.variables, "w": state.variables["w"][:1]},
            r"variables/w: float32\[1, 1\] saved, float32\[2, 1\] expected",
        ),
        ({**state.variables, "b": own["t"]}, r"variables/b: int64\[\] saved, float32\[1\] expected"),
    ):
        onnx2jax.training.save_checkpoint(path, replace(state, variables=entries))
        with pytest.raises(CheckpointError, match=complaint):
            onnx2jax.training.load_checkpoint(path, other.state)


def test_outputs_limits_what_is_returned() -> None:
    assert TrainingModel(linear(), outputs=["loss"]).train_step(BATCH).keys() == {"loss"}
    with pytest.raises(InputNameError, match=r"\['los'\]; the outputs of main graph and algorithms are \['b1', 'loss'"):
        TrainingModel(linear(), outputs=["los"])


def test_a_partitioned_step() -> None:
    """A data-dependent operator in the algorithm runs on the host; the state is unaffected."""
    text = """s () => (float w1, int64[k] kept) {
        i = NonZero(x)  kept = Squeeze(i)  l = ReduceSum <keepdims = 0> (y)
        g = Gradient <xs = ["w"], y = "l"> (w)  w1 = Sub(w, g) }"""
    main = "main (float[n] x) => (float[n] y) <float w = {2.0}> { y = Mul(x, w) }"
    trainer = TrainingModel(training(main, info(text, {"w": "w1"})))
    for x in ([0, 1, 0, 2], [0, 3, 3, 0]):
        outputs = trainer.train_step(x=np.float32(x))
        np.testing.assert_array_equal(outputs["kept"], np.nonzero(x)[0])
    assert variables(trainer.state) == {"w": -7}


def test_batches_that_are_one_program_compile_after_a_partitioned_step() -> None:
    """Whether NonZero runs depends on a shape, which each signature knows."""
    text = """s () => (float w1, int64 count) <int64[1] one = {1}> {
        n = Shape(x)  alone = Equal(n, one)
        count = If (alone) <then_branch = a () => (int64 c) { c = Size(x) },
                            else_branch = b () => (int64 c) { i = NonZero(x)  c = Size(i) }>
        more = CastLike(count, w)  w1 = Add(w, more) }"""
    main = "main (float[n] x) => (float[n] y) <float w = {2.0}> { y = Mul(x, w) }"
    trainer = TrainingModel(training(main, info(text, {"w": "w1"})))
    compiled = []
    for x in ([0, 5, 6], [4], [1, 0, 0], [7]):
        trainer.train_step(x=np.float32(x))
        compiled.append(trainer.compilations)
    assert variables(trainer.state) == {"w": 2 + 2 + 1 + 1 + 1}
    assert compiled[1] == compiled[0] + 1 and compiled[1:] == [compiled[1]] * 3


def test_64_bit_variables_in_a_callers_jit() -> None:
    main = "main (double x) => (double y) <double w = {1.0}> { y = Mul(x, w) }"
    text = (
        "s () => (double w1, int64 t1) <int64 t = {4294967296}, double e = {1e-12}> { w1 = Add(w, e)  t1 = Add(t, t) }"
    )
    trainer = TrainingModel(training(main, info(text, {"w": "w1", "t": "t1"})), donate=False)
    step = jax.jit(lambda state: trainer.step(state, {"x": np.float64(1)})[0])
    state = step(step(trainer.init()))
    assert np.asarray(state.own[0]["t"]) == 2**34
    assert np.asarray(state.variables["w"]) == 1 + 1e-12 + 1e-12


def test_steps_in_a_scan() -> None:
    trainer = TrainingModel(linear(), donate=False)
    state, losses = jax.lax.scan(
        lambda s, _: (lambda r: (r[0], r[1]["loss"]))(trainer.step(s, BATCH)), trainer.init(), length=5
    )
    other = trainer.init()
    for loss in losses:
        other, outputs = trainer.step(other, BATCH)
        np.testing.assert_allclose(outputs["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(state.variables["w"], other.variables["w"], rtol=1e-5)


def test_a_state_of_another_model_raises() -> None:
    with pytest.raises(onnx2jax.errors.InputError, match="init"):
        TrainingModel(linear()).step(TrainingModel(doubling()).init(), BATCH)
