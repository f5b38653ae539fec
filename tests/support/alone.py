"""Checks an installed wheel with its requirements only; run by the environment's own Python.

It fails by an assertion, and imports nothing of the tests.
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from pathlib import Path

import jax
import numpy as np

import onnx2jax
from onnx2jax.data import demo_samples

EXTRAS = ("matplotlib", "onnx", "onnxruntime", "optax", "orbax", "pytest", "rich", "safetensors", "torch")


def refused(work: object, extra: str) -> None:
    """Asserts that an optional feature names the extra it needs."""
    try:
        work()  # type: ignore[operator]
    except ImportError as error:
        assert f"needs the extra {extra} " in str(error), error
    else:
        raise AssertionError(f"ran without onnx2jax[{extra}]")


def main() -> None:
    """Runs all checks."""
    site = Path(sysconfig.get_path("purelib"))
    assert Path(onnx2jax.__file__).parent == site / "onnx2jax", onnx2jax.__file__
    assert [name for name in EXTRAS if importlib.util.find_spec(name)] == []

    model = onnx2jax.convert(onnx2jax.demo_model())
    box = demo_samples()
    np.testing.assert_allclose(model(box["images"]), box["logits"], atol=1e-4)
    slope = jax.grad(lambda params: model.apply(params, box["images"])[0, 7])(model.params)
    assert slope.keys() == model.params.keys()
    assert onnx2jax.check(onnx2jax.demo_model()).ok

    refused(model.verify, "verify")
    refused(lambda: onnx2jax.finetune(model, lambda y, _: y.mean(), None).fit([]), "train")
    print(f"onnx2jax {onnx2jax.__version__}, jax {jax.__version__}, Python {sys.version.split()[0]}")


if __name__ == "__main__":
    main()
