"""Opening a file that holds its own training."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..errors import UnsupportedError
from ..ir import analysis, binding
from ..ir.file import Reading
from ..ir.graph import Imported, read_constants
from ..ir.training_info import TrainingInfo, read_training
from ..model.convert import open_model
from ..proto.origin import Origin


class Opened(NamedTuple):
    """A file with training, imported."""

    imported: Imported
    infos: tuple[TrainingInfo, ...]
    origin: Origin


def open_training(source: Any, reading: Reading) -> Opened:
    """Import a model with training_info; the arguments are those of ``convert``.

    Raises:
        UnsupportedError: it has none (rule TR-27).
        ModelError: the file is no ONNX model, or breaks a rule of the format.
    """
    importer = open_model(source, reading)
    if not importer.message.training_info:
        raise UnsupportedError(
            "the model has no training_info, so it does not say how to train it. With a loss and an "
            "optimizer of your own: onnx2jax.finetune(onnx2jax.convert(source), loss, optimizer)",
            rule="TR-27",
        )
    imported = importer.model()
    infos = read_training(importer.message, imported.graph, importer)
    binding.check_supported(importer.unsupported, importer.rejected)
    for graph in (imported.graph, *(g for info in infos for g in (info.initialization, info.algorithm))):
        read_constants(graph, analysis.parameters(graph))
    return Opened(imported, infos, Origin(importer.message, importer.files))
