"""Rules DV: device configurations are validated, applied to eight devices, and do not change results."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np
import onnx
import pytest
from jax.sharding import PartitionSpec as P

import onnx2jax
from onnx2jax.errors import ShardingError, ShardingWarning
from tests.support.cases import RELU, F, X, clean, parse, refused_when_strict, rule, rules_of, same, warned
from tests.support.helpers import bytes_per_device

Dims = Sequence[tuple[Any, ...]]
"""Axis and numbers of shards; a number of shards may be a pair with the extent of its factor."""
SQUARE = F([[1, 2], [3, 4]])
SAME = "g (float[2, 2] x) => (float[2, 2] y) { y = Identity (x) }"
MLP = """g (float[8, 4] x) => (float[8, 2] y) <float[4, 6] w1, float[6] b1, float[6, 2] w2>
    { [first] h = MatMul (x, w1) [bias] a = Add (h, b1) [relu] r = Relu (a) [second] y = MatMul (r, w2) }"""


def model(text: str, devices: int = 2, *, labels: Sequence[str] = (), name: str = "c", ir: int = 11) -> Any:
    """A model with one configuration; values declared without numbers become random weights."""
    proto = parse(text, ir_version=ir)
    proto.configuration.add(name=name, num_devices=devices, device=labels)
    generator = np.random.default_rng(0)
    for v in proto.graph.value_info:
        array = generator.normal(size=[d.dim_value for d in v.type.tensor_type.shape.dim]).astype(F)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, v.name))
    del proto.graph.value_info[:]
    return proto


def annotate(
    node: Any, tensor: str, dims: Dims = (), holders: Sequence[Any] = (0, 1), name: str = "c", stage: int | None = None
) -> None:
    """Shard a tensor of a node; holders that are lists become groups -1, -2, ..."""
    entry = next((e for e in node.device_configurations if e.configuration_id == name), None)
    entry = entry or node.device_configurations.add(configuration_id=name)
    if stage is not None:
        entry.pipeline_stage = stage
    if not tensor:
        return
    spec = entry.sharding_spec.add(tensor_name=tensor)
    for i, holder in enumerate(holders):
        spec.device.append(holder if isinstance(holder, int) else -1 - i)
        if not isinstance(holder, int):
            spec.index_to_device_group_map.add(key=-1 - i, value=holder)
    for axis, *shards in dims:
        dim = spec.sharded_dim.add(axis=axis)
        for n in shards:
            n, extent = n if isinstance(n, tuple) else (n, None)
            field = {} if extent is None else {"dim_value" if isinstance(extent, int) else "dim_param": extent}
            dim.simple_sharding.add(num_shards=n, **field)


def divided(text: str, dims: Dims, holders: Sequence[Any] = (0, 1), devices: int = 2, tensor: str = "y") -> Any:
    """A model whose first node has one sharded tensor."""
    proto = model(text, devices)
    annotate(proto.graph.node[0], tensor, dims, holders)
    return proto


def follow(proto: Any, **kwargs: Any) -> onnx2jax.Model:
    return onnx2jax.convert(proto, device_configuration="c", **kwargs)


def pieces(array: jax.Array) -> dict[int, Any]:
    """Device -> its shard."""
    return {shard.device.id: np.asarray(shard.data).tolist() for shard in array.addressable_shards}


def equations(jaxpr: Any) -> Iterator[Any]:
    for e in jaxpr.eqns:
        yield e
        for value in e.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def traced(converted: onnx2jax.Model, *args: Any) -> list[Any]:
    jaxpr = jax.make_jaxpr(lambda params, *args: converted.apply(params, *args))(converted.params, *args)
    return list(equations(jaxpr.jaxpr))


def constraints(converted: onnx2jax.Model, *args: Any) -> list[tuple[tuple[int, ...], P]]:
    """Shape and spec of every constraint in the program."""
    found = [e for e in traced(converted, *args) if e.primitive.name == "sharding_constraint"]
    return [(e.invars[0].aval.shape, e.params["sharding"].spec) for e in found]


def program(converted: onnx2jax.Model, *args: Any) -> str:
    """The HLO that XLA compiles."""
    placed = converted.placement
    assert placed is not None
    given = placed.put_params(converted.params), *placed.put_inputs(dict(zip("xabcd", args, strict=False))).values()
    return jax.jit(lambda params, *args: converted.apply(params, *args)).lower(*given).compile().as_text()


def agrees(proto: Any, *args: Any, **kwargs: Any) -> onnx2jax.Model:
    """Check that the results on several devices are those on one; returns the model."""
    converted = follow(proto, **kwargs)
    results, expected = converted(*args), onnx2jax.convert(proto)(*args)
    jax.tree.map(lambda r, e: np.testing.assert_allclose(r, e, rtol=1e-5, atol=1e-6), results, expected)
    return converted


def mlp(devices: int = 2, name: str = "c") -> Any:
    """Two layers, the first sharded by columns, the second by rows, as in Megatron-LM."""
    proto = model(MLP, devices, name=name)
    first, bias, _, second = proto.graph.node
    every = range(devices)
    annotate(first, "w1", [(1, devices)], every, name)
    annotate(first, "h", [(1, devices)], every, name)
    annotate(bias, "b1", [(0, devices)], every, name)
    annotate(second, "w2", [(0, devices)], every, name)
    return proto


BATCH = np.random.default_rng(1).normal(size=(8, 4)).astype(F)


# ------------------------------------------------------------------------------------------------ hints


@rule("DV-01", "DV-25")
def test_results_are_those_of_one_device() -> None:
    converted = agrees(mlp(), BATCH)
    assert constraints(converted, BATCH) == [
        ((4, 6), P(None, "d0")),
        ((8, 6), P(None, "d0")),
        ((6,), P("d0")),
        ((6, 2), P("d0", None)),
    ]
    assert constraints(onnx2jax.convert(mlp()), BATCH) == []  # configurations are applied only on request
    assert onnx2jax.convert(mlp()).placement is None


@rule("DV-02")
@pytest.mark.parametrize(
    "fields", [{"name": ""}, {"num_devices": 0}, {"num_devices": -1}, {"num_devices": 3}], ids=lambda f: str(f)
)
def test_a_configuration_has_a_name_and_devices(fields: Any) -> None:
    proto = model(RELU)
    proto.configuration.add(name="other", num_devices=2, device=["a", "b"])
    for name, value in fields.items():
        setattr(proto.configuration[1], name, value)
    same(refused_when_strict(proto, "DV-02")(X), [0, 2])
    if proto.configuration[1].num_devices < 1:
        with pytest.raises(ShardingError, match=r"'other' has -?\d devices \(rule DV-02\)"):
            onnx2jax.convert(proto, device_configuration="other")


@rule("DV-02")
def test_configurations_have_names_of_their_own() -> None:
    proto = model(RELU)
    proto.configuration.add(name="c", num_devices=2)
    refused_when_strict(proto, "DV-02")


@rule("DV-03")
def test_the_user_picks_a_configuration() -> None:
    proto = model(SAME.replace("2, 2", "8, 2"), 2, name="tp2")
    proto.configuration.add(name="tp8", num_devices=8)
    annotate(proto.graph.node[0], "y", [(0, 2)], name="tp2")
    annotate(proto.graph.node[0], "y", [(0, 8)], range(8), name="tp8")
    x = np.arange(16, dtype=F).reshape(8, 2)
    for name, devices in (("tp2", 2), ("tp8", 8)):
        converted = onnx2jax.convert(proto, device_configuration=name)
        assert converted.placement.mesh.shape == {"d0": devices}
        assert len(converted(x).sharding.device_set) == devices
        same(converted(x), x)
    same(clean(proto, x), x)


@rule("DV-03")
@pytest.mark.parametrize(("listed", "known"), [(["two"], "['two']"), ([], "[]")])
def test_unknown_configurations_are_refused(listed: list[str], known: str) -> None:
    proto = parse(RELU, ir_version=11)
    for name in listed:
        proto.configuration.add(name=name, num_devices=2)
    with pytest.raises(ShardingError, match=re.escape(f"'c' is not one of the model's, which are {known}")):
        follow(proto)


@rule("DV-04")
def test_a_node_names_a_configuration_of_the_model() -> None:
    proto = divided(RELU, [(0, 2)])
    annotate(proto.graph.node[0], "y", [(0, 2)], name="three")
    same(refused_when_strict(proto, "DV-04")(X), [0, 2])
    with pytest.warns(ShardingWarning, match=r"configuration 'three' is not one of \['c'\] \(rule DV-04\)"):
        agrees(proto, X)


@rule("DV-05")
def test_a_sharding_is_of_the_nodes_own_tensors() -> None:
    proto = divided(RELU, [(0, 2)], tensor="z")
    same(refused_when_strict(proto, "DV-05")(X), [0, 2])
    with pytest.warns(ShardingWarning, match=r"node 'y'.*sharding of 'z': it is not an input or output .*DV-05"):
        agrees(proto, X)


@rule("DV-05")
def test_one_sharding_covers_both_uses_of_a_tensor() -> None:
    proto = divided("g (float[2] x) => (float[2] y) { y = Add (x, x) }", [(0, 2)], tensor="x")
    assert constraints(agrees(proto, X), X) == [((2,), P("d0"))] * 2


# ------------------------------------------------------------------------------------------------ shards

WORKED = {
    "W1 rows": (SQUARE, [(0, 2)], (0, 1), {0: [[1, 2]], 1: [[3, 4]]}),
    "W2 columns": (SQUARE, [(1, 2)], (0, 1), {0: [[1], [3]], 1: [[2], [4]]}),
    "W3 both axes": (SQUARE, [(0, 2), (1, 2)], range(4), {0: [[1]], 1: [[2]], 2: [[3]], 3: [[4]]}),
    "W4 axis 1 first": (SQUARE, [(1, 2), (0, 2)], range(4), {0: [[1]], 1: [[3]], 2: [[2]], 3: [[4]]}),
    "W5 replicated": (SQUARE, [], [[0, 1]], {0: [[1, 2], [3, 4]], 1: [[1, 2], [3, 4]]}),
    "several plain devices": (SQUARE, [], (0, 1), {0: [[1, 2], [3, 4]], 1: [[1, 2], [3, 4]]}),
    "W5b in groups": (SQUARE, [(0, 2)], [[0, 1], [2, 3]], {0: [[1, 2]], 1: [[1, 2]], 2: [[3, 4]], 3: [[3, 4]]}),
    "groups across": (SQUARE, [(0, 2)], [[0, 2], [1, 3]], {0: [[1, 2]], 2: [[1, 2]], 1: [[3, 4]], 3: [[3, 4]]}),
    "W11 negative axis": (SQUARE, [(-1, 2)], (0, 1), {0: [[1], [3]], 1: [[2], [4]]}),
    "another order": (SQUARE, [(0, 2)], (1, 0), {0: [[3, 4]], 1: [[1, 2]]}),
    "order within an axis": (F(range(4)), [(0, 4)], (0, 2, 1, 3), {0: [0], 2: [1], 1: [2], 3: [3]}),
}
"""Array, shards, holders, and what each device then holds; W1 to W5b are examples of ONNX's proposal."""


