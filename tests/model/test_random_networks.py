"""Random networks in seven ways and three batches, beside onnxruntime without its optimisations."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest

import onnx2jax
from tests.support.random_blocks import random_network, special_network, tiny_network
from tests.support.random_network import Network, outputs_of
from tests.support.subjects import as_list

BATCHES = (1, 3, 8)
KINKED = {"MaxPool", "GlobalMaxPool", "ReduceMax", "ReduceMin", "Max", "Min", "TopK", "Clip", "Floor", "Round", "Sign"}
"""Gradients at ties and borders are a matter of convention, and last digits decide on which side a value lies."""


def assert_close(ours: Any, theirs: Any, net: Network, where: str) -> None:
    """Differences relative to the largest value; where roundings are amplified, most values have to agree."""
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, where
    if not theirs.size:
        return
    difference = np.abs(ours - theirs) / max(float(np.abs(theirs).max()), 1e-2)
    if net.rounds:
        assert difference.mean() < 1e-2, f"{where}: {difference.mean():.2g} on average"
    else:
        assert difference.max() < 5e-4, f"{where}: {difference.max():.2g} at most"


def check(seed: int) -> None:
    proto, net = random_network(seed)
    model, plain = onnx2jax.convert(proto), onnx2jax.convert(proto, optimize=False)
    numbers = np.random.default_rng(seed)
    # Gradients of the input, with and without optimisation.
    differentiated = [] if net.rounds or any(n.op_type in KINKED for n in net.nodes) else [model, plain]

    @jax.jit
    def transformed(params: Any, x: Any) -> Any:
        def total(x: Any, model: Any) -> Any:
            return sum(jnp.sin(y).sum() for y in jax.tree.leaves(model.apply(model.params, x)))

        rows = jax.vmap(lambda row: jax.tree.map(lambda y: y[0], model(row[None])))(x)
        return model.apply(params, x), rows, [jax.grad(total)(x, m) for m in differentiated]

    for batch in BATCHES:
        x = numbers.normal(size=(batch, *net.shape("x")[1:])).astype(np.float32)
        results = {"run": model.run(None, {"x": x}), "call": model(x)}
        if batch == BATCHES[seed % 3]:
            results["optimize=False"] = plain(x)
            results["jit"], results["vmap"], gradients = transformed(model.params, x)
            if gradients:
                assert_close(*gradients, net, f"seed {seed}, batch {batch}, grad")
        wanted = outputs_of(proto, {"x": x})
        for way, found in results.items():
            for ours, theirs, value in zip(jax.tree.leaves(found), wanted, model.outputs, strict=True):
                assert_close(ours, theirs, net, f"seed {seed}, batch {batch}, {way}, {value.name}")


def check_tiny(seed: int) -> None:
    """``run``, whose first call traces and whose second takes the fast path: NumPy's for half of the networks."""
    proto, net = tiny_network(seed)
    model, numbers = onnx2jax.convert(proto), np.random.default_rng(seed)
    for batch in BATCHES:
        x = numbers.normal(size=(batch, *net.shape("x")[1:])).astype(np.float32)
        for wanted, *calls in zip(
            outputs_of(proto, {"x": x}), *(model.run(None, {"x": x}) for _ in range(2)), strict=True
        ):
            for ours in calls:
                assert_close(ours, wanted, net, f"seed {seed}, batch {batch}")


def check_evaluated(seed: int) -> None:
    """First calls with ``background_compile``, which NumPy evaluates."""
    proto, net = random_network(seed)
    model, numbers = onnx2jax.convert(proto, background_compile=True), np.random.default_rng(seed)
    for batch in BATCHES:
        x = numbers.normal(size=(batch, *net.shape("x")[1:])).astype(np.float32)
        for ours, wanted in zip(model.run(None, {"x": x}), outputs_of(proto, {"x": x}), strict=True):
            assert_close(ours, wanted, net, f"seed {seed}, batch {batch}, evaluated")


