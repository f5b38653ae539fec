"""Signatures, the keys of the dispatch cache: every field matters, and none refers to the caller's memory."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from onnx import helper

import onnx2jax
from onnx2jax import compat
from onnx2jax.eval.interpreter import Settings
from onnx2jax.ir.graph import Graph
from onnx2jax.runtime import memory, params
from onnx2jax.runtime.dispatch import Callee, Constants, DispatchCache, Signature, signature, signature_of, snapshot
from onnx2jax.runtime.jitted import PersistentJit
from onnx2jax.runtime.multi_device_jit import Spread
from onnx2jax.runtime.program_cache import Store
from tests.support.models import mlp, model, one_node, text_model, value

GRAPH = Graph("g", "", (), (), {}, ())
X = np.ones((3, 4), np.float32)
WEIGHT = {"w": jax.ShapeDtypeStruct((4, 4), np.float32)}
CALLEE = {"graph": GRAPH, "settings": Settings(), "params": WEIGHT, "constants": Constants({"s": np.float32(2)})}


def signed(x: Any = X, *, as_numpy: bool = False, name: str = "x", device: Any = None, **callee: Any) -> Signature:
    found = signature(Callee(**{**CALLEE, **callee}), (name,), [x], device, as_numpy)
    assert found is not None
    return found


def configured() -> Signature:
    with jax.default_matmul_precision("highest"):
        return signed()


OTHERS: dict[str, dict[str, Callable[[], Signature]]] = {
    "callee": {
        "graph": lambda: signed(graph=replace(GRAPH, name="g")),
        "settings": lambda: signed(settings=Settings(max_trips=3)),
        "params": lambda: signed(params={"w": jax.ShapeDtypeStruct((5, 4), np.float32)}),
        "constants": lambda: signed(constants=Constants({"s": np.float32(3)})),
    },
    "inputs": {"name": lambda: signed(name="z")},
    "arrays": {
        "dtype": lambda: signed(X.astype(np.float64)),
        "byte order": lambda: signed(X.astype(">f4")),
        "shape": lambda: signed(X[:2]),
        "JAX's own": lambda: signed(jnp.asarray(X)),
    },
    "device": {"another": lambda: signed(device=jax.devices()[0])},
    "configuration": {"precision": configured},
    "as_numpy": {"NumPy": lambda: signed(as_numpy=True)},
}
CASES = [(field, name) for field, cases in OTHERS.items() for name in cases]


def test_every_signature_field_has_a_case() -> None:
    assert OTHERS.keys() == {*Signature._fields}
    assert OTHERS["callee"].keys() == {*Callee.__slots__} - {"_hash"}


@pytest.mark.parametrize(("field", "name"), CASES)
def test_each_field_changes_the_signature(field: str, name: str) -> None:
    other, own = OTHERS[field][name](), signed()
    assert own == signed() and hash(own) == hash(signed())
    assert own != other
    assert [f for f in Signature._fields if getattr(own, f) != getattr(other, f)] == [field]


def test_signatures_include_weak_type_device_and_commitment() -> None:
    plain, (first, second, *_) = jnp.ones((3, 4), np.float32), jax.devices()
    arrays = [plain, jnp.full((3, 4), 1.0), jax.device_put(X, first), jax.device_put(X, second)]
    assert arrays[1].weak_type
    assert len({signed(x) for x in arrays}) == len(arrays)


def test_constants_of_equal_bytes_differ_by_dtype_and_shape() -> None:
    dtypes, shapes = (np.int32, np.float32), ((2,), (2, 1), (1, 2))
    arrays = [np.zeros(shape, dtype) for dtype in dtypes for shape in shapes]
    assert len({Constants({"s": array}) for array in [*arrays, np.zeros(1, np.int64)]}) == 7


def test_arrays_of_numpy_and_jax_share_a_program() -> None:
    first, second, *_ = jax.devices()
    own = signed(device=first).program
    for x in (jnp.asarray(X), jax.device_put(X, first)):
        assert signed(x, device=first).program == own == signed(device=first, as_numpy=True).program
    others = [jax.device_put(X, second), jnp.full((3, 4), 1.0), jnp.asarray(X[:2])]
    assert len({own, *(signed(x, device=first).program for x in others)}) == 4
    called = onnx2jax.convert(mlp())
    x = np.ones((3, 4), np.float32)
    for given in (x, jnp.asarray(x), jax.device_put(x, first)):
        called(given)
        called.run(None, {called.inputs[0].name: given})
    assert called.compilations == 1


def test_traced_and_sharded_arguments_have_no_signature() -> None:
    callee = Callee(**CALLEE)
    found: list[Any] = []

    def note(x: Any) -> Any:
        found.append(signature(callee, ("x",), [x], None, False))
        return x

    jax.jit(note)(X)
    jax.vmap(note)(X)
    jax.grad(lambda x: note(x).sum())(X)
    mesh = jax.make_mesh((2,), ("data",))
    spread = jax.device_put(np.ones((2, 2)), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data")))
    note(spread)
    note([X])
    assert found == [None] * 5


@pytest.mark.parametrize("dtype", [np.int64, object])
def test_constants_are_copied(dtype: Any) -> None:
    given = np.array([1, 2], dtype)
    constants = Constants({}, {"s": given})
    before = hash(constants), repr(constants)
    given[:] = 7
    assert constants.inputs["s"].tolist() == [1, 2]
    assert (hash(constants), repr(constants)) == before
    with pytest.raises(ValueError, match="read-only"):
        constants.inputs["s"][0] = 3


def test_constants_are_compared_bitwise() -> None:
    keys = {Constants({"s": np.float32(v)}) for v in (0.0, -0.0, np.nan, 1)}
    assert len(keys) == 4
    assert Constants({"s": np.float32(1)}) != Constants({}, {"s": np.float32(1)})


def test_snapshot_copies_numpy_arrays_only() -> None:
    theirs, own = jnp.asarray(X), X.copy()
    copied: Any = snapshot({"a": own, "b": theirs, "c": [own]})
    own[:] = 5
    assert copied["a"].max() == copied["c"][0].max() == 1
    assert copied["b"] is theirs


def test_a_changed_jax_configuration_is_recompiled() -> None:
    m = onnx2jax.convert(mlp())
    plain = np.asarray(m(X))
    with jax.default_matmul_precision("bfloat16"):
        m(X), m(X)
    assert m.compilations == 2
    np.testing.assert_array_equal(m(X), plain)
    assert m.compilations == 2


def test_caches_share_what_numpy_and_jax_arrays_run_and_keep_configurations_apart() -> None:
    cache, first, other = DispatchCache[object](), jax.devices()[0], jax.devices()[1]

    def program(x: Any, **static: Any) -> object:
        return cache.program(signature_of(tuple(static.items()), {"x": x}, first), object)

    found = program(X)
    assert found is program(jnp.asarray(X)) is program(jax.device_put(X, first)) is program(X)
    wide = jax.NamedSharding(jax.make_mesh((2,), ("data",)), jax.P("data"))
    others = [program(v) for v in (X[:2], X[0, 0], jnp.full((3, 4), 1.0), jax.device_put(X, other))]
    others += [program(jax.device_put(X[:2], wide)), program(X, k=1)]
    with jax.default_matmul_precision("highest"):
        others += [program(X), program(X)]
        assert others.pop() is others[-1]
    assert len({found, *others}) == 8
    assert program(np.float32(1)) is others[1]
    assert program([object()]) is not program([object()]), "no signature, and so no entry"
    copies = [copy.copy(cache), copy.deepcopy({"a": cache})["a"], pickle.loads(pickle.dumps(cache))]
    assert copies == [{}] * 3 and {type(c) for c in copies} == {DispatchCache}


def test_threads_that_miss_at_once_get_one_program() -> None:
    cache, both = DispatchCache[object](), Barrier(2)

    def build() -> object:
        both.wait()
        return object()

    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(lambda _: cache.program(signed(), build), range(2))
    assert one is two


def test_jitted_functions_and_spread_ones_compile_for_each_configuration(tmp_path: Path) -> None:
    def double(x: Any) -> Any:
        return x @ x.T * 2

    for call in (PersistentJit(jax.jit(double), Store(tmp_path)), Spread(double)):
        for _ in range(2):
            np.testing.assert_array_equal(call(X), double(X))
            with jax.default_matmul_precision("float32"):
                np.testing.assert_array_equal(call(X), double(X))
        assert len({key.configuration for key in call._programs if key}) == 2


def test_explain_call_names_path_and_reason() -> None:
    m = onnx2jax.convert(mlp())
    assert m.explain_call(X).splitlines()[1:3] == [
        "model(...)  compiled  one program, called directly for this signature",
        "model.run   numpy     dispatch would cost more than the computation",
    ]
    plain = onnx2jax.convert(mlp(), optimize=False)
    assert "full" in plain.explain_call(X) and "optimize=False" in plain.explain_call(X)
    nodes = [helper.make_node("NonZero", ["x"], ["i"]), helper.make_node("Shape", ["i"], ["y"])]
    file = model(nodes, [value("x", np.float32, ["n", 4])], [value("y", np.int64, [2])])
    assert "needs the value" in onnx2jax.convert(file).explain_call(X)


def test_debug_levels_print_nodes_and_paths(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ONNX2JAX_DEBUG", "2")
    m = onnx2jax.convert(mlp())
    m(X), m(X)
    monkeypatch.delenv("ONNX2JAX_DEBUG")
    m(X)
    printed = capsys.readouterr().err
    assert "onnx2jax: trace node" in printed
    assert [line.rsplit(": ", 1)[1] for line in printed.splitlines() if "call of" in line] == ["full", "compiled"]
    monkeypatch.setenv("ONNX2JAX_DEBUG", "2")
    m(X)
    assert capsys.readouterr().err == "onnx2jax: call of 'main': compiled\n", "every level is read at each call"


def test_signatures_without_jax_trace_context_use_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "trace_context", compat.configuration)
    assert configured() != signed()


@pytest.mark.parametrize("name", ["rows", "columns", "every other", "reversed", "scalar", "empty"])
def test_large_snapshots_are_aligned_copies(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA:CPU reads an array at a multiple of 64 bytes in place, and makes a second copy of any other."""
    monkeypatch.setattr(memory, "LARGE", 0)
    x = np.arange(12.0).reshape(3, 4)
    arrays = {"rows": x, "columns": x.T, "every other": x[:, ::2], "reversed": x[::-1], "scalar": x[0, 1:2].reshape(())}
    array = arrays.get(name, x[:0])
    copies = [snapshot(array) for _ in range(9)]
    for copied in copies:
        assert copied.ctypes.data % memory.ALIGNMENT == 0 and copied.flags.c_contiguous
        assert not np.shares_memory(copied, array)
        np.testing.assert_array_equal(copied, array, strict=True)


