"""Dispatch: which calls take the fast path, that signatures tell calls apart, and what is counted and warned of."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from onnx import helper

import onnx2jax
from onnx2jax.errors import InputNameError, InputShapeError, InputTypeError, RecompilationWarning
from onnx2jax.model.calls import arguments
from onnx2jax.runtime import numpy_executor
from tests.support import decoders
from tests.support.helpers import mesh
from tests.support.models import mlp, mlp_reference, model, one_node, text_model, value

X = np.random.default_rng(1).normal(size=(3, 4)).astype(np.float32)
Y = np.random.default_rng(2).normal(size=(3, 4)).astype(np.float32)


class FullPath:
    """Counts the calls that took the full path."""

    count = 0


@pytest.fixture
def full_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[FullPath]:
    """Counts calls that bind their arguments: the fast path does not. ``convert`` binds fixed inputs, none here."""
    counter, bind = FullPath(), arguments.bind

    def counting(inputs: Any, optional: Any, args: Any, named: Any, *options: Any) -> Any:
        counter.count += len(args) + len(named) > 0
        return bind(inputs, optional, args, named, *options)

    monkeypatch.setattr(arguments, "bind", counting)
    yield counter


def difference() -> onnx.ModelProto:
    """less = a - b, more = a + b: the order of the inputs matters."""
    nodes = [helper.make_node("Sub", ["a", "b"], ["less"]), helper.make_node("Add", ["a", "b"], ["more"])]
    ends = [value("a", np.float32, ["n", 4]), value("b", np.float32, ["n", 4])]
    return model(nodes, ends, [value("less", np.float32, ["n", 4]), value("more", np.float32, ["n", 4])])


def doubled(dtype: Any) -> onnx.ModelProto:
    return model([helper.make_node("Add", ["x", "x"], ["y"])], [value("x", dtype, ["n"])], [value("y", dtype, ["n"])])


# ------------------------------------------------------------------------------------------------ which path

CALLS: dict[str, Callable[[Any], Any]] = {
    "numpy": lambda m: m(X),
    "jax": lambda m: m(jnp.asarray(X)),
    "by name": lambda m: m(x=X),
    "run": lambda m: m.run(None, {"x": X})[0],
    "run, some outputs": lambda m: m.run(["y"], {"x": X})[0],
    "inside a jit": lambda m: jax.jit(lambda a: a + m(X))(0.0),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_second_call_of_a_signature_takes_the_fast_path(call: Callable[[Any], Any], full_path: FullPath) -> None:
    m = onnx2jax.convert(mlp())
    results = [call(m) for _ in range(3)]
    assert (full_path.count, m.compilations) == (1, 1)
    for result in results:
        np.testing.assert_allclose(result, mlp_reference(m.params, X), rtol=1e-5)


def test_call_and_run_have_separate_signatures_and_share_a_program(full_path: FullPath) -> None:
    m = onnx2jax.convert(mlp())
    for _ in range(2):
        m(x=X)
        m.run(None, {"x": Y})
    assert (full_path.count, m.compilations) == (2, 1)


def nonzero_of_product() -> onnx.ModelProto:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("NonZero", ["y"], ["where"])]
    ends = [value("x", np.float32, [3, 4])], [value("where", np.int64, None)]
    return model(nodes, *ends, {"w": np.eye(4, dtype=np.float32)})


def test_a_call_of_a_bucket_s_size_is_bound_and_one_that_pads_is_not(full_path: FullPath) -> None:
    m = onnx2jax.convert(mlp(), bucket={"batch": [len(X)]})
    full_path.count = 0
    whole, again, part = m(X), m(X), m(X[:2])
    assert full_path.count == 2
    assert [" full " in m.explain_call(x).splitlines()[1] for x in (X, X[:2])] == [False, True]
    np.testing.assert_array_equal(whole, again)
    np.testing.assert_allclose(part, whole[:2], rtol=1e-5)


def test_a_host_only_call_is_bound(full_path: FullPath) -> None:
    m = onnx2jax.convert(one_node("NonZero", {"x": (np.float32, [3, 4])}))
    for x in (X, Y, np.where(X > 0, X, 0)):
        np.testing.assert_array_equal(m(x), np.nonzero(x))
        np.testing.assert_array_equal(m.run(None, {"x": x})[0], np.nonzero(x))
        assert isinstance(m(x), jax.Array)
    assert full_path.count == 2


def test_a_partitioned_graph_is_bound_across_data_dependent_shapes(full_path: FullPath) -> None:
    nodes = [*nonzero_of_product().graph.node, helper.make_node("Cast", ["where"], ["float"], to=1)]
    nodes.append(helper.make_node("MatMul", ["float", "float_t"], ["z"]))
    nodes.insert(3, helper.make_node("Transpose", ["float"], ["float_t"]))
    ends = [value("x", np.float32, [3, 4])], [value("z", np.float32, None)]
    m = onnx2jax.convert(model(nodes, *ends, {"w": np.eye(4, dtype=np.float32)}))
    for x in (X, Y, np.where(X > 0, X, 0), X):
        found = np.stack(np.nonzero(x)).astype(np.float32)
        np.testing.assert_allclose(m.run(None, {"x": x})[0], found @ found.T)
    assert full_path.count == 1


@pytest.mark.parametrize("dtype", [object, "U2"])
def test_strings_of_either_dtype_are_bound(full_path: FullPath, dtype: Any) -> None:
    m = onnx2jax.convert(one_node("StringNormalizer", {"x": (np.object_, ["n"])}, case_change_action="UPPER"))
    for text in ("ab", "cd", "ef"):
        (y,) = m.run(None, {"x": np.array([text, "x"], dtype)})
        assert y.dtype == object and y.tolist() == [text.upper(), "X"]
    assert full_path.count == 1


FULL_PATH: dict[str, tuple[onnx.ModelProto, dict[str, Any], tuple[Any, ...]]] = {
    "a list": (mlp(), {}, (X.tolist(),)),
    "a weak type": (doubled(np.float32), {}, (jnp.full(3, 2.0),)),
    "a NumPy scalar": (one_node("Neg", {"x": (np.float32, [])}), {}, (np.float32(2),)),
    "a subclass": (mlp(), {}, (X.view(np.matrix),)),
    "buckets": (mlp(), {"bucket": {"batch": [4, 8]}}, (X,)),
    "a size to check": (one_node("NonZero", {"x": (np.float32, [3, 4])}), {"max_size": {"NonZero_0": 12}}, (X,)),
    "random numbers": (one_node("RandomNormalLike", {"x": (np.float32, ["n", 4])}), {}, (X,)),
    "an input by value": (
        one_node("Reshape", {"x": (np.float32, [3, 4]), "s": (np.int64, [2])}), {}, (X, np.array([4, 3])),
    ),
    "not optimised": (mlp(), {"optimize": False}, (X,)),
    "a mesh": (mlp(), {"mesh": "data"}, (X,)),
}  # fmt: skip


@pytest.mark.parametrize(("proto", "options", "args"), FULL_PATH.values(), ids=FULL_PATH)
@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")  # np.matrix
def test_calls_that_need_more_than_a_program_take_the_full_path(
    proto: onnx.ModelProto, options: dict[str, Any], args: tuple[Any, ...], full_path: FullPath
) -> None:
    if "max_size" in options:
        proto.graph.node[0].name = "NonZero_0"
    if "mesh" in options:
        options = {"mesh": mesh(data=1)}
    m = onnx2jax.convert(proto, **options)
    full_path.count = 0
    results = [jax.tree.map(np.asarray, m(*args)) for _ in range(3)]
    assert full_path.count == 3
    same = all(jax.tree.leaves(jax.tree.map(np.array_equal, results[0], results[2])))
    assert same is not m.graph.draws


def test_sharded_arrays_and_a_surrounding_mesh_take_the_full_path(full_path: FullPath) -> None:
    m, over = onnx2jax.convert(mlp()), mesh(data=2)
    x = np.concatenate([X, X])
    expected = np.asarray(m(x))
    divided = jax.device_put(x, NamedSharding(over, PartitionSpec("data")))
    full_path.count = 0
    np.testing.assert_allclose([m(divided), m(divided)], [expected, expected], rtol=1e-5)
    with jax.set_mesh(over):
        np.testing.assert_allclose([m(x), m(x)], [expected, expected], rtol=1e-5)
    assert full_path.count == 4


def test_a_new_partition_invalidates_bound_calls(full_path: FullPath) -> None:
    m = onnx2jax.convert(mlp())
    expected = m(X)
    program = m._runtime.program
    program.reasons[m.graph.nodes[1]] = "found by another call"
    program._partition()
    np.testing.assert_allclose([m(X), m(X)], [expected, expected], rtol=1e-6)
    assert full_path.count == 2
    assert not m.jitted


# ------------------------------------------------------------------------------------------------ signatures


def test_signatures_distinguish_order_and_names_of_arguments() -> None:
    m = onnx2jax.convert(difference())
    for _ in range(2):
        for less, more in (
            m(X, Y), m(X, b=Y), m(a=X, b=Y), m(b=Y, a=X), m.run(None, {"b": Y, "a": X}),
            m.run(["more", "less"], {"a": X, "b": Y})[::-1], m(jnp.asarray(X), Y), m(X, jnp.asarray(Y)),
        ):  # fmt: skip
            np.testing.assert_array_equal(less, X - Y)
            np.testing.assert_array_equal(more, X + Y)
    assert m(X, Y)._fields == ("less", "more")


def test_invalid_arguments_are_rejected_after_valid_calls() -> None:
    m = onnx2jax.convert(mlp())
    for _ in range(2):
        m(X), m(x=X)
        with pytest.raises(InputTypeError, match="float64"):
            m(X.astype(np.float64))
        with pytest.raises(InputTypeError):
            m(X.astype(">f4"))
        with pytest.raises(InputShapeError):
            m(X[:, :3])
        for args, named in (((X, X), {}), ((X,), {"x": X}), ((), {"z": X}), ((), {})):
            with pytest.raises(InputNameError):
                m(*args, **named)
        with pytest.raises(InputNameError, match="no output 'z'"):
            m.run(["z"], {"x": X})


def test_signatures_distinguish_shapes() -> None:
    m = onnx2jax.convert(mlp())
    for _ in range(2):
        for n in (1, 3, 2):
            np.testing.assert_allclose(m(X[:n]), mlp_reference(m.params, X[:n]), rtol=1e-5)
    assert m.compilations == 3


def test_memory_layout_does_not_change_results() -> None:
    m = onnx2jax.convert(mlp())
    for x in (X, np.asfortranarray(X), np.repeat(X, 2, axis=0)[::2]):
        np.testing.assert_allclose(m(x), mlp_reference(m.params, X), rtol=1e-5)


@pytest.mark.parametrize("wide", [False, True])
def test_64_bit_values_are_exact_with_and_without_x64(wide: bool) -> None:
    m, big = onnx2jax.convert(doubled(np.int64)), np.array([2**40 + 1])
    for mode in (wide, not wide, wide):
        with jax.enable_x64(mode):
            for result in (m(big), *m.run(None, {"x": big})):
                assert (result.dtype, int(result[0])) == (np.int64, 2**41 + 2)
            assert int(m(jnp.asarray([3], jnp.int32 if not mode else jnp.int64))[0]) == 6
            assert jax.config.jax_enable_x64 is mode
    with pytest.raises(InputTypeError):
        m(np.array([1], np.uint32))


def test_models_with_other_parameters_share_programs_but_no_bound_calls() -> None:
    scale = {"k": np.float32([2, 3, 4, 5]), "s": np.float32(1)}  # a scalar is part of the program
    nodes = [helper.make_node("Mul", ["x", "k"], ["h"]), helper.make_node("Add", ["h", "s"], ["y"])]
    a = onnx2jax.convert(model(nodes, [value("x", np.float32, ["n", 4])], [value("y", np.float32, ["n", 4])], scale))
    a(X)
    b = a.with_params({"k": scale["k"] * 10})
    c = b.with_params({"s": np.float32(7)})
    for _ in range(3):
        np.testing.assert_allclose(a(X), X * scale["k"] + 1)
        np.testing.assert_allclose(b(X), X * scale["k"] * 10 + 1)
        np.testing.assert_allclose(c(X), X * scale["k"] * 10 + 7)
    assert a.compilations == 2


def test_copies_and_pickles_compute_the_same() -> None:
    m = onnx2jax.convert(mlp())
    expected = m(X)
    for other in (copy.copy(m), copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        for _ in range(2):
            np.testing.assert_array_equal(other(X), expected)


def test_transformations_work_after_bound_calls() -> None:
    m = onnx2jax.convert(mlp())
    expected = np.asarray(m(X))
    m(X)
    np.testing.assert_allclose(jax.jit(m)(X), expected, rtol=1e-5)
    np.testing.assert_allclose(jax.vmap(m)(X[None])[0], expected, rtol=1e-5)
    gradient = jax.grad(lambda x: m(x).sum())(X)
    assert np.any(gradient)
    np.testing.assert_array_equal(m(X), expected)


def test_inputs_specialised_on_are_not_bound_by_shape_alone() -> None:
    reshape = onnx2jax.convert(one_node("Reshape", {"x": (np.float32, [3, 4]), "s": (np.int64, [2])}))
    for _ in range(2):
        for shape in ([4, 3], [2, 6], [12, 1]):
            assert reshape(X, np.array(shape)).shape == tuple(shape)


def test_overridden_defaults_have_their_own_signature() -> None:
    k = {"k": np.float32([1, 1, 1, 1])}
    ends = [value("x", np.float32, ["n", 4]), value("k", np.float32, [4])], [value("y", np.float32, ["n", 4])]
    m = onnx2jax.convert(model([helper.make_node("Mul", ["x", "k"], ["y"])], *ends, k))
    for _ in range(2):
        np.testing.assert_array_equal(m(X), X)
        np.testing.assert_array_equal(m(X, k=k["k"] * 2), X * 2)
        np.testing.assert_array_equal(m(k=k["k"] * 3, x=X), X * 3)


def test_unused_and_fixed_inputs() -> None:
    nodes = [helper.make_node("Mul", ["x", "f"], ["y"])]
    ends = [value(n, np.float32, ["n", 4]) for n in ("unused", "f", "x")], [value("y", np.float32, ["n", 4])]
    m = onnx2jax.convert(model(nodes, *ends), static={"f": Y})
    for _ in range(2):
        np.testing.assert_array_equal(m(X * 0, X), X * Y)
        np.testing.assert_array_equal(m(x=X, unused=X * 0), X * Y)


# ------------------------------------------------------------------------------------------------ contexts


def test_a_changed_jax_configuration_takes_the_full_path(full_path: FullPath) -> None:
    m = onnx2jax.convert(mlp())
    m(X), m(X)
    with jax.default_matmul_precision("highest"):
        m(X), m(X)
    assert (m.compilations, full_path.count) == (2, 2)
    m(X)
    assert m.compilations == 2


def test_debug_nans_is_honoured_after_a_bound_call() -> None:
    m = onnx2jax.convert(one_node("Log", {"x": (np.float32, ["n"])}))
    m(X[0] * 0 - 1)
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        m(X[0] * 0 - 1)
    assert np.isnan(m(X[0] * 0 - 1)).all()


def test_debug_nans_is_honoured_in_the_first_call() -> None:
    with jax.debug_nans(True):
        for call in (lambda m: m(X[0] * 0 - 1), lambda m: m.run(None, {"x": X[0] * 0 - 1})):
            m = onnx2jax.convert(one_node("Log", {"x": (np.float32, ["n"])}))
            for _ in range(2):
                with pytest.raises(FloatingPointError, match="nan"):
                    call(m)
            assert m.run(None, {"x": X[0] * 0 + 1})[0].tolist() == [0] * len(X[0])


LOG = "g (float[n] x) => (float[n] y) { y = Log(x) }"
DIV = "g (float[n] x) => (float[n] y) { y = Div(x, x) }"
EAGER: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "vmap": (LOG, lambda m, x: jax.vmap(lambda x: m.apply({}, x))(x[None])),
    "jvp": (LOG, lambda m, x: jax.jvp(lambda x: m.apply({}, x), (x,), (x,))),
    "run, which NumPy computes": (DIV, lambda m, x: m.run(None, {"x": x})),
    "a call": (DIV, lambda m, x: m(x)),
}


@pytest.mark.parametrize("case", EAGER)
@pytest.mark.parametrize("x64", [False, True])
def test_debug_nans_is_honoured_in_disable_jit(case: str, x64: bool) -> None:
    text, call = EAGER[case]
    m = onnx2jax.convert(text_model(text))
    bad = X[0] * 0 - (1 if text == LOG else 0)
    with jax.enable_x64(x64), jax.disable_jit():
        call(m, bad)
        with jax.debug_nans(True):
            call(m, X[0] * 0 + 1)
            with pytest.raises(FloatingPointError, match="nan"):
                call(m, bad)


CONSTANT = "g (float[3] x) => (float[m] y) { w = NonZero(x)  c = Cast<to = 1>(w)  d = Div(c, c)  y = Reshape(d, all) }"


def test_debug_nans_is_honoured_by_outputs_that_numpy_computes() -> None:
    """NonZero specialises on x, so that NumPy computes all of it while the program is traced."""
    m, x = onnx2jax.convert(text_model(CONSTANT, all=[-1])), np.ones(3, np.float32)
    for call in (lambda: m.run(None, {"x": x}), lambda: m(x)):
        for _ in range(2):
            call()
            with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
                call()
            with jax.debug_infs(True):
                call()


def test_disable_jit_is_honoured() -> None:
    m = onnx2jax.convert(one_node("Identity", {"x": (np.int64, ["n"])}))
    x = np.array([2**40])
    m(x)
    with jax.disable_jit():
        result = m(x)
    assert isinstance(result, jax.Array)
    assert (result.dtype, int(result[0])) == (np.int64, 2**40)


def test_transfer_guard_is_honoured() -> None:
    m = onnx2jax.convert(mlp())
    m(X), m(jnp.asarray(X))
    placed = jax.device_put(X)
    with jax.transfer_guard("disallow"):
        m(placed)
        with pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed"):
            m(X)


def test_deleted_arrays_are_rejected() -> None:
    m = onnx2jax.convert(mlp())
    m(jnp.asarray(X))
    array = jnp.asarray(X)
    array.delete()
    with pytest.raises(InputTypeError, match="deleted"):
        m(array)


def test_bound_calls_run_on_the_device_of_the_arguments() -> None:
    m = onnx2jax.convert(mlp())
    expected, device = m(jnp.asarray(X)), jax.devices("cpu")[1]
    m(X)
    for _ in range(2):
        there = m(jax.device_put(X, device))
        assert there.devices() == {device}
        np.testing.assert_array_equal(there, expected)
        with jax.default_device(device):
            np.testing.assert_array_equal(m(X), expected)


# ------------------------------------------------------------------------------------------------ warnings


def test_recompilations_are_counted_and_warned_of() -> None:
    m = onnx2jax.convert(mlp(), warn_after=1)
    m(X)
    program = m._runtime.program
    compiled = program._subprogram(program.partitioned.nodes[0].attributes["body"])
    seconds = compiled.seconds
    with jax.default_matmul_precision("highest"), pytest.warns(RecompilationWarning, match="compiled 2 times"):
        m(X)
    assert m.compilations == 2
    assert compiled.seconds > seconds


def test_many_shapes_warn_once() -> None:
    m = onnx2jax.convert(mlp(), warn_after=2)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        for n in (1, 2, 3, 1, 2, 3):
            m(np.ones((n, 4), np.float32))
    assert [w.category for w in given] == [RecompilationWarning]


def test_contradicted_declarations_warn_once() -> None:
    proto = one_node("Neg", {"x": (np.float32, ["n"])})
    proto.graph.output[0].CopyFrom(value("y", np.float32, ["n", 7]))
    m = onnx2jax.convert(proto)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        for n in (2, 2, 3, 3):
            m(np.ones(n, np.float32))
    assert [w.category.__name__ for w in given] == ["DeclarationWarning"]


# ------------------------------------------------------------------------------------------------ threads, memory


def test_concurrent_calls() -> None:
    m = onnx2jax.convert(mlp())
    inputs = [np.full((n, 4), i, np.float32) for i in range(4) for n in (1, 2)]
    expected = [mlp_reference(m.params, x) for x in inputs]
    start, wrong = threading.Barrier(4), []

    def calls() -> None:
        start.wait()
        for _ in range(20):
            for x, y in zip(inputs, expected, strict=True):
                if not np.allclose(m(x), y, rtol=1e-5):
                    wrong.append(x)

    threads = [threading.Thread(target=calls) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_bound_calls_do_not_keep_a_model_alive() -> None:
    m = onnx2jax.convert(mlp())
    m(X), m(X)
    reference = weakref.ref(m)
    gc.disable()
    try:
        del m
        assert reference() is None
    finally:
        gc.enable()


def test_run_returns_the_program_output_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numpy_executor, "SMALL_PROGRAM", -100)  # else NumPy runs it
    m = onnx2jax.convert(mlp())
    for _ in range(2):
        (y,) = m.run(None, {"x": X})
        assert not y.flags.owndata


def test_a_growing_kv_cache_warns_once_with_the_fix() -> None:
    model = onnx2jax.convert(decoders.appending().proto)
    rows = {"input_ids": np.array([[3]]), "position_ids": np.array([[0]])}

    def call(past: int) -> None:
        caches = {
            n: np.zeros((1, 2, past, 16), np.float32) for n in ("past_key_values.0.key", "past_key_values.0.value")
        }
        model.run(None, {**rows, "attention_mask": np.ones((1, past + 1), np.int64), **caches})

    call(0)
    call(1)
    with pytest.warns(RecompilationWarning, match=r"its cache 'past_key_values.0.key' grows: \(1, 2, 0, 16\), "):
        call(2)
    call(3)
