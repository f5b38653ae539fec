"""Pipeline stages on separate devices give the results of one device, in calls, gradients and training."""

from __future__ import annotations

import itertools
import pickle
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from onnx import helper

import onnx2jax
from onnx2jax.errors import InputShapeError, ShardingError
from onnx2jax.model.devices.explained import BETWEEN_STAGES, programs
from onnx2jax.runtime.multi_device_jit import Spread
from onnx2jax.sharding import stages
from onnx2jax.sharding.propagation import key
from onnx2jax.sharding.stages import Staged
from tests.conformance.test_devices import annotate
from tests.sharding import networks
from tests.sharding.networks import alone, suggested_mesh, written
from tests.support.helpers import bytes_per_device, mesh
from tests.support.models import cut_in_the_middle, mlp, model, text_model, value
from tests.support.tiers import canaries, extended

NETWORKS = [name for name in networks.NETWORKS if name != "gpt, packed by heads"]
SIZES = {"4 bits": (4, 4)}
"""Vocabulary size and layers, else (8, 2): float32 embeddings are large beside 4-bit layers, and shift the cuts."""
MICROBATCHES = {("bert", 1): 4, ("gpt, packed", 2): 2}
X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)


def staged(proto: Any, stages: int = 2, **named: Any) -> tuple[onnx2jax.Model, Staged]:
    converted = onnx2jax.convert(proto, stages=stages, **named)
    assert isinstance(converted.placement, Staged)
    return converted, converted.placement


def same(results: Any, expected: Any, atol: float = 1e-5) -> None:
    assert jax.tree.structure(results) == jax.tree.structure(expected)
    for r, e in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(r, e, rtol=1e-5, atol=atol)


@pytest.mark.parametrize(
    ("name", "data"), canaries(itertools.product(NETWORKS, (1, 2)), [("bert", 1), ("gpt, packed", 2)])
)
def test_stages_of_networks(name: str, data: int) -> None:
    network = written(name, *SIZES.get(name, (8, 2)))
    over: Any = {"mesh": mesh(stage=2, data=2), "shardings": "data"} if data > 1 else {}
    converted, placement = staged(network.proto, microbatches=MICROBATCHES.get((name, data), 1), **over)
    results = jax.tree.leaves(converted(**network.inputs))
    same(results, alone(name, *SIZES.get(name, (8, 2))))
    assert {d.id for d in results[0].devices()} == {*range(data, 2 * data)}

    held = bytes_per_device(placement.put_params(converted.params))
    assert sorted(d.id for d in held) == [*range(2 * data)]
    each = sum(v.nbytes for v in converted.params.values()) / 2
    assert max(abs(n - each) for n in held.values()) < 0.05 * each


@pytest.mark.long
@pytest.mark.parametrize("name", ["bert", "gpt, packed"])
def test_twelve_layers_in_four_stages(name: str) -> None:
    network = written(name, 8, 12)
    converted, placement = staged(network.proto, 4, mesh=mesh(stage=4, data=2), shardings="data", microbatches=2)
    same(converted(**network.inputs), onnx2jax.convert(network.proto)(**network.inputs))
    held = bytes_per_device(placement.put_params(converted.params))
    each = sum(v.nbytes for v in converted.params.values()) / 4
    assert max(abs(n - each) for n in held.values()) < 0.05 * each
    handed = [
        c.bytes for p in programs(converted, (), network.inputs) for c in p.exchanges() if c.kind == BETWEEN_STAGES
    ]
    half = networks.BATCH * networks.LENGTH * networks.HIDDEN * 4 // 2
    assert [n for n in handed if n >= half] == [half] * 3


def test_values_between_stages() -> None:
    converted, _ = staged(mlp())
    first, second = programs(converted, (X,), {})
    assert list(first.exchanges()) == []
    assert [(c.kind, c.bytes) for c in second.exchanges()] == [(BETWEEN_STAGES, 8 * 8 * 4)]
    text = converted.explain_sharding(jax.ShapeDtypeStruct(X.shape, X.dtype))
    assert "stage 1 on devices 1: 2 parameters" in text
    assert text.splitlines()[-1].split() == ["between", "stages", "1", "256"]


