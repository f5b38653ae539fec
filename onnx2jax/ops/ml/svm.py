"""ai.onnx.ml: support vector machines."""

from __future__ import annotations

from typing import Literal

import numpy as np

from ..activation import sigmoid
from ..arrays import argmax, xp
from ..registry import op
from .scores import DOMAIN, LABELS, Transform, batch, class_labels, labels_of, repeat, transform, two_scores

Kernel = Literal["LINEAR", "POLY", "RBF", "SIGMOID"]


def _kernel(X, vectors, kernel_type, kernel_params):
    """The kernel matrix [N, S] of rows and support vectors."""
    gamma, coef0, degree = (float(p) for p in (kernel_params or (0.0, 0.0, 0.0)))
    if kernel_type == "RBF":
        return xp.exp(-gamma * ((X[:, None] - vectors) ** 2).sum(-1))
    dot = X @ vectors.T
    if kernel_type == "LINEAR":
        return dot
    dot = gamma * dot + coef0
    return xp.tanh(dot) if kernel_type == "SIGMOID" else dot ** (int(degree) if degree == int(degree) else degree)


@op("SVMRegressor", domain=DOMAIN, heavy=True)
def svm_regressor(
    X, *, coefficients, kernel_params=None, kernel_type: Kernel = "LINEAR", n_supports=0, one_class=0,
    post_transform: Transform = "NONE", rho=(0.0,), support_vectors=(),
):  # fmt: skip
    """SVMRegressor; without support vectors the coefficients define a linear model."""
    X = batch(X).astype(np.float32)
    vectors = np.array(support_vectors if n_supports else coefficients, np.float32).reshape(n_supports or 1, -1)
    score = _kernel(X, vectors, kernel_type if n_supports else "LINEAR", kernel_params)
    if n_supports:
        score = score @ np.array(coefficients, np.float32)[:, None]
    score = score + np.float32(rho[0])
    if one_class:
        score = xp.where(score > 0, 1, -1).astype(np.float32)
    return transform(score, post_transform)


def _coupled(pairwise, n):
    """Class probabilities from pairwise ones [N, n, n], by the iteration of Wu, Lin and Weng (second method)."""
    r, eye = pairwise, np.eye(n, dtype=np.float32)
    q = xp.where(eye == 1, (r * r).sum(1)[:, None, :], -r * xp.swapaxes(r, 1, 2))

    def sweep(_, state):
        p, done = state
        qp = (q * p[:, None, :]).sum(-1)
        pqp = (p * qp).sum(-1)
        done = done | (abs(qp - pqp[:, None]).max(-1) < 0.005 / n)
        new = p
        for t in range(n):
            step = (pqp - qp[:, t]) / q[:, t, t]
            pqp = (pqp + step * (step * q[:, t, t] + 2 * qp[:, t])) / (1 + step) ** 2
            qp = (qp + step[:, None] * q[:, t]) / (1 + step[:, None])
            new = (new + step[:, None] * eye[t]) / (1 + step[:, None])
        return xp.where(done[:, None], p, new), done

    return repeat(100, sweep, (xp(r).full(r.shape[:2], 1 / n, np.float32), xp(r).zeros(r.shape[0], bool)))[0]


@op("SVMClassifier", domain=DOMAIN, heavy=True, labels="classlabels_ints", limits=LABELS)
def svm_classifier(
    X, *, coefficients, classlabels_ints=None, classlabels_strings=None, kernel_params=None,
    kernel_type: Kernel = "LINEAR", post_transform: Transform = "NONE", prob_a=(), prob_b=(), rho=(0.0,),
    support_vectors=(), once, vectors_per_class=(),
):  # fmt: skip
    """SVMClassifier: one-vs-one votes of support vectors, or without these one linear score per class."""
    labels = once(class_labels, {"classlabels_ints": classlabels_ints, "classlabels_strings": classlabels_strings})
    X, n, total = batch(X).astype(np.float32), len(labels), sum(vectors_per_class)
    coefficients = np.array(coefficients, np.float32)
    if not total:
        scores = X @ coefficients.reshape(n, -1).T + np.float32(rho[0])
        index = argmax(scores, 1)
        if n == 2 and not prob_a:
            best = scores.max(1)
            index = xp.where(best >= 0.5 if (coefficients >= 0).all() else best > 0, 1, index)
        return labels_of(labels, index), transform(scores, post_transform)
    kernel = _kernel(X, np.array(support_vectors, np.float32).reshape(total, -1), kernel_type, kernel_params)
    i, j = np.triu_indices(n, 1)  # all pairs of classes; a vector has a coefficient for each class except its own
    own, others = np.repeat(np.arange(n), vectors_per_class)[:, None], coefficients.reshape(n - 1, total).T
    weights = np.where(own == i, others[:, j - 1], np.where(own == j, others[:, i], np.float32(0)))
    scores = kernel @ weights + np.array(rho, np.float32)
    index = argmax(xp.where(scores[..., None] > 0, np.eye(n)[i], np.eye(n)[j]).sum(1), 1)
    if prob_a:
        p = sigmoid(-(scores * np.array(prob_a, np.float32) + np.array(prob_b, np.float32)))
        p = xp.clip(p, np.float32(1e-7), np.float32(1 - 1e-7))
        # entry [a, b] is the probability of class a given that it is a or b
        above, at = np.triu(np.ones((n, n), np.float32), 1), np.zeros((n, n), int)
        at[i, j] = at[j, i] = np.arange(len(i))
        pairwise = p[:, at] * above + (1 - p[:, at]) * above.T
        scores = _coupled(pairwise, n)
    elif n == 2:
        return labels_of(labels, index), two_scores(scores, post_transform, margin=post_transform == "NONE")
    return labels_of(labels, index), transform(scores, post_transform)
