"""What onnxruntime's on-device training starts from: an evaluation model, its checkpoint, its optimizer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ModelError, UnsupportedError
from ..model.convert import convert
from ..model.model import Model
from ..proto.external import ExternalFiles
from ..proto.files import read_model
from ..proto.ort_checkpoint import read_checkpoint
from ..proto.tensors import to_array


@dataclass(frozen=True)
class Artifacts:
    """A model to train, as onnxruntime keeps it. Made by ``load_artifacts``.

    Attributes:
        model: the evaluation model, with the checkpoint's parameters in ``model.params``. Its first output is the
            loss.
        trainable: the names of the parameters to train.
        optimizer: the nodes of the optimizer model in order, each with its attributes: ``{"AdamWOptimizer":
            {"alpha": 0.9, "beta": 0.999, "epsilon": 1e-06, "weight_decay": 0.0, ...}}``. Empty without that model.
        learning_rate: of the optimizer; None when the checkpoint has no state of it.
        step: how many steps it has made.
        moments: its state by parameter: ``{"fc.weight": {"momentum0": ..., "momentum1": ...}}``.
        properties: what the user added to the checkpoint.
    """

    model: Model
    trainable: tuple[str, ...]
    optimizer: Mapping[str, Mapping[str, Any]]
    learning_rate: float | None
    step: int
    moments: Mapping[str, Mapping[str, np.ndarray]]
    properties: Mapping[str, int | float | str]

    @property
    def params(self) -> dict[str, Any]:
        """The parameters to train, for ``model.apply`` and its derivatives."""
        return {name: self.model.params[name] for name in self.trainable}


def load_artifacts(folder: str | os.PathLike[str], *, checkpoint: str = "checkpoint", **options: Any) -> Artifacts:
    """Load what ``onnxruntime.training.artifacts.generate_artifacts`` wrote, to train it with JAX.

    ``training_model.onnx`` is not needed: JAX differentiates the evaluation model::

        artifacts = onnx2jax.load_artifacts("artifacts")

        def loss(params, x, labels):
            return artifacts.model.apply(params, x, labels)

        value, gradients = jax.value_and_grad(loss)(artifacts.params, x, labels)

    The AdamW of onnxruntime (``adam_mode`` 1) adds epsilon before it corrects the bias, that of optax after it: with
    the same attributes they take nearly the same steps, not the same ones.

    Args:
        folder: where ``eval_model.onnx``, the checkpoint and, if there is one, ``optimizer_model.onnx`` are.
        checkpoint: the name of the checkpoint in the folder. What it keeps in a file apart is read from there.
        options: as for ``convert``.

    Raises:
        ModelError: a file is damaged, or the checkpoint does not fit the model.
        UnsupportedError: the checkpoint has several groups of parameters.
        FileNotFoundError: no such file.
        ImportError: flatbuffers is not installed.
    """
    folder = Path(folder)
    message = read_model(folder / "eval_model.onnx")
    content, files = read_checkpoint(folder / checkpoint), ExternalFiles(folder)
    if len(content.groups) > 1:
        names = [group.name for group in content.groups]
        raise UnsupportedError(f"the checkpoint has {len(names)} groups of parameters ({names}); one is supported")
    group = next(iter(content.groups), None)
    _set_parameters(message, content.trained + content.frozen)
    return Artifacts(
        model=convert(message.SerializeToString(), external_data_dir=folder, **options),
        trainable=tuple(t.name for t in content.trained),
        optimizer=_attributes(folder / "optimizer_model.onnx"),
        learning_rate=group.learning_rate if group else None,
        step=group.step if group else 0,
        moments={n: {t.name: to_array(t, files) for t in ts} for n, ts in (group.moments if group else {}).items()},
        properties=content.properties,
    )


def _set_parameters(message: Any, tensors: list[Any]) -> None:
    """Parameters, which the evaluation model takes as inputs, become its initializers."""
    inputs = {v.name: v for v in message.graph.input}
    for tensor in tensors:
        value = inputs.pop(tensor.name, None)
        if value is None:
            raise ModelError(f"the checkpoint has {tensor.name!r}, but eval_model.onnx has no such input: {[*inputs]}")
        declared, dims = value.type.tensor_type, [d.dim_value for d in value.type.tensor_type.shape.dim]
        if (declared.elem_type, dims) != (tensor.data_type, list(tensor.dims)):
            raise ModelError(
                f"{tensor.name!r} has element type {tensor.data_type} and dims {list(tensor.dims)} in the checkpoint, "
                f"but element type {declared.elem_type} and dims {dims} in eval_model.onnx"
            )
    kept = list(inputs.values())
    del message.graph.input[:]
    message.graph.input.extend(kept)
    message.graph.initializer.extend(tensors)


def _attributes(path: Path) -> dict[str, dict[str, Any]]:
    """The nodes of a model, each with its attributes."""
    if not path.exists():
        return {}
    message = read_model(path)
    return {n.op_type: {a.name: a.i if a.HasField("i") else a.f for a in n.attribute} for n in message.graph.node}
