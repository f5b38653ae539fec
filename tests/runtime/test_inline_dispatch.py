"""Short programs whose results are wanted as NumPy arrays run in the thread of their caller."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import onnx
import pytest
from onnx import helper

import onnx2jax
from onnx2jax import compat
from onnx2jax.compat import programs
from onnx2jax.jaxpr.passes.cpu import onednn
from onnx2jax.runtime import inline_dispatch as room
from onnx2jax.runtime import numpy_executor
from tests.support.models import mlp, mlp_reference, model, one_node, value

pytestmark = pytest.mark.skipif(compat.synchronous_device() is None, reason="no such CPU in this jaxlib")
X = np.random.default_rng(1).normal(size=(3, 4)).astype(np.float32)


@pytest.fixture(autouse=True)
def numpy_executor_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else NumPy runs these programs."""
    monkeypatch.setattr(numpy_executor, "SMALL_PROGRAM", -100)


def run_of(m: onnx2jax.Model, x: np.ndarray = X) -> list[Any]:
    return m.run(None, {"x": x})


def paths(m: onnx2jax.Model) -> set[str]:
    """How calls that return NumPy arrays run."""
    return {bound.path for key, bound in m.weights.bound.items() if key.as_numpy}


def test_it_runs_on_a_cpu_of_its_own_and_gives_numpy_arrays() -> None:
    device = compat.synchronous_device()
    assert device is not None and device not in jax.devices()
    m = onnx2jax.convert(mlp())
    for _ in range(2):
        (y,) = run_of(m)
        assert type(y) is np.ndarray
        np.testing.assert_allclose(y, mlp_reference(m.params, X), rtol=1e-5)
    np.testing.assert_array_equal(y, m(X))
    assert m(X).devices() == {jax.devices()[0]}  # what a call returns is where the caller works
    assert m.compilations == 1 and paths(m) == {"inline"}


