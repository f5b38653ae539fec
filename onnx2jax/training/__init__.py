"""Training: by the file's own ``training_info`` (TrainingModel), or with a user's loss and optimizer (finetune).

Both are update functions of a state pytree, compiled and run by one engine.

- ``training_model``: training_info; ``artifacts``: onnxruntime's on-device training.
- ``finetune``: a user's loss. ``weights`` selects the parameters to train, ``form`` rewrites the graph for training,
  ``straight_through`` passes gradients through rounding, ``lora`` adds adapters, ``decoders`` has the next-token loss
  and packs texts into rows, ``objective`` has the loss as a function of parameters, and the optimizer's update.
- ``modules``: a model as a flax or equinox module.
- ``engine``, ``checkpoint``, ``progress_bar``: shared by all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ..lazy import exports

if TYPE_CHECKING:
    from .artifacts import Artifacts, load_artifacts
    from .checkpoint import Checkpoints, load_checkpoint, save_checkpoint
    from .decoders import next_token_loss, pack_texts
    from .engine import FineTuningState, TrainingState
    from .finetune import FineTuning
    from .lora import load_adapter
    from .modules import to_equinox, to_nnx

__all__ = [
    "Artifacts",
    "Checkpoints",
    "FineTuning",
    "FineTuningState",
    "TrainingState",
    "load_adapter",
    "load_artifacts",
    "load_checkpoint",
    "next_token_loss",
    "pack_texts",
    "save_checkpoint",
    "to_equinox",
    "to_nnx",
]

_MODULES: Final = {
    "Artifacts": "artifacts",
    "Checkpoints": "checkpoint",
    "FineTuning": "finetune",
    "FineTuningState": "engine",
    "TrainingState": "engine",
    "load_adapter": "lora",
    "load_artifacts": "artifacts",
    "load_checkpoint": "checkpoint",
    "next_token_loss": "decoders",
    "pack_texts": "decoders",
    "save_checkpoint": "checkpoint",
    "to_equinox": "modules",
    "to_nnx": "modules",
}

if not TYPE_CHECKING:  # for which every name would exist, misspelt or not
    __getattr__, __dir__ = exports(__name__, _MODULES)
