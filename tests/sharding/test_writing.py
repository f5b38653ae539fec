"""Placements survive a round trip through a device configuration in a file."""

from __future__ import annotations

from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import onnx2jax
from onnx2jax.errors import ShardingError
from onnx2jax.model.devices.explained import programs
from onnx2jax.sharding.stages import Staged
from tests.sharding.networks import alone, written
from tests.sharding.test_stages import NETWORKS, X, same
from tests.support.helpers import bytes_per_device, mesh
from tests.support.models import mlp
from tests.support.tiers import canaries


def again(model: onnx2jax.Model, folder: Path) -> onnx2jax.Model:
    """The model, saved with its configuration and converted again."""
    path = onnx2jax.save(model, folder / "model.onnx", configuration="written")
    assert str(onnx2jax.check(path)) == "no findings"
    return onnx2jax.convert(path, device_configuration="written")


def lies(model: onnx2jax.Model) -> dict[str, Any]:
    assert model.placement is not None
    return {n: s.devices_indices_map(model.params[n].shape) for n, s in model.placement.params.items()}


@pytest.mark.parametrize("name", canaries(NETWORKS, ["gpt, packed"]))
def test_products_by_columns_and_rows(name: str, tmp_path: Path) -> None:
    network = written(name)
    planned = onnx2jax.convert(network.proto, mesh=mesh(model=2), shardings="tensor")
    read = again(planned, tmp_path)
    assert lies(read) == lies(planned)
    placement = read.placement
    assert placement is not None
    weights = {n for n, v in read.params.items() if v.size > 1 and not any(fnmatchcase(n, p) for p in network.whole)}
    held = bytes_per_device(placement.put_params({n: read.params[n] for n in weights}))
    assert set(held.values()) == {sum(read.params[n].nbytes for n in weights) // 2}

    (program,) = programs(read, (), network.inputs)
    with jax.enable_x64(True):
        key = placement.put_replicated(jax.random.key(0))
        results = program.compiled(placement.put_params(read.params), placement.put_inputs(network.inputs), key)
    same(jax.tree.leaves(results), alone(name))
    found = Counter(c.kind for c in program.exchanges())
    # Two per layer, and one for the embedding. A file cannot express that a device slices a replicated value, so
    # shards of concatenated queries, keys and values are permuted between devices.
    assert found == {"all-reduce": 5, **({"collective-permute": 4} if name == "gpt, packed" else {})}


CASES: dict[str, Any] = {
    "data": {"mesh": mesh(data=4), "shardings": "data"},
    "fsdp and tensor": {"mesh": mesh(data=2, model=2), "shardings": "fsdp+tensor"},
    "stages": {"stages": 2},
    "stages and fsdp": {"stages": 2, "mesh": mesh(stage=2, data=2), "shardings": "fsdp"},
    "stages last in the mesh": {"stages": 2, "mesh": mesh(data=2, stage=2)},
}


@pytest.mark.parametrize("case", CASES)
def test_other_placements(case: str, tmp_path: Path) -> None:
    placed = onnx2jax.convert(mlp(), **CASES[case])
    read = again(placed, tmp_path)
    assert lies(read) == lies(placed)
    assert isinstance(read.placement, Staged) == ("stages" in case)
    same(read(X), onnx2jax.convert(mlp())(X))
    if "stages" not in case:
        assert placed.placement is not None and read.placement is not None
        inputs = [m.placement.put_inputs({"x": X})["x"] for m in (placed, read)]
        assert inputs[0].sharding.devices_indices_map(X.shape) == inputs[1].sharding.devices_indices_map(X.shape)


def test_saving_replaces_one_configuration_and_keeps_others(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx2jax.save(onnx2jax.convert(mlp(), stages=2), path, configuration="a")
    for name in "ba":
        onnx2jax.save(onnx2jax.convert(path, mesh=mesh(model=2), shardings="tensor"), path, configuration=name)
    read = {n: onnx2jax.convert(path, device_configuration=n) for n in "ab"}
    assert lies(read["a"]) == lies(read["b"])
    assert not any(isinstance(m.placement, Staged) for m in read.values())
    with pytest.raises(ShardingError, match="follows 'a', which is already in the file"):
        onnx2jax.save(read["a"], path, configuration="c")
    with pytest.raises(ShardingError, match="names the placement of a model on a mesh"):
        onnx2jax.save(onnx2jax.convert(mlp()), path, configuration="c")
    np.testing.assert_array_equal(onnx2jax.convert(path)(X), onnx2jax.convert(mlp())(X))
