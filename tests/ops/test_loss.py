"""Losses: what ignoring, weighting and reducing mean, and that gradients stay clean."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.helpers import run_op

LOSSES = ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")
LOGP = np.log(np.array([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.2, 0.2, 0.6]]))
LABELS = np.array([0, 1, 7], np.int64)
P = np.log([0.5, 0.6])


@pytest.mark.parametrize("name", LOSSES)  # softmax(log p) is p again
@pytest.mark.parametrize("opset", [12, 13, 22, 28])
@pytest.mark.parametrize(
    ("weight", "reduction", "expected"),
    [
        (None, "none", [-P[0], -P[1], 0]),
        (None, "sum", -P.sum()),
        (None, "mean", -P.mean()),  # the ignored sample does not count
        ([1.0, 3.0, 5.0], "mean", -(P[0] + 3 * P[1]) / 4),
        ([1.0, 3.0, 5.0], "none", [-P[0], -3 * P[1], 0]),
    ],
)
def test_ignored_labels_may_be_out_of_range(name, opset, weight, reduction, expected):
    weights = () if weight is None else (np.array(weight),)
    loss = run_op(name, LOGP, LABELS, *weights, opset=opset, ignore_index=7, reduction=reduction)
    loss = loss[0] if isinstance(loss, tuple) else loss
    np.testing.assert_allclose(loss, expected, rtol=1e-12)


@pytest.mark.parametrize("asarray", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("bad", [-1, 3])
def test_labels_out_of_range_give_nan(asarray, bad):
    loss = run_op("NegativeLogLikelihoodLoss", asarray(LOGP), asarray(np.array([0, bad, 2])), reduction="none")
    assert np.isnan(loss).tolist() == [False, True, False]


def test_ignored_samples_have_zero_gradient_even_where_scores_are_infinite():
    scores = jnp.asarray(np.array([[1.0, 2.0], [-np.inf, -np.inf]], np.float32))
    labels = np.array([1, 9])
    grad = jax.grad(lambda x: run_op("NegativeLogLikelihoodLoss", x, labels, ignore_index=9))(scores)
    np.testing.assert_array_equal(grad, [[0, -1], [0, 0]])


def test_large_scores_do_not_overflow():
    scores = np.array([[1e4, 0.0]], np.float32)
    loss, log_prob = run_op("SoftmaxCrossEntropyLoss", scores, np.array([1], np.int32), n_outputs=2)
    assert loss == 1e4 and log_prob.tolist() == [[0, -1e4]] and log_prob.dtype == np.float32


def test_half_precision_sums_in_float32():
    scores = np.full((4096, 2), -1.0, np.float16)
    loss = run_op("NegativeLogLikelihoodLoss", scores, np.zeros(4096, np.int64), reduction="sum")
    assert loss.dtype == np.float16 and loss == 4096
    assert run_op("NegativeLogLikelihoodLoss", jnp.tile(scores, (32, 1)), np.zeros(131072, np.int64)) == 1


@pytest.mark.parametrize(("labels", "reduction"), [(np.zeros((3, 1), np.int64), "mean"), (LABELS, "average")])
def test_misuse_is_refused(labels, reduction):
    with pytest.raises(ValueError, match=r"need labels|'none', 'sum', 'mean'"):
        run_op("NegativeLogLikelihoodLoss", LOGP, labels, reduction=reduction)