@rule("DV-06", "DV-07", "DV-08", "DV-09")
@pytest.mark.parametrize(("x", "dims", "holders", "expected"), WORKED.values(), ids=WORKED)
def test_what_each_device_holds(x: Any, dims: Dims, holders: Any, expected: Any) -> None:
    text = SAME.replace("2, 2", ", ".join(map(str, x.shape)))
    proto = divided(text, dims, holders, len(expected))
    clean(proto, x)
    result = follow(proto)(x)
    same(result, x)
    assert pieces(result) == expected


@rule("DV-06")
def test_devices_are_numbers_or_groups() -> None:
    refused_when_strict(divided(RELU, [(0, 2)], (0, 2)), "DV-06")
    refused_when_strict(divided(RELU, [(0, 2)], (-1, -2)), "DV-06")
    proto = divided(RELU, [(0, 2)], (-1, 7))
    spec = proto.graph.node[0].device_configurations[0].sharding_spec[0]
    spec.index_to_device_group_map.add(key=-1, value=[0])
    spec.index_to_device_group_map.add(key=7, value=[1])
    same(clean(proto, X), [0, 2])  # a key makes a group, whatever its sign
    assert pieces(follow(proto)(X)) == {0: [0], 1: [2]}
    with pytest.warns(ShardingWarning, match=r"device 2 is neither one of 0 to 1 nor a group \(rule DV-06\)"):
        agrees(divided(RELU, [(0, 2)], (0, 2)), X)


