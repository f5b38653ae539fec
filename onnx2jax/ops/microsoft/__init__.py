"""The domain com.microsoft: operators that onnxruntime's optimizers, quantizers and model builders emit."""

from .operands import MICROSOFT as MICROSOFT  # before the operators, whose operands that module checks
