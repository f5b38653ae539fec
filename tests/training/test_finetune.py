"""Fine-tuning: trained and frozen parameters, batches and precision, resuming, and errors."""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime
import optax
import pytest
from jax.sharding import PartitionSpec as P
from onnx import helper
from sklearn.datasets import load_digits

import onnx2jax
from onnx2jax.errors import (
    InputError,
    InputNameError,
    InputShapeError,
    InputTypeError,
    KnownValueError,
    LossError,
    NaNLossWarning,
    ShardingError,
    TrainingFormError,
)
from tests.support.helpers import mesh
from tests.support.models import mlp, mlp_reference, model, value
from tests.support.tiers import extended
from tests.support.training import cross_entropy, trained

pytestmark = pytest.mark.usefixtures("standard_promotion")  # optax

RNG = np.random.default_rng(0)
BATCH = {"x": RNG.normal(size=(8, 4)).astype(np.float32), "label": np.arange(8) % 2}


def with_accuracy(logits: Any, batch: dict[str, Any]) -> Any:
    return cross_entropy(logits, batch), {"accuracy": (logits.argmax(-1) == batch["label"]).mean()}


def tuning(loss: Any = cross_entropy, optimizer: Any = None, proto: Any = None, **options: Any) -> Any:
    return onnx2jax.finetune(onnx2jax.convert(proto or mlp()), loss, optimizer or optax.sgd(0.1), **options)


def after(tuned: Any, steps: int = 1, batch: Any = BATCH) -> Any:
    return trained(tuned, batch, steps)[0]


def close(a: Any, b: Any, **tolerance: float) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), dict(a), dict(b))


def test_steps_match_hand_written_jax() -> None:
    tuned = tuning(with_accuracy, optax.adamw(1e-2))
    state = after(tuned, 5)
    params = {n: jnp.array(v) for n, v in onnx2jax.convert(mlp()).params.items()}
    optimizer = optax.adamw(1e-2)
    opt_state = optimizer.init(params)

    @jax.jit
    def step(params: Any, opt_state: Any) -> Any:
        grads = jax.grad(lambda p: cross_entropy(mlp_reference(p, BATCH["x"]), BATCH))(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for _ in range(5):
        params, opt_state = step(params, opt_state)
    close(state.params, params, rtol=1e-5, atol=1e-6)


def test_metrics_precede_the_update_and_match_evaluate() -> None:
    tuned = tuning(with_accuracy)
    state = tuned.init()
    before = tuned.evaluate(state, BATCH)
    state, metrics = tuned.step(state, BATCH)
    assert set(before) == {"loss", "accuracy"} and set(metrics) == {"loss", "accuracy", "grad_norm"}
    for name, found in before.items():
        np.testing.assert_allclose(found, metrics[name], rtol=1e-6)
    assert tuned.evaluate(state, BATCH)["loss"] < before["loss"]
    assert state.step == 1


@pytest.mark.parametrize(
    ("trainable", "changing"),
    [
        (None, {"w1", "b1", "w2", "b2"}),
        ("w*", {"w1", "w2"}),
        (["b1", "?2"], {"b1", "w2", "b2"}),
        (lambda _, array: array.ndim == 1, {"b1", "b2"}),
    ],
)
def test_only_trainable_parameters_change(trainable: Any, changing: set[str]) -> None:
    tuned = tuning(trainable=trainable)
    assert set(tuned.trainable) == changing
    before = onnx2jax.convert(mlp()).params
    now = tuned.to_model(after(tuned, 2)).params
    assert {n for n in before if not np.array_equal(before[n], now[n])} == changing


def test_the_source_model_is_not_modified() -> None:
    source = onnx2jax.convert(mlp())
    params, y = {n: v.copy() for n, v in source.params.items()}, np.asarray(source(BATCH["x"]))
    tuned = onnx2jax.finetune(source, cross_entropy, optax.sgd(1.0))
    new = tuned.to_model(after(tuned))
    assert not np.allclose(new(BATCH["x"]), y)
    np.testing.assert_array_equal(source(BATCH["x"]), y)
    assert all(np.array_equal(source.params[n], v) for n, v in params.items())


def test_a_step_compiles_once_per_batch_shape() -> None:
    tuned = tuning(with_accuracy, optax.adam(1e-2))
    state = after(tuned, 3)
    assert tuned.compilations == 1
    tuned.evaluate(state, BATCH)
    assert tuned.compilations == 2
    state, _ = tuned.step(state, {n: v[:4] for n, v in BATCH.items()})
    tuned.step(state, BATCH)
    assert tuned.compilations == 3


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.contrib.reduce_on_plateau(patience=1),
        optax.inject_hyperparams(optax.sgd)(learning_rate=0.1),
        optax.MultiSteps(optax.adam(0.1), 2),
        optax.lbfgs(),
        optax.chain(optax.clip_by_global_norm(1.0), optax.ema(0.9), optax.sgd(optax.cosine_decay_schedule(0.1, 9))),
    ],
    ids=["plateau", "injected", "multi", "lbfgs", "chain"],
)
def test_optimizers_with_other_state_dtypes_compile_once(optimizer: Any) -> None:
    if isinstance(optimizer, optax.MultiSteps):
        optimizer = optimizer.gradient_transformation()
    tuned = tuning(optimizer=optimizer)
    after(tuned, 3)
    assert tuned.compilations == 1


