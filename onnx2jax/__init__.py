"""Any ONNX model as a JAX function.

>>> import onnx2jax
>>> model = onnx2jax.convert(onnx2jax.demo_model())
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .lazy import exports

if TYPE_CHECKING:
    from . import backend, errors, generation, ops, session, training
    from .checker.check import Report, check
    from .data import demo_decoder, demo_model, demo_training_model
    from .generation.decoder import Decoder
    from .generation.files import decoder
    from .generation.sampling import Sampling
    from .ir.file import OnnxFile, read
    from .jaxpr.program import portable
    from .model.convert import convert
    from .model.devices.cost import Cost, cost
    from .model.files.exported import ExportedModel, load_exported
    from .model.files.join import join
    from .model.files.save import save
    from .model.model import Model
    from .ops.registry import supported
    from .sharding.plans import Plan
    from .training.finetune import finetune
    from .training.training_model import TrainingModel

__all__ = [
    "Cost",
    "Decoder",
    "ExportedModel",
    "Model",
    "OnnxFile",
    "Plan",
    "Report",
    "Sampling",
    "TrainingModel",
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
    "generation",
    "join",
    "load_exported",
    "ops",
    "portable",
    "read",
    "save",
    "session",
    "supported",
    "training",
]
__version__ = "1.0.0rc1"

_MODULES: Final = {
    "Cost": "model.devices.cost",
    "Decoder": "generation.decoder",
    "ExportedModel": "model.files.exported",
    "Model": "model.model",
    "OnnxFile": "ir.file",
    "Plan": "sharding.plans",
    "Report": "checker.check",
    "Sampling": "generation.sampling",
    "TrainingModel": "training.training_model",
    "check": "checker.check",
    "convert": "model.convert",
    "cost": "model.devices.cost",
    "decoder": "generation.files",
    "demo_decoder": "data",
    "demo_model": "data",
    "demo_training_model": "data",
    "finetune": "training.finetune",
    "join": "model.files.join",
    "load_exported": "model.files.exported",
    "portable": "jaxpr.program",
    "read": "ir.file",
    "save": "model.files.save",
    "supported": "ops.registry",
}
"""Where each public name is defined. Modules are imported at first use: all of them take half as long as JAX does."""

if not TYPE_CHECKING:  # for which every name would exist, misspelt or not
    _INNER: Final = "errors", "ops", "training", "generation", "session"
    __getattr__, __dir__ = exports(__name__, _MODULES, _INNER, ("Model", "Decoder"))
