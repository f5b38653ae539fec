"""Reading a file that holds its own training."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, NamedTuple

from ..checker.check import check_message
from ..errors import UnsupportedError
from ..ir import binding
from ..ir.graph import Imported, read_constants
from ..ir.importer import Importer
from ..ir.training_info import TrainingInfo, read_training
from ..proto.files import read_model
from ..proto.operator_sets import read_operator_sets
from ..proto.origin import Origin


class Opened(NamedTuple):
    """A file with training, read."""

    imported: Imported
    infos: tuple[TrainingInfo, ...]
    origin: Origin


def open_training(
    source: Any,
    *,
    strict: bool,
    external_data_dir: str | os.PathLike[str] | None,
    follow_links: bool,
    allow_newer_opset: bool,
    operator_sets: Iterable[Any],
) -> Opened:
    """Read a model with training_info; the arguments are those of ``convert``.

    Raises:
        UnsupportedError: it has none (rule TR-27).
        ModelError: the file is no ONNX model, or breaks a rule of the format.
    """
    message, files = read_model(source, external_data_dir=external_data_dir, follow_links=follow_links)
    documents = read_operator_sets(operator_sets)
    if strict:
        check_message(message, files, allow_newer_opset=allow_newer_opset, documents=documents).raise_errors()
    if not message.training_info:
        raise UnsupportedError(
            "the model has no training_info, so it does not say how to train it. With a loss and an "
            "optimizer of your own: onnx2jax.finetune(onnx2jax.convert(source), loss, optimizer)",
            rule="TR-27",
        )
    importer = Importer(message, files, strict, allow_newer_opset, None, documents)
    imported = importer.model()
    infos = read_training(message, imported.graph, importer)
    if importer.missing:
        raise binding.missing_error(tuple(importer.missing))
    for graph in (imported.graph, *(g for info in infos for g in (info.initialization, info.algorithm))):
        read_constants(graph)
    return Opened(imported, infos, Origin(message, files))
