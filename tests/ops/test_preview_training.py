"""Optimizers of ai.onnx.preview.training, by hand from their definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.helpers import run_op

DOMAIN = "ai.onnx.preview.training"
R, X, G, V, H = (np.float64(v) for v in (0.1, 2.0, 0.5, 0.25, 0.75))
MOMENTUM = {"alpha": 0.9, "beta": 0.5, "norm_coefficient": 0.25}
REG = 0.25 * 2 + 0.5  # the regularised gradient


def momentum(mode, first):
    v = 0.9 * V + (1 if first else 0.5) * REG
    return [X - R * (REG + 0.9 * v if mode == "nesterov" else v), v]


def adam(t):
    v, h = 0.9 * V + 0.1 * REG, 0.99 * H + 0.01 * REG**2
    rate = R * np.sqrt(1 - 0.99**t) / (1 - 0.9**t) if t else R
    return [(1 - 0.125) * (X - rate * v / (np.sqrt(h) + 0.5)), v, h]


ADAM = {"alpha": 0.9, "beta": 0.99, "epsilon": 0.5, "norm_coefficient": 0.25, "norm_coefficient_post": 0.125}
H2 = H + REG**2
CASES = [
    ("Momentum", 0, (X, G, V), {**MOMENTUM, "mode": "standard"}, momentum("standard", True)),
    ("Momentum", 3, (X, G, V), {**MOMENTUM, "mode": "standard"}, momentum("standard", False)),
    ("Momentum", 3, (X, G, V), {**MOMENTUM, "mode": "nesterov"}, momentum("nesterov", False)),
    ("Adam", 0, (X, G, V, H), ADAM, adam(0)),
    ("Adam", 4, (X, G, V, H), ADAM, adam(4)),
    (
        "Adagrad",
        4,
        (X, G, H),
        {"decay_factor": 0.5, "epsilon": 0.5, "norm_coefficient": 0.25},
        [X - R / 3 * REG / (np.sqrt(H2) + 0.5), H2],
    ),
]


@pytest.mark.rule("TR-38", "TR-39", "TR-40")
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(("name", "count", "state", "attributes", "expected"), CASES)
def test_several_tensors_are_grouped_by_kind(jit, name, count, state, attributes, expected):
    # a scalar and a matrix, interleaved as X_1, X_2, G_1, G_2, ...
    inputs = [np.full(shape, value) for value in state for shape in ((), (2, 3))]
    args = np.array([R]), np.array(count)  # a rate of shape [1] must not add a dimension
    got = run_op(name, *args, *inputs, domain=DOMAIN, n_outputs=2 * len(expected), jit=jit, **attributes)
    assert [x.shape for x in got] == [(), (2, 3)] * len(expected)
    np.testing.assert_allclose([np.ravel(x)[0] for x in got], np.repeat(expected, 2), rtol=1e-12)


@pytest.mark.parametrize("rate", [np.float32, np.float64])
def test_optimizers_keep_element_types(rate):
    inputs = [np.ones(2, np.float32)] * 4
    args = np.array(0.1, rate), np.array(1)
    got = run_op("Adam", *args, *inputs, domain=DOMAIN, n_outputs=3, jit=True)
    assert {x.dtype for x in got} == {np.dtype(np.float32)}


def test_a_step_is_differentiable_at_zero_gradient():
    zero = jnp.zeros(2)

    def step(g):
        return run_op("Adagrad", R, np.array(0), zero, g, zero, domain=DOMAIN, n_outputs=2)[0].sum()

    assert np.isfinite(jax.grad(step)(zero)).all()


def test_misuse_is_refused():
    with pytest.raises(ValueError, match="3 groups"):
        run_op("Adagrad", R, np.array(0), X, G, domain=DOMAIN, n_outputs=2)
    with pytest.raises(ValueError, match="'standard', 'nesterov'"):
        attributes = {**MOMENTUM, "mode": "heavy"}
        run_op("Momentum", R, np.array(0), X, G, V, domain=DOMAIN, **attributes)
