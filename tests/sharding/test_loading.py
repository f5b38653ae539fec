"""Sharded loading: a process reads, and a device holds, only its own shards of the weights."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import optax
import pytest
from onnx import helper

import onnx2jax
from onnx2jax.proto.mapped import is_lazy, load
from tests.support.helpers import ROOT, bytes_per_device, mesh
from tests.support.loading import F, counted, written
from tests.support.models import model, value

pytestmark = pytest.mark.usefixtures("standard_promotion")  # optax


def test_only_the_requested_part_of_an_array_is_read(tmp_path: Path) -> None:
    weight = np.arange(8 * 6 * 5 * 128, dtype=F).reshape(8, 6, 5, 128)
    proto = model(
        [helper.make_node("Add", ["x", "w"], ["y"])], [value("x", F, None)], [value("y", F, None)], {"w": weight}
    )
    onnx.save(proto, tmp_path / "m.onnx", save_as_external_data=True, location="weights", size_threshold=0)
    stored = onnx2jax.convert(tmp_path / "m.onnx").graph.initializers["w"]
    assert is_lazy(stored)
    for places in itertools.product(
        [(0, 8), (2, 4)], [(0, 6), (5, 6)], [(0, 5), (1, 3)], [(0, 128), (64, 128), (3, 3)]
    ):
        index = tuple(slice(*p) for p in places)
        with counted() as reads:
            np.testing.assert_array_equal(load(stored, index), weight[index])
        assert reads.bytes == weight[index].nbytes


@pytest.mark.parametrize("plan", ["fsdp", "tensor"])
def test_each_shard_is_read_once(plan: str, tmp_path: Path) -> None:
    size = written(tmp_path / "m.onnx")
    part = size // 4 // 8
    x = np.random.default_rng(1).normal(size=(8, 256)).astype(F)
    alone = onnx2jax.convert(tmp_path / "m.onnx")(x)
    over = mesh(data=8) if plan == "fsdp" else mesh(model=8)
    with counted() as reads:
        spread = onnx2jax.convert(tmp_path / "m.onnx", mesh=over, shardings=plan)
        assert reads.bytes == 0, "a file is opened, and not read"
        np.testing.assert_allclose(spread(x), alone, rtol=1e-4, atol=1e-5)
        assert (reads.bytes, reads.largest) == (size, part)
        assert set(bytes_per_device(dict(spread.weights)).values()) == {size // 8}
        tuned = onnx2jax.finetune(spread, lambda y, _: (y**2).mean(), optax.adam(0.1))
        state = tuned.init()
        # Beyond the shards, conversion reads the first row of each weight, to detect tables of rotations.
        assert 2 * size < (before := reads.bytes) < 2.01 * size and reads.largest == part
        assert max(bytes_per_device(state).values()) < 3 * size // 8 * 1.1
        changed = tuned.to_model(tuned.step(state, {"x": x})[0])
        assert not np.allclose(changed(x), alone, rtol=1e-4, atol=1e-5)
        assert reads.bytes == before, "what is on the devices is not read again"


PEAK = """
import re, sys
import jax
jax.config.update("jax_num_cpu_devices", 8)
import onnx2jax
from tests.support.helpers import bytes_per_device
mesh = jax.make_mesh((8,), (sys.argv[2],))
jax.block_until_ready(jax.device_put(jax.numpy.zeros(8), jax.sharding.NamedSharding(mesh, jax.P(sys.argv[2]))))
# Of this process only: getrusage starts with the peak of the parent process.
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
before = peak()
model = onnx2jax.convert(sys.argv[1], mesh=mesh, shardings=sys.argv[3])
weights = jax.block_until_ready(dict(model.weights))
print(peak() - before, max(bytes_per_device(weights).values()))
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_is_that_of_the_shards(tmp_path: Path) -> None:
    size = written(tmp_path / "m.onnx", 2048, 8)
    assert size > 250e6
    for axis, plan in (("data", "fsdp"), ("model", "tensor")):
        command = [sys.executable, "-c", PEAK, str(tmp_path / "m.onnx"), axis, plan]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300)
        host, device = map(int, done.stdout.split())
        # CPU devices share the host's memory, so all shards are in it, but no complete weight.
        assert size <= host < size * 1.1
        assert device == size // 8