@rule("DV-08")
@pytest.mark.parametrize(("dims", "holders"), [([(0, 3)], (0, 1)), ([(0, 2)], ()), ([(0, 2)], [[0, 1]])])
def test_there_are_as_many_devices_as_shards(dims: Dims, holders: Any) -> None:
    proto = divided(RELU, dims, holders)
    assert rules_of(proto) == {"DV-08"}
    refused_when_strict(proto, "DV-08")
    with pytest.warns(ShardingWarning, match=r"\d shards for \d devices \(rule DV-08\)"):
        agrees(proto, X)


@rule("DV-09")
@pytest.mark.parametrize("axes", [(0, 0), (2,), (-3,), (0, -2)])
def test_axes_exist_and_are_named_once(axes: tuple[int, ...]) -> None:
    proto = divided(SAME, [(a, 2) for a in axes], range(2 ** len(axes)), 2 ** len(axes))
    assert rules_of(proto) == {"DV-09"}
    refused_when_strict(proto, "DV-09")
    with pytest.warns(ShardingWarning, match="DV-09"):
        agrees(proto, SQUARE)


@rule("DV-10")
def test_shards_are_counted_from_one() -> None:
    proto = divided(RELU, [(0, 0)])
    assert rules_of(proto) == {"DV-10"}
    with pytest.warns(ShardingWarning, match="num_shards is 0"):
        agrees(proto, X)


