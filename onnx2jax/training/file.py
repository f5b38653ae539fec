"""Imports a file with ``training_info``."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..errors import UnsupportedError
from ..ir import analysis, binding
from ..ir.file import Reading
from ..ir.graph import Imported, read_constants
from ..ir.training_info import TrainingInfo, read_training
from ..model.convert import check_operands, open_model
from ..proto.origin import Origin


class Opened(NamedTuple):
    """An imported model, its training_info, and its origin."""

    imported: Imported
    infos: tuple[TrainingInfo, ...]
    origin: Origin


def open_training(source: Any, reading: Reading) -> Opened:
    """Imports a model with training_info.

    Raises:
        UnsupportedError: the model has no training_info (rule TR-27).
        ModelError: the file is not an ONNX model, or breaks a rule of the format.
    """
    importer = open_model(source, reading)
    if not importer.message.training_info:
        raise UnsupportedError(
            "the model has no training_info. Train it with your own loss and optimizer: "
            "onnx2jax.finetune(onnx2jax.convert(source), loss, optimizer)",
            rule="TR-27",
        )
    imported = importer.model()
    infos = read_training(importer.message, imported.graph, importer)
    binding.check_supported(importer.unsupported, importer.rejected)
    check_operands(importer)
    for graph in (imported.graph, *(g for info in infos for g in (info.initialization, info.algorithm))):
        read_constants(graph, analysis.parameters(graph))
    return Opened(imported, infos, Origin(importer.message, importer.files))