def test_threads_that_ask_first_at_once_share_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that was loaded for one would refuse arguments on another."""
    monkeypatch.setattr(programs, "_synchronous_device", functools.cache(programs._synchronous_device.__wrapped__))
    start = threading.Barrier(4)

    def ask(_: int) -> Any:
        start.wait()
        return compat.synchronous_device()

    with ThreadPoolExecutor(4) as pool:
        assert len(set(map(id, pool.map(ask, range(4))))) == 1


def test_weights_lie_there_in_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    lent: list[tuple[Any, Any]] = []
    load = compat.load_compiled

    def loaded(dumped: Any, device: Any = None) -> Callable[..., Any]:
        program = load(dumped, device)

        def call(shared: list[Any], leaves: Any) -> Any:
            lent.extend((v.unsafe_buffer_pointer(), v.device) for v in shared)
            return program(shared, leaves)

        return call

    monkeypatch.setattr(compat, "load_compiled", loaded)
    m = onnx2jax.convert(mlp())
    run_of(m)
    (prepared,) = m.weights.hoisted.values()
    own = [v.unsafe_buffer_pointer() for v in prepared]
    assert [at for at, _ in lent] == own and {d for _, d in lent} == {compat.synchronous_device()}


def test_other_weights_are_not_confused() -> None:
    m = onnx2jax.convert(mlp())
    run_of(m)
    other = m.with_params({n: v * 2 for n, v in m.params.items()})
    np.testing.assert_allclose(run_of(other)[0], mlp_reference(other.params, X), rtol=1e-5)
    np.testing.assert_allclose(run_of(m)[0], mlp_reference(m.params, X), rtol=1e-5)


def test_arrays_of_jax_are_taken_too() -> None:
    m = onnx2jax.convert(mlp())
    for x in (jax.numpy.asarray(X), jax.device_put(X, jax.devices()[0])):
        for _ in range(2):
            np.testing.assert_allclose(m.run(None, {"x": x})[0], mlp_reference(m.params, X), rtol=1e-5)


def test_many_threads_run_one_model() -> None:
    m = onnx2jax.convert(mlp())
    rows = np.random.default_rng(0).normal(size=(4, 50, 3, 4)).astype(np.float32)
    wrong: list[Any] = []

    def work(own: np.ndarray) -> None:
        for x in own:
            if not np.allclose(run_of(m, x)[0], mlp_reference(m.params, x), rtol=1e-5, atol=1e-6):
                wrong.append(x)

    threads = [threading.Thread(target=work, args=[own]) for own in rows]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_under_another_configuration_it_is_compiled_anew() -> None:
    m = onnx2jax.convert(mlp())
    run_of(m)
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        run_of(m, np.full_like(X, np.nan))
    assert np.isnan(run_of(m, np.full_like(X, np.nan))[0]).all()


def test_on_another_device_it_runs_as_ever() -> None:
    """What was compiled for one device cannot be loaded on one of another number."""
    m = onnx2jax.convert(mlp())
    with jax.default_device(jax.devices()[3]):
        np.testing.assert_allclose(run_of(m)[0], mlp_reference(m.params, X), rtol=1e-5)


def test_a_stage_gives_numpy_arrays_to_the_host() -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"]),
        helper.make_node("NonZero", ["y"], ["where"]),
        helper.make_node("Transpose", ["where"], ["rows"]),
    ]
    ends = [value("x", np.float32, ["n", 4])], [value("rows", np.int64, None), value("y", np.float32, ["n", 2])]
    m = onnx2jax.convert(model(nodes, *ends, {"w": np.eye(4, 2, dtype=np.float32)}))
    x = np.array([[1, 0, 5, 5], [0, 2, 5, 5]], np.float32)
    for _ in range(2):
        rows, y = m.run(None, {"x": x})
        np.testing.assert_array_equal(rows, [[0, 0], [1, 1]])
        np.testing.assert_array_equal(y, x[:, :2])
    assert paths(m) == {"inline", "host"}


def as_ever(m: onnx2jax.Model) -> None:
    """It runs where JAX lets all programs run, and gives the same."""
    assert paths(m) == {"compiled"}


def test_a_long_program_is_not_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "SHORT", 10)
    m = onnx2jax.convert(mlp())
    np.testing.assert_allclose(run_of(m)[0], mlp_reference(m.params, X), rtol=1e-5)
    as_ever(m)


def calls_back() -> onnx.ModelProto:
    nodes = [helper.make_node("Back", ["x"], ["y"], domain="tests.synchronous")]
    ends = [value("x", np.float32, ["n", 4])], [value("y", np.float32, ["n", 4])]
    return model(nodes, *ends, opsets={"tests.synchronous": 1})


def test_a_program_that_calls_python_back_runs_as_ever() -> None:
    @onnx2jax.ops.op("Back", domain="tests.synchronous", replace=True)
    def back(x: Any) -> Any:
        return jax.pure_callback(lambda v: np.asarray(v) + 1, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    m = onnx2jax.convert(calls_back())
    np.testing.assert_array_equal(run_of(m)[0], X + 1)
    as_ever(m)


@pytest.mark.skipif(not onednn.is_available(), reason="this processor or this jaxlib has no such kernels")
def test_a_program_of_onednn_which_cannot_be_written_runs_as_ever() -> None:
    ends = {"A": (np.uint8, [65, 130]), "B": (np.int8, [130, 67])}
    m = onnx2jax.convert(one_node("MatMulInteger", ends))
    a, b = np.full((65, 130), 255, np.uint8), np.full((130, 67), -128, np.int8)
    for _ in range(2):
        np.testing.assert_array_equal(m.run(None, {"A": a, "B": b})[0], np.full((65, 67), -255 * 128 * 130))
    as_ever(m)


def test_without_such_a_cpu_it_runs_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "synchronous_device", lambda: None)
    m = onnx2jax.convert(mlp())
    np.testing.assert_allclose(run_of(m)[0], mlp_reference(m.params, X), rtol=1e-5)
    as_ever(m)


@pytest.mark.usefixtures("one_cpu")
def test_a_program_from_the_folder_of_programs_runs_there_too(tmp_path: Any) -> None:
    for found in (False, True):
        m = onnx2jax.convert(mlp(), cache_dir=tmp_path)
        np.testing.assert_allclose(run_of(m)[0], mlp_reference(m.params, X), rtol=1e-5)
        (executable,) = m.weights.hoisted
        assert (paths(m), executable._code is not None) == ({"inline"}, found)
