"""Random operators: which streams are fixed, which follow the caller's key, and what they draw."""

from itertools import product

import jax
import ml_dtypes
import numpy as np
import onnx
import pytest
import scipy.stats

import onnx2jax
from tests.support.helpers import run_op
from tests.support.joined import joined
from tests.support.models import model, value

KEYS = (jax.random.key(1), jax.random.key(2))
DRAWS = {
    "RandomNormal": ((), {"shape": (8,)}),
    "RandomUniform": ((), {"shape": (8,)}),
    "RandomNormalLike": ((np.zeros(8, np.float32),), {}),
    "RandomUniformLike": ((np.zeros(8, np.float32),), {}),
    "Bernoulli": ((np.full(64, 0.5, np.float32),), {}),
    "Multinomial": ((np.zeros((2, 5), np.float32),), {"sample_size": 32}),
}


def drawn(draws):
    """Draws compiled as one program, by name: of each its operator, inputs, and keywords of ``run_op``."""

    def call(name, inputs, how):
        key = {n: how[n] for n in ("rng",) if n in how}
        return lambda key, *inputs: run_op(name, *inputs, **{**how, **key}), (key, *inputs)

    return jax.tree.map(np.asarray, joined({n: call(*draw) for n, draw in draws.items()}))


def test_seed_or_else_key_determines_the_stream():
    a, b = KEYS
    streams = {
        "seed a": {"rng": a, "seed": 1.5},
        "seed b": {"rng": b, "seed": 1.5},
        "a": {"rng": a},
        "a again": {"rng": a},
        "b": {"rng": b},
        "zero": {"rng": a, "seed": 0.0},
        "-zero": {"rng": a, "seed": -0.0},
    }
    draws = {
        (name, s): (name, inputs, attributes | stream)
        for name, (inputs, attributes) in DRAWS.items()
        for s, stream in streams.items()
    }
    found = drawn(draws)
    for name in DRAWS:
        of = {s: found[name, s] for s in streams}
        np.testing.assert_array_equal(of["seed a"], of["seed b"], name)
        np.testing.assert_array_equal(of["a"], of["a again"], name)
        for other in ("b", "seed a", "zero"):
            assert (of["a"] != of[other]).any(), (name, other)
        assert (of["zero"] != of["-zero"]).any(), name  # the bits count, not the value


@pytest.mark.parametrize(
    ("name", "inputs", "attributes", "dtype"),
    [
        ("RandomNormal", (), {"shape": (3,)}, np.float32),
        ("RandomUniform", (), {"shape": (), "dtype": 11}, np.float64),
        ("RandomNormalLike", (np.zeros(3, np.int32),), {"dtype": 10}, np.float16),
        ("RandomUniformLike", (np.zeros(3, ml_dtypes.bfloat16),), {}, ml_dtypes.bfloat16),
        ("RandomUniformLike", (np.array(["a", "b"], object),), {"dtype": 1}, np.float32),
        ("Bernoulli", (np.zeros(3, np.float16),), {}, np.float16),
        ("Bernoulli", (np.zeros(3, np.float64),), {"dtype": 9}, np.bool_),
        ("Multinomial", (np.zeros((1, 2), np.float16),), {}, np.int32),
        ("Multinomial", (np.zeros((1, 2), np.float64),), {"dtype": 7}, np.int64),
    ],
)
def test_output_types(name, inputs, attributes, dtype):
    assert jax.eval_shape(lambda: run_op(name, *inputs, rng=KEYS[0], **attributes)).dtype == dtype


def test_like_operators_reject_integer_inputs_without_dtype():
    with pytest.raises(ValueError, match="set the attribute dtype"):
        run_op("RandomNormalLike", np.zeros(3, np.int64), rng=KEYS[0])


def test_events_of_probability_0_and_1():
    p = np.repeat([0.0, 1.0], 1000)
    np.testing.assert_array_equal(run_op("Bernoulli", p, seed=1.0), p)
    scores = np.log(np.array([[4.0, 0.0, 4.0]]) + 1e-300)
    assert not (run_op("Multinomial", scores, sample_size=1000, seed=1.0) == 1).any()


def test_like_operators_read_shapes_only():
    shape = jax.ShapeDtypeStruct((4,), np.float32)
    assert jax.eval_shape(lambda: run_op("RandomNormalLike", shape, seed=3.0)) == shape


N = 20_000
STREAMS = {"seed": {"seed": 5.0}, "key": {"rng": KEYS[0]}}
CONTINUOUS = {
    "RandomNormal": ({"shape": (N,), "mean": 3.0, "scale": 0.5}, scipy.stats.norm(3, 0.5)),
    "RandomNormalLike": ({"mean": -1.0, "scale": 2.0}, scipy.stats.norm(-1, 2)),
    "RandomUniform": ({"shape": (N,), "low": -2.0, "high": 6.0}, scipy.stats.uniform(-2, 8)),
    "RandomUniformLike": ({"low": 1.0, "high": 1.5}, scipy.stats.uniform(1, 0.5)),
}


