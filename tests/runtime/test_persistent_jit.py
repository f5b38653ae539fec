"""Programs kept by what they lower to: of meshes, layers, training steps and a user's own operators."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from onnx import helper, parser

import onnx2jax
from onnx2jax import compat
from onnx2jax.ops.registry import op
from onnx2jax.runtime.jitted import PersistentJit
from onnx2jax.runtime.program_cache import Store
from tests.support.helpers import ROOT
from tests.support.ledger import spent
from tests.support.tiers import extended

IMAGES = np.random.default_rng(0).random((4, 1, 8, 8)).astype(np.float32)
X = np.arange(8, dtype=np.float32).reshape(2, 4)
DEEP = parser.parse_model(
    '<ir_version: 10, opset_import: ["": 21]> deep (float[n, 8] x0) => (float[n, 8] x3) {'
    + "".join(f"h{k} = MatMul(x{k}, w{k}) r{k} = Relu(h{k}) x{k + 1} = Add(x{k}, r{k}) " for k in range(3))
    + "}"
)
DEEP.graph.initializer.extend(helper.make_tensor(f"w{k}", 1, (8, 8), np.full(64, 0.1 * k)) for k in range(3))


def own(function: Callable[..., Any]) -> Any:
    """A model of one operator, a user's."""
    op("Own", domain="test.lowered", replace=True)(function)
    values = [helper.make_tensor_value_info(n, 1, [None, 4]) for n in "xy"]
    node = helper.make_node("Own", ["x"], ["y"], domain="test.lowered")
    opsets = [helper.make_opsetid("test.lowered", 1)]
    return helper.make_model(helper.make_graph([node], "g", values[:1], values[1:]), opset_imports=opsets, ir_version=8)


def over_mesh(folder: Path, devices: slice = slice(2)) -> Any:
    mesh = Mesh(np.array(jax.devices()[devices]), ("data",))
    return onnx2jax.convert(onnx2jax.demo_model(), mesh=mesh, cache_dir=folder)(IMAGES)


def of_layers(folder: Path) -> Any:
    return onnx2jax.convert(DEEP, scan_layers="calls", cache_dir=folder)(np.ones((2, 8), np.float32))


def of_own_operator(folder: Path) -> Any:
    return onnx2jax.convert(own(lambda x: x + 1), cache_dir=folder)(X)


def of_library_call(folder: Path) -> Any:
    determinant = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[n, n] x) => (float y) { y = Det(x) }'
    )
    return onnx2jax.convert(determinant, cache_dir=folder)(2 * np.eye(6, dtype=np.float32))


def finetuned(folder: Path) -> Any:
    model = onnx2jax.convert(onnx2jax.demo_model(), cache_dir=folder)
    tuned = onnx2jax.finetune(model, lambda logits, _: (logits**2).mean(), optax.adam(1e-3))
    return tuned.step(tuned.init(), {"image": IMAGES})


def trained(folder: Path) -> Any:
    os.environ["ONNX2JAX_CACHE_DIR"] = str(folder)
    trainer = onnx2jax.TrainingModel(onnx2jax.demo_training_model())
    os.environ["ONNX2JAX_CACHE_DIR"] = ""
    trainer.initialize()
    return trainer.train_step(image=np.ones((2, 64), np.float32), label=np.zeros(2, np.int64))


KINDS = (over_mesh, of_layers, of_own_operator, of_library_call, finetuned, trained)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("results", [extended(k) if k is finetuned else k for k in KINDS])
def test_another_model_of_equal_programs_compiles_nothing(results: Callable[[Path], Any], tmp_path: Path) -> None:
    first, before = results(tmp_path), spent().compilations
    assert list(tmp_path.glob("*.program"))
    again = results(tmp_path)
    assert spent().compilations == before
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(_numbers, again), jax.tree.map(_numbers, first))


