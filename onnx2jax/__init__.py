"""Any ONNX model as a JAX function.

>>> import onnx2jax
>>> model = onnx2jax.convert(onnx2jax.demo_model())
"""

from __future__ import annotations

from . import errors
from .artifacts import Artifacts, load_artifacts
from .check import Report, check
from .checkpoint import Checkpoints, load_checkpoint, save_checkpoint
from .declared import DeclarationWarning
from .export import save
from .finetuning import FineTuning, finetune
from .model import Model, convert
from .ops.registry import Shaped, Static, op, supported
from .resources import demo_model, demo_training_model
from .sharding import ShardingWarning
from .train import TrainingModel
from .unit import RecompilationWarning

__all__ = [
    "Artifacts",
    "Checkpoints",
    "DeclarationWarning",
    "FineTuning",
    "Model",
    "RecompilationWarning",
    "Report",
    "Shaped",
    "ShardingWarning",
    "Static",
    "TrainingModel",
    "check",
    "convert",
    "demo_model",
    "demo_training_model",
    "errors",
    "finetune",
    "load_artifacts",
    "load_checkpoint",
    "op",
    "save",
    "save_checkpoint",
    "supported",
]
__version__ = "0.1.0"
