"""ai.onnx.ml: support vector machines."""

from __future__ import annotations

from typing import Any, Literal

import jax
import numpy as np
from jax import lax

from ...limits import SVM_DIFFERENCES
from ..activation import sigmoid
from ..arrays import argmax, is_known, repeat, xp
from ..registry import op
from .scores import DOMAIN, LABELS, Transform, batch, class_labels, labels_of, result_dtype, transform, two_scores

Kernel = Literal["LINEAR", "POLY", "RBF", "SIGMOID"]
LOST_DIGITS = 256
"""Squared norms, relative to the kernel's width, up to which a product loses less than 1e-4 of the kernel."""
SWEEPS = 100
"""Iterations of the coupling of probabilities at most, as in onnxruntime; three to five are common."""


def _kernel(X, vectors, kernel_type, kernel_params):
    """The kernel matrix [N, S] of rows and support vectors."""
    gamma, coef0, degree = (float(p) for p in (kernel_params or (0.0, 0.0, 0.0)))
    if kernel_type == "RBF":
        return xp.exp(-gamma * _squared_distances(X, vectors, gamma))
    dot = X @ vectors.T
    if kernel_type == "LINEAR":
        return dot
    dot = gamma * dot + coef0
    return xp.tanh(dot) if kernel_type == "SIGMOID" else dot ** (int(degree) if degree == int(degree) else degree)


def _squared_distances(X, vectors, gamma):
    """Squared distances [N, S]; many by one product, of rows from which the mean of the vectors is subtracted.

    The product cancels where a row is close to a vector, so it is for vectors whose norm is a few widths of the kernel.
    """
    many = not isinstance(X.shape[0], int) or X.shape[0] * vectors.size >= SVM_DIFFERENCES
    if not (many and vectors.size and gamma * _squared_norms(vectors - vectors.mean(0)).max() <= LOST_DIGITS):
        return ((X[:, None] - vectors) ** 2).sum(-1)
    mean = vectors.mean(0)
    X, vectors = X - mean, vectors - mean
    by_columns, exact = (((1,), (1,)), ((), ())), lax.Precision.HIGHEST
    dot = X @ vectors.T if is_known(X) else lax.dot_general(X, vectors, by_columns, precision=exact)
    dot = xp.where(xp.isfinite(dot), dot, 0)  # of rows whose norm is not finite either: inf - inf is no distance
    return _squared_norms(X)[:, None] - 2 * dot + _squared_norms(vectors)


def _squared_norms(rows):
    return (rows * rows).sum(1)


@op("SVMRegressor", domain=DOMAIN, heavy=True, wide=True)
def svm_regressor(
    X, *, coefficients, kernel_params=None, kernel_type: Kernel = "LINEAR", n_supports=0, one_class=0,
    post_transform: Transform = "NONE", rho=(0.0,), support_vectors=(), double=False,
):  # fmt: skip
    """SVMRegressor; without support vectors the coefficients define a linear model."""
    dtype = result_dtype(double)
    X = batch(X).astype(dtype)
    vectors = np.array(support_vectors if n_supports else coefficients, dtype).reshape(n_supports or 1, -1)
    score = _kernel(X, vectors, kernel_type if n_supports else "LINEAR", kernel_params)
    if n_supports:
        score = score @ np.array(coefficients, dtype)[:, None]
    score = score + dtype.type(rho[0])
    if one_class:
        score = xp.where(score > 0, 1, -1).astype(dtype)
    return transform(score, post_transform)


def _coupled(pairwise):
    """Class probabilities [n, N] from pairwise ones [n, n, N], by the second method of Wu, Lin and Weng."""
    r, eye = pairwise, np.eye(len(pairwise), dtype=pairwise.dtype)[..., None]
    q = xp.where(eye == 1, (r * r).sum(0), -r * xp.swapaxes(r, 0, 1))
    if not is_known(q):
        return _iterated(q)
    state = _start(q)
    for _ in range(SWEEPS):
        if state[1].all():
            break
        state = _sweep(q, state)
    return state[0]


def _start(q):
    """Equal probabilities [n, N], and which rows have converged [N]."""
    n, _, rows = q.shape
    return xp(q).full((n, rows), 1 / n, q.dtype), xp(q).zeros(rows, bool)


def _sweep(q, state):
    """One iteration over all classes; rows that have converged keep their probabilities."""
    n, (p, done) = len(q), state
    qp = (q * p).sum(1)
    pqp = (p * qp).sum(0)
    done = done | (abs(qp - pqp).max(0) < 0.005 / n)
    new, eye = p, np.eye(n, dtype=q.dtype)[..., None]
    for t in range(n):
        step = (pqp - qp[t]) / q[t, t]
        pqp = (pqp + step * (step * q[t, t] + 2 * qp[t])) / (1 + step) ** 2
        qp = (qp + step * q[:, t]) / (1 + step)
        new = (new + step * eye[t]) / (1 + step)
    return xp.where(done, p, new), done