def test_the_state_is_donated_and_can_be_copied_and_resumed() -> None:
    tuned = tuning(optimizer=optax.adam(1e-2))
    first = tuned.init()
    state, _ = tuned.step(first, BATCH)
    assert first.params["w1"].is_deleted()
    with pytest.raises(InputError, match="donated to an earlier step"):
        tuned.step(first, BATCH)
    leaves, structure = jax.tree.flatten(state)
    kept = [np.asarray(leaf) if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf for leaf in leaves]
    kept[-1] = jax.random.wrap_key_data(np.asarray(jax.random.key_data(kept[-1])))
    straight, _ = tuned.step(state, BATCH)
    resumed, _ = tuned.step(jax.tree.unflatten(structure, kept), BATCH)
    close(straight.params, resumed.params, rtol=0)
    assert resumed.step == 2


@pytest.mark.usefixtures("in_32_bits")
def test_labels_keep_64_bits_in_32_bit_mode() -> None:
    seen = []

    def loss(logits: Any, batch: dict[str, Any]) -> Any:
        seen.append(batch["label"].dtype)
        return (logits.sum() * (batch["label"][0] - 2**40)).astype(np.float32)

    tuned = tuning(loss)
    state, metrics = tuned.step(tuned.init(), BATCH | {"label": np.array([2**40 + 3])})
    total = mlp_reference(onnx2jax.convert(mlp()).params, BATCH["x"]).sum()
    assert seen[0] == np.int64
    np.testing.assert_allclose(metrics["loss"], 3 * total, rtol=1e-5)
    assert state.params["w1"].dtype == np.float32 and jnp.zeros(1).dtype == np.float32


def test_a_float64_model_is_trained_in_float64() -> None:
    weights = {"w": RNG.normal(size=(4, 2))}
    ends = [value("x", np.float64, ["n", 4])], [value("y", np.float64, ["n", 2])]
    proto = model([helper.make_node("MatMul", ["x", "w"], ["y"])], *ends, weights)
    x = RNG.normal(size=(3, 4))
    tuned = tuning(lambda y, _: (y**2).sum(), optax.sgd(0.5), proto)
    state = after(tuned, 1, {"x": x})
    assert state.params["w"].dtype == np.float64
    with jax.enable_x64(True):
        np.testing.assert_allclose(np.asarray(state.params["w"]), weights["w"] - x.T @ (x @ weights["w"]), rtol=1e-13)


