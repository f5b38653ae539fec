"""Any ONNX model as a JAX function.

>>> import onnx2jax
>>> model = onnx2jax.convert(onnx2jax.demo_model())
"""

from __future__ import annotations

from . import errors
from .check import Report, check
from .checkpoint import Checkpoints, load_checkpoint, save_checkpoint
from .export import save
from .finetuning import FineTuning, finetune
from .model import Model, convert
from .ops.registry import Shaped, Static, op, supported
from .resources import demo_model
from .unit import RecompilationWarning

__all__ = [
    "Checkpoints",
    "FineTuning",
    "Model",
    "RecompilationWarning",
    "Report",
    "Shaped",
    "Static",
    "check",
    "convert",
    "demo_model",
    "errors",
    "finetune",
    "load_checkpoint",
    "op",
    "save",
    "save_checkpoint",
    "supported",
]
__version__ = "0.1.0"
