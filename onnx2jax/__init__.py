"""Any ONNX model as a JAX function.

>>> import onnx2jax
>>> model = onnx2jax.convert(onnx2jax.demo_model())
"""

from __future__ import annotations

from . import backend
from .checker.check import Report, check
from .data import demo_decoder, demo_model, demo_training_model
from .generation.beam import Beams
from .generation.decoder import Decoder, Generation
from .generation.files import decoder
from .generation.sampling import Sampling
from .ir.file import OnnxFile, read
from .model.calls.outputs import DeclarationWarning
from .model.convert import convert
from .model.devices.cost import Cost, cost
from .model.files.exported import ExportedModel, load_exported
from .model.files.join import join
from .model.files.save import save
from .model.model import Model
from .ops.registry import MayBeEmpty, Shaped, Static, op, supported
from .runtime.compile import RecompilationWarning
from .runtime.cpu.pipeline import OptimizationWarning
from .runtime.node_errors import DeviationWarning
from .runtime.portable import portable
from .session import InferenceSession
from .sharding.plans import Plan
from .sharding.rules import ShardingWarning
from .training.artifacts import Artifacts, load_artifacts
from .training.checkpoint import Checkpoints, load_checkpoint, save_checkpoint
from .training.decoders import next_token_loss
from .training.finetune import FineTuning, finetune
from .training.lora import load_adapter
from .training.modules import to_equinox, to_nnx
from .training.packing import pack_texts
from .training.state import FineTuningState, TrainingState
from .training.straight_through import ZeroGradientWarning
from .training.training_model import TrainingModel

__all__ = [
    "Artifacts",
    "Beams",
    "Checkpoints",
    "Cost",
    "DeclarationWarning",
    "Decoder",
    "DeviationWarning",
    "ExportedModel",
    "FineTuning",
    "FineTuningState",
    "Generation",
    "InferenceSession",
    "MayBeEmpty",
    "Model",
    "OnnxFile",
    "OptimizationWarning",
    "Plan",
    "RecompilationWarning",
    "Report",
    "Sampling",
    "Shaped",
    "ShardingWarning",
    "Static",
    "TrainingModel",
    "TrainingState",
    "ZeroGradientWarning",
    "backend",
    "check",
    "convert",
    "cost",
    "decoder",
    "demo_decoder",
    "demo_model",
    "demo_training_model",
    "errors",
    "finetune",
    "join",
    "load_adapter",
    "load_artifacts",
    "load_checkpoint",
    "load_exported",
    "next_token_loss",
    "op",
    "pack_texts",
    "portable",
    "read",
    "save",
    "save_checkpoint",
    "supported",
    "to_equinox",
    "to_nnx",
]
__version__ = "1.0.0rc1"