def test_float16_parameters_are_updated_in_float32_and_saved_in_float16() -> None:
    weights = {"w": np.ones((4, 2), np.float16)}
    ends = [value("x", np.float16, ["n", 4])], [value("y", np.float16, ["n", 2])]
    proto = model([helper.make_node("MatMul", ["x", "w"], ["y"])], *ends, weights)
    tuned = tuning(lambda y, _: y.astype(np.float32).sum(), optax.sgd(1e-5), proto)
    state = after(tuned, 100, {"x": np.ones((1, 4), np.float16)})
    assert state.params["w"].dtype == np.float32
    np.testing.assert_allclose(state.params["w"], 0.999, rtol=1e-5)  # steps that float16 would round away
    assert tuned.params(state)["w"].dtype == np.float16
    assert tuned.to_model(state).params["w"][0, 0] == np.float16(0.999)


@pytest.mark.parametrize("count", [2, extended(8)])
def test_microbatches_match_the_whole_batch(count: int) -> None:
    whole, parts = tuning(with_accuracy), tuning(with_accuracy, accumulate=count)
    a, with_whole = whole.step(whole.init(), BATCH)
    b, with_parts = parts.step(parts.init(), BATCH)
    close(a.params, b.params, rtol=1e-5, atol=1e-6)
    close(with_whole, with_parts, rtol=1e-5)


def test_bfloat16_products_keep_float32_parameters() -> None:
    tuned = tuning(compute_dtype="bfloat16")
    state, metrics = tuned.step(tuned.init(), BATCH)
    _, exact = (plain := tuning()).step(plain.init(), BATCH)
    assert {v.dtype for v in state.params.values()} == {np.dtype(np.float32)}
    assert metrics["loss"].dtype == np.float32
    assert 0 < abs(metrics["loss"] - exact["loss"]) < 0.02
    text = str(jax.make_jaxpr(tuned._train_step)(state, tuned._frozen, BATCH))
    assert "dot_general" in text and "bf16[8,4]" in text


def test_bfloat16_keeps_masks_finite() -> None:
    mask = np.full((4, 4), np.finfo(np.float32).min, np.float32)
    nodes = [helper.make_node("MatMul", ["x", "mask"], ["y"])]
    ends = [value("x", np.float32, ["n", 4])], [value("y", np.float32, ["n", 4])]
    tuned = tuning(lambda y, _: (y * 1e-38).sum(), proto=model(nodes, *ends, {"mask": mask}), compute_dtype="bfloat16")
    _, metrics = tuned.step(tuned.init(), {"x": np.eye(4, dtype=np.float32)})
    assert np.isfinite(metrics["loss"])


def test_remat_is_in_the_program_and_keeps_results() -> None:
    plain, saving = tuning(optimizer=optax.adam(0.1)), tuning(optimizer=optax.adam(0.1), remat=["hidden", "[ah]*"])
    close(after(plain, 3).params, after(saving, 3).params, rtol=1e-6, atol=1e-7)
    state = saving.init()
    assert str(jax.make_jaxpr(saving._train_step)(state, saving._frozen, BATCH)).count("remat") > 0
    assert "remat" not in str(jax.make_jaxpr(plain._train_step)(state, plain._frozen, BATCH))
    assert plain.compilations == saving.compilations


def test_remat_includes_the_nodes_between_its_matches() -> None:
    tuned = tuning(remat="h*")  # "hidden" and "head"; "act" is between
    (block,) = (n for n in tuned._form.training.nodes if n.op_type == "Remat")
    assert [n.name for n in block.graphs[0].nodes] == ["hidden", "act", "head"]
    close(after(tuned).params, after(tuning()).params, rtol=1e-6)


