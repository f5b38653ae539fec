"""``python -m onnx2jax``, and the command ``onnx2jax``."""

import gc
import sys

from .cli import main


def run() -> int:
    """Run a command in a process of its own, and return its exit status."""
    status = main()
    gc.freeze()  # else Python searches all that JAX has imported for cycles before it ends, for 0.2 s
    return status


if __name__ == "__main__":
    sys.exit(run())
