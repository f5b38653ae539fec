"""A Model is a pytree: its leaves are the parameters by name, all else is static. JAX transforms the model itself."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import NamedSharding, PartitionSpec

import onnx2jax
from onnx2jax import compat
from onnx2jax.errors import InputError, InputShapeError, InputTypeError, RandomKeyError, UnsupportedError
from tests.support.decoders import group_query
from tests.support.helpers import mesh
from tests.support.models import mlp, text_model

X = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
INT8 = """g (float[n, 4] x) => (float[n, 3] y)
{ w = DequantizeLinear(q, s)  h = MatMul(x, w)  i = Add(h, b)  y = Mul(i, c) }"""
close = partial(jax.tree.map, partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5))


def loss(model: onnx2jax.Model, x: Any) -> Any:
    return (model(x) ** 2).mean()


@pytest.fixture(scope="module")
def model() -> onnx2jax.Model:
    return onnx2jax.convert(mlp())


@pytest.fixture(scope="module")
def int8() -> onnx2jax.Model:
    floats = {"s": np.float32(0.5), "b": np.float32([1, 2, 3]), "c": np.float32(2)}
    q = np.arange(12, dtype=np.int8).reshape(4, 3)
    return onnx2jax.convert(text_model(INT8, q=q, **floats), weights="packed")


@pytest.fixture(scope="module")
def gradient(model: onnx2jax.Model) -> Any:
    return jax.jit(jax.grad(lambda params: (model.apply(params, X) ** 2).mean()))(model.params)


def test_leaves_are_the_parameters_by_name(model: onnx2jax.Model, int8: onnx2jax.Model) -> None:
    for each in (model, int8):
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(each)]
        assert paths == [f"['{name}']" for name in each.params]
        close(dict(zip(each.params, jax.tree.leaves(each), strict=True)), each.params)
    assert int8.params.keys() == {"q", "q.scales", "b", "c"}  # packed weights, and a scalar, which calls compile in
    assert "w1" in model and "x" not in model
    assert repr(jax.tree.structure(model)) == "PyTreeDef(CustomNode(Model['main', 4 parameters], [*, *, *, *]))"


def test_leaves_are_arrays_on_the_device_made_once(model: onnx2jax.Model) -> None:
    first, second = jax.tree.leaves(model), jax.tree.leaves(model)
    assert all(isinstance(a, jax.Array) and a is b for a, b in zip(first, second, strict=True))
    assert jax.tree.leaves(jax.tree.map(lambda v: v, model))[0] is first[0]


def test_models_of_one_graph_share_programs(model: onnx2jax.Model) -> None:
    call = jax.jit(lambda m, x: m(x))
    before = model(X)
    call(model, X)
    count = model.compilations
    others = [model.with_params({"b2": np.float32([5, 6])}), jax.tree.map(lambda v: 2 * v, model)]
    for other in others:
        np.testing.assert_allclose(call(other, X), other(X), rtol=1e-5)
    assert call._cache_size() == 1 and model.compilations == count == others[1].compilations
    assert jax.tree.structure(others[0]) == jax.tree.structure(model)
    fixed = onnx2jax.convert(mlp(), dims={"batch": 4})
    np.testing.assert_allclose(call(fixed, X), before, rtol=1e-5)
    assert call._cache_size() == 2 and jax.tree.structure(fixed) != jax.tree.structure(model)


def test_a_call_with_a_model_calls_one_function_of_ours(model: onnx2jax.Model) -> None:
    call, seen = jax.jit(lambda m, x: m(x)), []
    call(model, X)
    sys.setprofile(lambda frame, event, _: seen.append(frame.f_code.co_filename) if event == "call" else None)
    try:
        call(model, X)
    finally:
        sys.setprofile(None)
    assert len(seen) == 1  # JAX has the same calls for a dict, without the one that gives the leaves


def test_weights_of_four_bits_are_no_constants() -> None:
    decoder = onnx2jax.convert(group_query(bits="symmetric").proto)
    types = {v.name: v.reshaped([d if isinstance(d, int) else 1 for d in v.shape or ()]).type for v in decoder.inputs}
    feeds = {n: np.ones(t.shape, t.dtype) for n, t in types.items()}  # type: ignore[union-attr]
    traced = jax.jit(lambda m, feeds: m(feeds)).trace(decoder, feeds)
    stored = sum(np.asarray(v).nbytes for v in decoder.params.values())
    assert any(v.dtype == np.uint8 for v in decoder.params.values())
    assert sum(np.asarray(c).nbytes for c in traced.jaxpr.consts) < 0.01 * stored


def stacked(model: onnx2jax.Model) -> onnx2jax.Model:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), model, model)


TRANSFORMATIONS: dict[str, Callable[[onnx2jax.Model], Any]] = {
    "grad": lambda m: jax.grad(loss)(m, X),
    "value_and_grad": lambda m: jax.value_and_grad(loss)(m, X)[1],
    "checkpoint": lambda m: jax.grad(jax.checkpoint(loss))(m, X),
    "linearize": lambda m: jax.linear_transpose(jax.linearize(lambda m: loss(m, X), m)[1], m)(1.0)[0],
    "vjp": lambda m: jax.vjp(lambda m: loss(m, X), m)[1](1.0)[0],
    "a keyword": lambda m: jax.grad(lambda m: (m(x=X) ** 2).mean())(m),
    "a dict": lambda m: jax.grad(lambda m: (m({"x": X}) ** 2).mean())(m),
    "vmap": lambda m: jax.tree.map(lambda v: v[1], jax.vmap(jax.grad(loss), in_axes=(0, None))(stacked(m), X)),
    "scan": lambda m: jax.lax.scan(lambda m, x: (jax.grad(loss)(m, x), 0), m, X[None])[0],
    "shard_map": lambda m: jax.shard_map(
        lambda m, x: jax.tree.map(lambda v: jax.lax.pmean(v, "data"), jax.grad(loss)(m, x)),
        **{"mesh": compat.auto(mesh(data=2)), "in_specs": (PartitionSpec(), PartitionSpec("data"))},
        **{"out_specs": PartitionSpec(), "check_vma": False},
    )(m, X),
}
"""Ways to the gradient of the loss."""


def test_transformations_take_the_model_itself(model: onnx2jax.Model, gradient: Any) -> None:
    found = jax.jit(lambda m: {name: f(m) for name, f in TRANSFORMATIONS.items() if name != "shard_map"})(model)
    found["shard_map"] = jax.jit(TRANSFORMATIONS["shard_map"])(model)
    for name, each in found.items():
        assert isinstance(each, onnx2jax.Model), name
        close(each.params, gradient)
    tangent = jax.jvp(lambda m: loss(m, X), (model,), (model,))[1]
    expected = sum(np.vdot(gradient[n], v) for n, v in model.params.items())
    np.testing.assert_allclose(tangent, expected, rtol=1e-4)


def test_shapes_are_enough(model: onnx2jax.Model) -> None:
    shapes = jax.eval_shape(lambda: jax.tree.map(lambda v: 2 * v, model))
    assert shapes.params["w1"].shape == (4, 8) and "4 parameters" in repr(shapes)
    assert jax.eval_shape(lambda m, x: m(x), shapes, X).shape == (4, 2)


def test_a_quantised_model_is_differentiated_by_its_floating_parameters(int8: onnx2jax.Model) -> None:
    with pytest.raises(TypeError, match="uint8"):
        jax.grad(loss)(int8, X)
    every = jax.grad(loss, allow_int=True)(int8, X)
    some = jax.grad(lambda params: (int8.apply(params, X) ** 2).mean())(int8.floating_params)
    assert some.keys() == {"q.scales", "b", "c"} < every.params.keys()
    close(some, {n: every.params[n] for n in some})
    assert {v.dtype for n, v in every.params.items() if n not in some} == {jax.dtypes.float0}


@pytest.mark.parametrize(
    "leaf", [None, object(), "w", True, (1, 2), np.zeros(0, jax.dtypes.float0)], ids=lambda v: type(v).__name__
)
def test_any_leaf_is_accepted_until_the_call(model: onnx2jax.Model, leaf: Any) -> None:
    built = jax.tree.map(lambda _: leaf, model)
    assert "4 parameters" in repr(built) and built.params["w1"] is leaf
    with pytest.raises(InputError, match="w1"):
        built(X)
    with pytest.raises(InputTypeError, match=f"'w1' is {type(leaf).__name__}, not an array of type float32"):
        built.save("never.onnx")


def test_stacked_models_are_for_vmap(model: onnx2jax.Model, tmp_path: Path) -> None:
    several = stacked(model)
    assert "a stack of [2] models, for jax.vmap" in repr(several) and "stack" not in repr(model)
    with pytest.raises(
        InputShapeError, match=r"\[4, 8\], not \[2, 4, 8\].*jax\.vmap\(lambda model: model\(x\)\)\(model\)"
    ):
        several(X)
    of_each = jax.vmap(lambda model: model(X))(several)
    np.testing.assert_allclose(of_each[1], model(X), rtol=1e-5)
    for call in (lambda: model.apply(several.params, X), lambda: model.with_params(several.params)):
        with pytest.raises(InputShapeError, match=r"jax\.vmap\(lambda params: model\.apply\(params, x\)\)\(params\)"):
            call()
    np.testing.assert_allclose(jax.vmap(lambda params: model.apply(params, X))(several.params), of_each, rtol=1e-6)
    with pytest.raises(
        InputTypeError, match=r"'w1' is float32\[2, 4, 8\], .*: take one, jax\.tree\.map\(lambda a: a\[0\]"
    ):
        several.save(tmp_path / "m.onnx")
    jax.tree.map(lambda a: a[0], several).save(tmp_path / "m.onnx")


def test_float64_in_64_bit_mode_is_offered_both_ways(model: onnx2jax.Model) -> None:
    """Distributions of NumPyro and others draw float64 there."""
    with jax.enable_x64(True):
        drawn = {n: jnp.asarray(v, jnp.float64) for n, v in model.params.items()}
        says = r"astype\('float32'\), or compute in double: model\.with_options\(dtype=\"float64\"\)"
        with pytest.raises(InputTypeError, match=says):
            model.apply(drawn, X)
        assert model.with_options(dtype="float64").apply(drawn, X).dtype == jnp.float64


def test_a_model_that_jax_built_is_a_model(model: onnx2jax.Model, tmp_path: Path) -> None:
    new = jax.jit(lambda m: jax.tree.map(lambda v: 2 * v, m))(model)
    expected = model.with_params({n: 2 * v for n, v in model.params.items()})(X)
    again, saved = pickle.loads(pickle.dumps(new)), onnx2jax.convert(new.save(tmp_path / "m.onnx"))
    for each in (new(X), new.run(None, {"x": X})[0], again(X), saved(X), new.values(X, names="y")["y"]):
        np.testing.assert_allclose(each, expected, rtol=1e-5)
    with pytest.raises(ValueError, match="read-only"):
        new.params["w1"][0] = 0
    assert new.changed().keys() == model.params.keys() and new.with_params({"b2": np.zeros(2, np.float32)})(X).any()


def test_arrays_of_a_caller_are_not_kept(model: onnx2jax.Model) -> None:
    mine = [np.array(v) for v in jax.tree.leaves(model)]
    built = jax.tree.unflatten(jax.tree.structure(model), mine)
    expected = built(X)
    for array in mine:
        array[...] = 7
    np.testing.assert_array_equal(built(X), expected)
    assert all(isinstance(v, jax.Array) for v in jax.tree.leaves(built))


def test_a_model_in_a_trace_is_changed_and_read(model: onnx2jax.Model) -> None:
    def inside(m: onnx2jax.Model, b: Any) -> Any:
        silent, changed = m.replace({"r": jnp.zeros_like}), m.with_params({"b2": b})
        return m.values(X, names="r"), silent(X), m.cut(outputs="r")(X), changed(X), m.apply({"b2": b}, X)

    b = np.float32([5, 6])
    values, silent, cut, changed, applied = jax.jit(inside)(jax.tree.map(lambda v: 1 * v, model), b)
    np.testing.assert_allclose(values["r"], cut, rtol=1e-5)
    np.testing.assert_allclose(silent, np.tile(model.params["b2"], (4, 1)), rtol=1e-5)
    for each in (changed, applied):
        np.testing.assert_allclose(each, model.with_params({"b2": b})(X), rtol=1e-5)


def test_a_model_takes_traced_parameters(model: onnx2jax.Model) -> None:
    def total(b: Any) -> Any:
        return model.with_params({"b2": b})(X).sum()  # nothing but the parameter is traced

    b, before = np.float32([5, 6]), model(X)
    np.testing.assert_allclose(jax.jit(total)(b), (before - model.params["b2"] + b).sum(), rtol=1e-5)
    np.testing.assert_allclose(jax.grad(total)(b), [len(X)] * 2, rtol=1e-5)
    np.testing.assert_array_equal(model(X), before)
    with pytest.raises(InputShapeError, match=r"params\['b2'\] has a new shape, \[3\], inside"):
        jax.jit(lambda b: model.with_params({"b2": b}, new_shapes=True))(np.zeros(3, np.float32))


def test_donated_parameters_are_named(model: onnx2jax.Model) -> None:
    expected = model(X)
    given = jax.tree.map(jnp.copy, model)
    given(X)
    step = jax.jit(lambda m: jax.tree.map(lambda v: 1 * v, m), donate_argnums=0)
    np.testing.assert_array_equal(step(given)(X), expected)
    with pytest.raises(InputTypeError, match="'w1' is a deleted array: its buffer was donated"):
        given(X)
    read = jax.tree.map(jnp.copy, model)
    arrays = read.params
    np.testing.assert_array_equal(step(read)(X), expected)
    close(arrays, model.params)


@pytest.mark.parametrize("where", ["another device", "several devices"])
def test_models_are_put_on_devices(model: onnx2jax.Model, where: str) -> None:
    over = NamedSharding(compat.auto(mesh(data=4)), PartitionSpec("data"))
    split = lambda v: over if v.shape[0] % 4 == 0 else NamedSharding(over.mesh, PartitionSpec())  # noqa: E731
    put = jax.device_put(model, jax.devices()[3] if where == "another device" else jax.tree.map(split, model))
    for result in (put(X), put(X), jax.jit(lambda m: m(X))(put)):
        np.testing.assert_allclose(result, model(X), rtol=1e-5)
        assert result.sharding.device_set == jax.tree.leaves(put)[0].sharding.device_set


def test_programs_of_a_model_are_exported(model: onnx2jax.Model) -> None:
    pytest.importorskip("flatbuffers", reason="jax.export writes with flatbuffers")
    step = jax.jit(lambda m, x: (m(x), jax.tree.map(lambda v: 2 * v, m)))
    program = export.deserialize(export.export(step)(model, X).serialize())
    for each in (model, onnx2jax.convert(mlp())):  # another process has a graph of its own
        y, doubled = program.call(each, X)
        np.testing.assert_allclose(y, model(X), rtol=1e-5)
        with pytest.raises(UnsupportedError, match=r"jax.tree.unflatten\(jax.tree.structure\(model\)"):
            doubled(X)
        again = jax.tree.unflatten(jax.tree.structure(model), jax.tree.leaves(doubled))
        close(again.params, {n: 2 * v for n, v in model.params.items()})


def test_random_numbers_of_a_traced_model_need_a_key() -> None:
    text = "g (float[n] x) => (float[n] y) { r = RandomNormalLike(x)  y = Mul(r, w) }"
    noisy = onnx2jax.convert(text_model(text, w=np.ones(3, np.float32)))
    x = np.zeros(3, np.float32)
    with pytest.raises(RandomKeyError):
        jax.jit(lambda m: m(x))(noisy)
    assert jax.jit(lambda m, key: m(x, rng=key))(noisy, jax.random.key(0)).any()
