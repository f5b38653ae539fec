"""Checkpoints in both formats: bitwise round trips, reports of mismatches, atomic writes."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import safetensors.numpy
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import onnx2jax
from onnx2jax.errors import CheckpointError, InputValueError
from onnx2jax.training import checkpoint
from tests.support import resumption
from tests.support.helpers import ROOT, mesh
from tests.support.killed import killed
from tests.support.tiers import extended

pytestmark = pytest.mark.usefixtures("standard_promotion")  # optax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    params: dict[str, Any]
    own: tuple[dict[str, Any], ...]
    key: Any


def in_a_file(folder: Path, state: Any, like: Any, position: Any = None) -> tuple[Any, Any]:
    path = onnx2jax.training.save_checkpoint(folder / "s.safetensors", state, position=position)
    return onnx2jax.training.load_checkpoint(path, like)


def in_a_folder(folder: Path, state: Any, like: Any, position: Any = None) -> tuple[Any, Any]:
    with onnx2jax.training.Checkpoints(folder / "series") as checkpoints:
        newest = (checkpoints.steps or [0])[-1]
        checkpoints.save(newest + 1, state, position=position)
        return checkpoints.load(like)


Format = Callable[..., tuple[Any, Any]]
either_format = pytest.mark.parametrize("through", [in_a_file, in_a_folder])


def bits(leaf: Any) -> tuple[Any, ...]:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return (str(jax.random.key_impl(leaf)), leaf.shape, np.asarray(jax.random.key_data(leaf)).tobytes())
    return (leaf.dtype, leaf.shape, np.asarray(leaf).tobytes())


def assert_same(state: Any, other: Any) -> None:
    assert jax.tree.structure(state) == jax.tree.structure(other)
    assert [bits(x) for x in jax.tree.leaves(state)] == [bits(x) for x in jax.tree.leaves(other)]


TYPES = [
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64", "bfloat16", "complex64", "complex128"),
    *(
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "int4",
        "uint4",
        "int2",
        "float4_e2m1fn",
    ),
]


@either_format
def test_bitwise_round_trip_of_every_dtype(through: Format, tmp_path: Path) -> None:
    default = jnp.zeros(1).dtype
    with jax.enable_x64(True):
        arrays = {t: jax.device_put(np.array([[1, 1, 0], [1, 0, 1]]).astype(t)) for t in TYPES}
        scalars = {t: jax.device_put(np.array(1).astype(t)) for t in TYPES}
        exact = {"f": jnp.float64(1 / 3), "i": jnp.int64(2**53 + 1), "nan": jnp.float32("nan"), "zero": -jnp.zeros(2)}
    state = {"arrays": arrays, "scalars": scalars, "exact": exact, "empty": jnp.zeros((0, 3))}
    again, position = through(tmp_path, state, state)
    assert_same(state, again)
    assert position is None
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(again))
    assert jnp.zeros(1).dtype == default  # the global 64-bit flag is unchanged


@either_format
def test_round_trip_of_nested_states(through: Format, tmp_path: Path) -> None:
    params = {"/enc/layer.0/W:0": jnp.ones((3, 2)), "..": jnp.zeros(()), "": jnp.ones(2), 'ü "<>?*|\\': jnp.ones(1)}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3), optax.ema(0.9))
    keys = {impl: jax.random.split(jax.random.key(3, impl=impl), 4) for impl in ("threefry2x32", "rbg", "unsafe_rbg")}
    state = State(params, (keys, {}, {"T": jnp.int32(4)}), (jax.random.key(1), optimizer.init(params)))
    like = jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x * 0, state)
    assert_same(state, through(tmp_path, state, like)[0])
    assert_same(state, through(tmp_path, state, jax.eval_shape(lambda: state))[0])


@either_format
def test_numpy_arrays_stay_numpy_and_are_copied(through: Format, tmp_path: Path) -> None:
    w = np.arange(6.0).reshape(2, 3)
    state = {"w": w, "t": w.T, "x": jnp.ones(2), "scalar": np.float16(3)}
    again, _ = through(tmp_path, state, state)
    assert_same(state, again)
    assert isinstance(again["w"], np.ndarray) and isinstance(again["x"], jax.Array)
    with onnx2jax.training.Checkpoints(tmp_path / "later") as checkpoints:
        checkpoints.save(1, state)
        w[:] = -1
        assert checkpoints.load(state)[0]["w"].min() == 0


def test_what_is_written_later_is_a_copy() -> None:
    w = np.zeros(3)
    entries, _ = checkpoint._entries({"w": w, "t": w[::-1]}, None)
    w[:] = 1
    assert [v.tolist() for v in entries.values()] == [[0, 0, 0]] * 2


ONE = {"x": np.ones(1)}


@either_format
def test_position_round_trip(through: Format, tmp_path: Path) -> None:
    positions: list[Any] = [{"epoch": 2, "batches": [1, 2.5, "x", None, True]}, 7, "text", [], 2**70]
    assert [through(tmp_path, ONE, ONE, position)[1] for position in positions] == positions
    scalars = {"a": np.int64(3), "b": [np.float32(0.5), np.bool_(True)], "c": jnp.int32(4), "d": np.array(5)}
    position = through(tmp_path, ONE, ONE, scalars)[1]
    assert position == {"a": 3, "b": [0.5, True], "c": 4, "d": 5} and type(position["a"]) is int


@either_format
def test_positions_that_json_changes_raise(through: Format, tmp_path: Path, subtests: pytest.Subtests) -> None:
    for position in ((1, 2), {1: 2}, {np.int64(1): 2}, np.arange(3), {1, 2}, object()):
        with subtests.test(msg=repr(position)), pytest.raises(TypeError, match="JSON"):
            through(tmp_path, ONE, ONE, position)


@either_format
def test_leaves_that_are_not_arrays_raise(through: Format, tmp_path: Path, subtests: pytest.Subtests) -> None:
    message = "'params/w' of the state is not an array"
    for leaf in (1.5, "text", np.array(["text"], object), object(), np.ma.masked_array(np.ones(2), [True, False])):
        with subtests.test(msg=repr(leaf)), pytest.raises(TypeError, match=message):
            through(tmp_path, {"params": {"w": leaf}}, {})


def test_names_of_other_formats_raise(tmp_path: Path) -> None:
    with pytest.raises(InputValueError, match=r"one of safetensors: '.*s\.safetensors'"):
        onnx2jax.training.save_checkpoint(tmp_path / "s.npz", ONE)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("keep", [0, -1, True, "3"])
def test_checkpoints_to_keep_are_one_or_more(keep: Any, tmp_path: Path) -> None:
    with pytest.raises(InputValueError, match="it is a number of checkpoints, 1 or more, or None for all"):
        onnx2jax.training.Checkpoints(tmp_path / "run", keep=keep)


def test_two_leaves_with_the_same_name_raise(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="two leaves of the state are named 'a/b'"):
        onnx2jax.training.save_checkpoint(tmp_path / "s", {"a/b": jnp.ones(1), "a": {"b": jnp.ones(1)}})


@either_format
def test_mismatches_are_listed_together(through: Format, tmp_path: Path) -> None:
    ones = partial(jnp.ones, dtype=jnp.float32)
    state = {"w": ones((3, 2)), "old": ones(1), "t": ones(2), "k": jax.random.key(0), "same": ones(1)}
    like = {
        **{"w": ones((2, 3)), "new": ones(4), "t": jnp.ones(2, jnp.bfloat16)},
        **{"k": jax.random.key(0, impl="rbg"), "same": ones(1)},
    }
    with pytest.raises(CheckpointError) as caught:
        through(tmp_path, state, like)
    assert sorted(str(caught.value).splitlines()[1:]) == [
        "  k: key<fry>[] saved, key<rbg>[] expected",
        "  new: nothing saved, float32[4] expected",
        "  old: float32[1] saved, nothing expected",
        "  t: float32[2] saved, bfloat16[2] expected",
        "  w: float32[3, 2] saved, float32[2, 3] expected",
    ]
    many = {f"w{i}": jnp.ones(1) for i in range(30)}
    with pytest.raises(CheckpointError, match="and 20 more"):
        through(tmp_path, many, {})


@either_format
def test_states_without_leaves(through: Format, tmp_path: Path) -> None:
    for state in ({}, (), {"x": jnp.zeros((0,))}):
        assert_same(state, through(tmp_path, state, state)[0])


@either_format
def test_shardings_are_restored(through: Format, tmp_path: Path) -> None:
    devices = mesh(data=4, model=2)
    with jax.enable_x64(True):
        whole = {
            "w": jnp.arange(32.0, dtype=jnp.float64).reshape(8, 4) / 3,
            "b": jnp.arange(4.0),
            "n": jnp.int64(2**40),
        }
    whole["keys"] = jax.random.split(jax.random.key(5), 8)
    specs = {"w": P("data", "model"), "b": P("model"), "n": P(), "keys": P("data")}
    spread = {n: jax.device_put(v, NamedSharding(devices, specs[n])) for n, v in whole.items()}
    others = {n: NamedSharding(mesh(x=2), P("x") if n in "wb" else P()) for n in whole}
    for state, like in ((whole, spread), (spread, whole), (spread, spread)):
        again, _ = through(tmp_path, state, like)
        assert_same(whole, again)
        assert all(again[n].sharding == like[n].sharding for n in again)
        assert all(again[n].committed == like[n].committed for n in again)
    like = {n: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=others[n]) for n, v in whole.items()}
    again, _ = through(tmp_path, spread, like)
    assert_same(whole, again)
    assert all(v.sharding.is_equivalent_to(others[n], v.ndim) for n, v in again.items())


@either_format
def test_a_loaded_state_does_not_recompile_and_like_may_be_donated(through: Format, tmp_path: Path) -> None:
    step = jax.jit(lambda state: jax.tree.map(lambda x: x * 2 + 1, state), donate_argnums=0)
    first = {"w": jnp.ones((3, 2)), "n": jnp.ones(())}
    state = step(first)
    assert first["w"].is_deleted()
    again, _ = through(tmp_path, state, first)
    compiled = step._cache_size()
    assert_same(step(again), step(state))
    assert step._cache_size() == compiled


def test_steps_of_a_folder(tmp_path: Path) -> None:
    with onnx2jax.training.Checkpoints(tmp_path / "run", keep=2) as checkpoints:
        assert checkpoints.steps == []
        with pytest.raises(
            FileNotFoundError, match=r"there is no checkpoint in '.*': Checkpoints\.save has written none"
        ):
            checkpoints.load({})
        for step in (1, 5, 9):
            checkpoints.save(step, {"w": jnp.full(2, step, jnp.int32)}, position=step * 10)
        assert checkpoints.steps == [5, 9]
        assert checkpoints.load({"w": jnp.zeros(2, jnp.int32)}, step=5)[1] == 50
        with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 1 in .*steps are \["):
            checkpoints.load({}, step=1)
        with pytest.raises(ValueError, match="step 9 is not above 9, the newest"):
            checkpoints.save(9, {})
    with onnx2jax.training.Checkpoints(tmp_path / "run", keep=None) as checkpoints:
        for step in (10, 11, 12):
            checkpoints.save(step, {"w": jnp.zeros(1)})
        assert checkpoints.steps == [5, 9, 10, 11, 12]


def test_background_writes_are_unaffected_by_donation(tmp_path: Path) -> None:
    step = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    state = step({"w": jnp.zeros((1000, 1000)), "n": jnp.zeros(())})
    with onnx2jax.training.Checkpoints(tmp_path, keep=None) as checkpoints:
        for i in range(1, 6):
            checkpoints.save(i, state)
            for _ in range(3):
                state = step(state)
        for i in range(1, 6):
            again, _ = checkpoints.load(state, step=i)
            assert {float(v) for x in again.values() for v in (x.min(), x.max())} == {3.0 * i - 2}


def test_inside_a_running_event_loop(tmp_path: Path) -> None:
    with jax.enable_x64(True):
        state = {"n": jnp.int64(2**40 + 1)}

    async def cell() -> Any:
        return in_a_folder(tmp_path, state, state)[0]

    assert_same(state, asyncio.run(cell()))


def test_other_tools_read_the_file(tmp_path: Path) -> None:
    state = {"params": {"fc.weight": jnp.ones((2, 3), jnp.bfloat16)}, "key": jax.random.key(1)}
    path = onnx2jax.training.save_checkpoint(tmp_path / "s.safetensors", state)
    arrays = safetensors.numpy.load_file(path)
    assert arrays["params/fc.weight"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(arrays["key"], jax.random.key_data(state["key"]))


# ------------------------------------------------------------------------------------------ damage, interrupted writes


def test_every_truncation_of_a_file_raises(tmp_path: Path) -> None:
    state = {"w": jnp.ones((3, 2)), "n": jnp.ones(())}
    data = onnx2jax.training.save_checkpoint(tmp_path / "whole", state).read_bytes()
    path = tmp_path / "cut"
    for size in range(0, len(data), 7):
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match="damaged, or not a safetensors file"):
            onnx2jax.training.load_checkpoint(path, state)
    path.write_bytes(data + b"more")
    with pytest.raises(CheckpointError, match="damaged"):
        onnx2jax.training.load_checkpoint(path, state)


ABOUTS = {
    "not JSON": "{",
    "a number": "3",
    "without entries": json.dumps({"keys": {}, "position": None}),
    "entries of another type": json.dumps({"entries": 3, "keys": {}, "position": None}),
    "without the key's algorithm": json.dumps({"entries": {"key": "key<fry>[]"}, "keys": {}, "position": None}),
    "an unknown algorithm": json.dumps({"entries": {"key": "key<fry>[]"}, "keys": {"key": "?"}, "position": None}),
}


@pytest.mark.parametrize("name", ABOUTS)
def test_damaged_metadata_raises(name: str, tmp_path: Path) -> None:
    key = jax.random.key(0, impl="threefry2x32")
    safetensors.numpy.save_file(
        {"key": np.asarray(jax.random.key_data(key))}, tmp_path / "s", {"onnx2jax": ABOUTS[name]}
    )
    with pytest.raises(CheckpointError, match="damaged"):
        onnx2jax.training.load_checkpoint(tmp_path / "s", {"key": key})


def test_foreign_files_raise(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    safetensors.numpy.save_file({"w": np.ones(2, np.float32)}, path)
    with pytest.raises(CheckpointError, match="not written by save_checkpoint"):
        onnx2jax.training.load_checkpoint(path, {"w": jnp.ones(2)})
    about = {"entries": {"w": "float32[2]"}, "keys": {}, "position": None}
    safetensors.numpy.save_file({"w": np.ones((1, 2), np.float32)}, path, {"onnx2jax": json.dumps(about)})
    with pytest.raises(CheckpointError, match=r"w should be float32\[2\], but is float32\[1, 2\]"):
        onnx2jax.training.load_checkpoint(path, {"w": jnp.ones(2, jnp.float32)})
    with pytest.raises(FileNotFoundError):
        onnx2jax.training.load_checkpoint(tmp_path / "none", {})
    with pytest.raises(IsADirectoryError, match=r"Checkpoints\(folder\)"):
        onnx2jax.training.load_checkpoint(tmp_path, {})


def test_damage_to_each_file_of_a_folder(tmp_path: Path) -> None:
    state = {"w": jnp.arange(1000.0)}  # one array: when one of several fails, orbax's loop closes under the others
    with onnx2jax.training.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        raised_for = []
        for file in sorted(p for p in (tmp_path / "1").rglob("*") if p.is_file() and p.stat().st_size):
            data = file.read_bytes()
            file.write_bytes(data[: len(data) // 2])
            try:
                assert_same(state, checkpoints.load(state)[0])
            except CheckpointError as error:
                assert "cannot be read" in str(error)
                raised_for.append(file.parent.name)
            file.write_bytes(data)
        assert "d" in raised_for or "ocdbt.process_0" in raised_for
        assert_same(state, checkpoints.load(state)[0])


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = onnx2jax.training.save_checkpoint(tmp_path / "s", {"w": jnp.ones(2)}, position=1)

    def full(*_: Any) -> None:
        raise OSError("no space left")

    for module, name in ((safetensors.numpy, "save_file"), (os, "replace")):
        with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
            patch.setattr(module, name, full)
            onnx2jax.training.save_checkpoint(path, {"w": jnp.zeros(2)}, position=2)
        assert list(tmp_path.iterdir()) == [path]
        assert onnx2jax.training.load_checkpoint(path, {"w": jnp.zeros(2)})[1] == 1


def test_a_killed_write_leaves_the_old_or_the_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, like, met = tmp_path / "s", {"w": jnp.zeros(2)}, set()
    for at in range(20):
        onnx2jax.training.save_checkpoint(path, like, position=0)
        new = {"w": jnp.ones(2)}
        ended = killed(monkeypatch, at, lambda: onnx2jax.training.save_checkpoint(path, new, position=1))  # noqa: B023
        state, position = onnx2jax.training.load_checkpoint(path, like)
        assert state["w"].tolist() == [position] * 2
        met.add(position)
        if not ended:
            break
    assert met == {0, 1}


# ------------------------------------------------------------------------------------------------------------- extras


def test_extras_are_imported_only_when_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = """
import sys, jax, jax.numpy, jax.export
extras = {"orbax", "safetensors", "optax", "flatbuffers", "rich"} - {*sys.modules}
import onnx2jax
onnx2jax.convert
assert not extras & {*sys.modules}, extras & {*sys.modules}
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    for name in ("safetensors", "safetensors.numpy", "orbax.checkpoint"):
        monkeypatch.setitem(sys.modules, name, None)
    for use in (
        lambda: onnx2jax.training.save_checkpoint(tmp_path / "s", {}),
        lambda: onnx2jax.training.load_checkpoint(tmp_path / "s", {}),
        lambda: onnx2jax.training.Checkpoints(tmp_path),
    ):
        with pytest.raises(ImportError, match=r"needs the extra checkpoint .*pip install"):
            use()