def tied() -> onnx.ModelProto:
    """An embedding used by the first stage and, tied, by the last."""
    rng = np.random.default_rng(0)
    weights = {n: rng.normal(size=s).astype(np.float32) for n, s in {"words": (8, 4), "w": (4, 4)}.items()}
    nodes = [
        helper.make_node("Gather", ["words", "ids"], ["x"]),
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Transpose", ["words"], ["head"], perm=[1, 0]),
        helper.make_node("MatMul", ["h", "head"], ["y"]),
    ]
    return model(nodes, [value("ids", np.int64, ["n"])], [value("y", np.float32, ["n", 8])], weights)


def test_gradients_of_a_weight_that_stages_share() -> None:
    ids = np.array([1, 7, 3, 3])

    def gradients(m: onnx2jax.Model) -> Any:
        return jax.grad(lambda p: (m.apply(p, ids) ** 2).mean())(m.params)

    found = gradients(staged(tied(), microbatches=2)[0])
    same(dict(found), dict(gradients(onnx2jax.convert(tied()))))
    assert {d.id for d in found["words"].devices()} == {0}


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    "over",
    [
        extended({}, id="stages"),
        pytest.param({"mesh": mesh(stage=2, data=2)}, id="stages and data"),
    ],
)
def test_training(over: Any) -> None:
    batch = {"x": X, "label": np.arange(8) % 2}

    def loss(logits: Any, batch: Any) -> Any:
        each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return each.mean(), {"worst": each.max()}

    def losses(m: onnx2jax.Model) -> Any:
        optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.05))
        tuned = onnx2jax.finetune(m, loss, optimizer, trainable="*")
        state, seen = tuned.init(), []
        for _ in range(3):
            state, metrics = tuned.step(state, batch)
            seen.append(jax.tree.map(float, dict(metrics)))
        return [*seen, float(tuned.evaluate(state, batch)["loss"])], tuned.to_model(state)(X), state

    expected, after, _ = losses(onnx2jax.convert(mlp()))
    found, results, state = losses(staged(mlp(), microbatches=4, **over)[0])
    same(found, expected)
    same(results, after)
    w1, w2 = ({d.id for d in state.params[n].devices()} for n in ("w1", "w2"))
    assert w1.isdisjoint(w2)
    assert {d.id for d in jax.tree.leaves(state.opt_state)[1].devices()} <= w1 | w2


@pytest.mark.usefixtures("standard_promotion")
def test_training_that_stages_do_not_support() -> None:
    converted, _ = staged(mlp())

    def tuned(optimizer: Any = None, **options: Any) -> onnx2jax.training.FineTuning:
        return onnx2jax.finetune(
            converted, lambda y, _: (y**2).mean(), optimizer or optax.sgd(0.1), trainable="*", **options
        )

    with pytest.raises(ShardingError, match="leave out accumulate="):
        tuned(accumulate=2)
    with pytest.raises(ShardingError, match="a line search re-evaluate the loss, which is unsupported"):
        search = tuned(optax.lbfgs())
        search.step(search.init(), {"x": X})


def shapes_across() -> onnx.ModelProto:
    """The second stage reshapes to the input's shape, which the first stage reads."""
    rng = np.random.default_rng(0)
    weights = {f"w{i}": rng.normal(size=(4, 4)).astype(np.float32) for i in range(2)}
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("MatMul", ["x", "w0"], ["h"]),
        helper.make_node("MatMul", ["h", "w1"], ["z"]),
        helper.make_node("Reshape", ["z", "shape"], ["y"]),
    ]
    return model(nodes, [value("x", np.float32, ["n", 4])], [value("y", np.float32, ["n", 4])], weights)


def test_shapes_are_known_in_later_stages() -> None:
    plain, (spread, _) = onnx2jax.convert(shapes_across()), staged(shapes_across())
    same(spread(X), plain(X))
    same(jax.grad(lambda x: spread(x).sum())(X), jax.grad(lambda x: plain(x).sum())(X))


def test_a_stage_on_the_host_and_copies() -> None:
    spread, _ = staged(cut_in_the_middle())
    same(list(spread(X)), list(onnx2jax.convert(cut_in_the_middle())(X)))
    spread, placement = staged(mlp(), microbatches=2)
    same(pickle.loads(pickle.dumps(spread))(X), onnx2jax.convert(mlp())(X))
    same(spread.with_params({"b2": np.ones(2, np.float32)})(X), spread(X) - spread.params["b2"] + 1)
    same(spread.values(X, names="h")["h"], onnx2jax.convert(mlp()).values(X, names="h")["h"])
    text = "mesh stage: 2 over devices 0, 1\nstage 0 on devices 0: 2 parameters\nstage 1 on devices 1: 2 parameters"
    assert str(placement) == text
    assert str(spread.summary(dims={"batch": 8})) == str(onnx2jax.convert(mlp()).summary(dims={"batch": 8}))
    assert "stage 1 on devices 1" in spread.explain()


