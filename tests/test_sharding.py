"""Rules by name: where a user wants arrays to lie."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from onnx2jax.errors import ShardingError
from onnx2jax.sharding import batch_sharding, by_batch, by_name, bytes_per_device, check_patterns

from .helpers import mesh

PARAMS = {"a.weight": np.zeros((4, 6), np.float32), "a.bias": np.zeros(6, np.float32), "scale": np.float32(1)}


def test_the_first_rule_that_matches_counts() -> None:
    rules = {"a.*": P(None, "model"), "*.weight": P("model")}
    found = by_name(
        {"a.weight": np.zeros((4, 6)), "b.weight": np.zeros((4, 6)), "c": np.zeros(3)}, mesh(model=2), rules
    )
    assert {n: s.spec for n, s in found.items()} == {"a.weight": P(None, "model"), "b.weight": P("model"), "c": P()}


def test_a_pattern_that_is_the_name_matches_whatever_signs_it_has() -> None:
    assert by_name({"w[0]": np.zeros(4)}, mesh(model=2), {"w[0]": P("model")})["w[0]"].spec == P("model")


def test_shapes_without_arrays_will_do() -> None:
    found = by_name({"w": jax.ShapeDtypeStruct((8, 2), np.float32)}, mesh(data=4, model=2), {"w": P("data", "model")})
    assert found["w"].shard_shape((8, 2)) == (2, 1)


def test_explicit_axes_become_automatic() -> None:
    # An Explicit mesh, which jax.make_mesh makes, would put shardings into the types of every value in the model.
    explicit = mesh(data=2)
    assert by_name(PARAMS, explicit, {})["scale"].mesh.axis_types == (AxisType.Auto,)
    assert batch_sharding(explicit).mesh.axis_types == (AxisType.Auto,)


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        (P("tensor"), "names axis 'tensor'; the mesh has ['data', 'model']"),
        (P("model", "model"), "uses axis 'model' twice"),
        (P(("model", "model")), "uses axis 'model' twice"),
        (P(None, None, "model"), "the spec has 3 entries, the array 2 axes"),
        (P(None, "data"), "axis 1 of 6 cannot be divided evenly over 4 devices. Pad it to 8"),
        (P(("data", "model")), "axis 0 of 4 cannot be divided evenly over 8 devices. Pad it to 8"),
        ("model", "'model' is no PartitionSpec"),
    ],
    ids=str,
)
def test_a_spec_that_does_not_fit(spec: Any, match: str) -> None:
    with pytest.raises(ShardingError, match=re.escape(match)):
        by_name(PARAMS, mesh(data=4, model=2), {"*.weight": spec})


def test_a_scalar_cannot_be_divided() -> None:
    with pytest.raises(ShardingError, match=r"'scale' of shape \[\], rule 's\*': .*1 entries, the array 0 axes"):
        by_name(PARAMS, mesh(data=4), {"s*": P("data")})


def test_an_empty_array_can_be_divided() -> None:
    (sharding,) = by_name({"w": np.zeros((0, 3))}, mesh(data=4), {"w": P("data")}).values()
    assert jax.device_put(np.zeros((0, 3)), sharding).shape == (0, 3)


def test_the_batch_lies_over_the_first_axis() -> None:
    assert batch_sharding(mesh(data=4, model=2)).spec == P("data")
    assert batch_sharding(mesh(data=4, model=2), P(("data", "model"))).spec == P(("data", "model"))
    with pytest.raises(ShardingError, match=r"batch: .* names axis 'x'; the mesh has"):
        batch_sharding(mesh(data=4), P("x"))


def test_a_batch_with_scalars() -> None:
    found = by_batch({"x": np.zeros((8, 3)), "rate": np.float32(0.1)}, mesh(data=4))
    assert {n: s.spec for n, s in found.items()} == {"x": P("data"), "rate": P()}
    with pytest.raises(ShardingError, match=r"'x' of shape \[6, 3\], the batch: .* axis 0 of 6 .* over 4 devices"):
        by_batch({"x": np.zeros((6, 3))}, mesh(data=4))


def test_a_pattern_that_matches_nothing_is_a_slip() -> None:
    check_patterns({"*.weight": P(), "scale": P()}, PARAMS)
    with pytest.raises(ShardingError, match=r"'a\.wieght' matches none of the 3 names; near it are \['a\.weight'"):
        check_patterns({"a.wieght": P()}, PARAMS)


def test_bytes_of_each_device() -> None:
    array = np.zeros((8, 4), np.float32)
    over = mesh(data=4, model=2)
    divided = jax.device_put(array, NamedSharding(over, P("data")))
    assert set(bytes_per_device(divided).values()) == {32}
    whole = {"w": jax.device_put(array, NamedSharding(over, P())), "key": jax.random.key(0)}
    assert sorted(bytes_per_device(whole).values()) == [128] * 7 + [136]


def test_one_device_is_a_mesh_too() -> None:
    script = """
import jax, numpy as np
from jax.sharding import PartitionSpec as P
from onnx2jax.sharding import by_name
mesh = jax.make_mesh((1, 1), ("data", "model"))
array = np.arange(6, dtype=np.float32).reshape(3, 2)
(sharding,) = by_name({"w": array}, mesh, {"w": P("data", "model")}).values()
assert (jax.device_put(array, sharding) == array).all() and len(jax.devices("cpu")) == 1
"""
    subprocess.run([sys.executable, "-c", script], check=True)
