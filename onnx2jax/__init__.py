"""Any ONNX model as a JAX function.

>>> import onnx2jax
>>> model = onnx2jax.convert(onnx2jax.demo_model())
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from . import backend
    from .checker.check import Report, check
    from .data import demo_decoder, demo_model, demo_training_model
    from .eval.node_errors import DeviationWarning
    from .generation.beam import Beams
    from .generation.decoder import Decoder
    from .generation.files import decoder
    from .generation.results import Generation
    from .generation.sampling import Sampling
    from .ir.file import OnnxFile, read
    from .jaxpr.pipeline import OptimizationWarning
    from .jaxpr.portable import portable
    from .model.calls.outputs import DeclarationWarning
    from .model.convert import convert
    from .model.devices.cost import Cost, cost
    from .model.files.exported import ExportedModel, load_exported
    from .model.files.join import join
    from .model.files.save import save
    from .model.model import Model
    from .ops.registry import MayBeEmpty, Shaped, Static, op, supported
    from .runtime.compile import RecompilationWarning
    from .session import (
        ExecutionMode,
        GraphOptimizationLevel,
        InferenceSession,
        RunOptions,
        SessionOptions,
        get_available_providers,
        get_device,
    )
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
    "ExecutionMode",
    "ExportedModel",
    "FineTuning",
    "FineTuningState",
    "Generation",
    "GraphOptimizationLevel",
    "InferenceSession",
    "MayBeEmpty",
    "Model",
    "OnnxFile",
    "OptimizationWarning",
    "Plan",
    "RecompilationWarning",
    "Report",
    "RunOptions",
    "Sampling",
    "SessionOptions",
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
    "get_available_providers",
    "get_device",
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

_MODULES: Final = {
    "Artifacts": "training.artifacts",
    "Beams": "generation.beam",
    "Checkpoints": "training.checkpoint",
    "Cost": "model.devices.cost",
    "DeclarationWarning": "model.calls.outputs",
    "Decoder": "generation.decoder",
    "DeviationWarning": "eval.node_errors",
    "ExecutionMode": "session",
    "ExportedModel": "model.files.exported",
    "FineTuning": "training.finetune",
    "FineTuningState": "training.state",
    "Generation": "generation.results",
    "GraphOptimizationLevel": "session",
    "InferenceSession": "session",
    "MayBeEmpty": "ops.registry",
    "Model": "model.model",
    "OnnxFile": "ir.file",
    "OptimizationWarning": "jaxpr.pipeline",
    "Plan": "sharding.plans",
    "RecompilationWarning": "runtime.compile",
    "Report": "checker.check",
    "RunOptions": "session",
    "Sampling": "generation.sampling",
    "SessionOptions": "session",
    "Shaped": "ops.registry",
    "ShardingWarning": "sharding.rules",
    "Static": "ops.registry",
    "TrainingModel": "training.training_model",
    "TrainingState": "training.state",
    "ZeroGradientWarning": "training.straight_through",
    "check": "checker.check",
    "convert": "model.convert",
    "cost": "model.devices.cost",
    "decoder": "generation.files",
    "demo_decoder": "data",
    "demo_model": "data",
    "demo_training_model": "data",
    "finetune": "training.finetune",
    "get_available_providers": "session",
    "get_device": "session",
    "join": "model.files.join",
    "load_adapter": "training.lora",
    "load_artifacts": "training.artifacts",
    "load_checkpoint": "training.checkpoint",
    "load_exported": "model.files.exported",
    "next_token_loss": "training.decoders",
    "op": "ops.registry",
    "pack_texts": "training.packing",
    "portable": "jaxpr.portable",
    "read": "ir.file",
    "save": "model.files.save",
    "save_checkpoint": "training.checkpoint",
    "supported": "ops.registry",
    "to_equinox": "training.modules",
    "to_nnx": "training.modules",
}
"""Where each public name is defined. Modules are imported at first use: all of them take half as long as JAX does."""


def __getattr__(name: str) -> Any:
    """A public name, or a module of this package, imported at its first use."""
    if name in _MODULES:
        value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        return value
    if not name.startswith("_") and find_spec(f"{__name__}.{name}"):
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