# --------------------------------------------------------------------------------------------------------- resumption


@pytest.mark.parametrize(
    "names",
    [
        ["finetune on 8 devices", "training_info"],
        extended(["finetune", "training_info on 8 devices"]),
    ],
    ids=" and ".join,
)
def test_training_resumed_in_another_process_is_bitwise_equal(names: list[str], tmp_path: Path) -> None:
    """That process is killed while it writes: complete steps are left, and further ones can be written."""
    ends = {}
    for name in names:
        training, folder = resumption.TRAININGS[name](), tmp_path / name
        beginning = training.init()
        state, position = resumption.run(training, training.init(), {"epoch": 0, "batch": 0}, resumption.STOP)
        assert position == {"epoch": 1, "batch": resumption.STOP - resumption.BATCHES}
        with onnx2jax.training.Checkpoints(folder / "series") as checkpoints:
            checkpoints.save(resumption.STOP, state, position=position)
            onnx2jax.training.save_checkpoint(folder / "file", state, position=position)
            ends[name] = resumption.run(training, state, position, resumption.END - resumption.STOP)
        both = zip(jax.tree.leaves(ends[name][0]), jax.tree.leaves(beginning), strict=True)
        assert all(bits(x) != bits(y) for x, y in both if x.ndim)
    # The bits depend on how the compiler optimises.
    env = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": str(jax.config.values["jax_disable_most_optimizations"])}
    command = [sys.executable, "-W", "error", "-m", "tests.support.resumption", tmp_path, *names]
    subprocess.run(command, check=True, cwd=ROOT, env=env)
    for name, (state, position) in ends.items():
        for form in ("file", "series"):
            again, where = onnx2jax.training.load_checkpoint(tmp_path / name / f"end of {form}", state)
            assert where == position
            assert_same(state, again)

    with onnx2jax.training.Checkpoints(tmp_path / "killed") as checkpoints:
        again, newest = checkpoints.load(resumption.marked(0))
        assert_same(again, resumption.marked(newest))
        if newest == 1:
            checkpoints.save(2, resumption.marked(2), position=2)
        checkpoints.save(3, resumption.marked(3), position=3)
        assert checkpoints.load(resumption.marked(0))[1] == 3
