"""Sharding rules by name, and models that give the results of one device with them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from onnx import TensorProto, helper

import onnx2jax
from onnx2jax.errors import ShardingError
from onnx2jax.runtime import jitted
from onnx2jax.sharding.plans import by_rules
from tests.support.helpers import ROOT, bytes_per_device, mesh
from tests.support.models import cut_in_the_middle, mlp, model, value
from tests.support.training import linear

PARAMS = {"a.weight": np.zeros((4, 6), np.float32), "a.bias": np.zeros(6, np.float32), "scale": np.float32(1)}


def by_name(params: Any, over: jax.sharding.Mesh, rules: Any) -> dict[str, NamedSharding]:
    return dict(by_rules(params, (), over, rules).params)


def by_batch(values: Any, over: jax.sharding.Mesh) -> dict[str, NamedSharding]:
    return dict(by_rules({}, (), over, {}).of_inputs(values, True))


def test_the_first_matching_rule_applies() -> None:
    rules = {"a.*": P(None, "model"), "*.weight": P("model")}
    found = by_name(
        {"a.weight": np.zeros((4, 6)), "b.weight": np.zeros((4, 6)), "c": np.zeros(3)}, mesh(model=2), rules
    )
    assert {n: s.spec for n, s in found.items()} == {"a.weight": P(None, "model"), "b.weight": P("model"), "c": P()}


def test_a_pattern_equal_to_the_name_matches_literally() -> None:
    assert by_name({"w[0]": np.zeros(4)}, mesh(model=2), {"w[0]": P("model")})["w[0]"].spec == P("model")


def test_shapes_without_arrays_are_accepted() -> None:
    found = by_name({"w": jax.ShapeDtypeStruct((8, 2), np.float32)}, mesh(data=4, model=2), {"w": P("data", "model")})
    assert found["w"].shard_shape((8, 2)) == (2, 1)


def test_explicit_axes_become_auto() -> None:
    # With Explicit axes, the default of jax.make_mesh, shardings would be part of the type of every value.
    explicit = mesh(data=2)
    assert by_name(PARAMS, explicit, {})["scale"].mesh.axis_types == (AxisType.Auto,)


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        (P("tensor"), "names axis 'tensor'; the mesh has ['data', 'model']"),
        (P("model", "model"), "uses axis 'model' twice"),
        (P(("model", "model")), "uses axis 'model' twice"),
        (P(None, None, "model"), "the spec has 3 entries, the array 2 axes"),
        (P(None, "data"), "axis 1 of 6 cannot be divided evenly over 4 devices. Pad it to 8"),
        (P(("data", "model")), "axis 0 of 4 cannot be divided evenly over 8 devices. Pad it to 8"),
        ("model", "'model' is not a PartitionSpec"),
    ],
    ids=str,
)
def test_a_spec_that_does_not_fit_is_refused(spec: Any, match: str) -> None:
    with pytest.raises(ShardingError, match=re.escape(match)):
        by_name(PARAMS, mesh(data=4, model=2), {"*.weight": spec})


def test_a_scalar_cannot_be_sharded() -> None:
    with pytest.raises(ShardingError, match=r"'scale' of shape \[\], rule 's\*': .*1 entries, the array 0 axes"):
        by_name(PARAMS, mesh(data=4), {"s*": P("data")})


def test_an_empty_array_can_be_sharded() -> None:
    (sharding,) = by_name({"w": np.zeros((0, 3))}, mesh(data=4), {"w": P("data")}).values()
    assert jax.device_put(np.zeros((0, 3)), sharding).shape == (0, 3)


def test_a_batch_is_sharded_over_the_first_axis_without_its_scalars() -> None:
    found = by_batch({"x": np.zeros((8, 3)), "rate": np.float32(0.1)}, mesh(data=4))
    assert {n: s.spec for n, s in found.items()} == {"x": P("data"), "rate": P()}
    with pytest.raises(ShardingError, match=r"'x' of shape \[6, 3\], the batch: .* axis 0 of 6 .* over 4 devices"):
        by_batch({"x": np.zeros((6, 3))}, mesh(data=4))


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    by_name(PARAMS, mesh(model=2), {"*.weight": P(), "scale": P()})
    with pytest.raises(ShardingError, match=r"'a\.wieght' matches none of the 3 names; the closest are \['a\.weight'"):
        by_name(PARAMS, mesh(model=2), {"a.wieght": P()})


def test_bytes_per_device() -> None:
    array = np.zeros((8, 4), np.float32)
    over = mesh(data=4, model=2)
    divided = jax.device_put(array, NamedSharding(over, P("data")))
    assert set(bytes_per_device(divided).values()) == {32}
    whole = {"w": jax.device_put(array, NamedSharding(over, P())), "key": jax.random.key(0)}
    assert sorted(bytes_per_device(whole).values()) == [128] * 7 + [136]


def test_one_device_is_a_mesh_too() -> None:
    array = np.arange(6, dtype=np.float32).reshape(3, 2)
    (sharding,) = by_name({"w": array}, mesh(data=1, model=1), {"w": P("data", "model")}).values()
    np.testing.assert_array_equal(jax.device_put(array, sharding), array)


# ---------------------------------------------------------------------------------------------- models

RULES = {"w1": P(None, "model"), "b1": P("model"), "w2": P("model", None)}
"""The first layer by columns, the second by rows: one all-reduce per pass."""
X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
MESHES: Any = {"data": ({"data": 8}, {}), "data and model": ({"data": 4, "model": 2}, RULES), "one": ({"data": 1}, {})}


@pytest.mark.parametrize(("axes", "rules"), MESHES.values(), ids=MESHES)
def test_a_model_over_devices_computes_the_same(axes: dict[str, int], rules: Any) -> None:
    alone = onnx2jax.convert(mlp())
    spread = onnx2jax.convert(mlp(), mesh=mesh(**axes), shardings=rules)
    result = spread(X)
    np.testing.assert_allclose(result, alone(X), rtol=1e-5)
    assert result.sharding.shard_shape(result.shape) == (8 // axes["data"], 2)
    np.testing.assert_allclose(spread.run(None, {"x": X})[0], alone(X), rtol=1e-5)
    np.testing.assert_allclose(spread.apply(spread.params, X), alone(X), rtol=1e-5)
    np.testing.assert_allclose(spread(X[:5]), alone(X[:5]), rtol=1e-5)  # indivisible, hence replicated


def test_each_device_holds_its_shards_of_the_weights() -> None:
    spread = onnx2jax.convert(mlp(), mesh=mesh(data=4, model=2), shardings=RULES)
    assert spread.placement is not None
    placed = spread.placement.put_params(spread.params)
    assert {n: v.sharding.spec for n, v in placed.items()} == RULES | {"b2": P()}
    assert set(bytes_per_device(placed).values()) == {(4 * 8 + 8 + 8 * 2) * 4 // 2 + 2 * 4}
    single = {"w1": spread.params["w1"] * 2}
    np.testing.assert_allclose(spread.with_params(single)(X), onnx2jax.convert(mlp()).apply(single, X), rtol=1e-5)


@pytest.mark.parametrize(("axes", "rules"), MESHES.values(), ids=MESHES)
def test_a_users_own_jit_and_gradient(axes: dict[str, int], rules: Any) -> None:
    alone = onnx2jax.convert(mlp())
    over = mesh(**axes)
    params = jax.device_put(dict(alone.params), by_name(alone.params, over, rules))
    x = jax.device_put(X, by_batch({"x": X}, over)["x"])
    expected = jax.grad(lambda p: (alone.apply(p, X) ** 2).sum())(alone.params)
    gradients = jax.jit(jax.grad(lambda p, x: (alone.apply(p, x) ** 2).sum()))(params, x)
    for name, g in gradients.items():
        np.testing.assert_allclose(g, expected[name], rtol=1e-4)
        assert g.sharding.is_equivalent_to(params[name].sharding, g.ndim)


def test_rules_apply_to_inputs_too() -> None:
    spread = onnx2jax.convert(mlp(), mesh=mesh(data=2, model=2), shardings={"x": P("data", "model"), **RULES})
    assert spread.placement is not None
    assert spread.placement.put_inputs({"x": X})["x"].sharding.spec == P("data", "model")
    np.testing.assert_allclose(spread(X), onnx2jax.convert(mlp())(X), rtol=1e-5)
    with pytest.raises(ShardingError, match=r"'x' of shape \[5, 4\], rule 'x': .* axis 0 of 5 .* over 2 devices"):
        spread(X[:5])


def test_a_committed_array_moves_to_the_mesh() -> None:
    spread = onnx2jax.convert(mlp(), mesh=mesh(data=4))
    x = jax.device_put(X, jax.devices("cpu")[7])
    np.testing.assert_allclose(spread(x), onnx2jax.convert(mlp())(X), rtol=1e-5)


def test_stages_on_the_host_between_devices() -> None:
    proto = cut_in_the_middle()
    spread = onnx2jax.convert(proto, mesh=mesh(data=2, model=2), shardings={"v": P(None, "model")})
    for result, expected in zip(spread(X), onnx2jax.convert(proto)(X), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-5)
    assert not spread.jitted


def test_lists_of_arrays() -> None:
    sequence = helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, ["n", 4])
    nodes = [helper.make_node("ConcatFromSequence", ["s"], ["y"], axis=0)]
    proto = model(nodes, [sequence], [value("y", np.float32, ["m", 4])])
    spread = onnx2jax.convert(proto, mesh=mesh(data=4))
    np.testing.assert_array_equal(spread([X, X[:3]]), np.concatenate([X, X[:3]]))


OVERLAPPING = """
import jax
jax.config.update("jax_num_cpu_devices", 8)
from concurrent.futures import ThreadPoolExecutor
from tests.support import resumption