def check_special(seed: int) -> None:
    """Special constants, and then special inputs, for which all ways have to agree with the plain program.

    onnxruntime is no oracle for these inputs: its kernels differ in what a maximum of NaN is.
    """
    proto, net = special_network(seed)
    model, plain = onnx2jax.convert(proto), onnx2jax.convert(proto, optimize=False)
    evaluated, jitted = onnx2jax.convert(proto, background_compile=True), jax.jit(model.apply)
    numbers, batch = np.random.default_rng(seed), BATCHES[seed % 3]
    x = numbers.normal(size=(batch, *net.shape("x")[1:])).astype(np.float32)
    spoilt = x.copy()
    spoilt.flat[numbers.integers(x.size, size=1 + x.size // 50)] = numbers.choice([np.nan, np.inf, -np.inf, -0.0])
    for feed, wanted in ((x, outputs_of(proto, {"x": x})), (spoilt, [np.asarray(y) for y in as_list(plain(spoilt))])):
        ways = {"run": model.run(None, {"x": feed}), "call": model(feed), "jit": jitted(model.params, feed)}
        ways |= {"optimize=False": plain(feed), "evaluated": evaluated.run(None, {"x": feed})}
        for way, found in ways.items():
            for ours, theirs, value in zip(jax.tree.leaves(found), wanted, model.outputs, strict=True):
                ours, finite = np.asarray(ours), np.isfinite(theirs)
                where = f"seed {seed}, batch {batch}, {'finite' if feed is x else 'special'}, {way}, {value.name}"
                np.testing.assert_array_equal(ours[~finite], theirs[~finite], where)
                assert_close(np.where(finite, ours, 0), np.where(finite, theirs, 0), net, where)


def check_many(seeds: Iterable[int], one: Callable[[int], None] = check, network: Any = random_network) -> None:
    for seed in seeds:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                one(seed)
        except Exception as e:
            e.add_note(f"the network of seed {seed}:\n{onnx.printer.to_text(network(seed)[0])[:4000]}")
            raise


SHORT = (3, 4, 6, 13, 14, 17, 18, 19, 23)
"""Seeds of networks that compile fast and together have most operators."""


def test_random_networks() -> None:
    check_many(SHORT)


@pytest.mark.extended
@pytest.mark.parametrize("block", range(4))
def test_more_random_networks(block: int) -> None:
    check_many(seed for seed in range(6 * block, 6 * (block + 1)) if seed not in SHORT)


@pytest.mark.long
@pytest.mark.parametrize("block", range(40))
def test_many_random_networks(block: int) -> None:
    check_many(range(1000 + 50 * block, 1000 + 50 * (block + 1)))


def test_network_of_special_values() -> None:
    check_many(range(2), check_special, special_network)


@pytest.mark.long
@pytest.mark.parametrize("block", range(50))
def test_many_networks_of_special_values(block: int) -> None:
    check_many(range(10 * block, 10 * (block + 1)), check_special, special_network)


@pytest.mark.parametrize("block", [1, *(pytest.param(k, marks=pytest.mark.extended) for k in (0, 2, 3))])
def test_networks_evaluated_by_numpy(block: int) -> None:
    check_many(range(25 * block, 25 * (block + 1)), check_evaluated)


@pytest.mark.long
@pytest.mark.parametrize("block", range(40))
def test_many_networks_evaluated_by_numpy(block: int) -> None:
    check_many(range(1000 + 50 * block, 1000 + 50 * (block + 1)), check_evaluated)


@pytest.mark.parametrize("block", [1, *(pytest.param(k, marks=pytest.mark.extended) for k in (0, 2))])
def test_tiny_networks(block: int) -> None:
    check_many(range(10 * block, 10 * (block + 1)), check_tiny, tiny_network)


@pytest.mark.long
@pytest.mark.parametrize("block", range(40))
def test_many_tiny_networks(block: int) -> None:
    check_many(range(100 + 50 * block, 100 + 50 * (block + 1)), check_tiny, tiny_network)