def test_continuous_distributions(subtests):
    """The first four moments, and Kolmogorov and Smirnov's distance; the streams are fixed, so nothing is flaky."""
    draws = {}
    for name, dtype, (kind, stream) in product(CONTINUOUS, (1, 10, 11, 16), STREAMS.items()):
        inputs = (np.zeros(N, np.float32),) if name.endswith("Like") else ()
        draws[name, dtype, kind] = name, inputs, {"dtype": dtype, **stream, **CONTINUOUS[name][0]}
    for case, x in drawn(draws).items():
        with subtests.test(msg=str(case)):
            check_distribution(case[0], case[1], np.asarray(x, np.float64))


def check_distribution(name, dtype, x):
    wanted = CONTINUOUS[name][1]
    assert "Normal" in name or (x.min() >= wanted.support()[0] and x.max() < wanted.support()[1])
    z = (x - wanted.mean()) / wanted.std()
    standard = scipy.stats.norm if "Normal" in name else scipy.stats.uniform(-(3**0.5), 2 * 3**0.5)
    for k in (1, 2, 3, 4):
        deviation = (standard.moment(2 * k) - standard.moment(k) ** 2) ** 0.5 / N**0.5
        assert abs((z**k).mean() - standard.moment(k)) < 4 * deviation
    grid = 0 if dtype in (1, 11) else np.spacing(np.float16(8)) * (8 if dtype == 16 else 1)  # what rounding moves
    assert scipy.stats.ks_1samp(x, wanted.cdf).statistic < 1.95 / N**0.5 + grid * wanted.pdf(wanted.mean())
    assert abs(np.corrcoef(x[1:], x[:-1])[0, 1]) < 4 / N**0.5  # draws that follow each other are independent


def test_discrete_distributions():
    p = np.array([0.1, 0.5, 0.9], np.float32)
    drawn = np.asarray(run_op("Bernoulli", np.repeat(p[:, None], N, 1), seed=2.0))
    for row, share in zip(drawn, p, strict=True):
        assert scipy.stats.binomtest(int(row.sum()), N, float(share)).pvalue > 0.001
    weights = np.array([[1.0, 2.0, 5.0], [4.0, 3.0, 1.0]])
    chosen = np.asarray(run_op("Multinomial", np.log(weights), sample_size=N, rng=KEYS[1]))
    for row, share in zip(chosen, weights / 8, strict=True):
        assert scipy.stats.chisquare(np.bincount(row, minlength=3), share * N).pvalue > 0.001


@pytest.mark.parametrize("stream", [{"seed": 7}, {"rng": KEYS[1]}], ids=["seed", "key"])
@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9])
def test_dropout_in_training(ratio, stream):
    x = np.linspace(1, 2, N, dtype=np.float32)
    y, mask = run_op("Dropout", x, np.float32(ratio).reshape(()), np.array(True), n_outputs=2, **stream)
    kept = np.asarray(mask).astype(float)
    assert scipy.stats.binomtest(int(kept.sum()), N, 1 - ratio).pvalue > 0.001
    assert abs(np.corrcoef(kept[1:], kept[:-1])[0, 1]) < 4 / N**0.5
    places = np.nonzero(kept)[0] / N  # everywhere alike
    assert scipy.stats.kstest(places, "uniform").pvalue > 0.001
    np.testing.assert_allclose(y, x * kept / (1 - ratio), rtol=1e-5)


@pytest.mark.parametrize("name", [*DRAWS, "Dropout"])
def test_the_key_is_folded_with_the_node(name):
    """Two nodes of one model draw differently, and each the same again; a seed is the same stream in both."""
    inputs, attributes = DRAWS.get(name, ((np.ones(64, np.float32), np.float32(0.5).reshape(()), np.array(True)), {}))
    names = [f"x{i}" for i in range(len(inputs))]
    declared = [value(n, x.dtype, x.shape) for n, x in zip(names, inputs, strict=True)]
    outputs = [onnx.ValueInfoProto(name=n) for n in ("a", "b", "c", "d")]
    seed = {"seed": 3 if name == "Dropout" else 3.0}
    nodes = [
        onnx.helper.make_node(name, names, [n], name=f"draw {n}", **attributes, **(seed if n in "cd" else {}))
        for n in ("a", "b", "c", "d")
    ]
    m = onnx2jax.convert(model(nodes, declared, outputs))
    feeds = dict(zip(names, inputs, strict=True))
    a, b, c, d = m.run(None, feeds, rng=KEYS[0])
    assert (a != b).any() and (a != c).any()
    np.testing.assert_array_equal(c, d)
    again = m.run(None, feeds, rng=KEYS[0])
    for first, second in zip((a, b, c, d), again, strict=True):
        np.testing.assert_array_equal(first, second)
    other = m.run(None, feeds, rng=KEYS[1])
    assert (a != other[0]).any()
    np.testing.assert_array_equal(c, other[2])