@jax.custom_jvp
def _iterated(q: Any) -> Any:
    """Probabilities after as many sweeps as the slowest row needs; differentiated as all of them."""
    more = lambda state: (state[0] < SWEEPS) & ~state[1][1].all()  # noqa: E731
    return lax.while_loop(more, lambda state: (state[0] + 1, _sweep(q, state[1])), (0, _start(q)))[1][0]


@_iterated.defjvp
def _derivative_of_iterated(primals, tangents):
    return jax.jvp(lambda q: repeat(SWEEPS, lambda _, state: _sweep(q, state), _start(q))[0], primals, tangents)


def _by_pairs(kernel, coefficients, counts, *, one_product):
    """The sums [N, P] over the vectors of each pair of classes, by their coefficients against the other of the two.

    One matrix of all pairs is zero for the vectors of other classes, whose kernel may be infinite.
    """
    i, j = np.triu_indices(len(counts), 1)
    if one_product:
        label = np.repeat(np.arange(len(counts)), counts)[:, None]
        of_second = np.where(label == j, coefficients[:, i], coefficients.dtype.type(0))
        return kernel @ np.where(label == i, coefficients[:, j - 1], of_second)
    ends = np.cumsum(counts).tolist()
    each = (slice(end - count, end) for end, count in zip(ends, counts, strict=True))
    parts = xp.stack([kernel[:, rows] @ coefficients[rows] for rows in each])  # [n, N, n - 1]
    return (parts[i, :, j - 1] + parts[j, :, i]).T


@op("SVMClassifier", domain=DOMAIN, heavy=True, labels="classlabels_ints", wide=True, limits=LABELS)
def svm_classifier(
    X, *, coefficients, classlabels_ints=None, classlabels_strings=None, kernel_params=None,
    kernel_type: Kernel = "LINEAR", post_transform: Transform = "NONE", prob_a=(), prob_b=(), rho=(0.0,),
    support_vectors=(), once, vectors_per_class=(), double=False,
):  # fmt: skip
    """SVMClassifier: one-vs-one votes of support vectors, or without these one linear score per class."""
    labels = once(class_labels, {"classlabels_ints": classlabels_ints, "classlabels_strings": classlabels_strings})
    dtype = result_dtype(double)
    X, n, total = batch(X).astype(dtype), len(labels), sum(vectors_per_class)
    coefficients = np.array(coefficients, dtype)
    if not total:
        scores = X @ coefficients.reshape(n, -1).T + dtype.type(rho[0])
        index = argmax(scores, 1)
        if n == 2 and not prob_a:
            best = scores.max(1)
            index = xp.where(best >= 0.5 if (coefficients >= 0).all() else best > 0, 1, index)
        return labels_of(labels, index), transform(scores, post_transform)
    if len(vectors_per_class) != n:
        raise ValueError(f"vectors_per_class {tuple(vectors_per_class)} must have one entry for each of {n} classes")
    pairs = n * (n - 1) // 2
    for name, values, counts in (
        ("rho", rho, (1, pairs)),
        ("prob_a", prob_a, (0, pairs)),
        ("prob_b", prob_b, (0, pairs)),
    ):
        if len(values) not in counts or (name == "prob_b" and len(values) != len(prob_a)):
            raise ValueError(f"{name} must have {pairs} entries, one for each pair of classes (it has {len(values)})")
    vectors = np.array(support_vectors, dtype).reshape(total, -1)
    kernel = _kernel(X, vectors, kernel_type, kernel_params)
    # Gaussians of finite vectors are at most 1, and NaN for all vectors at once.
    bounded = kernel_type == "RBF" and (kernel_params or (0,))[0] >= 0 and np.isfinite(vectors).all()
    scores = _by_pairs(kernel, coefficients.reshape(n - 1, total).T, vectors_per_class, one_product=bounded)
    scores = scores + np.array(rho, dtype)
    i, j = np.triu_indices(n, 1)  # all pairs of classes
    first, second = np.eye(n, dtype=np.float32)[[i, j]]  # the two classes of each pair: one of them gets its vote
    index = argmax((scores > 0).astype(np.float32) @ (first - second) + second.sum(0), 1)
    if prob_a:
        p = sigmoid(-(scores * np.array(prob_a, dtype) + np.array(prob_b, dtype)))
        p = xp.clip(p, dtype.type(1e-7), dtype.type(1 - 1e-7))
        # entry [a, b] is the probability of class a given that it is a or b
        above, at = np.triu(np.ones((n, n), dtype), 1), np.zeros((n, n), int)
        at[i, j] = at[j, i] = np.arange(len(i))
        p, above = p.T[at], above[..., None]  # classes before rows, which are many
        scores = _coupled(p * above + (1 - p) * above.swapaxes(0, 1)).T
    elif n == 2:
        return labels_of(labels, index), two_scores(scores, post_transform, margin=post_transform == "NONE")
    return labels_of(labels, index), transform(scores, post_transform)
