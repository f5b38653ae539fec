"""Training over eight devices: losses match one device, the state is sharded by rule, and memory use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import onnx
import pytest
from jax.sharding import PartitionSpec as P

import onnx2jax
from onnx2jax import TrainingModel
from onnx2jax.errors import ShardingError
from tests.conformance.test_devices import annotate, equations
from tests.support.cases import rule
from tests.support.helpers import bytes_per_device, mesh
from tests.support.tiers import extended
from tests.support.training import info, training

F = np.float32
MAIN = """main (float[n,4] x) => (float[n,2] y) <float[4,16] w1, float[16] b1, float[16,2] w2> {
    [first] h = MatMul (x, w1)  [bias] a = Add (h, b1)  c = Tanh (a)  [second] y = MatMul (c, w2) }"""
MOMENTUM = """momentum (float[n,2] z) => (float loss, float[4,16] w1n, float[16] b1n, float[16,2] w2n, float[4,16] v1n,
    float[16] vbn, float[16,2] v2n, int64 tn) <float rate = {0.1}, int64 t = {0}, int64 one = {1},
    float[4,16] v1, float[16] vb, float[16,2] v2> {
    d = Sub (y, z)  q = Mul (d, d)  loss = ReduceMean <keepdims = 0> (q)
    g1, gb, g2 = Gradient <xs = ["w1", "b1", "w2"], zs = ["x", "z"], y = "loss"> (w1, b1, w2, x, z)
    w1n, b1n, w2n, v1n, vbn, v2n = Momentum <alpha = 0.9, beta = 1.0, mode = "standard", norm_coefficient = 0.01>
        (rate, t, w1, b1, w2, g1, gb, g2, v1, vb, v2)
    tn = Add (t, one) }"""
VARIABLES = {"w1": "w1n", "b1": "b1n", "w2": "w2n", "v1": "v1n", "vb": "vbn", "v2": "v2n", "t": "tn"}
RULES = {"[wv]1": P(None, "model"), "[bv]*[1b]": P("model"), "[wv]2": P("model")}
X = np.random.default_rng(0).normal(size=(8, 4)).astype(F)
Z = np.random.default_rng(1).normal(size=(8, 2)).astype(F)
BATCH = {"x": X, "z": Z}
BYTES = 2 * (4 * 16 + 16 + 16 * 2) * 4
"""Bytes of weights and their momenta."""
REST = 8 + 8
"""The count of steps and the random key."""
MESHES: Any = {
    "data": ({"data": 8}, {}, BYTES + REST),
    "data and model": ({"data": 4, "model": 2}, RULES, BYTES // 2 + REST),
    "model": ({"model": 8}, RULES, BYTES // 8 + REST),
    "one": ({"data": 1}, {}, BYTES + REST),
}
"""Axes of the mesh, rules, and the bytes of the state on each device."""


def network(edit: Any = None) -> onnx.ModelProto:
    """A layer of 16 trained by momentum; weights are drawn, momenta start at zero."""
    proto = training(MAIN, info(MOMENTUM, VARIABLES))
    generator = np.random.default_rng(2)
    for graph in (proto.graph, proto.training_info[0].algorithm):
        for v in graph.value_info:
            array = generator.normal(size=[d.dim_value for d in v.type.tensor_type.shape.dim]) * (graph is proto.graph)
            graph.initializer.append(onnx.numpy_helper.from_array(array.astype(F), v.name))
        del graph.value_info[:]
    if edit is not None:
        edit(proto)
    return proto


def losses(trainer: TrainingModel, steps: int = 5) -> list[float]:
    return [float(trainer.train_step(BATCH)["loss"]) for _ in range(steps)]


@rule("TR-41")
@pytest.mark.parametrize(
    ("axes", "rules", "size"),
    [
        pytest.param(*case, id=name) if name == "data and model" else extended(*case, id=name)
        for name, case in MESHES.items()
    ],
)
def test_losses_match_one_device(axes: dict[str, int], rules: Any, size: int, caplog: Any) -> None:
    alone = TrainingModel(network())
    sharded = TrainingModel(network(), mesh=mesh(**axes), shardings=rules)
    expected, shardings = losses(alone), jax.tree.map(lambda v: v.sharding, sharded.state)
    assert expected[4] < expected[0] / 2
    np.testing.assert_allclose(losses(sharded), expected, rtol=1e-5)
    for name, value in sharded.changed().items():
        np.testing.assert_allclose(value, alone.changed()[name], rtol=1e-4, atol=1e-6)
    assert jax.tree.map(lambda v: v.sharding, sharded.state) == shardings
    assert set(bytes_per_device(sharded.state).values()) == {size}
    caplog.clear()
    with jax.log_compiles():
        sharded.train_step(BATCH)
    assert not [r for r in caplog.records if "Compiling" in r.getMessage()]


@rule("TR-41")
def test_the_state_is_sharded_by_rule(tmp_path: Path) -> None:
    sharded = TrainingModel(network(), mesh=mesh(data=4, model=2), shardings=RULES)
    losses(sharded, 2)
    specs = {n: v.sharding.spec for values in (sharded.state.variables, *sharded.state.own) for n, v in values.items()}
    assert specs == {
        "w1": P(None, "model"),
        "b1": P("model"),
        "w2": P("model"),
        "v1": P(None, "model"),
        "vb": P("model"),
        "v2": P("model"),
        "t": P(),
    }
    sharded.initialize()
    assert sharded.state.variables["w1"].sharding.spec == P(None, "model")
    sharded.state, _ = onnx2jax.training.load_checkpoint(
        onnx2jax.training.save_checkpoint(tmp_path / "s", sharded.state), sharded.state
    )
    assert sharded.state.own[0]["v1"].sharding.spec == P(None, "model")
    elsewhere = jax.devices("cpu")[3]
    result = sharded.infer(x=jax.device_put(X, elsewhere))
    np.testing.assert_allclose(result, sharded.to_model()(X), rtol=1e-5)
    assert result.sharding.shard_shape(result.shape) == (2, 2)
    sharded.state, _ = sharded.step(sharded.state, BATCH, jax.device_put(jax.random.key(0), elsewhere))
    sharded.initialize(rng=jax.device_put(jax.random.key(0), elsewhere))


def test_the_program_of_a_step() -> None:
    sharded = TrainingModel(network(), mesh=mesh(data=4, model=2), shardings=RULES)
    jaxpr = jax.make_jaxpr(lambda state, batch: sharded.step(state, batch))(sharded.state, BATCH)
    found = list(equations(jaxpr.jaxpr))
    step = next(e for e in found if e.params.get("name") == "train_step")
    assert not any(step.params["donated_invars"]), "a caller's trace keeps the state"
    assert not {e.primitive.name for e in found} & {"psum", "all_gather", "ppermute", "shard_map"}
    before = sharded.state
    losses(sharded, 1)
    assert all(v.is_deleted() for v in (*before.variables.values(), *before.own[0].values())), "donated"


def test_donated_buffers_are_reused() -> None:
    sharded = TrainingModel(network(), mesh=mesh(data=4, model=2), shardings=RULES, outputs=["loss"])
    state = sharded.init()
    pointers = {s.data.unsafe_buffer_pointer() for s in state.variables["w1"].addressable_shards}
    state, outputs = sharded.step(state, BATCH)
    assert {s.data.unsafe_buffer_pointer() for s in state.variables["w1"].addressable_shards} == pointers
    assert outputs.keys() == {"loss"}


def test_a_batch_that_cannot_be_divided_raises() -> None:
    sharded = TrainingModel(network(), mesh=mesh(data=8))
    with pytest.raises(ShardingError, match=r"'x' of shape \[3, 4\], the batch: .* over 8 devices\. Pad it to 8"):
        sharded.train_step({"x": X[:3], "z": Z[:3]})


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"shardings": {"w1": P()}}, "needs the mesh whose axes it names: mesh=jax.make_mesh"),
        ({"mesh": {"data": 8}, "shardings": {"w3": P()}}, "'w3' matches none of the"),
        ({"mesh": {"data": 8}, "shardings": {"v2": P(None, "data")}}, "'v2' of shape .* axis 1 of 2 cannot be divided"),
        ({"mesh": {"data": 8}, "device_configuration": "c"}, "pass one of them"),
        ({"device_configuration": "c"}, r"'c' is not one of the model's, which are \[\]"),
    ],
    ids=str,
)
def test_invalid_arguments_raise(options: dict[str, Any], match: str) -> None:
    if "mesh" in options:
        options = options | {"mesh": mesh(**options["mesh"])}
    with pytest.raises(ShardingError, match=match):
        TrainingModel(network(), **options)


# ---------------------------------------------------------------------------------------------- configurations


def configured(proto: Any) -> None:
    """Shards the first layer by columns, the second by rows, and the first momentum by columns, over 2 devices."""
    proto.ir_version = 11
    proto.configuration.add(name="c", num_devices=2)
    first, bias, _, second = proto.graph.node
    annotate(first, "w1", [(1, 2)])
    annotate(bias, "b1", [(0, 2)])
    annotate(second, "w2", [(0, 2)])
    momentum = next(n for n in proto.training_info[0].algorithm.node if n.op_type == "Momentum")
    annotate(momentum, "v1", [(1, 2)])
    annotate(momentum, "v1n", [(1, 2)])


@rule("DV-26")
def test_the_state_inherits_the_placement_of_the_file() -> None:
    alone, sharded = TrainingModel(network()), TrainingModel(network(configured), device_configuration="c")
    np.testing.assert_allclose(losses(sharded), losses(alone), rtol=1e-5)
    specs = {n: v.sharding.spec for values in (sharded.state.variables, *sharded.state.own) for n, v in values.items()}
    assert specs == {
        "w1": P(None, "d0"),
        "b1": P("d0"),
        "w2": P("d0", None),
        "v1": P(None, "d0"),
        "vb": P(),
        "v2": P(),
        "t": P(),
    }
    divided = (4 * 16 + 16 + 16 * 2 + 4 * 16) * 4
    assert set(bytes_per_device(sharded.state).values()) == {BYTES - divided // 2 + REST}
    np.testing.assert_allclose(sharded.infer(x=X), alone.infer(x=X), rtol=1e-4)