def _numbers(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


SCRIPT = """
import sys
from pathlib import Path

import jax

from tests.runtime import test_persistent_jit as kinds

if sys.argv[2] == "again":
    jax.stages.Lowered.compile = None
kinds.jax.config.update("jax_num_cpu_devices", 4)
print([jax.tree.map(lambda v: kinds._numbers(v).tolist(), kind(Path(sys.argv[1]))) for kind in kinds.KINDS])
"""


@pytest.mark.extended  # two processes; the other test shows the same in one
def test_another_process_compiles_nothing(tmp_path: Path) -> None:
    printed = []
    for seed, which in (("1", "first"), ("2", "again")):
        command = [sys.executable, "-c", SCRIPT, str(tmp_path), which]
        done = subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": seed}, cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    assert printed[0] == printed[1]


def test_devices_are_part_of_the_key(tmp_path: Path) -> None:
    for devices in (slice(2), slice(2, 4), slice(3, 1, -1)):
        result = over_mesh(tmp_path, devices)
        assert [s.device for s in result.addressable_shards] == list(jax.devices()[devices])
    assert len(list(tmp_path.glob("*.program"))) == 3


def test_what_an_operator_computes_is_part_of_the_key(tmp_path: Path) -> None:
    for function in (lambda x: x + 1, lambda x: x + 2):
        result = onnx2jax.convert(own(function), cache_dir=tmp_path)(X)
        np.testing.assert_array_equal(result, function(X))


def test_a_damaged_program_is_recompiled(tmp_path: Path) -> None:
    wanted = over_mesh(tmp_path)
    (path,) = tmp_path.glob("*.program")
    whole = path.read_bytes()
    for data in (b"", whole[: len(whole) // 2], whole[:-1] + bytes([whole[-1] ^ 1])):
        path.write_bytes(data)
        with pytest.warns(UserWarning, match="in cache_dir cannot be used and is recompiled"):
            np.testing.assert_array_equal(over_mesh(tmp_path), wanted)
        assert path.read_bytes() != data


def test_arguments_are_told_apart_and_donated(tmp_path: Path) -> None:
    """By weak types, which StableHLO does not show, among others."""
    for _ in range(2):
        add = PersistentJit(jax.jit(lambda k, x: x * k, static_argnums=0, donate_argnums=1), Store(tmp_path), static=1)
        assert [add(k, np.float32(3)).item() for k in (2, 3)] == [6, 9]
        assert add(2, jnp.int32(3)).weak_type is False and add(2, jnp.asarray(3)).weak_type is True
        assert add(2, 3).weak_type is True and add(2, np.int32([3])).shape == (1,)
        donated = jnp.ones(3)
        add(2, donated)
        assert donated.is_deleted()
        (elsewhere,) = add(2, jax.device_put(np.ones(3), jax.devices()[1])).devices()
        assert elsewhere == jax.devices()[1]


def test_arguments_that_a_program_does_not_read_are_part_of_the_key(tmp_path: Path) -> None:
    first = PersistentJit(jax.jit(lambda x: x + 1), Store(tmp_path))
    other = PersistentJit(jax.jit(lambda x, unread: x + 1), Store(tmp_path))  # noqa: ARG005
    x = np.ones(3, np.float32)
    np.testing.assert_array_equal(first(x), other(x, x))


def test_programs_bound_to_their_process_are_not_kept(tmp_path: Path) -> None:
    said: list[float] = []

    def with_callback(x: Any) -> Any:
        jax.debug.callback(lambda v: said.append(float(v)), x)
        return jax.pure_callback(lambda v: v + 1, jax.ShapeDtypeStruct((), np.float32), x)

    call = PersistentJit(jax.jit(with_callback), Store(tmp_path))
    assert [call(np.float32(1)).item() for _ in range(2)] == [2, 2]
    jax.effects_barrier()
    assert said == [1, 1]
    with jax.disable_jit():
        assert PersistentJit(jax.jit(lambda x: x + 1), Store(tmp_path))(np.float32(1)) == 2
    narrow = PersistentJit(jax.jit(lambda x: x), Store(tmp_path))
    assert narrow(jnp.array([1, -2], jnp.int4)).tolist() == [1, -2]
    assert not list(tmp_path.iterdir())


def test_jaxs_own_cache_takes_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the user's folder; nothing read from JAX's is serialized again."""
    monkeypatch.setattr(compat, "keeps_programs", lambda: True)
    monkeypatch.setattr("onnx2jax.compat.programs.keeps_programs", lambda: True)
    over_mesh(tmp_path)
    assert not list(tmp_path.iterdir())
