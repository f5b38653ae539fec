"""RNN, GRU, LSTM against loops written from the specification's equations."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from onnx2jax import compat
from tests.support.helpers import run_op

RNG = np.random.default_rng(0)
SEQ, BATCH, INPUT, HIDDEN = 5, 3, 4, 6
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


def real(*shape):
    return (RNG.normal(size=shape) * 0.6).astype(np.float32)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def operands(name, directions=1):
    n = GATES[name] * HIDDEN
    X, W, R = real(SEQ, BATCH, INPUT), real(directions, n, INPUT), real(directions, n, HIDDEN)
    states = [real(directions, BATCH, HIDDEN) for _ in range(2 if name == "LSTM" else 1)]
    return X, W, R, real(directions, 2 * n), states


def by_hand(name, X, W, R, B, states, clip=None, lbr=0, P=None, f=sigmoid, input_forget=0, g=np.tanh):
    """One direction, in float64."""
    X, W, R, B, *states = (v.astype(np.float64) for v in (X, W, R, B, *states))
    Wb, Rb = np.split(B, 2)
    W, R, Wb, Rb = (np.split(v, GATES[name]) for v in (W, R, Wb, Rb))
    cut = (lambda v: v) if clip is None else (lambda v: np.clip(v, -clip, clip))
    h, c = states[0], states[-1]
    outputs = []
    for x in X:
        pre = [x @ w.T + wb for w, wb in zip(W, Wb, strict=True)]
        rec = [h @ r.T + rb for r, rb in zip(R, Rb, strict=True)]
        if name == "RNN":
            h = g(cut(pre[0] + rec[0]))
        elif name == "GRU":
            z, r = f(cut(pre[0] + rec[0])), f(cut(pre[1] + rec[1]))
            hidden = r * rec[2] if lbr else (r * h) @ R[2].T + Rb[2]
            h = (1 - z) * g(cut(pre[2] + hidden)) + z * h
        else:
            p = np.zeros((3, HIDDEN)) if P is None else P.reshape(3, -1).astype(np.float64)
            i = f(cut(pre[0] + rec[0] + p[0] * c))
            forget = 1 - i if input_forget else f(cut(pre[2] + rec[2] + p[2] * c))
            c = forget * c + i * g(cut(pre[3] + rec[3]))
            h = f(cut(pre[1] + rec[1] + p[1] * c)) * np.tanh(cut(c))
        outputs.append(h)
    return np.stack(outputs), h, c


@pytest.mark.parametrize(
    ("name", "options", "attributes"),
    [
        ("RNN", {}, {}), ("RNN", {"clip": 0.3}, {"clip": 0.3}),
        ("GRU", {}, {}), ("GRU", {"lbr": 1}, {"linear_before_reset": 1}), ("GRU", {"clip": 0.3}, {"clip": 0.3}),
        ("LSTM", {}, {}), ("LSTM", {"clip": 0.3}, {"clip": 0.3}), ("LSTM", {"input_forget": 1}, {"input_forget": 1}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("opset", [1, 3, 22])
def test_every_opset(name, options, attributes, opset):
    if options.get("lbr") and opset < 3:
        pytest.skip("linear_before_reset came with opset 3")
    X, W, R, B, states = operands(name)
    results = run_op(name, X, W, R, B, None, *states, opset=opset, n_outputs=1 + len(states), **attributes)
    Y, h, c = by_hand(name, X, W[0], R[0], B[0], [s[0] for s in states], **options)
    np.testing.assert_allclose(results[0][:, 0], Y, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(results[1][0], h, rtol=1e-4, atol=1e-5)
    if name == "LSTM":
        np.testing.assert_allclose(results[2][0], c, rtol=1e-4, atol=1e-5)


def test_peepholes():
    X, W, R, B, states = operands("LSTM")
    P = real(1, 3 * HIDDEN)
    Y = run_op("LSTM", X, W, R, B, None, *states, P, n_outputs=3)[0]
    expected = by_hand("LSTM", X, W[0], R[0], B[0], [s[0] for s in states], P=P[0])[0]
    np.testing.assert_allclose(Y[:, 0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", GATES)
def test_sequence_lens_in_both_directions(name):
    """A shorter sequence ends in the state of its own last step, backwards from there; Y is zero behind it."""
    X, W, R, B, states = operands(name, 2)
    lengths = np.array([5, 2, 3], np.int32)
    Y, h, *_ = run_op(
        name, X, W, R, B, lengths, *states, n_outputs=1 + len(states), direction="bidirectional", jit=True
    )
    for b, n in enumerate(lengths):
        for d in range(2):
            x = X[:n, b : b + 1]
            one = by_hand(name, x[::-1] if d else x, W[d], R[d], B[d], [s[d, b : b + 1] for s in states])
            ys = one[0][::-1] if d else one[0]
            np.testing.assert_allclose(Y[:n, d, b], ys[:, 0], rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(h[d, b], one[1][0], rtol=1e-4, atol=1e-5)
        assert not np.asarray(Y[n:, :, b]).any()


@pytest.mark.parametrize("name", GATES)
def test_layout_1_puts_the_batch_first(name):
    X, W, R, B, states = operands(name, 2)
    plain = run_op(name, X, W, R, B, None, *states, n_outputs=1 + len(states), direction="bidirectional")
    swapped = [np.swapaxes(s, 0, 1) for s in states]
    first = run_op(
        name, np.swapaxes(X, 0, 1), W, R, B, None, *swapped, n_outputs=1 + len(states), direction="bidirectional",
        layout=1,
    )  # fmt: skip
    np.testing.assert_allclose(first[0], np.transpose(plain[0], (2, 0, 1, 3)), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(first[1], np.swapaxes(plain[1], 0, 1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "alpha", "beta", "function"),
    [
        ("Affine", 0.5, 0.1, lambda x: 0.5 * x + 0.1), ("Affine", None, None, lambda x: x),
        ("LeakyRelu", None, None, lambda x: np.where(x >= 0, x, 0.01 * x)),
        ("ThresholdedRelu", None, None, lambda x: np.where(x >= 1, x, 0)),
        ("ScaledTanh", 0.5, 0.3, lambda x: 0.5 * np.tanh(0.3 * x)),
        ("HardSigmoid", None, None, lambda x: np.clip(0.2 * x + 0.5, 0, 1)),
        ("Elu", 0.7, None, lambda x: np.where(x >= 0, x, 0.7 * np.expm1(x))),
        ("Softsign", None, None, lambda x: x / (1 + abs(x))), ("Softplus", None, None, lambda x: np.log1p(np.exp(x))),
        ("relu", None, None, lambda x: np.maximum(x, 0)),
    ],
)  # fmt: skip
def test_activations(name, alpha, beta, function):
    X, W, R, B, states = operands("RNN")
    given = {} if alpha is None else {"activation_alpha": (alpha,)}
    given |= {} if beta is None else {"activation_beta": (beta,)}
    Y = run_op("RNN", X, W, R, B, None, *states, n_outputs=2, activations=(name,), **given)[0]
    expected = by_hand("RNN", X, W[0], R[0], B[0], [states[0][0]], g=function)[0]
    np.testing.assert_allclose(Y[:, 0], expected, rtol=1e-4, atol=1e-5)


def test_alphas_are_consumed_by_parametric_activations_only():
    X, W, R, B, states = operands("GRU", 2)
    names, alphas = ("Sigmoid", "Elu", "HardSigmoid", "Tanh"), (0.7, 0.3)
    Y = run_op(
        "GRU", X, W, R, B, None, *states, n_outputs=2, direction="bidirectional", activations=names,
        activation_alpha=alphas, activation_beta=(0.4,),
    )[0]  # fmt: skip
    elu = by_hand("GRU", X, W[0], R[0], B[0], [states[0][0]], g=lambda x: np.where(x >= 0, x, 0.7 * np.expm1(x)))[0]
    hard = by_hand("GRU", X[::-1], W[1], R[1], B[1], [states[0][1]], f=lambda x: np.clip(0.3 * x + 0.4, 0, 1))[0]
    np.testing.assert_allclose(Y[:, 0], elu, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(Y[:, 1], hard[::-1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"direction": "backwards"}, "direction"), ({"direction": "bidirectional"}, "direction"),
        ({"activations": ("Swish",)}, "unknown"), ({"hidden_size": 7}, "hidden_size"),
        ({"activations": ("Tanh",), "direction": "bidirectional"}, "needs 2"),
        ({"activations": ("ScaledTanh",)}, "no defaults"),
    ],
)  # fmt: skip
def test_errors(attributes, message):
    X, W, R, B, states = operands("RNN")
    with pytest.raises(ValueError, match=message):
        run_op("RNN", X, W, R, B, None, *states, **attributes)


def test_the_typo_in_grus_first_default():
    X, W, R, B, states = operands("GRU")
    old, new = (run_op("GRU", X, W, R, B, None, *states, opset=1, direction=d) for d in ("foward", "forward"))
    np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("name", GATES)
def test_gradient_through_a_long_loop_with_lengths(name):
    X, W, R, B, states = operands(name)
    X = real(20, BATCH, INPUT)
    lengths = np.array([20, 0, 7], np.int32)

    def loss(W):
        return run_op(name, X, W, R, B, lengths, *states, n_outputs=2)[0].sum()

    grad = np.asarray(jax.grad(loss)(W))
    step = np.zeros_like(W)
    step[0, 1, 2] = 1e-2
    slope = (float(loss(W + step)) - float(loss(W - step))) / 2e-2
    assert np.isfinite(grad).all() and grad[0, 1, 2] == pytest.approx(slope, rel=2e-2, abs=1e-3)


def scans(jaxpr):
    """The equations that are scans, those inside other programs included."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from scans(inner)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("name", GATES)
def test_half_precision_keeps_its_type(name, platform):
    """What an accelerator keeps of all steps, projections and outputs, has half precision, too."""
    X, W, R, B, states = operands(name, 2)
    lengths, n = np.array([5, 2, 3], np.int32), 1 + len(states)
    half = [v.astype(np.float16) for v in (X, W, R, B, *states)]

    def layer(X, W, R, B, *states):
        return run_op(name, X, W, R, B, lengths, *states, n_outputs=n, direction="bidirectional")

    with compat.on_platform(platform):
        results, traced = jax.jit(layer)(*half), jax.make_jaxpr(layer)(*half)
    for result, full in zip(results, layer(X, W, R, B, *states), strict=True):
        assert result.dtype == np.float16
        np.testing.assert_allclose(np.asarray(result, np.float32), full, atol=5e-3)
    stacked = [
        str(v.aval.dtype)
        for e in scans(traced.jaxpr)
        for v in (*e.invars, *e.outvars)
        if v.aval.shape[:2] == (SEQ, BATCH)
    ]
    gates = ["float32"] * GATES[name] if platform == "cpu" else ["float16"]  # on a CPU split by gate
    assert stacked == [*gates, "float16"] * 2
