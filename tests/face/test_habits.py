"""Calls as users of onnxruntime, Hugging Face and PyTorch write them, and names that are misspelt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from onnx import TensorProto, helper

import onnx2jax
from onnx2jax.cli import main
from onnx2jax.errors import InputNameError, InputTypeError, ModelError
from tests.support.models import mlp, text_model, value

X = np.random.default_rng(1).normal(size=(3, 4)).astype(np.float32)
INTEGERS = "g (int64[n] ids, float[n] x) => (int64[n] y, float[n] z) { y = Add(ids, ids)  z = Neg(x) }"


@pytest.fixture(scope="module")
def model() -> onnx2jax.Model:
    return onnx2jax.convert(mlp())


def test_a_dict_of_inputs_is_one_argument(model: onnx2jax.Model) -> None:
    expected = model(X)
    np.testing.assert_array_equal(model({"x": X}), expected)
    np.testing.assert_allclose(model.apply(model.params, {"x": X}), expected, rtol=1e-6)
    assert model.values({"x": X}, names="y").keys() == {"y"}
    assert "model(...)" in model.explain_call({"x": X})
    slopes = jax.grad(lambda x: model.apply(model.params, {"x": x}).sum())(X)
    assert slopes.shape == X.shape
    with pytest.raises(InputNameError, match=r"there is no input 'X'.*did you mean 'x'\?"):
        model({"X": X})


def test_inputs_are_given_to_each_method_as_to_a_call(model: onnx2jax.Model) -> None:
    for args, named in (((X,), {}), ((), {"x": X}), (({"x": X},), {})):
        assert model.compile(*args, **named) is model
        assert model.summary(*args, **named).inputs == {"x": "float32[3, 4]"}
        assert model.values(*args, **named, names="y")["y"].shape == (3, 2)
        assert "model(...)" in model.explain_call(*args, **named)
    assert model.summary(jax.ShapeDtypeStruct((7, 4), np.float32)).nodes[-1].outputs == {"y": "float32[7, 2]"}
    for call in (model.compile, model.summary):
        with pytest.raises(InputNameError, match=r"there is no input 'dim'.*did you mean 'dims'\?"):
            call(dim={"batch": 2})


def test_a_dict_is_the_input_itself_where_the_model_takes_a_map() -> None:
    kind = helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
    node = helper.make_node("CastMap", ["m"], ["y"], domain="ai.onnx.ml", map_form="SPARSE", max_map=3)
    ends = [helper.make_value_info("m", kind)], [value("y", np.float32, [1, 3])]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("ai.onnx.ml", 3)]
    source = helper.make_model(helper.make_graph([node], "g", *ends), opset_imports=opsets, ir_version=10)
    np.testing.assert_array_equal(onnx2jax.convert(source)({1: 5.0}), [[0, 5, 0]])


@pytest.mark.parametrize("as_jax", [False, True])
def test_int32_is_widened_to_int64_exactly(as_jax: bool) -> None:
    called = onnx2jax.convert(text_model(INTEGERS))
    ids, x = np.array([2**31 - 1, -5], np.int32), np.float32([1, 2])
    argument = jnp.asarray(ids) if as_jax else ids
    for _ in range(3):  # the full path, then the bound call
        y, z = called(argument, x)
        ran = called.run(None, {"ids": argument, "x": x})
        for output in (y, ran[0]):
            assert output.dtype == np.int64
            np.testing.assert_array_equal(output, 2 * ids.astype(np.int64))
        np.testing.assert_array_equal(z, -x)
    ids[:] = 7
    np.testing.assert_array_equal(y, [2 * (2**31 - 1), -10])
    with pytest.raises(InputTypeError, match="uint64"):
        called(np.ones(2, np.uint64), x)
    with pytest.raises(InputTypeError, match="float64"):
        called(ids, x.astype(np.float64))


def test_a_single_name_is_no_list_of_characters(model: onnx2jax.Model) -> None:
    (y,) = model.run("y", {"x": X})
    np.testing.assert_allclose(y, model(X), rtol=1e-5)
    assert model.cut(outputs="r").outputs[0].name == "r"
    tuned = onnx2jax.finetune(model, lambda y, _: y.sum(), optax.sgd(1.0), trainable="b2", outputs="y")
    assert tuned.trainable == ("b2",)


def test_models_save_themselves(model: onnx2jax.Model, tmp_path: Path) -> None:
    path = model.save(tmp_path / "m.onnx", params={"b2": np.float32([1, 2])})
    np.testing.assert_array_equal(onnx2jax.convert(path).params["b2"], [1, 2])


def test_floating_parameters_can_be_differentiated() -> None:
    text = "g (float[n, 2] x) => (float[n, 3] y) { w = DequantizeLinear(q, s)  h = MatMul(x, w)  y = Add(h, b) }"
    stored = {"q": np.arange(6, dtype=np.int8).reshape(2, 3), "s": np.float32(0.5), "b": np.float32([1, 2, 3])}
    packed = onnx2jax.convert(text_model(text, **stored), weights="packed")
    assert any(v.dtype == np.uint8 for v in packed.params.values())

    def loss(params: dict[str, Any]) -> Any:
        return packed.apply(params, np.ones((1, 2), np.float32)).sum()

    with pytest.raises(TypeError, match="uint8"):
        jax.grad(loss)(dict(packed.params))
    np.testing.assert_array_equal(jax.grad(loss)(packed.floating_params)["b"], [1, 1, 1])


def test_optax_labels_parameters_by_name(model: onnx2jax.Model) -> None:
    labels = jax.tree_util.tree_map_with_path(
        lambda path, _: "head" if path[0].key in ("w2", "b2") else "body", model.params
    )
    optimizer = optax.multi_transform({"head": optax.sgd(1.0), "body": optax.set_to_zero()}, labels)
    slopes = jax.grad(lambda params: model.apply(params, X).sum())(model.params)
    updates, _ = optimizer.update(slopes, optimizer.init(model.params), model.params)
    moved = {name for name, update in updates.items() if np.any(update)}
    assert moved == {"w2", "b2"}


DIGITS = onnx2jax.demo_training_model()
Call = Callable[[Any], object]
MISSPELT: dict[str, tuple[Call, str]] = {
    "keyword": (lambda _: onnx2jax.convert(mlp(), dim={}), "dims"),  # type: ignore[call-arg]
    "keyword of decoder": (lambda _: onnx2jax.decoder(mlp(), contekst=8), "context"),
    "keyword of a session": (lambda _: onnx2jax.session.InferenceSession(mlp(), provider=[]), "providers"),  # type: ignore[arg-type]
    "keyword of TrainingModel": (lambda _: onnx2jax.TrainingModel(DIGITS, output=["loss"]), "outputs"),  # type: ignore[call-arg]
    "dimension": (lambda _: onnx2jax.convert(mlp(), dims={"bacth": 3}), "batch"),
    "output": (lambda model: model.run(["Y"], {"x": X}), "y"),
    "output of join": (lambda model: onnx2jax.join(model, mlp(), {"Y": "x"}), "y"),
    "input of join": (lambda model: onnx2jax.join(model, mlp(), {"y": "X"}), "x"),
    "parameter": (lambda model: model.with_params({"W1": X}), "w1"),
    "value": (lambda model: model.cut(outputs=["H"]), "h"),
    "runtime of verify": (lambda model: model.verify(against="onnx-runtime"), "onnxruntime"),
    "static": (lambda _: onnx2jax.convert(mlp(), static={"X": X}), "x"),
    "outputs of finetune": (lambda model: onnx2jax.finetune(model, "next_token", optax.sgd(1.0), outputs="Y"), "y"),
}
"""Calls with a misspelt name, and the name that is meant."""
SWAPPED: dict[str, tuple[Call, str]] = {
    "run": (lambda model: model.run({"x": X}, None), r"swapped: run\(output_names, inputs\)"),
    "finetune": (
        lambda model: onnx2jax.finetune(model, optax.sgd(1.0), abs),  # type: ignore[arg-type]
        r"swapped: finetune\(model, loss, optimizer",
    ),
    "join": (lambda model: onnx2jax.join(model, {"y": "x"}, model), "names is the third argument"),  # type: ignore[arg-type]
    "load_adapter": (
        lambda model: onnx2jax.training.load_adapter("a.safetensors", model),  # type: ignore[arg-type]
        r"load_adapter\(model, 'a.safetensors'\)",
    ),
    "load_checkpoint": (lambda _: onnx2jax.training.load_checkpoint({}, "s"), r"load_checkpoint\(path, like\)"),  # type: ignore[arg-type]
    "save_checkpoint": (lambda _: onnx2jax.training.save_checkpoint({}, "s"), r"save_checkpoint\(path, state\)"),  # type: ignore[arg-type]
    "save": (lambda model: onnx2jax.save("m.onnx", model), r"swapped: save\(model, 'm.onnx'\)"),  # type: ignore[arg-type]
    "replace": (lambda model: model.replace(abs), "replace takes a dict of functions"),
    "static as a list": (lambda _: onnx2jax.convert(mlp(), static=["x"]), r"static is \['x'\]; it is a dict"),  # type: ignore[arg-type]
    "a Model": (lambda model: onnx2jax.convert(model), "is a Model already"),
    "a path to finetune": (
        lambda _: onnx2jax.finetune("m.onnx", lambda y, _: y.sum(), optax.sgd(1.0)),  # type: ignore[arg-type]
        r"finetune\(onnx2jax.convert\('m.onnx'\)",
    ),
    "a module of a path": (lambda _: onnx2jax.training.to_nnx("m.onnx"), r"to_nnx\(onnx2jax.convert"),  # type: ignore[arg-type]
}
"""Calls with swapped or mistaken arguments, and what the message says."""


@pytest.mark.parametrize("which", MISSPELT)
def test_the_name_that_is_meant_is_suggested(model: onnx2jax.Model, which: str) -> None:
    call, meant = MISSPELT[which]
    with pytest.raises(TypeError, match=f"did you mean '{meant}'\\?"):
        call(model)


@pytest.mark.parametrize("which", SWAPPED)
def test_swapped_arguments_are_recognised(model: onnx2jax.Model, which: str) -> None:
    call, said = SWAPPED[which]
    with pytest.raises(InputTypeError, match=said):
        call(model)


def test_a_graph_is_no_model() -> None:
    with pytest.raises(TypeError, match=r"not onnx.GraphProto; onnx.helper.make_model"):
        onnx2jax.convert(mlp().graph)


def test_messages_about_files_name_no_protobuf_classes(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"\xffno model at all")
    with pytest.raises(ModelError, match="its bytes are not a protobuf message") as caught:
        onnx2jax.convert(tmp_path / "m.onnx")
    assert "Proto" not in str(caught.value)


def test_an_unknown_parameter_is_answered_with_names(model: onnx2jax.Model) -> None:
    with pytest.raises(InputNameError, match=r"\['hidden'\]; model.params has 'w1', 'b1', 'w2', 'b2'"):
        model.with_params({"hidden": X})


def test_a_node_where_a_value_is_wanted_is_named_with_its_outputs(model: onnx2jax.Model) -> None:
    calls = [lambda: model.cut(outputs=["hidden"]), lambda: model.values(X, names="hidden")]
    for call in (*calls, lambda: model.run(["hidden"], {"x": X})):
        with pytest.raises(InputNameError, match=r"'hidden' is a node, whose outputs are \['h'\]"):
            call()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["inspekt", "m.onnx"], "did you mean 'inspect'?"),
        (["run", "m.onnx", "--randon"], "did you mean '--random'?"),
        (["run", "m.onnx", "--randon"], "usage: onnx2jax run"),
        (["run", "m.onnx", "--dtype", "bfloat"], "did you mean 'bfloat16'?"),
    ],
)
def test_commands_and_options_are_suggested(arguments: list[str], said: str, capsys: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert said in capsys.readouterr().err


def test_sessions_show_their_model() -> None:
    assert "Model" in repr(onnx2jax.session.InferenceSession(onnx2jax.demo_model()))
