"""Plans: results equal those of one device, weights are sharded, and collectives are those of the textbook."""

from __future__ import annotations

import itertools
import pickle
import re
from collections import Counter
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import onnx2jax
from onnx2jax import Plan
from onnx2jax.errors import ShardingError
from onnx2jax.model.devices.hlo import Collective, collectives
from tests.sharding import networks
from tests.sharding.networks import NETWORKS, alone, suggested_mesh, written
from tests.support import decoders
from tests.support.helpers import bytes_per_device, mesh
from tests.support.models import mlp
from tests.support.tiers import canaries

PLANS = {"data": {"data": 8}, "fsdp": {"data": 4}, "tensor": {"model": 2}, "data+tensor": {"data": 4, "model": 2}}
ROUTED = Counter({"all-gather": networks.LAYERS})
"""XLA does not shard the sort that selects experts, so it gathers each router's logits along the batch."""


def compiled(model: onnx2jax.Model, inputs: dict[str, Any]) -> tuple[list[Any], list[Collective]]:
    """The results of a model, and the collectives of its program."""
    assert model.placement is not None
    with jax.enable_x64(True):
        operands = model.placement.put_params(model.params), model.placement.put_inputs(inputs)
        program = jax.jit(lambda params, inputs: model.apply(params, **inputs)).lower(*operands).compile()
        results = jax.block_until_ready(program(*operands))
    return jax.tree.leaves(results), list(collectives(program.as_text()))


def same(results: Any, expected: list[np.ndarray]) -> None:
    for result, e in zip(jax.tree.leaves(results), expected, strict=True):
        np.testing.assert_allclose(result, e, rtol=1e-5, atol=1e-5)


CANARIES = {
    ("bert", "fsdp"),
    ("gpt, packed", "data"),
    ("gpt, packed by heads", "tensor"),
    ("mixture of experts", "data+tensor"),
    ("4 bits", "tensor"),
}