@rule("DV-10")
@pytest.mark.parametrize("extent", [6, 8, "N", "M"])
def test_extents_are_those_of_the_tensor(extent: Any) -> None:
    text = f"g (float[{6 if isinstance(extent, int) else 'N'}] x) => (float[{6 if isinstance(extent, int) else 'N'}] y)"
    proto = divided(text + " { y = Relu (x) }", [(0, (2, extent))])
    x = np.arange(6, dtype=F) - 3
    if extent in (6, "N"):
        clean(proto, x)
    else:
        warned(proto, "DV-10")
    assert constraints(agrees(proto, x), x) == [((6,), P("d0"))]


@rule("DV-11")
def test_a_fused_axis_is_sharded_by_its_factors() -> None:
    # Worked example W8: [A, B] in 2 x 2 shards, reshaped to [A * B]. Contiguous quarters would be other shards.
    proto = divided(SAME.replace("2, 2", "8"), [(0, (2, 4), (2, 2))], range(4), 4)
    x = np.arange(8, dtype=F)
    clean(proto, x)
    assert constraints(agrees(proto, x), x) == [((4, 2), P("d0", "d1"))]
    inferred = divided(SAME.replace("2, 2", "8"), [(0, (2, "A"), (2, 2))], range(4), 4)
    assert constraints(agrees(inferred, x), x) == [((4, 2), P("d0", "d1"))]


@rule("DV-10", "DV-11")
@pytest.mark.parametrize("factors", [((2, 3), (2, 2)), ((2, "A"), (2, "B")), ((2, "A"), (2, 0)), ((2, "A"), (2, 3))])
def test_factors_that_do_not_make_the_axis(factors: Any) -> None:
    proto = divided(SAME.replace("2, 2", "8"), [(0, *factors)], range(4), 4)
    with pytest.warns(ShardingWarning, match=r"node 'y'.*'y' is ignored: axis 0 of 8 is not the product of \[.*DV-10"):
        assert pieces(agrees(proto, np.arange(8, dtype=F))(np.arange(8, dtype=F)))[3] == list(range(8))


@rule("DV-12")
@pytest.mark.parametrize("rows", [5, 1, 0])
def test_uneven_shards(rows: int) -> None:
    text = "g (float[N, 2] x) => (float[N, 2] y) <float[2, 5] w> { h = MatMul (x, w) h2 = Relu (h) y = MatMul (h2, v) }"
    text = text.replace("w>", "w, float[5, 2] v>")
    proto = divided(text, [(0, 2)], tensor="h")
    annotate(proto.graph.node[2], "v", [(0, 2)])
    x = np.ones((rows, 2), F)
    converted = agrees(proto, x)
    assert constraints(converted, x)[0] == ((rows, 5), P("d0", None))
    assert converted.placement.params["v"].spec == P()  # stored arrays need even shards
    assert "'v' is replicated: " in converted.placement.notes[0]


@rule("DV-13")
def test_a_weight_is_sharded_as_at_its_first_consumer_where_that_fits() -> None:
    text = "g (float[N, 5] x) => (float[N, 2] y) <float[5, 2] v> { h = MatMul (x, v) g = MatMul (x, v) y = Add (h, g) }"
    proto = divided(text, [(0, 2)], tensor="h")
    for node, axis in zip(proto.graph.node, (0, 1), strict=False):  # 5 rows are no even shards, 2 columns are
        annotate(node, "v", [(axis, 2)])
    placement = agrees(proto, np.ones((4, 5), F)).placement
    assert placement.params["v"].spec == P(None, "d0")
    assert placement.notes == ()


# ------------------------------------------------------------------------------------------------ unannotated tensors


@rule("DV-13")
def test_an_unannotated_input_keeps_its_producers_sharding() -> None:
    proto = model(MLP)
    annotate(proto.graph.node[0], "h", [(1, 2)])
    del proto.graph.node[3]
    proto.graph.output[0].name = "r"
    result = agrees(proto, BATCH)(BATCH)
    assert result.sharding.spec == P(None, "d0")  # through Add and Relu, which have no annotations


@rule("DV-13")
def test_inputs_of_the_model_are_replicated() -> None:
    converted = follow(divided(SAME, [(0, 2)]))
    assert converted.placement.put_inputs({"x": SQUARE})["x"].sharding.spec == P()


