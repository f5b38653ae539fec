"""The domain com.microsoft: operators that onnxruntime's optimizers, quantizers and model builders emit."""

from typing import Final

MICROSOFT: Final = "com.microsoft"

from . import operands  # noqa: E402, F401  (before the operators, whose operands it checks)