def test_fit_yields_each_step_and_may_be_left_early() -> None:
    tuned = tuning(with_accuracy)
    losses = [float(metrics["loss"]) for _, metrics in tuned.fit([BATCH] * 5)]
    assert len(losses) == 5 and losses == sorted(losses, reverse=True)
    for state, metrics in tuned.fit(BATCH for _ in range(1000)):  # noqa: B007
        if metrics["loss"] < losses[2]:
            break
    assert state.step == 4
    assert tuned.evaluate(state, BATCH)["loss"] < losses[3] + 1e-6


def test_a_loss_that_is_nan_is_warned_of_once_with_its_step() -> None:
    tuned, damaged = tuning(), BATCH | {"x": np.full_like(BATCH["x"], np.nan)}
    with pytest.warns(NaNLossWarning, match="loss is NaN in step 3: its batch has NaN") as warned:
        list(tuned.fit([BATCH, BATCH, damaged, BATCH]))
    assert len(warned) == 1 and warned[0].filename == __file__
    with pytest.warns(NaNLossWarning, match="in step 1"):
        for _ in tuned.fit([damaged] * 2):
            break


def test_the_progress_bar_shows_steps_and_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    tuned = tuning()
    list(tuned.fit([BATCH] * 3, progress=True))
    shown = capsys.readouterr().err
    assert "step 3/3" in shown and "loss" in shown and "grad_norm" in shown
    list(tuned.fit([BATCH]))
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("without_rich")
def test_a_progress_bar_without_rich_names_the_extra() -> None:
    tuned = tuning()
    assert len(list(tuned.fit([BATCH]))) == 1
    with pytest.raises(ImportError, match=r"needs the extra train .*pip install"):
        next(tuned.fit([BATCH], progress=True))


def test_without_optax_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optax", None)
    with pytest.raises(ImportError, match=r"needs the extra train .*pip install"):
        onnx2jax.finetune(onnx2jax.convert(mlp()), cross_entropy, None)


def test_outputs_limits_what_is_computed() -> None:
    proto = mlp()
    proto.graph.node.append(helper.make_node("NonZero", ["r"], ["where"], name="find"))
    proto.graph.output.append(value("where", np.int64, None))
    with pytest.raises(KnownValueError, match=r"(?s)'find'.*outputs=\['output name'\]"):
        after(tuning(lambda outputs, batch: cross_entropy(outputs.y, batch), proto=proto))
    close(after(tuning(proto=proto, outputs=["y"])).params, after(tuning()).params, rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"trainable": "w3"}, InputNameError, "'w3', which no parameter matches; similar names are ['w2', 'w1']"),
        ({"trainable": lambda *_: False}, TrainingFormError, "nothing to train"),
        ({"remat": "layer.*"}, InputNameError, "'layer.*', which no node name matches"),
        ({"outputs": ["z"]}, InputNameError, "the model's outputs are ['y']"),
        ({"optimizer": 0.1}, InputTypeError, "not an optax optimizer"),
        ({"batchnorm": "train"}, TrainingFormError, "no BatchNormalization node: exporters fold them"),
        ({"batchnorm": "off"}, TrainingFormError, "'frozen' or 'train'"),
        ({"dropout": True}, TrainingFormError, "no Dropout node: exporters remove them"),
        ({"accumulate": 0}, InputShapeError, "1 or more"),
        ({"compute_dtype": "float16"}, InputTypeError, "bfloat16"),
        ({"shardings": {"w*": P()}}, ShardingError, "mesh="),
        ({"mesh": mesh(data=2), "shardings": {"v*": P()}}, ShardingError, "'v*' matches none"),
    ],
)
def test_invalid_arguments_raise(options: Any, error: Any, message: str) -> None:
    with pytest.raises(error) as raised:
        tuning(**options)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("loss", "batch", "options", "error", "message"),
    [
        (lambda y, _: y.sum(-1), {}, {}, LossError, "the loss has shape [8]; it must be a scalar: loss.mean()"),
        (lambda y, _: (y > 0).sum(), {}, {}, LossError, "the loss is int64"),
        (lambda y, _: (y.sum(), [1]), {}, {}, LossError, "a dict of metrics"),
        (lambda y, _: (y.sum(), {"loss": 1}), {}, {}, LossError, "'loss', 'grad_norm' and 'loss_scale' are reserved"),
        (cross_entropy, None, {}, InputTypeError, "a dict of arrays by name, not NoneType"),
        (cross_entropy, {"x": None}, {}, InputNameError, "no entry 'x'; it has ['label']"),
        (cross_entropy, {"x": np.zeros((8, 4))}, {}, InputTypeError, "float64"),
        (cross_entropy, {"x": np.zeros((8, 5), np.float32)}, {}, InputShapeError, "extent 4 on axis 1, but 5"),
        (cross_entropy, {"label": np.array(["a"] * 8)}, {}, InputTypeError, "'label' of the batch has dtype <U1"),
        (cross_entropy, {}, {"accumulate": 3}, InputShapeError, "accumulate=3 does not divide"),
        (cross_entropy, {"label": np.zeros(4, int)}, {"accumulate": 2}, InputShapeError, "{'label': 4, 'x': 8}"),
    ],
)
def test_invalid_batches_and_losses_raise(loss: Any, batch: Any, options: Any, error: Any, message: str) -> None:
    tuned = tuning(loss, **options)
    given = None if batch is None else {n: v for n, v in (BATCH | batch).items() if v is not None}
    with pytest.raises(error) as raised:
        tuned.step(tuned.init(), given)
    assert message in str(raised.value)


