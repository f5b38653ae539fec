"""Models as flax.nnx and equinox modules: results, gradients, jit, training with optax, and conversion back."""

from __future__ import annotations

import copy
import pickle
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from onnx import helper

import onnx2jax
from onnx2jax.errors import InputNameError
from tests.support.models import mlp, model, value

pytestmark = pytest.mark.usefixtures("standard_promotion")
X = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
LIBRARIES = ["nnx", "equinox"]


def library(kind: str) -> Any:
    """The imported library; skips if it is not installed."""
    return pytest.importorskip("flax.nnx" if kind == "nnx" else "equinox", reason=f"pip install 'onnx2jax[{kind}]'")


def convert(kind: str, source: Any, **options: Any) -> tuple[Any, onnx2jax.Model, Any]:
    """The library, the Model, and the Model as a module of the library."""
    its, m = library(kind), onnx2jax.convert(source)
    return its, m, (onnx2jax.training.to_nnx if kind == "nnx" else onnx2jax.training.to_equinox)(m, **options)


def arrays(module: Any) -> dict[str, Any]:
    return {n: jnp.asarray(v[...]) for n, v in module.params.items()}


def gradients(its: Any, kind: str, loss: Any, module: Any) -> dict[str, Any]:
    if kind == "nnx":
        return {n: v[...] for n, v in its.grad(loss)(module)["params"].items()}
    found: dict[str, Any] = its.filter_grad(loss)(module).params
    return found


@pytest.mark.parametrize("kind", LIBRARIES)
def test_calls_and_gradients_match_the_model(kind: str) -> None:
    its, m, module = convert(kind, mlp())
    jit = its.jit if kind == "nnx" else its.filter_jit
    want = np.asarray(m(X))
    np.testing.assert_allclose(module(X), want, rtol=1e-5)
    np.testing.assert_allclose(jit(lambda module, x: module(x))(module, X), want, rtol=1e-5)
    assert arrays(module).keys() == m.params.keys()
    by_jax = jax.grad(lambda p: (m.apply(p, X) ** 2).mean())(dict(m.params))
    for name, g in gradients(its, kind, lambda module: (module(X) ** 2).mean(), module).items():
        np.testing.assert_allclose(g, by_jax[name], rtol=1e-4, atol=1e-5)


def test_nnx_trains_with_optax() -> None:
    nnx, m, module = convert("nnx", mlp())
    optimizer = nnx.Optimizer(module, optax.adam(0.05), wrt=nnx.Param)

    @nnx.jit
    def step(module: Any, optimizer: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda module: (module(X) ** 2).mean())(module)
        optimizer.update(module, grads)
        return loss

    check_trained(m, module, [float(step(module, optimizer)) for _ in range(5)])


def test_equinox_trains_with_optax() -> None:
    eqx, m, module = convert("equinox", mlp())
    optimizer = optax.adam(0.05)
    state = optimizer.init(eqx.filter(module, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(module: Any, state: Any) -> Any:
        loss, grads = eqx.filter_value_and_grad(lambda module: (module(X) ** 2).mean())(module)
        updates, state = optimizer.update(grads, state)
        return eqx.apply_updates(module, updates), state, loss

    losses = []
    for _ in range(5):
        module, state, loss = step(module, state)
        losses.append(float(loss))
    check_trained(m, module, losses)


def check_trained(m: onnx2jax.Model, module: Any, losses: list[float]) -> None:
    assert losses[-1] < losses[0]
    trained = module.to_model()
    assert all((trained.params[n] != v).any() for n, v in m.params.items())
    np.testing.assert_allclose(trained(X), module(X), rtol=1e-5)


@pytest.mark.parametrize("kind", LIBRARIES)
def test_parameters_that_are_not_weights_are_constant(kind: str) -> None:
    """Training would make running variances negative; integers have no gradient."""
    _, m, module = convert(kind, onnx2jax.demo_model())
    assert m.params.keys() - arrays(module).keys() == {f"bn{i}.{n}" for i in (1, 2, 3) for n in ("mean", "var")}
    _, _, module = convert(kind, onnx2jax.demo_model(), trainable="fc.*")
    assert arrays(module).keys() == {"fc.weight", "fc.bias"}
    with pytest.raises(InputNameError, match="which no parameter matches"):
        convert(kind, mlp(), trainable="nothing*")
    ends = [value("x", np.float32, ["n", 4])], [value("y", np.float32, ["n", 4])]
    _, _, module = convert(kind, model([helper.make_node("Relu", ["x"], ["y"])], *ends))
    np.testing.assert_array_equal(module(X), np.maximum(X, 0))


@pytest.mark.parametrize("kind", LIBRARIES)
def test_modules_nest_and_can_be_copied(kind: str) -> None:
    its, m, module = convert(kind, mlp())
    for again in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        np.testing.assert_allclose(again(X), m(X), rtol=1e-5)
    if kind == "nnx":
        whole = its.Sequential(module, its.Linear(2, 3, rngs=its.Rngs(0)))
        assert whole(X).shape == (6, 3)
        graph, state = its.split(whole)
        np.testing.assert_allclose(its.merge(graph, state)(X), whole(X))
    else:
        whole = its.nn.Sequential([module, its.nn.Lambda(jnp.tanh)])
        np.testing.assert_allclose(whole(X), np.tanh(m(X)), rtol=1e-5)


@pytest.mark.parametrize("kind", LIBRARIES)
def test_random_numbers_use_the_given_keys(kind: str) -> None:
    node = helper.make_node("RandomNormalLike", ["x"], ["y"])
    ends = [value("x", np.float32, ["n", 4])], [value("y", np.float32, ["n", 4])]
    its, m, module = convert(kind, model([node], *ends))
    key = jax.random.key(3)
    by_key = module(X, rngs=key) if kind == "nnx" else module(X, key=key)
    np.testing.assert_array_equal(by_key, m(X, rng=key))
    if kind == "nnx":
        rngs = its.Rngs(0)
        assert (np.asarray(module(X, rngs=rngs)) != np.asarray(module(X, rngs=rngs))).any()


@pytest.mark.parametrize("kind", LIBRARIES)
@pytest.mark.usefixtures("in_32_bits")
def test_64_bit_types_are_preserved(kind: str) -> None:
    w = np.array([[1 + 2**-40, 0], [0, 1]])
    ends = [value("x", np.float64, ["n", 2])], [value("y", np.float64, ["n", 2])]
    _, _, module = convert(kind, model([helper.make_node("MatMul", ["x", "w"], ["y"])], *ends, {"w": w}))
    x = np.eye(2)
    assert np.asarray(module(x)).dtype == np.float64
    np.testing.assert_array_equal(module(x), w)
    np.testing.assert_array_equal(module.to_model().params["w"], w)


@pytest.mark.parametrize("kind", LIBRARIES)
def test_without_the_library(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from onnx2jax.training import modules

    for cached in (modules._nnx, modules._equinox):
        cached.cache_clear()
    monkeypatch.setitem(sys.modules, "flax.nnx" if kind == "nnx" else "equinox", None)
    with pytest.raises(ImportError, match=rf"needs the extra {kind} .*pip install"):
        (onnx2jax.training.to_nnx if kind == "nnx" else onnx2jax.training.to_equinox)(onnx2jax.convert(mlp()))