@pytest.mark.parametrize(("name", "plan"), canaries(itertools.product(NETWORKS, PLANS), CANARIES))
def test_results_shards_and_collectives(name: str, plan: str) -> None:
    network, axes = written(name), PLANS[plan]
    model = onnx2jax.convert(network.proto, mesh=mesh(**axes), shardings=plan)
    results, found = compiled(model, network.inputs)
    same(results, alone(name))

    placement = model.placement
    assert placement is not None
    divided = {n for n, s in placement.params.items() if not s.is_fully_replicated}
    weights = {n for n, v in model.params.items() if v.size > 1}
    whole = {n for n in weights if any(fnmatchcase(n, pattern) for pattern in network.whole)}
    assert divided == {"data": set(), "fsdp": weights}.get(plan, weights - whole)
    parts = axes.get("model", 4)
    held = bytes_per_device(placement.put_params({n: v for n, v in model.params.items() if n in divided}))
    assert set(held.values()) == ({sum(model.params[n].nbytes for n in divided) // parts} if divided else set())

    routed = ROUTED if name.startswith("mixture") and "data" in axes else Counter[str]()
    gathered = Counter({"all-gather": len(divided)}) if plan == "fsdp" else Counter[str]()
    summed = Counter({"all-reduce": network.sums}) if "tensor" in plan else Counter[str]()
    assert Counter(c.kind for c in found) == routed + gathered + summed
    # Each all-reduce is of a value [batch, length, hidden] in float32; all-gathers are of weights.
    hidden = networks.BATCH * networks.LENGTH * networks.HIDDEN * 4 // axes.get("data", 1)
    assert {c.bytes for c in found if c.kind == "all-reduce"} <= {hidden}
    if plan == "fsdp" and not routed:
        assert sorted(c.bytes for c in found) == sorted(model.params[n].nbytes for n in divided)


def test_a_call_and_its_gradient() -> None:
    size = ("gpt, packed", networks.WORDS, 1)
    network = written(*size)
    plain = onnx2jax.convert(network.proto)
    spread = onnx2jax.convert(network.proto, mesh=mesh(data=4, model=2), shardings="fsdp+tensor")
    same(spread(**network.inputs), alone(*size))
    assert spread.placement is not None

    def loss(model: Any) -> Any:
        return jax.jit(jax.grad(lambda p: (model.apply(p, network.inputs["ids"]) ** 2).mean()))

    with jax.enable_x64(True):
        expected = loss(plain)(plain.params)
        gradients = loss(spread)(spread.placement.put_params(spread.params))
    for n, g in gradients.items():
        np.testing.assert_allclose(g, expected[n], rtol=1e-3, atol=1e-5, err_msg=n)


FILES = [decoders.group_query, decoders.multi_head, decoders.onnx_attention, decoders.appending]


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.__name__)
def test_attention_and_its_caches_are_sharded_by_heads(file: Callable[[], decoders.File]) -> None:
    written = file()
    model = onnx2jax.convert(written.proto, mesh=mesh(data=2, model=2), shardings="data+tensor")
    assert model.placement is not None
    specs = {n: s.spec for n, s in model.placement.params.items()}
    assert {specs[f"0.{n}"] for n in ("q", "k", "v", "up")} == {P(None, "model")}
    assert {specs[f"0.{n}"] for n in ("o", "down")} == {P("model")}
    caches = {n: np.zeros((4, *shape[1:]), dtype) for n, (_, shape, dtype) in written.caches.items()}
    for placed in model.placement.put_inputs(caches).values():
        assert placed.sharding.spec == P("data", "model")
    # The vocabulary of 61 is indivisible: listed with the reason for the embedding and the head.
    text = "\n".join(model.placement.notes)
    assert "'embedding' is not sharded over 'model': axis 0 of 61 cannot be divided evenly over 2 devices" in text
    assert "'head' is not sharded over 'model': the 61 columns of MatMul" in text


def test_keys_with_fewer_heads_than_devices_are_replicated() -> None:
    model = onnx2jax.convert(decoders.appending().proto, mesh=mesh(model=4), shardings="tensor")
    assert model.placement is not None
    specs = {n: s.spec for n, s in model.placement.params.items()}
    assert (specs["0.q"], specs["0.k"], specs["0.o"]) == (P(None, "model"), P(), P("model"))
    assert "Reshape" in model.placement.reasons["0.k"]


def test_axis_names_and_a_users_rules() -> None:
    rules = {"w1": P(), "x": P(None, "tp")}
    plan = Plan("tensor", model="tp", rules=rules)
    model = onnx2jax.convert(mlp(), mesh=mesh(tp=2), shardings=plan)
    assert model.placement is not None
    specs = {n: s.spec for n, s in model.placement.params.items()}
    assert specs == {"w1": P(), "b1": P("tp"), "w2": P("tp"), "b2": P()}
    x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    assert model.placement.put_inputs({"x": x})["x"].sharding.spec == P(None, "tp")
    np.testing.assert_allclose(model(x), onnx2jax.convert(mlp())(x), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(pickle.loads(pickle.dumps(model))(x), model(x), rtol=1e-6)


def test_one_weight_may_be_sharded_over_both_axes() -> None:
    model = onnx2jax.convert(mlp(), mesh=mesh(data=2, model=2), shardings="fsdp+tensor")
    assert model.placement is not None
    specs = {n: s.spec for n, s in model.placement.params.items()}
    assert specs == {"w1": P("data", "model"), "b1": P(("model", "data")), "w2": P("model", "data"), "b2": P("data")}


def test_indivisible_weights_are_replicated_and_listed() -> None:
    model = onnx2jax.convert(mlp(), mesh=mesh(model=3), shardings="tensor")
    assert model.placement is not None
    assert all(s.is_fully_replicated for s in model.placement.params.values())
    assert model.placement.reasons["w1"] == (
        "is not sharded over 'model': the 8 columns of Gemm 'hidden' cannot be divided evenly over 3 devices"
    )
    model = onnx2jax.convert(mlp(), mesh=mesh(data=5), shardings="fsdp")
    assert model.placement is not None
    assert model.placement.notes[0] == "'w1' is not sharded over 'data': no axis of [4, 8] is a multiple of 5"


def test_the_tables() -> None:
    model = onnx2jax.convert(mlp(), mesh=mesh(data=2, model=2), shardings="data+tensor")
    text = model.explain_sharding(jax.ShapeDtypeStruct((8, 4), np.float32))
    first, weights, exchanges = text.split("\n\n")
    assert first == "mesh data: 2 x model: 2 over devices 0, 1, 2, 3"
    assert [re.split(r"  +", line)[:4] for line in weights.split("\n")[1:4]] == [
        ["w1", "[4, 8]", "P(None, 'model')", "64"],
        ["b1", "[8]", "P('model',)", "16"],
        ["w2", "[8, 2]", "P('model',)", "32"],
    ]
    assert "Add 'bias' needs it replicated" in weights
    assert exchanges.split("\n")[1].split() == ["all-reduce", "1", "32"]
    assert model.explain_sharding() == f"{first}\n\n{weights}"
    with pytest.raises(ShardingError, match="the model is on one device; shard it"):
        onnx2jax.convert(mlp()).explain_sharding()


@pytest.mark.parametrize(
    ("axes", "shardings", "match"),
    [
        ({"data": 2}, "pipeline", "there is no plan 'pipeline'; the plans are 'data', 'fsdp', 'tensor', 'data+tensor'"),
        ({"data": 2}, "data+tensor", "shards over axis 'model', the mesh has ['data']"),
        ({"x": 2, "y": 2}, "tensor", "shards over axis 'model', the mesh has ['x', 'y']"),
        ({"x": 2}, Plan("tensor", rules={"w9": P()}, model="x"), "'w9' matches none of the 5 names"),
        (
            {"x": 3},
            Plan("tensor", rules={"w1": P(None, "x")}, model="x"),
            "axis 1 of 8 cannot be divided evenly over 3",
        ),
        (None, "tensor", "shardings= needs the mesh"),
        ({"data": 2}, 3, "shardings=3 does not map patterns to specs"),
    ],
    ids=str,
)
def test_invalid_arguments_are_refused(axes: Any, shardings: Any, match: str) -> None:
    with pytest.raises(ShardingError, match=re.escape(match)):
        onnx2jax.convert(mlp(), mesh=mesh(**axes) if axes else None, shardings=shardings)


@pytest.mark.parametrize(
    ("shardings", "axes"),
    [
        ("tensor", {"model": 8}),
        ("data", {"data": 8}),
        ("data+tensor", {"data": 4, "model": 2}),
        (Plan("fsdp+tensor", data="x", model="y", rules={"b1": P("z")}), {"x": 2, "y": 2, "z": 2}),
        ({"w1": P(None, "cells")}, {"cells": 8}),
        ({"w1": P()}, {"data": 8}),
    ],
    ids=str,
)
@pytest.mark.parametrize("has_mesh", [False, True])
def test_the_suggested_mesh_has_the_axes_that_shardings_name(shardings: Any, axes: Any, has_mesh: bool) -> None:
    if has_mesh and not isinstance(shardings, str | Plan):
        pytest.skip("rules without a plan fit any mesh that has their axes")
    with pytest.raises(ShardingError) as caught:
        onnx2jax.convert(mlp(), mesh=mesh(other=2) if has_mesh else None, shardings=shardings)
    suggested = suggested_mesh(caught.value)
    assert dict(suggested.shape) == axes
    onnx2jax.convert(mlp(), mesh=suggested, shardings=shardings)


@pytest.mark.parametrize(
    ("given", "axes"),
    [
        ((4, 2), {"data": 4, "model": 2}),
        ({"model": 4}, {"model": 4}),
        (2, {"data": 2}),
        (jax.devices(), {"data": 8}),
        ("data", {"data": 8}),
    ],
    ids=["extents", "axes", "a number", "devices", "a name"],
)
def test_what_is_no_mesh_is_answered_with_one(given: Any, axes: dict[str, int]) -> None:
    plain = onnx2jax.convert(mlp())
    calls: list[Callable[[Any], Any]] = [
        lambda m: onnx2jax.convert(mlp(), mesh=m),
        lambda m: onnx2jax.TrainingModel(onnx2jax.demo_training_model(), mesh=m),
        lambda m: onnx2jax.finetune(plain, lambda y, _: y.sum(), optax.sgd(0.1), trainable="*", mesh=m),
        lambda m: plain.with_options(mesh=m),
    ]
    for call in calls:
        with pytest.raises(ShardingError, match=r"which is no jax\.sharding\.Mesh") as caught:
            call(given)
        suggested = suggested_mesh(caught.value)
        assert dict(suggested.shape) == axes
    assert plain.with_options(mesh=suggested).placement is not None


def test_plans_with_equal_axes_and_plans_for_training() -> None:
    with pytest.raises(ShardingError, match="both are 'x'"):
        Plan("data+tensor", data="x", model="x")
    over: Any = {"mesh": mesh(data=2), "shardings": "data"}
    with pytest.raises(ShardingError, match="plan 'data' is for convert"):
        onnx2jax.TrainingModel(onnx2jax.demo_training_model(), **over)
    with pytest.raises(ShardingError, match="are for convert"):
        onnx2jax.finetune(onnx2jax.convert(mlp()), lambda y, _: y.sum(), optax.sgd(0.1), **over)