def many_steps(name):
    training = resumption.TRAININGS[name]()
    resumption.run(training, training.init(), {"epoch": 0, "batch": 0}, 300)

with ThreadPoolExecutor() as threads:
    list(threads.map(many_steps, 2 * ["finetune on 8 devices", "training_info on 8 devices"]))
"""


@pytest.mark.usefixtures("standard_promotion")  # optax
def test_calls_on_cpu_devices_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = mock.MagicMock()
    monkeypatch.setattr(jitted, "_turn", turns)
    over: Any = {"mesh": mesh(data=2)}
    batch, source = {"x": X}, onnx2jax.convert(mlp(), **over)
    tuned = onnx2jax.finetune(source, lambda y, _: (y**2).mean(), optax.sgd(0.1))
    trainer = onnx2jax.TrainingModel(linear(), **over)
    state, linear_batch = tuned.init(), {"x": X[:, :2], "z": X[:, :1]}
    calls: dict[str, Callable[[], Any]] = {
        "a model": lambda: source(X),
        "fine-tuning": lambda: tuned.step(state, batch),
        "training_info": lambda: trainer.train_step(linear_batch),
        "one device": lambda: onnx2jax.convert(mlp())(X),
    }
    taken = {}
    for name, call in calls.items():
        turns.reset_mock()
        call()
        taken[name] = turns.__enter__.called and turns.__exit__.called
    assert taken == dict.fromkeys(calls, True) | {"one device": False}


@pytest.mark.extended
def test_concurrent_calls_on_cpu_devices_do_not_deadlock() -> None:
    """Without serialization such calls deadlock, and XLA ends the process; hence a subprocess, with many steps."""
    subprocess.run([sys.executable, "-c", OVERLAPPING], check=True, cwd=ROOT)


def test_text_stays_on_the_host() -> None:
    nodes = [helper.make_node("StringConcat", ["x", "x"], ["y"])]
    proto = model(nodes, [value("x", object, ["n"])], [value("y", object, ["n"])])
    spread = onnx2jax.convert(proto, mesh=mesh(data=4))
    assert spread(np.array(["a", "b"], object)).tolist() == ["aa", "bb"]


def test_a_placement_as_text() -> None:
    spread = onnx2jax.convert(mlp(), mesh=mesh(data=4, model=2), shardings=RULES)
    first, *rows = str(spread.placement).splitlines()
    assert first == "mesh data: 4 x model: 2 over devices 0, 1, 2, 3, 4, 5, 6, 7"
    assert rows == ["w1  P(None, 'model')", "b1  P('model',)", "w2  P('model', None)", "b2  P()"]


def test_random_draws_are_those_of_one_device() -> None:
    nodes = [helper.make_node("RandomUniformLike", ["x"], ["r"]), helper.make_node("Add", ["x", "r"], ["y"])]
    proto = model(nodes, [value("x", np.float32, ["n", 4])], [value("y", np.float32, ["n", 4])])
    key = jax.device_put(jax.random.key(3), jax.devices("cpu")[0])
    spread = onnx2jax.convert(proto, mesh=mesh(data=4))
    np.testing.assert_array_equal(spread(X, rng=key), onnx2jax.convert(proto)(X, rng=key))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"shardings": RULES}, "shardings= needs the mesh whose axes it names"),
        ({"mesh": {"data": 2}, "device_configuration": "c"}, "pass one of them"),
        ({"mesh": {"data": 2}, "shardings": {"w3": P("data")}}, "'w3' matches none of the 5 names"),
        ({"mesh": {"data": 2}, "shardings": {"w*": P("model")}}, "names axis 'model'; the mesh has ['data']"),
        ({"mesh": {"data": 3}, "shardings": {"w1": P(None, "data")}}, "axis 1 of 8 cannot be divided evenly over 3"),
        ({"mesh": {"data": 4}, "shardings": {"b1": P(None, "data")}}, "the spec has 2 entries, the array 1 axes"),
        ({"mesh": {"data": 2}, "devices": {}}, "maps the labels of a device_configuration="),
    ],
    ids=str,
)
def test_arguments_that_do_not_fit_are_refused(arguments: dict[str, Any], match: str) -> None:
    if "mesh" in arguments:
        arguments = arguments | {"mesh": mesh(**arguments["mesh"])}
    with pytest.raises(ShardingError, match=re.escape(match)):
        onnx2jax.convert(mlp(), **arguments)