@rule("DV-14")
@pytest.mark.parametrize(
    ("text", "dims", "spec"),
    [
        ("{ y = Add (x, c) }", [(0, 2)], P("d0")),
        ("{ y = MatMul (x, w) }", [(0, 2)], P("d0")),
        ("{ y = ReduceSum <keepdims = 1> (x, axis) }", [(0, 2)], P("d0")),
        ("{ y = ReduceSum <keepdims = 1> (x, axis) }", [(1, 2)], P()),
    ],
)
def test_an_output_without_sharding_follows_from_the_inputs(text: str, dims: Dims, spec: P) -> None:
    head = "g (float[4, 4] x) => (float[4, M] y) <float[4, 4] w, float[4] c, int64[1] axis = {1}> "
    proto = model(head + text)
    annotate(proto.graph.node[0], "x", dims)
    x = np.arange(16, dtype=F).reshape(4, 4)
    result = agrees(proto, x)(x)
    assert result.sharding.is_equivalent_to(jax.NamedSharding(result.sharding.mesh, spec), 2)


@rule("DV-15", "DV-19")
def test_outputs_are_resharded_as_annotated() -> None:
    proto = divided(SAME, [(0, 2)], tensor="x")
    annotate(proto.graph.node[0], "y", [(1, 2)])
    converted = agrees(proto, SQUARE)
    assert pieces(converted(SQUARE)) == {0: [[1], [3]], 1: [[2], [4]]}
    proto = divided("g (float[2, 2] x) => (float[2, 2] y) { h = Exp (x) y = Identity (h) }", [(0, 2)], tensor="h")
    annotate(proto.graph.node[1], "y", [(1, 2)])
    assert re.search("all-to-all|all-gather", program(agrees(proto, SQUARE), SQUARE))


OUTER = "g (float[4, 1] x, float[1, 4] a) => (float[4, 4] y) { y = Add (x, a) }"


def outer(second: Any) -> Any:
    proto = divided(OUTER, [(0, 2)], [[0, 1], [2, 3]], 4, tensor="x")
    annotate(proto.graph.node[0], "a", [(1, 2)], second)
    return proto


@rule("DV-16")
def test_broadcast_operands_compose() -> None:
    x, a = np.arange(4, dtype=F)[:, None], np.arange(4, dtype=F)[None] * 10
    proto = outer([[0, 2], [1, 3]])  # worked examples W6 and W7
    clean(proto, x, a)
    converted = agrees(proto, x, a)
    assert constraints(converted, x, a) == [((4, 1), P("d0", None)), ((1, 4), P(None, "d1"))]
    held = pieces(converted(x, a))
    assert {d: np.shape(p) for d, p in held.items()} == dict.fromkeys(range(4), (2, 2))
    assert [held[d][0][0] for d in range(4)] == [0, 20, 2, 22]


@rule("DV-16")
def test_broadcast_operands_that_do_not_compose() -> None:
    x, a = np.arange(4, dtype=F)[:, None], np.arange(4, dtype=F)[None] * 10
    proto = outer([[0, 1], [2, 3]])
    assert rules_of(proto) == {"DV-16"}
    refused_when_strict(proto, "DV-16")
    agrees(proto, x, a)
    disjoint = divided("g (float[4] x, float[4] a) => (float[4] y) { y = Add (x, a) }", [(0, 2)], (0, 1), 4, "x")
    annotate(disjoint.graph.node[0], "a", [(0, 2)], (2, 3))
    assert rules_of(disjoint) == {"DV-16"}
    unlike = divided("g (float[4] x, float[4] a) => (float[4] y) { y = Add (x, a) }", [(0, 2)], (0, 1), 4, "x")
    annotate(unlike.graph.node[0], "a", [(0, 4)], range(4))
    assert rules_of(unlike, "warning") == {"DV-16"}
    single = divided(OUTER, [(1, 2)], (0, 1), 4, "x")
    annotate(single.graph.node[0], "a", [(1, 2)])
    assert rules_of(single, "warning") == {"DV-16"}


@rule("DV-17", "DV-19")
def test_a_contracted_axis_may_be_sharded() -> None:
    proto = model("g (float[8, 4] x) => (float[8, 6] y) <float[4, 6] w> { y = MatMul (x, w) }")
    node = proto.graph.node[0]
    annotate(node, "x", [(1, 2)])
    annotate(node, "w", [(0, 2)])
    converted = agrees(proto, BATCH)
    assert "all-reduce" in program(converted, BATCH)
    names = {e.primitive.name for e in traced(converted, BATCH)}
    assert "sharding_constraint" in names
    assert not names & {"psum", "psum_invariant", "all_gather", "all_to_all", "ppermute", "shard_map", "reduce_scatter"}
    assert converted(BATCH).sharding.is_fully_replicated
    unlike = model("g (float[8, 4] x) => (float[8, 6] y) <float[4, 6] w> { y = MatMul (x, w) }", 4)
    annotate(unlike.graph.node[0], "x", [(1, 4)], range(4))
    annotate(unlike.graph.node[0], "w", [(0, 2)], [[0, 1], [2, 3]])
    agrees(unlike, BATCH)