def test_errors_of_a_loss_say_how_it_is_called() -> None:
    for loss, error in ((lambda y: y, TypeError), (lambda _, batch: batch["labels"], KeyError)):
        with pytest.raises(error) as raised:
            after(tuning(loss))
        assert raised.value.__notes__ == [
            "in the loss of finetune, loss(outputs, batch), whose batch is a dict of ['label', 'x']"
        ]


def test_lists_of_a_batch_take_the_declared_type() -> None:
    listed = {n: v.tolist() for n, v in BATCH.items()}
    close(after(tuning(), batch=listed).params, after(tuning()).params)
    with pytest.raises(InputTypeError, match=r"'x'|input x: float32\[batch, 4\] cannot be converted from list"):
        after(tuning(), batch=BATCH | {"x": [["a"] * 4] * 8})


def test_saving_a_tuning_or_its_state_says_what_to_save(tmp_path: Any) -> None:
    tuned = tuning()
    with pytest.raises(TypeError, match=r"save\(tuned\.to_model\(state\), path\)"):
        onnx2jax.save(tuned, tmp_path / "m.onnx")
    with pytest.raises(InputTypeError, match=r"params is FineTuningState, .* params=tuned\.params\(state\)"):
        onnx2jax.save(onnx2jax.convert(mlp()), tmp_path / "m.onnx", params=tuned.init())
    with pytest.raises(InputTypeError, match=r"a Model, not Decoder: finetune\(decoder\.model, loss, optimizer\)"):
        onnx2jax.finetune(onnx2jax.decoder(onnx2jax.demo_decoder()), "next_token", optax.sgd(0.1))


def quantised() -> onnx.ModelProto:
    """int8 weights, a scale and an exponent as scalars, and a floating-point weight shared by two nodes."""
    rng = np.random.default_rng(1)
    constants = {
        "q": rng.integers(-99, 99, (4, 40)).astype(np.int8),
        "scale": np.float32(0.01),
        "two": np.float32(2),
        "w": rng.normal(size=(40, 40)).astype(np.float32),
    }
    nodes = [
        helper.make_node("DequantizeLinear", ["q", "scale"], ["d"]),
        helper.make_node("MatMul", ["x", "d"], ["h"]),
        helper.make_node("MatMul", ["h", "w"], ["m"]),
        helper.make_node("Pow", ["m", "two"], ["p"]),
        helper.make_node("MatMul", ["p", "w"], ["y"]),
    ]
    return model(nodes, [value("x", np.float32, ["n", 4])], [value("y", np.float32, ["n", 40])], constants)


