"""BatchNormalization and Dropout of inference models in training mode; remat= in branched graphs."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import numpy as np
import onnx
import optax
import pytest
from onnx import helper

import onnx2jax
from onnx2jax.errors import TrainingFormError
from tests.support.models import model, value
from tests.support.tiers import canaries, extended

pytestmark = pytest.mark.usefixtures("standard_promotion")  # optax

RNG = np.random.default_rng(3)
X = (RNG.normal(size=(6, 3, 4, 4)) * 2 + 1).astype(np.float32)
WEIGHTS = {
    "scale": np.array([1.0, 2, 3], np.float32),
    "bias": np.array([0.5, 0, -1], np.float32),
    "mean": np.array([0.0, 1, 2], np.float32),
    "var": np.array([1.0, 2, 3], np.float32),
}


def normalized(opset: int, nodes: int = 1, identity: bool = False, **attributes: Any) -> onnx.ModelProto:
    """BatchNormalization, ``nodes`` times with the same parameters."""
    statistics = ["mean2", "var2"] if identity else ["mean", "var"]
    copies = [helper.make_node("Identity", [n[:-1]], [n]) for n in statistics] if identity else []
    names = ["x", *(f"h{i}" for i in range(nodes - 1)), "y"]
    chain = [
        helper.make_node(
            "BatchNormalization", [a, "scale", "bias", *statistics], [b], f"bn_{b}", momentum=0.8, **attributes
        )
        for a, b in itertools.pairwise(names)
    ]
    ends = [value("x", np.float32, ["n", 3, 4, 4])], [value("y", np.float32, ["n", 3, 4, 4])]
    return model([*copies, *chain], *ends, WEIGHTS, opset=opset)


def squares(y: Any, _: Any) -> Any:
    return (y**2).mean(), {"y": y}


def stepped(proto: onnx.ModelProto, batch: Any = None, rate: float = 0.1, **options: Any) -> tuple[Any, Any, Any]:
    tuned = onnx2jax.finetune(onnx2jax.convert(proto), squares, optax.sgd(rate), **options)
    return tuned, *tuned.step(tuned.init(), {"x": X} if batch is None else batch)


def statistics(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return x.mean((0, 2, 3)), x.var((0, 2, 3))


def normalize(x: Any, mean: Any, var: Any) -> Any:
    shape = (-1, 1, 1)
    scale, bias = WEIGHTS["scale"].reshape(shape), WEIGHTS["bias"].reshape(shape)
    return (x - mean.reshape(shape)) / np.sqrt(var.reshape(shape) + 1e-5) * scale + bias


@pytest.mark.parametrize(
    ("opset", "attributes"),
    [
        (5, {"is_test": 1}),
        (9, {}),
        (21, {}),
        *(extended(6, {"is_test": 1}), extended(7, {}), extended(14, {})),
    ],
)
def test_batch_statistics_normalize_and_update_running_ones(opset: int, attributes: Any) -> None:
    proto = normalized(opset, **attributes)
    proto.ir_version = 3 if opset < 7 else proto.ir_version
    tuned, state, metrics = stepped(proto, batchnorm="train")
    mean, var = statistics(X)
    np.testing.assert_allclose(metrics["y"], normalize(X, mean, var), rtol=1e-4, atol=1e-5)
    assert tuned.trainable == ("scale", "bias") and set(state.stats) == {"mean", "var"}
    np.testing.assert_allclose(state.stats["mean"], 0.8 * WEIGHTS["mean"] + 0.2 * mean, rtol=1e-5)
    np.testing.assert_allclose(state.stats["var"], 0.8 * WEIGHTS["var"] + 0.2 * var, rtol=1e-5)


def test_evaluation_and_the_saved_model_use_the_running_statistics() -> None:
    tuned, state, _ = stepped(normalized(14), batchnorm="train", rate=0.0)
    expected = normalize(X, np.asarray(state.stats["mean"]), np.asarray(state.stats["var"]))
    np.testing.assert_allclose(tuned.evaluate(state, {"x": X})["y"], expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(tuned.to_model(state)(X), expected, rtol=1e-5, atol=1e-5)


def test_frozen_statistics_are_used_and_unchanged() -> None:
    tuned, state, metrics = stepped(normalized(14))
    np.testing.assert_allclose(metrics["y"], normalize(X, WEIGHTS["mean"], WEIGHTS["var"]), rtol=1e-5, atol=1e-5)
    assert state.stats == {} and tuned.trainable == ("scale", "bias")
    assert "mean" not in tuned.params(state)


@pytest.mark.parametrize("identity", [False, True])
def test_statistics_shared_by_two_nodes_update_twice(identity: bool) -> None:
    """Also through Identity, by which exporters share a tensor."""
    _, state, metrics = stepped(normalized(15, nodes=2, identity=identity), batchnorm="train")
    first = normalize(X, *statistics(X))
    expected = 0.8 * (0.8 * WEIGHTS["mean"] + 0.2 * statistics(X)[0]) + 0.2 * statistics(first)[0]
    np.testing.assert_allclose(state.stats["mean"], expected, rtol=1e-4)
    np.testing.assert_allclose(metrics["y"], normalize(first, *statistics(first)), rtol=1e-3, atol=1e-4)


def test_statistics_update_with_each_microbatch() -> None:
    _, state, _ = stepped(normalized(15), batchnorm="train", accumulate=2)
    mean = WEIGHTS["mean"]
    for part in (X[:3], X[3:]):
        mean = 0.8 * mean + 0.2 * statistics(part)[0]
    np.testing.assert_allclose(state.stats["mean"], mean, rtol=1e-5)


def test_gradients_through_batch_statistics_match_torch() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not a dependency")
    tuned = onnx2jax.finetune(
        onnx2jax.convert(normalized(15)), lambda y, b: (y * b["w"]).sum(), optax.sgd(1.0), batchnorm="train"
    )
    w = RNG.normal(size=X.shape).astype(np.float32)
    state, _ = tuned.step(tuned.init(), {"x": X, "w": w})
    layer = torch.nn.BatchNorm2d(3, momentum=0.2)
    with torch.no_grad():
        for name, p in zip(WEIGHTS, (layer.weight, layer.bias, layer.running_mean, layer.running_var), strict=True):
            p.copy_(torch.from_numpy(WEIGHTS[name]))
    (layer(torch.from_numpy(X)) * torch.from_numpy(w)).sum().backward()
    np.testing.assert_allclose(WEIGHTS["scale"] - state.params["scale"], layer.weight.grad, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(WEIGHTS["bias"] - state.params["bias"], layer.bias.grad, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(state.stats["mean"], layer.running_mean, rtol=1e-5)
    # PyTorch updates the running variance with the variance over n - 1, ONNX with that over n.
    count = X.size // 3
    updated = (layer.running_var.numpy() - 0.8 * WEIGHTS["var"]) * (count - 1) / count
    np.testing.assert_allclose(state.stats["var"] - 0.8 * WEIGHTS["var"], updated, rtol=1e-4)


def in_branch() -> onnx.ModelProto:
    """BatchNormalization in the branches of an If, its parameters outside."""
    branch = helper.make_graph(
        [helper.make_node("BatchNormalization", ["x", "scale", "bias", "mean", "var"], ["b"])],
        "branch",
        [],
        [value("b", np.float32, None)],
    )
    node = helper.make_node("If", ["on"], ["y"], then_branch=branch, else_branch=branch)
    ends = [value("x", np.float32, ["n", 3, 4, 4]), value("on", np.bool_, [])], [value("y", np.float32, None)]
    return model([node], *ends, WEIGHTS)


def in_function() -> onnx.ModelProto:
    """BatchNormalization in a function, whose formal parameters have other names."""
    body = [helper.make_node("BatchNormalization", ["a", "s", "c", "m", "v"], ["r"])]
    imports = [helper.make_opsetid("", 21)]
    function = helper.make_function("local", "Norm", ["a", "s", "c", "m", "v"], ["r"], body, imports)
    node = helper.make_node("Norm", ["x", "scale", "bias", "mean", "var"], ["y"], domain="local")
    ends = [value("x", np.float32, ["n", 3, 4, 4])], [value("y", np.float32, None)]
    return model([node], *ends, WEIGHTS, opsets={"local": 1}, functions=[function])


@pytest.mark.parametrize("proto", [in_branch(), in_function()], ids=["branch", "function"])
def test_statistics_inside_nodes_are_excluded_and_cannot_be_updated(proto: onnx.ModelProto) -> None:
    source = onnx2jax.convert(proto)
    assert onnx2jax.finetune(source, squares, optax.sgd(0.1)).trainable == ("scale", "bias")
    with pytest.raises(TrainingFormError, match="cannot return its running statistics; leave batchnorm='frozen'"):
        onnx2jax.finetune(source, squares, optax.sgd(0.1), batchnorm="train")


def test_statistics_that_the_model_computes_raise() -> None:
    proto = normalized(15)
    proto.graph.node.insert(0, helper.make_node("Abs", ["mean"], ["m"]))
    proto.graph.node[1].input[3] = "m"
    with pytest.raises(TrainingFormError, match=r"'m', 'var'\] are computed by the model"):
        stepped(proto, batchnorm="train")


def dropping(opset: int, mask: bool = False, inside: bool = False) -> onnx.ModelProto:
    """x * w through Dropout of ratio 0.25, in any opset."""
    ratio = {"ratio": 0.25} if opset < 12 else {}
    inputs = ["p", "ratio"] if opset >= 12 else ["p"]
    node = helper.make_node("Dropout", inputs, ["d", "mask"] if mask else ["d"], "drop", **ratio)
    nodes = [node]
    if inside:
        branch = helper.make_graph([node], "branch", [], [value("d", np.float32, None)])
        nodes = [helper.make_node("If", ["on"], ["d"], then_branch=branch, else_branch=branch)]
    nodes = [helper.make_node("Mul", ["x", "w"], ["p"]), *nodes, helper.make_node("Identity", ["d"], ["y"])]
    constants = {"w": np.ones(1000, np.float32), "ratio": np.float32(0.25), "on": np.array(True)}
    ends = [value("x", np.float32, ["n", 1000])], [value("y", np.float32, ["n", 1000])]
    if mask:
        ends[1].append(value("mask", np.float32 if opset < 10 else np.bool_, None))
    return model(nodes, *ends, constants, opset=opset)


ONES = {"x": np.ones((2, 1000), np.float32)}


DROPOUTS = [*itertools.product((7, 10, 12, 21), (False, True))]


@pytest.mark.parametrize(("opset", "inside"), canaries(DROPOUTS, [(7, False), (10, True), (12, False), (21, True)]))
def test_dropout_is_active_in_steps_and_not_in_evaluation(opset: int, inside: bool) -> None:
    tuned, state, metrics = stepped(dropping(opset, inside=inside), ONES, dropout=True, rate=0.0)
    y = np.asarray(metrics["y"])
    np.testing.assert_allclose(np.unique(y), [0, 4 / 3], rtol=1e-6)
    assert 0.2 < (y == 0).mean() < 0.3
    np.testing.assert_array_equal(tuned.evaluate(state, ONES)["y"], ONES["x"])


@pytest.mark.parametrize("opset", [7, extended(10), 13])
def test_a_rate_replaces_the_ratio_and_matches_the_mask(opset: int) -> None:
    tuned = onnx2jax.finetune(
        onnx2jax.convert(dropping(opset, mask=True)),
        lambda o, _: (o.y.sum(), {"y": o.y, "mask": o.mask}),
        optax.sgd(0.0),
        dropout=0.9,
    )
    _, metrics = tuned.step(tuned.init(), ONES)
    assert 0.87 < (metrics["y"] == 0).mean() < 0.93
    np.testing.assert_array_equal(metrics["y"] != 0, metrics["mask"] != 0)
    np.testing.assert_allclose(np.unique(metrics["y"]), [0, 10], rtol=1e-5)


def test_a_rate_out_of_range_raises() -> None:
    with pytest.raises(TrainingFormError, match=r"dropout is 1.0; .* 0 <= rate < 1"):
        stepped(dropping(13), ONES, dropout=1.0)


def test_dropout_is_reproducible_by_key_or_seed_and_differs_between_steps() -> None:
    tuned = onnx2jax.finetune(onnx2jax.convert(dropping(13)), squares, optax.sgd(0.0), dropout=True)

    def masks(key: Any) -> list[np.ndarray]:
        state, found = tuned.init(key), []
        for _ in range(2):
            state, metrics = tuned.step(state, ONES)
            found.append(np.asarray(metrics["y"]))
        return found

    key = jax.random.key(5)
    a, b, c = masks(5), masks(key), masks(6)
    np.testing.assert_array_equal(masks(5), a)
    np.testing.assert_array_equal(b, a)
    assert not key.is_deleted()
    assert not np.array_equal(a[0], a[1]) and not np.array_equal(a[0], c[0]) and not np.array_equal(b[0], b[1])


def test_dropout_with_microbatches_and_remat() -> None:
    _, _, metrics = stepped(dropping(13), ONES, dropout=True, accumulate=2)
    np.testing.assert_allclose(np.unique(metrics["y"]), [0, 2 / 3, 4 / 3], rtol=1e-6)  # a mean of two masks
    _, _, plain = stepped(dropping(13), ONES, dropout=True)
    _, _, saving = stepped(dropping(13), ONES, dropout=True, remat="*")
    np.testing.assert_array_equal(plain["y"], saving["y"])


def residual() -> onnx.ModelProto:
    """Two branches that join, one of them reshaped by shape arithmetic."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], "block/a"),
        helper.make_node("Shape", ["a"], ["s"], "shape"),
        helper.make_node("Tanh", ["x"], ["side"], "side"),
        helper.make_node("Tanh", ["a"], ["t"], "middle"),
        helper.make_node("Reshape", ["t", "s"], ["r"], "block/r"),
        helper.make_node("Add", ["r", "side"], ["y"], "sum"),
    ]
    ends = [value("x", np.float32, ["n", 4])], [value("y", np.float32, ["n", 4])]
    return model(nodes, *ends, {"w": RNG.normal(size=(4, 4)).astype(np.float32)})


def test_remat_keeps_shapes_static_and_topological_order() -> None:
    proto, batch = residual(), {"x": RNG.normal(size=(3, 4)).astype(np.float32)}
    tuned, a, _ = stepped(proto, batch, remat="block/*")
    _, b, _ = stepped(proto, batch)
    np.testing.assert_allclose(a.params["w"], b.params["w"], rtol=1e-6)
    text = str(jax.make_jaxpr(tuned._train_step)(a, tuned._frozen, batch))
    assert "remat" in text