def test_a_file_whose_stages_alternate() -> None:
    proto = mlp()
    proto.ir_version = 11
    proto.configuration.add(name="c", num_devices=4)
    for node, stage in zip(proto.graph.node, (5, 0, None, 5), strict=True):
        annotate(node, "", stage=stage)
    converted = onnx2jax.convert(proto, device_configuration="c", microbatches=2)
    assert isinstance(converted.placement, Staged)
    nodes = [[n.op_type for n in part] for _, part in converted.placement.segments(converted.graph)]
    assert nodes == [["Gemm"], ["Relu", "MatMul"], ["Add"]]
    same(converted(X), onnx2jax.convert(mlp())(X))
    assert [[d.id for d in p.mesh.devices.flat] for p in converted.placement.parts] == [[0, 1], [2, 3]]
    assert {d.id for d in jax.device_put(X, converted.placement.params["w1"]).devices()} == {2, 3}


def mixing() -> onnx.ModelProto:
    """Subtracts the mean over the batch, so microbatches would differ."""
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["mean"], axes=[0]),
        helper.make_node("Sub", ["x", "mean"], ["y"]),
    ]
    return model(nodes, [value("x", np.float32, ["n", 4])], [value("y", np.float32, ["n", 4])], opset=13)


def summed() -> onnx.ModelProto:
    nodes = [helper.make_node("Relu", ["x"], ["r"]), helper.make_node("ReduceSum", ["r"], ["y"], keepdims=0)]
    return model(nodes, [value("x", np.float32, ["n", 4])], [value("y", np.float32, [])], opset=13)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"stages": 9}, "stages=9: each stage needs a device, and there are 8"),
        ({"stages": 0}, "stages is 0; it is a number of stages from 1, or None for no stages"),
        ({"stages": -1}, "stages is -1"),
        ({"stages": "2"}, "stages is '2'"),
        ({"stages": 9, "mesh": mesh(data=8)}, "stages=9: each stage needs a device, and there are 8"),
        ({"stages": 5}, "5 stages for 4 nodes: each stage needs a node, so stages=4 is the maximum"),
        ({"stages": 2, "mesh": mesh(stage=4)}, "stages=2, and axis 'stage' of the mesh has 4 devices: stages=4"),
        ({"stages": 2, "microbatches": 0}, "microbatches=0"),
        ({"microbatches": 2}, "microbatches=2 need pipeline stages"),
        ({"stages": 2, "device_configuration": "c"}, "pass one of them"),
    ],
    ids=str,
)
def test_invalid_arguments_are_refused(options: Any, match: str) -> None:
    with pytest.raises(ShardingError, match=re.escape(match)):
        onnx2jax.convert(mlp(), **options)


@pytest.mark.parametrize(
    ("options", "axes"),
    [
        ({"mesh": mesh(data=4, model=2)}, {"stage": 2, "data": 2, "model": 2}),
        ({"mesh": mesh(data=1, model=6)}, {"stage": 2, "data": 1, "model": 3}),
        ({"mesh": mesh(data=3)}, {"stage": 2, "data": 1}),
        ({"mesh": mesh(data=1)}, {"stage": 2, "data": 1}),
        ({"shardings": "data"}, {"stage": 2, "data": 4}),
        ({"shardings": "fsdp+tensor"}, {"stage": 2, "data": 2, "model": 2}),
        ({"shardings": "tensor", "mesh": mesh(stage=2, data=2)}, {"stage": 2, "model": 4}),
        ({"shardings": {"w1": P(None, ("a", "b"))}}, {"stage": 2, "a": 2, "b": 2}),
    ],
    ids=str,
)
def test_the_suggested_mesh_has_stages(options: Any, axes: dict[str, int]) -> None:
    """No mesh of more devices than there are."""
    with pytest.raises(ShardingError) as caught:
        onnx2jax.convert(mlp(), stages=2, **options)
    suggested = suggested_mesh(caught.value)
    assert dict(suggested.shape) == axes
    staged(mlp(), **options | {"mesh": suggested})