@rule("DV-18")
def test_operators_without_defined_shardings() -> None:
    proto = model(
        """g (float[1, 1, 4, 4] x) => (float[1, 1, 2, 2] y) <float[1, 1, 3, 3] w> {
            [conv] h = Conv (x, w)  y = Relu (h) }"""
    )
    for node in proto.graph.node:
        annotate(node, "h", [(2, 2)])
    x = np.arange(16, dtype=F).reshape(1, 1, 4, 4)
    clean(proto, x)
    converted = agrees(proto, x)
    assert constraints(converted, x) == [((1, 1, 2, 2), P(None, None, "d0", None))]  # as an operand of Relu only
    (note,) = converted.placement.notes
    assert note == "node 'conv' (Conv, opset 21), sharding of 'h': ONNX defines no sharding of Conv (rule DV-18)"


# ------------------------------------------------------------------------------------------------ pipelines


@rule("DV-20")
def test_pipeline_stages_are_kept() -> None:
    proto = mlp()
    for node, stage in zip(proto.graph.node, (7, 0, None, 3), strict=True):
        annotate(node, "", stage=stage)
    clean(proto, BATCH)
    assert agrees(proto, BATCH).placement.stages == {"first": 7, "bias": 0, "second": 3}


@rule("DV-21", "DV-23")
def test_two_stages_of_two_devices_each() -> None:
    proto = model(MLP, 4)
    first, _, _, second = proto.graph.node
    annotate(first, "w1", [(1, 2)], (0, 1), stage=0)
    annotate(second, "w2", [(0, 2)], (2, 3), stage=1)
    converted = agrees(proto, BATCH)
    assert converted.placement.stages == {"first": 0, "second": 1}
    w1 = jax.device_put(converted.params["w1"], converted.placement.params["w1"])
    assert pieces(w1).keys() == {0, 1}
    w2 = jax.device_put(converted.params["w2"], converted.placement.params["w2"])
    halves = {d: np.asarray(p).tolist() for d, p in pieces(w2).items()}
    assert halves.keys() == {2, 3}
    same(halves[2], converted.params["w2"][:3])
    same(halves[3], converted.params["w2"][3:])


# ------------------------------------------------------------------------------------------------ devices and meshes


@rule("DV-22")
@pytest.mark.parametrize("key", ["labels", "numbers", "mixed", "list"])
def test_devices_by_a_table(key: str) -> None:
    proto = model(SAME, labels=["left", "right"])
    annotate(proto.graph.node[0], "y", [(0, 2)])
    five, six = jax.devices("cpu")[5:7]
    tables: Mapping[str, Any] = {
        "labels": {"right": five, "left": six},
        "numbers": {0: six, 1: five},
        "mixed": {"left": six, 1: five},
        "list": [six, five],
    }
    assert pieces(follow(proto, devices=tables[key])(SQUARE)) == {6: [[1, 2]], 5: [[3, 4]]}


@rule("DV-22")
def test_tables_that_do_not_fit() -> None:
    proto = model(SAME, labels=["left", "right"])
    five, six = jax.devices("cpu")[5:7]
    with pytest.raises(ShardingError, match=r"devices= has \['left'\], configuration 'c' also needs \['right'\]"):
        follow(proto, devices={"left": five})
    with pytest.raises(ShardingError, match="repeats a device"):
        follow(proto, devices=[five, five])
    with pytest.raises(ShardingError, match="maps the labels of a device_configuration="):
        onnx2jax.convert(proto, devices=[five, six])


@rule("DV-22")
def test_too_few_devices() -> None:
    proto = divided(SAME, [(0, 2)], devices=9)
    with pytest.warns(ShardingWarning, match="'c' is ignored: it needs 9 devices, there are 8"):
        converted = follow(proto)
    assert converted.placement is None
    same(converted(SQUARE), SQUARE)
    with pytest.warns(ShardingWarning, match="it needs 9 devices, there are 1"):
        follow(proto, devices=jax.devices("cpu")[:1])


