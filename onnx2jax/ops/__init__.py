"""The meanings of operators, one file a family. Nothing here knows the compiler above."""

from __future__ import annotations

import importlib
import pkgutil

if __name__ != "onnx2jax.ops":
    # Through the link at the top of the repository it would be a second copy of everything.
    raise ImportError(f"import onnx2jax.ops, not {__name__}: the folder ops beside onnx2jax is a link for readers")

for _module in pkgutil.walk_packages(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
