"""``python -m onnx2jax``."""

import sys

from .cli import main

sys.exit(main())