@rule("DV-23")
def test_shardings_that_one_mesh_cannot_express() -> None:
    proto = model("g (float[4] x) => (float[4] y) { [a] h = Neg (x) [b] y = Neg (h) }", 4)
    annotate(proto.graph.node[0], "h", [(0, 4)], range(4))
    annotate(proto.graph.node[1], "y", [(0, 4)], (3, 2, 1, 0))
    x = np.arange(4, dtype=F)
    text = (
        r"node 'b' \(Neg, opset 21\), sharding of 'y': shards on devices \[3, 2, 1, 0\] cannot be expressed by the mesh"
    )
    with pytest.warns(ShardingWarning, match=text):
        converted = agrees(proto, x)
    assert constraints(converted, x) == [((4,), P("d0"))]
    # The mesh has the device order that most shardings use.
    annotate(proto.graph.node[0], "x", [(0, 4)], (3, 2, 1, 0))
    with pytest.warns(ShardingWarning, match=r"node 'a'.*sharding of 'h': shards on devices \[0, 1, 2, 3\] cannot"):
        converted = agrees(proto, x)
    assert [d.id for d in converted.placement.mesh.devices.flat] == [3, 2, 1, 0]


@rule("DV-23")
def test_conflicting_factorisations_of_an_axis() -> None:
    proto = model("g (float[6] x) => (float[6] y) { [a] h = Neg (x) [b] y = Neg (h) }", 6)
    annotate(proto.graph.node[0], "h", [(0, 2)], [[0, 1, 2], [3, 4, 5]])
    annotate(proto.graph.node[1], "y", [(0, 3)], [[0, 1], [2, 3], [4, 5]])
    with pytest.warns(ShardingWarning, match="node 'b'"):
        agrees(proto, np.arange(6, dtype=F))


@rule("DV-23")
def test_a_device_with_two_shards_and_many_misses() -> None:
    count = 9
    nodes = " ".join(f"[n{i}] v{i + 1} = Neg (v{i})" for i in range(count))
    proto = model(f"g (float[2] v0) => (float[2] v{count}) {{ {nodes} }}")
    for i, node in enumerate(proto.graph.node):
        annotate(node, f"v{i + 1}", [(0, 2)], (0, 0))
    with pytest.warns(ShardingWarning, match=r"(?s)node 'n0'.*node 'n4'.*and 4 more: model.placement.notes") as caught:
        converted = follow(proto)
    assert len(caught) == 1
    assert len(converted.placement.notes) == count
    same(converted(X), -X)


CALLS = """
<ir_version: 11, opset_import: ["" : 21, "l" : 1]>
g (float[4] x) => (float[4] y) { [one] h = l.twice (x) [two] k = l.twice (h) y = Neg (k) }
<domain: "l", opset_import: ["" : 21]> twice (a) => (c) { b = Add (a, a)  c = Identity (b) }
"""


@rule("DV-24")
def test_annotations_in_a_function_apply_to_each_call() -> None:
    proto = onnx.parser.parse_model(CALLS)
    proto.configuration.add(name="c", num_devices=2)
    annotate(proto.functions[0].node[0], "b", [(0, 2)])
    x = np.arange(4, dtype=F)
    clean(proto, x)
    assert constraints(agrees(proto, x), x) == [((4,), P("d0"))] * 2


@rule("DV-24", "DV-25")
def test_annotations_in_a_subgraph() -> None:
    proto = model(
        """g (bool p, float[4] x) => (float[4] y) <float[4] w> {
            y = If (p) <then_branch = t () => (float[4] a) { a = Add (x, w) },
                        else_branch = e () => (float[4] b) { b = Neg (x) }> }"""
    )
    annotate(proto.graph.node[0].attribute[0].g.node[0], "w", [(0, 2)])
    x = np.arange(4, dtype=F)
    clean(proto, np.bool_(True), x)
    converted = agrees(proto, np.bool_(True), x)
    assert constraints(converted, np.bool_(True), x) == [((4,), P("d0"))]
    assert converted.placement.params["w"].spec == P("d0")  # captured from outside


@rule("DV-24")
def test_annotations_in_a_loop() -> None:
    proto = model(
        """g (int64 n, bool c, float[4] x) => (float[4] y) { y = Loop (n, c, x) <body = b (int64 i, bool k, float[4] s)
            => (bool k2, float[4] s2) { k2 = Identity (k)  s2 = Add (s, s) }> }"""
    )
    annotate(proto.graph.node[0].attribute[0].g.node[1], "s2", [(0, 2)])
    args = np.int64(3), np.bool_(True), np.arange(4, dtype=F)
    converted = agrees(proto, *args)
    assert constraints(converted, *args) == [((4,), P("d0"))]
    assert converted(*args).sharding.spec == P("d0")


