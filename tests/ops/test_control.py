"""If, Loop, Scan, SequenceMap: what each mode gives on the host, under jit, and to a gradient."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from onnx2jax.errors import KnownValueError
from tests.support.helpers import run_op


class Body:
    """A graph attribute as the evaluator hands it over: a closure that knows its inputs and outputs."""

    def __init__(self, function, n_outputs, types=None, input_shapes=None):
        self.function, self.steps = function, []
        self.outputs = [SimpleNamespace(name=f"o{k}", type=types and types[k]) for k in range(n_outputs)]
        shapes = input_shapes or [()] * 8
        self.inputs = [SimpleNamespace(name=f"i{k}", type=tensor(None, s)) for k, s in enumerate(shapes)]

    def __call__(self, *args, step=None):
        self.steps.append(step)
        return tuple(self.function(*args))

    def condition(self):
        return None, []


def if_(cond, then_branch, else_branch):
    n = len(then_branch.outputs)
    return run_op("If", cond, then_branch=then_branch, else_branch=else_branch, n_outputs=n)


def loop(M, cond, *state, body, **how):
    results = run_op("Loop", M, cond, *state, body=body, n_outputs=len(body.outputs) - 1, **how)
    return results if isinstance(results, tuple) else (results,)


def scan(*inputs, body, **attributes):
    return run_op("Scan", *inputs, body=body, n_outputs=len(body.outputs), **attributes)


def tensor(dtype, shape):
    return SimpleNamespace(dtype=dtype, shape=shape)


def f32(*values):
    return np.array(values, np.float32)


def i64(value):
    return np.array(value, np.int64)


TRUE, FALSE = np.array(True), np.array(False)


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


# ---------------------------------------------------------------------------------------------------- If


def branches(a, b):
    return Body(lambda: [a], 1), Body(lambda: [b], 1)


def test_if_constant_evaluates_one_branch_of_any_shape():
    assert if_(np.array([False]), *branches(f32(1), f32(1, 2))).shape == (2,)
    assert if_(TRUE, *branches([f32(1)], None)) == [f32(1)]


def test_if_traced():
    def f(cond, x):
        return if_(cond, Body(lambda: [x * 2], 1), Body(lambda: [f32(5)], 1))

    for cond in (TRUE, np.array([True])):
        assert jax.jit(f)(cond, f32(3)) == 6
        assert jax.jit(f)(~cond, f32(3)) == 5
    gradient = jax.grad(lambda x, c: jax.jit(f)(c, x).sum())
    assert gradient(jnp.float32(3).reshape(1), TRUE) == 2
    assert gradient(jnp.float32(3).reshape(1), FALSE) == 0


def test_if_folds_outputs_equal_in_both_branches():
    def f(cond, x):
        shape, y = if_(cond, *(Body(lambda s=s: [i64([2, 3]), x + s], 2) for s in (1, 2)))
        assert isinstance(shape, np.ndarray)
        return y

    assert jax.jit(f)(FALSE, f32(1)) == 3


@pytest.mark.parametrize(
    "a, b", [(f32(1), f32(1, 2)), (f32(1), i64([1])), ([f32(1)], [f32(1), f32(2)]), (None, f32(1))]
)
def test_if_traced_with_different_branches_is_an_error(a, b):
    with pytest.raises(KnownValueError, match=r"then: .*else: .*condition known"):
        jax.jit(lambda c: if_(c, *branches(a, b)))(TRUE)


def test_if_traced_with_a_branch_that_cannot_run():
    """The branch for other shapes, say: with the condition known it would be left alone."""
    wrong = Body(lambda: [f32(1, 2, 3).reshape(2, 2)], 1)
    right = Body(lambda: [f32(1)], 1)
    assert if_(FALSE, wrong, right) == 1
    with pytest.raises(KnownValueError, match=r"then_branch cannot run .*reshape"):
        jax.jit(lambda c: if_(c, wrong, right))(FALSE)


def test_if_condition_of_two_elements():
    with pytest.raises(ValueError, match="single element"):
        if_(np.array([True, False]), *branches(f32(1), f32(2)))


# -------------------------------------------------------------------------------------------------- Loop


def power(i, go, x, limit=None):
    """x doubles; the scan output is the old x and the iteration."""
    keep = go if limit is None else x * 2 < limit
    return keep, x * 2, x, i


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("M, cond", [(i64(3), TRUE), (i64(3), None), (i64([3]), np.array([True]))])
def test_loop_counted(M, cond, jit):
    def f(x):
        return loop(M, cond, x, body=Body(power, 4))

    final, seen, index = (jax.jit(f) if jit else f)(f32(1))
    assert final.tolist() == [8]
    assert np.asarray(seen).tolist() == [[1], [2], [4]]
    assert index.dtype == np.int64
    assert np.asarray(index).tolist() == [0, 1, 2]
    assert isinstance(final, np.ndarray) != jit


def test_loop_counted_is_differentiable():
    def f(x):
        final, seen, _ = loop(i64(3), TRUE, x, body=Body(power, 4))
        return final.sum() + seen.sum()

    assert jax.grad(f)(jnp.asarray(f32(1))) == 15


def test_loop_without_a_condition_ignores_the_body():
    """The second trip sees the condition of the first, which has no say."""
    body = Body(lambda _, go, x: (FALSE, x + 1, go), 3)
    final, seen = loop(i64(3), None, f32(0), body=body)
    assert (final.tolist(), seen.tolist()) == ([3], [True, False, False])
    final, seen = jax.jit(lambda x: loop(i64(3), None, x, body=body))(f32(0))
    assert (final.tolist(), np.asarray(seen).tolist()) == ([3], [True, False, False])


@pytest.mark.parametrize("M", [None, i64(10), i64(2**63 - 1)])
def test_loop_with_a_condition(M):
    body = Body(lambda i, go, x: power(i, go, x, 30)[:2], 2)
    assert loop(M, TRUE, f32(1), body=body)[0] == 32
    assert jax.jit(lambda x: loop(M, TRUE, x, body=body))(f32(1))[0] == 32
    assert jax.jit(lambda x, c: loop(M, c, x, body=body))(f32(1), FALSE)[0] == 1
    assert loop(i64(2), TRUE, f32(1), body=body)[0] == 4


def test_loop_with_traced_trip_count():
    body = Body(lambda i, go, x: power(i, go, x)[:2], 2)
    for cond in (TRUE, None):
        assert jax.jit(lambda m, x, c=cond: loop(m, c, x, body=body))(i64(5), f32(1))[0] == 32
    with pytest.raises(KnownValueError, match="scan output"):
        jax.jit(lambda m, x: loop(m, TRUE, x, body=Body(power, 4)))(i64(5), f32(1))


def test_endless_loop_raises():
    with pytest.raises(ValueError, match="never ends"):
        loop(None, None, f32(1), body=Body(power, 4))


def test_loop_data_dependent_on_the_host():
    body = Body(lambda i, go, x: power(i, go, x, 30), 4)
    assert loop(i64(100), TRUE, f32(1), body=body)[1].ravel().tolist() == [1, 2, 4, 8, 16]
    concrete = loop(i64(100), TRUE, jnp.asarray(f32(1)), body=body, eager=True)[1]
    assert concrete.ravel().tolist() == [1, 2, 4, 8, 16]


def test_loop_of_constants_is_folded_under_jit():
    def f(x):
        final, *_ = loop(i64(3), TRUE, i64([1]), body=Body(power, 4))
        assert isinstance(final, np.ndarray)
        return jnp.zeros(final, x.dtype) + x

    assert jax.jit(f)(f32(1)).shape == (8,)


def test_loop_over_a_captured_tracer():
    """Nothing passed to the loop is traced, but what the body captures is."""

    def f(x):
        body = Body(lambda _, go, a: (go, a + x, a * x), 3)
        return loop(i64(4), TRUE, f32(0), body=body)

    final, outs = jax.jit(f)(f32(2))
    assert (final.tolist(), outs.ravel().tolist()) == ([8], [0, 4, 8, 12])
    assert jax.jit(f).lower(f32(2)).as_text().count("while") > 0


def test_loop_constant_state_is_folded():
    """A shape carried through unchanged may be used as one, in the body and after it."""

    def f(x):
        body = Body(lambda _, go, shape, x: (go, shape, x + jnp.ones(tuple(shape), np.float32)), 3)
        shape, y = loop(i64(3), TRUE, i64([2]), x, body=body)
        assert isinstance(shape, np.ndarray)
        return y

    assert jax.jit(f)(f32(1, 2)).tolist() == [4, 5]


def test_loop_state_that_changes_the_sign_of_zero_is_not_constant():
    def f(x):
        body = Body(lambda _, go, zero, x: (go, -zero, x + 1), 3)
        zero, y = loop(i64(3), TRUE, np.zeros(1, np.float32), x, body=body)
        return y / jnp.asarray(zero)

    for run in (f, jax.jit(f)):
        np.testing.assert_array_equal(run(f32(1, 2)), [-np.inf] * 2)


def need(value):
    if isinstance(value, jax.core.Tracer):
        raise KnownValueError("a number is traced")
    return int(value)


@pytest.mark.parametrize(
    "name, body, want",
    [
        ("growing tensor", lambda _, go, x: (go, jnp.concatenate([x, x])), 8),
        ("known iteration", lambda i, go, x: (go, jnp.pad(x, (0, need(i)))), 4),
        ("condition ends it", lambda i, _go, x: (np.array(need(i) < 1), jnp.concatenate([x, x])), 4),
    ],
)
def test_loop_unrolls(name, body, want):
    f = jax.jit(lambda x: loop(i64(3), TRUE, x, body=Body(body, 2))[0])
    assert f(f32(1)).shape == (want,), name


def test_loop_unrolls_a_growing_sequence():
    def f(x):
        body = Body(lambda _, go, s, n: (go, [*s, x * n.astype(x.dtype)], n + 1), 3)
        return loop(i64(3), TRUE, [], i64(1), body=body)[0]

    assert [v.tolist() for v in jax.jit(f)(f32(1))] == [[1], [2], [3]]


def test_loop_counter_as_condition_with_scan_output():
    """Under scan the counter is traced and so is the condition; unrolled both are known."""

    def f(x):
        body = Body(lambda _, _go, n, x: (n < 3, n + 1, x * 2, x), 4)
        return loop(i64(2**63 - 1), TRUE, i64(1), x, body=body)

    n, x, outs = jax.jit(f)(f32(1))
    assert (n, x.tolist(), outs.ravel().tolist()) == (4, [8], [1, 2, 4])


def test_loop_state_that_changes_shape_under_a_traced_condition():
    body = Body(lambda _, _go, x: (x.sum() < 9, jnp.concatenate([x, x])), 2)
    with pytest.raises(KnownValueError, match="changes"):
        jax.jit(lambda x, m: loop(m, TRUE, x, body=body))(f32(1), i64(3))
    with pytest.raises(KnownValueError, match="traced"):
        jax.jit(lambda x: loop(i64(3), TRUE, x, body=body))(f32(1))


@pytest.mark.parametrize("M, cond", [(i64(0), TRUE), (i64(-1), None), (i64(3), FALSE)])
@pytest.mark.parametrize("jit", [False, True])
def test_loop_zero_trips(M, cond, jit):
    def f(x):
        return loop(M, cond, x, body=Body(power, 4))

    final, seen, index = (jax.jit(f) if jit else f)(f32(1, 2))
    assert final.tolist() == [1, 2]
    assert (seen.shape, seen.dtype, index.shape, index.dtype) == ((0, 2), np.float32, (0,), np.int64)


def test_loop_zero_trips_of_a_body_that_cannot_run():
    types = [None, None, tensor(np.dtype(np.float16), ("n", 4))]
    body = Body(lambda _, go, s: (go, s[1:], s[0]), 3, types=types)
    _, outs = loop(i64(0), TRUE, [], body=body)
    assert (outs.shape, outs.dtype) == ((0, 0, 4), np.float16)


def test_loop_folds_the_iteration_into_random_keys():
    body = Body(power, 4)
    loop(i64(3), TRUE, f32(1), body=body)
    assert body.steps == [0, 1, 2]


def test_loop_symbolic_trips_under_export():
    def f(x):
        body = Body(lambda _, go, y: (go, y + 1, y), 3)
        return loop(np.array(x.shape[0], object), TRUE, jnp.zeros((), np.float32), body=body)

    shape = jax.export.symbolic_shape("n")
    exported = jax.export.export(jax.jit(f))(jax.ShapeDtypeStruct(shape, np.float32))
    final, outs = exported.call(f32(1, 2, 3))
    assert (final, outs.tolist()) == (3, [0, 1, 2])


def test_loop_nested():
    def f(x):
        def outer(_, go, x):
            body = Body(lambda _, go, y: (go, y + x, y), 3)
            y, outs = loop(i64(2), TRUE, x, body=body)
            return go, y, outs

        return loop(i64(3), TRUE, x, body=Body(outer, 3))

    for g in (f, jax.jit(f)):
        final, outs = g(f32(1))
        assert (final.tolist(), outs.shape) == ([27], (3, 2, 1))


def test_loop_iteration_declared_as_vector():
    body = Body(lambda i, go, x: (go, x + i.shape[0] + go.shape[0]), 2, input_shapes=[(1,), (1,), ()])
    assert loop(i64(2), TRUE, f32(0), body=body)[0] == 4


def test_loop_carries_strings():
    body = Body(lambda _, go, s: (go, s + np.array(["b"], object), s), 3)
    final, outs = loop(i64(2), TRUE, np.array(["a"], object), body=body)
    assert final.tolist() == ["abb"]
    assert outs.tolist() == [["a"], ["ab"]]


def test_loop_under_vmap():
    body = Body(lambda i, go, x: power(i, go, x, 30)[:2], 2)
    f = jax.vmap(lambda x: loop(i64(10), TRUE, x, body=body)[0])
    assert f(f32(1, 3, 20)).tolist() == [32, 48, 40]


# -------------------------------------------------------------------------------------------------- Scan


def running(total, x):
    return total + x, total + x


@pytest.mark.parametrize("jit", [False, True])
def test_scan_axes_and_directions(jit):
    X = np.arange(6, dtype=np.float32).reshape(2, 3)

    def f(start, X):
        return scan(
            start,
            X,
            body=Body(running, 2),
            num_scan_inputs=1,
            scan_input_axes=[-1],
            scan_input_directions=[1],
            scan_output_axes=[-1],
            scan_output_directions=[1],
        )

    final, outs = (jax.jit(f) if jit else f)(f32(0, 0), X)
    want = np.cumsum(X[:, ::-1], 1)
    assert np.asarray(final).tolist() == want[:, -1].tolist()
    assert np.asarray(outs).tolist() == want[:, ::-1].tolist()


def test_scan_gradient_and_empty():
    def f(x):
        return scan(f32(0)[0], x, body=Body(running, 2), num_scan_inputs=1)[1].sum()

    assert jax.grad(f)(jnp.asarray(f32(1, 1, 1))).tolist() == [3, 2, 1]
    final, outs = scan(f32(0), np.zeros((0, 1), np.float32), body=Body(running, 2), num_scan_inputs=1)
    assert (final.tolist(), outs.shape) == ([0], (0, 1))


def test_scan_lengths_must_agree():
    body = Body(lambda a, b: (a + b,), 1)
    with pytest.raises(ValueError, match="differ in length"):
        scan(f32(1, 2), f32(1), body=body, num_scan_inputs=2)
    with pytest.raises(ValueError, match="scan_input_axes"):
        scan(f32(1, 2), f32(1), body=body, num_scan_inputs=2, scan_input_axes=[0])


@pytest.mark.parametrize("jit", [False, True])
def test_scan_8(jit):
    start = np.zeros((2, 1), np.float32)
    X = np.arange(1, 7, dtype=np.float32).reshape(2, 3, 1)

    def f(lens, start, X):
        return scan(lens, start, X, body=Body(running, 2), num_scan_inputs=1, opset=8)

    final, outs = (jax.jit(f) if jit else f)(i64([2, 3]), start, X)
    assert np.asarray(final).tolist() == [[3], [15]]
    assert np.asarray(outs)[..., 0].tolist() == [[1, 3, 0], [4, 9, 15]]
    assert scan(None, start, X, body=Body(running, 2), num_scan_inputs=1, opset=8)[0].tolist() == [[6], [15]]
    outs = scan(None, start, X, body=Body(running, 2), num_scan_inputs=1, directions=[1], opset=8)[1]
    assert outs[0, :, 0].tolist() == [3, 5, 6]


# ------------------------------------------------------------------------------------------- SequenceMap


def test_sequence_map():
    body = Body(lambda a, b, c: (a + b, a * c), 2)
    sums, products = run_op("SequenceMap", [f32(1), f32(1, 2)], f32(10), [f32(3), f32(4)], body=body, n_outputs=2)
    assert body.steps == [0, 1]
    assert [v.tolist() for v in sums] == [[11], [11, 12]]
    assert [v.tolist() for v in products] == [[3], [4, 8]]
    assert run_op("SequenceMap", [], f32(10), [], body=body, n_outputs=2) == ([], [])
    with pytest.raises(ValueError, match="differ in length"):
        run_op("SequenceMap", [f32(1)], f32(10), [], body=body)