@pytest.mark.parametrize("as_numpy", [False, True])
def test_bound_calls_take_64_bit_arrays_in_32_bit_mode(as_numpy: bool) -> None:
    """The program is called outside JAX's 64-bit mode unless NumPy arrays need it."""
    called = onnx2jax.convert(text_model("g (int64[2] x, int64[2] y) => (int64[2] z) { z = Add(x, y) }"))
    x, large = np.array([1, 2]), np.array([2**40, 2**41])
    with compat.enable_x64():
        on_device = jnp.asarray(large)
    for y in (large, on_device, on_device, large):
        found = called.run(None, {"x": x, "y": y})[0] if as_numpy else called(x, y)
        assert found.dtype == np.int64
        np.testing.assert_array_equal(np.asarray(found), x + large)
    path = called.explain_call(x, on_device)
    assert "compiled" in path, path


@pytest.mark.parametrize(("platform", "is_one_cpu"), [("cpu", True), ("gpu", False), ("tpu", False)])
def test_a_model_without_weights_runs_where_jax_does(
    platform: str, is_one_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU it gets none of the CPU's passes; nor does one whose weights span devices."""
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(platform=platform)])
    assert params.DeviceParams({}, {}.__getitem__, lambda _, v: v).on_one_cpu is is_one_cpu
    mesh = jax.make_mesh((2,), ("data",))
    spread = jax.device_put(np.ones(2), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data")))
    types = {"w": jax.ShapeDtypeStruct((2,), spread.dtype)}
    assert not params.DeviceParams(types, {"w": spread}.__getitem__, lambda _, v: v).on_one_cpu


def test_programs_take_the_branches_of_the_platform_they_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the platform's name in ``lax.platform_dependent``, not its device's."""
    a = np.arange(12, dtype=np.int8).reshape(4, 3)
    monkeypatch.setattr("onnx2jax.compat.lowering_platform", lambda _device: "cuda")
    product = onnx2jax.convert(one_node("MatMulInteger", {"a": (np.int8, [4, 3]), "b": (np.int8, [3, 4])}))
    np.testing.assert_array_equal(product(a, a.T), a.astype(int) @ a.T.astype(int))
    (program,) = product._runtime.program._compiled.values()  # type: ignore[union-attr]
    (executable,) = program.executables.values()
    assert "xbf16>" in executable.main.lower([], [a, np.ascontiguousarray(a.T)]).as_text()