@rule("DV-24", "DV-25")
def test_a_weight_that_a_function_shards() -> None:
    text = CALLS.replace("float[4] y)", "float[4] y) <float[4] w = {1, 2, 3, 4}>").replace("l.twice (x)", "l.twice (w)")
    proto = onnx.parser.parse_model(text.replace("y = Neg (k)", "y = Add (k, x)"))
    proto.configuration.add(name="c", num_devices=2)
    annotate(proto.functions[0].node[0], "a", [(0, 2)])
    assert agrees(proto, np.arange(4, dtype=F)).placement.params["w"].spec == P("d0")


@rule("DV-25")
def test_weights_are_placed_for_their_first_consumer() -> None:
    converted = follow(mlp())
    placed = converted.placement.put_params(converted.params)
    assert {n: s.spec for n, s in converted.placement.params.items()} == {
        "w1": P(None, "d0"),
        "b1": P("d0"),
        "w2": P("d0", None),
    }
    whole = sum(v.nbytes for v in converted.params.values())
    assert set(bytes_per_device(placed).values()) == {whole // 2}
    assert "all-gather" not in program(converted, BATCH)  # they are used without resharding


@rule("DV-25")
def test_a_weight_of_two_consumers_is_placed_for_the_first() -> None:
    proto = model("g (float[4, 4] x) => (float[4, 4] y) <float[4, 4] w> { h = MatMul (x, w)  y = MatMul (h, w) }")
    annotate(proto.graph.node[0], "w", [(1, 2)])
    annotate(proto.graph.node[1], "w", [(0, 2)])
    converted = agrees(proto, np.ones((4, 4), F))
    assert converted.placement.params["w"].spec == P(None, "d0")


@rule("DV-27")
def test_configurations_require_ir_11() -> None:
    proto = divided(RELU, [(0, 2)])
    proto.ir_version = 10
    same(warned(proto, "DV-27")(X), [0, 2])
    with pytest.warns(ShardingWarning, match=r"since IR 11, the model is of IR 10 \(rule DV-27\)"):
        converted = agrees(proto, X)
    assert len(converted(X).sharding.device_set) == 2  # applied nevertheless


# ------------------------------------------------------------------------------------------------ other features


@rule("DV-01")
def test_the_file_keeps_its_annotations(tmp_path: Path) -> None:
    proto = mlp()
    annotate(proto.graph.node[0], "", stage=0)
    data = proto.SerializeToString()
    onnx2jax.save(follow(data), tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx").read_bytes() == data
    converted = follow(data)
    onnx2jax.save(converted, tmp_path / "new.onnx", params={"b1": np.ones(6, F)})
    again = onnx.load(tmp_path / "new.onnx")
    assert again.configuration == proto.configuration
    assert [n.device_configurations for n in again.graph.node] == [n.device_configurations for n in proto.graph.node]
    agrees(again, BATCH)


@pytest.mark.extended  # beside test_too_few_devices
@rule("DV-01", "DV-22")
def test_a_process_with_one_device(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(mlp().SerializeToString())
    script = f"""
import warnings
import numpy as np, onnx2jax
x = np.ones((8, 4), np.float32)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    model = onnx2jax.convert({str(tmp_path / "model.onnx")!r}, device_configuration="c")
assert [w.category for w in caught] == [onnx2jax.errors.ShardingWarning]
assert "it needs 2 devices, there are 1" in str(caught[0].message)
assert (model(x) == onnx2jax.convert({str(tmp_path / "model.onnx")!r})(x)).all()
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_export_with_a_free_extent() -> None:
    proto = divided(SAME.replace("2, 2", "N, 4"), [(1, 2)])
    converted = follow(proto)
    (n,) = jax.export.symbolic_shape("n")
    exported = jax.export.export(jax.jit(lambda x: converted.apply({}, x)))(jax.ShapeDtypeStruct((n, 4), F))
    assert exported.nr_devices == 2
    assert exported.out_avals[0].shape == (n, 4)


def test_no_warning_when_every_annotation_is_applied() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        follow(mlp())(BATCH)


@rule("DV-19")
def test_transformations_go_through_constraints() -> None:
    converted, alone = follow(mlp()), onnx2jax.convert(mlp())

    def loss(model: onnx2jax.Model) -> Any:
        return lambda params: (model.apply(params, BATCH) ** 2).sum()

    gradients, expected = jax.grad(loss(converted))(converted.params), jax.grad(loss(alone))(alone.params)
    jax.tree.map(lambda g, e: np.testing.assert_allclose(g, e, rtol=1e-4), gradients, expected)
    batches = np.stack([BATCH, BATCH + 1])
    mapped = jax.vmap(lambda x: converted.apply(converted.params, x))(batches)
    np.testing.assert_allclose(mapped[1], alone(BATCH + 1), rtol=1e-5)