def test_scalars_are_trained_only_if_named_and_quantised_weights_never() -> None:
    assert tuning(proto=quantised()).trainable == ("w",)
    assert tuning(proto=quantised(), trainable=["*"]).trainable == ("w",)
    assert set(tuning(proto=quantised(), trainable=["scale", "w"]).trainable) == {"scale", "w"}
    with pytest.raises(InputTypeError, match=r"q \(int8\[4, 40\]\). Quantised weights cannot be trained"):
        tuning(proto=quantised(), trainable="q")
    with pytest.raises(InputTypeError, match="named in full"):
        tuning(proto=quantised(), trainable="scal?")


def test_a_shared_weight_sums_the_gradients_of_its_uses() -> None:
    tuned = tuning(lambda y, _: y.mean(), optax.sgd(1.0), quantised())
    start = tuned.init().params["w"]
    state = after(tuned, 1, {"x": BATCH["x"]})
    h = BATCH["x"] @ (onnx2jax.convert(quantised()).params["q"] * np.float32(0.01))
    gradient = jax.grad(lambda w: ((h @ w) ** 2 @ w).mean())(start)
    np.testing.assert_allclose(state.params["w"], start - gradient, rtol=1e-4, atol=1e-5)


def test_a_model_without_floating_point_weights_raises() -> None:
    proto = model([helper.make_node("Neg", ["x"], ["y"])], [value("x", np.float32, [1])], [value("y", np.float32, [1])])
    with pytest.raises(TrainingFormError, match=r"nothing to train: the model has no parameters$"):
        tuning(proto=proto)


def test_weights_in_attributes_are_named() -> None:
    """As those of scikit-learn's linear models and forests."""
    node = helper.make_node("Scaler", ["x"], ["y"], domain="ai.onnx.ml", offset=[0.0, 1.0], scale=[1.0, 2.0])
    ends = [value("x", np.float32, ["n", 2])], [value("y", np.float32, ["n", 2])]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("ai.onnx.ml", 3)]
    proto = helper.make_model(helper.make_graph([node], "g", *ends), opset_imports=opsets, ir_version=10)
    with pytest.raises(TrainingFormError, match=r"attributes of .*Scaler.*fit it in the library that made the file"):
        tuning(proto=proto)


@pytest.mark.extended
def test_the_digits_model_learns_a_new_task_and_matches_onnxruntime(tmp_path: Any) -> None:
    """Digits rotated by 180 degrees, of which the model recognises few; saved and run by onnxruntime."""
    images, labels = load_digits(return_X_y=True)
    images = np.ascontiguousarray(images.reshape(-1, 1, 8, 8)[:, :, ::-1, ::-1] / 16, np.float32)
    train, test = slice(0, 1536), slice(1536, None)
    source = onnx2jax.convert(onnx2jax.demo_model())

    tuned = onnx2jax.finetune(source, with_accuracy, optax.adam(3e-3))
    held_out = {"image": images[test], "label": labels[test]}
    before = tuned.evaluate(tuned.init(), held_out)["accuracy"]
    order = np.random.default_rng(0).permuted(np.tile(np.arange(1536), (6, 1)), axis=1).reshape(-1, 64)
    batches = ({"image": images[train][i], "label": labels[train][i]} for i in order)
    *_, (state, _) = tuned.fit(batches)
    accuracy = float(tuned.evaluate(state, held_out)["accuracy"])
    assert before < 0.5 < 0.85 < accuracy
    path = onnx2jax.save(source, tmp_path / "tuned.onnx", params=tuned.params(state))
    (logits,) = onnxruntime.InferenceSession(path).run(None, {"image": images[test]})
    assert (logits.argmax(-1) == labels[test]).mean() == pytest.approx(accuracy, abs=1e-6)
