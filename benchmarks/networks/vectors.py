"""Support vector machines of ai.onnx.ml; by hand two products, and the votes of all pairs of classes as a third."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.net import Net

from .network import OPSET, Network, built

DOMAIN = "ai.onnx.ml"


def _distances(x: Any, vectors: Any) -> Any:
    """Squared distances [n, vectors]."""
    dot = jnp.matmul(x, vectors.T, precision=jax.lax.Precision.HIGHEST)
    return (x * x).sum(1, keepdims=True) - 2 * dot + (vectors * vectors).sum(1)


def svr(folder: Path, batch: int, count: int = 400, features: int = 16) -> Network:
    """A regressor with Gaussian kernels."""
    net, rng = Net(OPSET, ml=1, ir=8), np.random.default_rng(0)
    vectors, coefficients = rng.standard_normal((count, features)), rng.standard_normal(count)
    y = net(
        "SVMRegressor",
        net.input("x", (batch, features)),
        domain=DOMAIN,
        kernel_type="RBF",
        kernel_params=(1 / features, 0.0, 3.0),
        n_supports=count,
        support_vectors=vectors.ravel().tolist(),
        coefficients=coefficients.tolist(),
        rho=(0.5,),
    )
    feeds = {"x": rng.standard_normal((batch, features)).astype(np.float32)}

    def by_hand(p: Any, x: Any) -> Any:
        return jnp.exp(-_distances(x, p["vectors"]) / features) @ p["coefficients"][:, None] + 0.5

    params = {"vectors": np.float32(vectors), "coefficients": np.float32(coefficients)}
    return built(net, folder, "SVR", feeds, [y], by_hand, params)


def svc(folder: Path, batch: int, classes: int = 10, each: int = 50, features: int = 64) -> Network:
    """A classifier with Gaussian kernels, one vote for each pair of classes; the scores of the pairs."""
    net, rng, count = Net(OPSET, ml=1, ir=8), np.random.default_rng(0), classes * each
    vectors, coefficients = rng.standard_normal((count, features)), rng.standard_normal((classes - 1, count))
    i, j = np.triu_indices(classes, 1)
    rho = rng.standard_normal(len(i)).astype(np.float32)
    label, scores = net(
        "SVMClassifier",
        net.input("x", (batch, features)),
        n=2,
        domain=DOMAIN,
        kernel_type="RBF",
        kernel_params=(1 / features, 0.0, 3.0),
        classlabels_ints=range(classes),
        vectors_per_class=[each] * classes,
        support_vectors=vectors.ravel().tolist(),
        coefficients=coefficients.ravel().tolist(),
        rho=rho.tolist(),
    )
    feeds = {"x": rng.standard_normal((batch, features)).astype(np.float32)}
    own, eye = np.repeat(np.arange(classes), each)[:, None], np.eye(classes, dtype=np.float32)
    weights = np.where(own == i, coefficients.T[:, j - 1], np.where(own == j, coefficients.T[:, i], 0))

    def by_hand(p: Any, x: Any) -> Any:
        scores = jnp.exp(-_distances(x, p["vectors"]) / features) @ p["weights"] + p["rho"]
        votes = jnp.where(scores > 0, 1.0, 0.0) @ (eye[i] - eye[j]) + eye[j].sum(0)
        return jnp.argmax(votes, 1).astype(int), scores

    params = {"vectors": np.float32(vectors), "weights": np.float32(weights), "rho": rho}
    path = net.save(folder, **{label: np.int64, scores: np.float32})
    return Network("SVC", path, feeds, by_hand, jax.tree.map(jnp.asarray, params))
