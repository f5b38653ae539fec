"""A script: a model's results after interfaces of JAX are removed, before the package is imported.

python -m tests.support.removal jax.interpreters.mlir jax.core.eval_context
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.support.models import mlp, mlp_reference

X = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)


def remove(path: str) -> None:
    """Remove a module, or an attribute of a module or class, if this JAX has it."""
    owner_path, _, name = path.rpartition(".")
    try:
        owner = importlib.import_module(owner_path)
        importlib.import_module(path)
    except ImportError:
        owner = sys.modules.get(owner_path) or getattr(
            sys.modules[owner_path.rpartition(".")[0]], owner_path.split(".")[-1]
        )
    if name in vars(owner):
        delattr(owner, name)
    if path in sys.modules:
        sys.modules[path] = None  # type: ignore[assignment]


def results(onnx2jax: Any) -> dict[str, Any]:
    """A model's results: called, transformed and exported."""
    model = onnx2jax.convert(mlp())
    with tempfile.TemporaryDirectory() as folder:
        exported = onnx2jax.load_exported(model.export(folder, platforms=["cpu"]))(X)
    return {
        "call": model(X),
        "call with a JAX array": model(jnp.asarray(X)),
        "jit": jax.jit(model.apply)(model.params, X),
        "grad": jax.grad(lambda x: model(x).sum())(X),
        "jit of grad": jax.jit(jax.grad(lambda x: model(x).sum()))(X),
        "jvp": jax.jvp(model, (X,), (X,))[1],
        "vmap": jax.vmap(model)(X[:, None]),
        "export": exported,
    }


def main() -> None:
    """Compare with the hand-written network."""
    jax.devices()  # JAX itself needs some of them to start
    for path in sys.argv[1:]:
        remove(path)
    onnx2jax = importlib.import_module("onnx2jax")
    params = onnx2jax.convert(mlp()).params

    def network(x: Any) -> Any:
        return mlp_reference(params, x)

    gradient = jax.grad(lambda x: network(x).sum())(X)
    want = {"grad": gradient, "jit of grad": gradient, "jvp": jax.jvp(network, (X,), (X,))[1]}
    want["vmap"] = network(X)[:, None]
    for name, found in results(onnx2jax).items():
        np.testing.assert_allclose(found, want.get(name, network(X)), 1e-5, 1e-5, err_msg=name)


if __name__ == "__main__":
    main()
