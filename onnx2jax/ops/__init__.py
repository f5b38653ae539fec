"""ONNX operators as functions of NumPy and JAX arrays, one module per family. Imports nothing from the compiler."""

from __future__ import annotations

if __name__ != "onnx2jax.ops":
    # Imported through the symbolic link at the top of the repository, every operator would be another one.
    raise ImportError(f"import onnx2jax.ops, not {__name__}: the folder ops beside onnx2jax is a link for readers")

from .registry import MayBeEmpty, Shaped, Static, op

__all__ = ["MayBeEmpty", "Shaped", "Static", "op"]
