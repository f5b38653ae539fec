"""A Model in JAX's libraries, as their own documentation writes each habit: no adapter, the model itself."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import onnx2jax
from onnx2jax.errors import InputTypeError
from tests.support.decoders import group_query
from tests.support.models import mlp, text_model

pytestmark = pytest.mark.usefixtures("standard_promotion")
X = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
Y = np.float32([[1, 0], [0, 1], [1, 1], [0, 0]])
close = partial(jax.tree.map, partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5))
same = partial(jax.tree.map, partial(np.testing.assert_array_equal, strict=True))


def loss(model: onnx2jax.Model, x: Any = X) -> Any:
    return ((model(x) - Y) ** 2).mean()


def is_weight(path: Any, _: Any) -> bool:
    return path[0].key.startswith("w")


@pytest.fixture(scope="module")
def model() -> onnx2jax.Model:
    return onnx2jax.convert(mlp())


@pytest.fixture(scope="module")
def slopes(model: onnx2jax.Model) -> onnx2jax.Model:
    return jax.jit(jax.grad(loss))(model)


@pytest.fixture(scope="module")
def int8() -> onnx2jax.Model:
    text = "g (float[n, 4] x) => (float[n, 2] y) { w = DequantizeLinear(q, s)  h = MatMul(x, w)  y = MatMul(h, v) }"
    q, v = np.arange(12, dtype=np.int8).reshape(4, 3), np.ones((3, 2), np.float32)
    return onnx2jax.convert(text_model(text, q=q, s=np.float32(0.5), v=v), weights="packed")


@pytest.fixture(scope="module")
def decoder() -> tuple[onnx2jax.Model, dict[str, Any]]:
    """A decoder with weights of 4 bits, and inputs."""
    decoder = onnx2jax.convert(group_query(bits="symmetric").proto)
    types = {v.name: v.reshaped([d if isinstance(d, int) else 1 for d in v.shape or ()]).type for v in decoder.inputs}
    return decoder, {n: np.ones(t.shape, t.dtype) for n, t in types.items()}  # type: ignore[union-attr]


Network = tuple[onnx2jax.Model, dict[str, Any]]
NETWORKS = ("small", "int8", "decoder")


@pytest.fixture
def network(
    request: pytest.FixtureRequest, model: onnx2jax.Model, int8: onnx2jax.Model, decoder: Network
) -> tuple[onnx2jax.Model, dict[str, Any]]:
    """A network with floating weights, one with integer leaves, and a decoder with weights of 4 bits."""
    every: dict[str, Network] = {"small": (model, {"x": X}), "int8": (int8, {"x": X}), "decoder": decoder}
    return every[request.param]


every_network = pytest.mark.parametrize("network", NETWORKS, indirect=True)


# --------------------------------------------------------------------------------------------------------- jax


@every_network
def test_jax_stacks_scans_and_donates(network: Network) -> None:
    original, feeds = network

    @partial(jax.jit, donate_argnums=0)
    def step(model: onnx2jax.Model) -> Any:
        several = jax.tree.map(lambda v: jnp.stack([v, v]), model)
        after, _ = jax.lax.scan(lambda model, _: (jax.tree.map(lambda v: v + 0 * v, model), ()), model, jnp.arange(2))
        return after, jax.vmap(lambda model: model(feeds))(several), model(feeds)

    donated = jax.tree.map(jnp.copy, original)
    after, stacked, y = step(donated)
    assert isinstance(after, onnx2jax.Model) and all(v.is_deleted() for v in jax.tree.leaves(donated))
    same(jax.tree.leaves(after), jax.tree.leaves(original))
    wanted = original(feeds)
    for result in (y, jax.tree.map(lambda v: v[1], stacked)):
        close(jax.tree.leaves(result), jax.tree.leaves(wanted))


@pytest.mark.parametrize("network", NETWORKS[1:], indirect=True)
def test_jax_differentiates_floating_leaves(network: Network) -> None:
    original, feeds = network

    def total(model: onnx2jax.Model) -> Any:
        return jax.tree.leaves(model(feeds))[0].sum()

    with pytest.raises(TypeError, match=r"grad requires real- or complex-valued inputs.*uint8"):
        jax.grad(total)(original)
    eqx = pytest.importorskip("equinox", reason="needs equinox")
    both = jax.jit(lambda model: (jax.grad(total, allow_int=True)(model), eqx.filter_grad(total)(model)))
    slopes, mixed = both(original)
    floating = {n for n, v in slopes.params.items() if v.dtype != jax.dtypes.float0}
    assert floating == original.floating_params.keys() < original.params.keys()
    assert {n for n, v in mixed.params.items() if v is not None} == floating
    close({n: mixed.params[n] for n in floating}, {n: slopes.params[n] for n in floating})


# ------------------------------------------------------------------------------------------------------- optax


def test_optax_trains_a_model(model: onnx2jax.Model) -> None:
    optimizer = optax.adam(1e-2)

    @jax.jit
    def step(model: onnx2jax.Model, state: Any) -> Any:
        value, slopes = jax.value_and_grad(loss)(model)
        updates, state = optimizer.update(slopes, state, model)
        return optax.apply_updates(model, updates), state, value

    state, values, trained = optimizer.init(model), [], model
    for _ in range(3):
        trained, state, value = step(trained, state)
        values.append(value)
    assert values[0] > values[1] > values[2] and step._cache_size() == 1
    np.testing.assert_allclose(trained(X), trained.run(None, {"x": X})[0], rtol=1e-5)


@pytest.mark.extended  # 35 programs; the other test trains
def test_optax_masks_and_labels(model: onnx2jax.Model, slopes: onnx2jax.Model) -> None:
    mask = jax.tree_util.tree_map_with_path(is_weight, model)
    labels = jax.tree.map(lambda chosen: "train" if chosen else "freeze", mask)
    transforms = {"train": optax.sgd(1.0), "freeze": optax.set_to_zero()}
    for optimizer in (
        optax.multi_transform(transforms, lambda _: labels),
        optax.chain(optax.sgd(1.0), optax.masked(optax.set_to_zero(), jax.tree.map(lambda v: not v, mask))),
        optax.adamw(1.0, weight_decay=0.0, mask=lambda model: jax.tree.map(lambda v: v.ndim > 1, model)),
    ):
        updates, _ = optimizer.update(slopes, optimizer.init(model), model)
        assert np.any(updates.params["w1"])
    named = {n: "train" if n.startswith("w") else "freeze" for n in model.params}
    optimizer = optax.multi_transform(transforms, named)
    updates, _ = optimizer.update(slopes.params, optimizer.init(model.params), model.params)
    assert {n for n, v in updates.items() if np.any(v)} == {"w1", "w2"}
    with pytest.raises(InputTypeError, match="a tree of masks or labels for optax"):
        optax.multi_transform(transforms, labels).init(model)


# ------------------------------------------------------------------------------------------------ flax and orbax


def test_flax_holds_a_model_in_a_train_state(model: onnx2jax.Model) -> None:
    train_state = pytest.importorskip("flax.training.train_state", reason="needs flax")
    for params, apply in ((model, lambda model, x: model(x)), (model.params, model.apply)):
        state = train_state.TrainState.create(apply_fn=apply, params=params, tx=optax.sgd(0.01))
        slopes = jax.grad(lambda params, f=apply: ((f(params, X) - Y) ** 2).mean())(state.params)
        state = state.apply_gradients(grads=slopes)
        assert state.step == 1 and isinstance(state.params, type(params))
    traverse_util = pytest.importorskip("flax.traverse_util", reason="needs flax")
    assert traverse_util.flatten_dict(model.params, sep="/").keys() == model.params.keys()


def test_flax_modules_hold_a_model(model: onnx2jax.Model) -> None:
    nnx = pytest.importorskip("flax.nnx", reason="needs flax")

    class Network(nnx.Module):  # type: ignore[misc]
        def __init__(self, rngs: Any) -> None:
            self.body, self.head = nnx.data(model), nnx.Linear(2, 3, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.head(self.body(x))

    network = Network(nnx.Rngs(0))
    y = nnx.jit(lambda network, x: network(x))(network, X)
    np.testing.assert_allclose(y, network.head(model(X)), rtol=1e-4, atol=1e-5)


@every_network
def test_orbax_keeps_a_model(network: Network, tmp_path: Path) -> None:
    checkpoint = pytest.importorskip("orbax.checkpoint", reason="needs orbax-checkpoint")
    changed = jax.tree.map(lambda v: v + 1, network[0])
    with checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model", {"model": changed, "step": 3})
        checkpointer.wait_until_finished()
        shapes = jax.eval_shape(lambda: network[0])
        restored = checkpointer.restore(tmp_path / "model", {"model": shapes, "step": 0})
    same(restored["model"], changed)


# ------------------------------------------------------------------------------------------------------ equinox


def test_equinox_filters(model: onnx2jax.Model, slopes: Any) -> None:
    eqx = pytest.importorskip("equinox", reason="needs equinox")
    np.testing.assert_allclose(eqx.filter_jit(lambda model, x: model(x))(model, X), model(X), rtol=1e-5)
    close(eqx.filter_grad(loss)(model).params, slopes.params)


def test_equinox_divides_and_joins(int8: onnx2jax.Model) -> None:
    eqx = pytest.importorskip("equinox", reason="needs equinox")
    floating, packed = eqx.partition(int8, eqx.is_inexact_array)
    slopes = jax.grad(lambda floating: loss(eqx.combine(floating, packed)))(floating)
    moved = eqx.apply_updates(int8, jax.tree.map(lambda v: -1e-4 * v, slopes))
    assert loss(moved) < loss(int8) and moved.params["q"].dtype == np.uint8
    with pytest.raises(InputTypeError, match="takes an array, not None"):
        floating(X)


def test_equinox_modules_files_and_ensembles(model: onnx2jax.Model, tmp_path: Path) -> None:
    eqx = pytest.importorskip("equinox", reason="needs equinox")

    class Network(eqx.Module):  # type: ignore[misc]
        body: onnx2jax.Model
        scale: jax.Array

        def __call__(self, x: Any) -> Any:
            return self.scale * self.body(x)

    network = Network(jax.tree.map(lambda v: 2 * v, model), jnp.ones(()))
    assert isinstance(eqx.filter_grad(lambda network: network(X).sum())(network).body, onnx2jax.Model)
    eqx.tree_serialise_leaves(tmp_path / "network.eqx", network)
    again = eqx.tree_deserialise_leaves(tmp_path / "network.eqx", Network(model, jnp.zeros(())))
    np.testing.assert_array_equal(again(X), network(X))
    factors = jnp.float32([1, 2])
    several = eqx.filter_vmap(lambda factor: jax.tree.map(lambda v: factor * v, model))(factors)
    y = eqx.filter_vmap(lambda model, x: model(x), in_axes=(eqx.if_array(0), None))(several, X)
    np.testing.assert_allclose(y[0], model(X), rtol=1e-5)


@every_network
def test_equinox_keeps_leaves_in_a_file(network: Network, tmp_path: Path) -> None:
    eqx = pytest.importorskip("equinox", reason="needs equinox")
    changed = jax.tree.map(lambda v: v + 1, network[0])
    eqx.tree_serialise_leaves(tmp_path / "model.eqx", changed)
    same(eqx.tree_deserialise_leaves(tmp_path / "model.eqx", network[0]), changed)


# ---------------------------------------------------------------------------------------------------- samplers


def energy(model: onnx2jax.Model) -> Any:
    return 0.5 * sum(jnp.sum(v**2) for v in jax.tree.leaves(model)) + loss(model) / 0.02


@pytest.mark.extended  # 75 programs; blackjax samples with the same model below
def test_numpyro_samples_models(model: onnx2jax.Model) -> None:
    infer = pytest.importorskip("numpyro.infer", reason="needs numpyro")
    sampler = infer.MCMC(
        infer.HMC(potential_fn=energy, trajectory_length=0.01), num_warmup=2, num_samples=3, progress_bar=False
    )
    sampler.run(jax.random.key(0), init_params=model)
    samples = sampler.get_samples()
    assert isinstance(samples, onnx2jax.Model) and samples.params["w1"].shape == (3, 4, 8)
    assert jax.vmap(lambda model: model(X))(samples).shape == (3, 4, 2)


def test_blackjax_samples_models(model: onnx2jax.Model) -> None:
    blackjax = pytest.importorskip("blackjax", reason="needs blackjax")
    inverse_mass = jnp.ones(sum(v.size for v in jax.tree.leaves(model)))
    sampler = blackjax.hmc(lambda model: -energy(model), 1e-3, inverse_mass, 2)
    state, _ = jax.jit(sampler.step)(jax.random.key(0), sampler.init(model))
    assert isinstance(state.position, onnx2jax.Model) and np.any(state.position(X) != model(X))
