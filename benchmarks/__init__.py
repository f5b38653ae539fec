"""Benchmarks, and the models they and the tests share."""

import os

os.environ.setdefault("ONNX2JAX_CACHE_DIR", "")  # what is measured is compiled, not read from the user's folder