def test_decoders_take_no_stages() -> None:
    proto = onnx2jax.demo_decoder()
    for source, options in ((proto, {"stages": 2}), (onnx2jax.convert(mlp(), stages=2), {})):
        with pytest.raises(ShardingError, match="a decoder takes no pipeline stages") as caught:
            onnx2jax.decoder(source, **options)
    onnx2jax.decoder(proto, mesh=suggested_mesh(caught.value), shardings="tensor")


def test_calls_that_are_refused() -> None:
    spread, _ = staged(mlp(), microbatches=3)
    with pytest.raises(InputShapeError, match=r"3 microbatches do not divide the batch evenly: .'x': 8"):
        spread(X)
    for program in (  # whether or not the model reads a tracer
        lambda: jax.jit(lambda p: spread.apply(p, X))(spread.params),
        lambda: jax.jit(lambda: spread(X))(),
        lambda: jax.jit(lambda x: x + spread(X))(np.float32(1)),
        lambda: jax.jit(jax.grad(lambda x: spread(x).sum()))(X),
        lambda: jax.vmap(jax.jit(spread))(X[None]),
        lambda: jax.lax.scan(lambda c, _: (c, spread(X)), 0, None, 2),
        lambda: jax.eval_shape(lambda: spread(X)),
    ):
        with pytest.raises(ShardingError, match="call it outside of jit, its stages are compiled"):
            program()
    with pytest.raises(ShardingError, match="convert it without stages="):
        spread.export("never written")
    with pytest.raises(ShardingError, match="output 'y' differs between 2 microbatches and the whole batch"):
        staged(mixing(), microbatches=2)[0](X)
    with pytest.raises(ShardingError, match="output 'y' differs"):
        jax.grad(lambda x: staged(mixing(), microbatches=2)[0](x)[0, 0])(X)
    with pytest.raises(ShardingError, match="'y' has no axis along which to concatenate microbatches"):
        staged(summed(), microbatches=2)[0](X)
    same(staged(mixing())[0](X), X - X.mean(0))


@pytest.mark.parametrize("microbatches", [2, pytest.param(1, marks=pytest.mark.extended)])
def test_gradients_inside_vmap_return_to_their_stage(microbatches: int) -> None:
    """JAX itself does not see there on which devices a value was."""
    spread, plain = staged(mlp(), microbatches=microbatches)[0], onnx2jax.convert(mlp())
    batches = np.stack([X, X + 1])

    def gradients(m: onnx2jax.Model) -> Any:
        by_input = jax.vmap(jax.grad(lambda x: (m(x) ** 2).sum()))(batches)
        return by_input, jax.vmap(jax.grad(lambda p, x: (m.apply(p, x) ** 2).sum()), (None, 0))(dict(m.params), batches)

    same(gradients(spread), gradients(plain), atol=1e-4)


def test_computation_follows_its_operands() -> None:
    meshes = [jax.sharding.Mesh(np.array(jax.devices()[i : i + 2]), ("data",)) for i in (0, 2)]
    x, y = (jax.device_put(np.arange(4.0, dtype=np.float32), NamedSharding(m, P("data"))) for m in meshes)
    scale = jnp.float32(2)

    def function(tree: Any, scale: Any) -> Any:
        norm = jnp.sqrt(sum(jnp.sum(v * v) for v in tree.values()))
        return jax.tree.map(lambda v: v / norm * scale, tree), scale + 1, jnp.float32(7)

    spread = Spread(function)
    found = spread({"x": x, "y": y}, scale)
    same(found, function({"x": np.asarray(x), "y": np.asarray(y)}, scale))
    assert [{d.id for d in found[0][n].devices()} for n in "xy"] == [{0, 1}, {2, 3}]


def test_nodes_without_a_stage_join_their_last_producer_or_first_consumer() -> None:
    """Split reads no other node; Neg and Exp read its outputs, and Mul theirs."""
    text = """g (float[4] x) => (float[2] y)
        { p, q = Split <num_outputs = 2> (x)  a = Neg (p)  b = Exp (q)  y = Mul (a, b) }"""
    nodes = onnx2jax.convert(text_model(text)).graph.nodes
    assert stages.staged(nodes, {key(nodes[1]): 1, key(nodes[2]): 2}) == [1, 1, 2, 2]
