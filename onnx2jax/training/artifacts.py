"""Loads the artifacts of onnxruntime's on-device training: evaluation model, checkpoint and optimizer."""

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
from ..proto.files import path_of, read_model
from ..proto.ort_checkpoint import read_checkpoint
from ..proto.tensors import to_array


@dataclass(frozen=True)
class Artifacts:
    """Training artifacts of onnxruntime. Created by ``load_artifacts``.

    Attributes:
        model: the evaluation model, with the checkpoint's parameters in ``model.params``. Its first output is the
            loss.
        trainable: the names of the parameters to train.
        optimizer: the nodes of the optimizer model in order, each with its attributes: ``{"AdamWOptimizer":
            {"alpha": 0.9, "beta": 0.999, "epsilon": 1e-06, "weight_decay": 0.0, ...}}``. Empty without that model.
        learning_rate: the optimizer's learning rate; None if the checkpoint has no optimizer state.
        step: the number of optimizer steps taken.
        moments: the optimizer state by parameter: ``{"fc.weight": {"momentum0": ..., "momentum1": ...}}``.
        properties: the user's own entries in the checkpoint.
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
        """The parameters to train, by name, as the first argument of ``model.apply``."""
        return {name: self.model.params[name] for name in self.trainable}


def load_artifacts(folder: str | os.PathLike[str], *, checkpoint: str = "checkpoint", **options: Any) -> Artifacts:
    """Loads the output of ``onnxruntime.training.artifacts.generate_artifacts``, for training with JAX.

    ``training_model.onnx`` is not needed: JAX differentiates the evaluation model::

        artifacts = onnx2jax.training.load_artifacts("artifacts")

        def loss(params, x, labels):
            return artifacts.model.apply(params, x, labels)

        value, gradients = jax.value_and_grad(loss)(artifacts.params, x, labels)

    onnxruntime's AdamW (``adam_mode`` 1) adds epsilon before bias correction, optax's after it, so equal settings give
    slightly different steps.

    Args:
        folder: contains ``eval_model.onnx``, the checkpoint and, optionally, ``optimizer_model.onnx``.
        checkpoint: the file name of the checkpoint in the folder; its external data file is read from there too.
        **options: keywords of ``convert``.

    Raises:
        ModelError: a file is damaged, or the checkpoint does not fit the model.
        UnsupportedError: the checkpoint has several groups of parameters.
        FileNotFoundError: a file is missing.
        ImportError: flatbuffers is not installed.
    """
    folder = path_of(folder)
    for name in ("eval_model.onnx", checkpoint):
        if not (folder / name).is_file():
            raise _missing(folder, name)
    message = read_model(folder / "eval_model.onnx")
    content, files = read_checkpoint(folder / checkpoint), ExternalFiles(folder)
    if len(content.groups) > 1:
        names = [group.name for group in content.groups]
        raise UnsupportedError(f"the checkpoint has {len(names)} groups of parameters ({names}); one is supported")
    group, optimizer = next(iter(content.groups), None), folder / "optimizer_model.onnx"
    nodes = read_model(optimizer).graph.node if optimizer.exists() else ()
    _set_parameters(message, content.trained + content.frozen)
    return Artifacts(
        model=convert(message.SerializeToString(), external_data_dir=folder, **options),
        trainable=tuple(t.name for t in content.trained),
        optimizer={n.op_type: {a.name: a.i if a.HasField("i") else a.f for a in n.attribute} for n in nodes},
        learning_rate=group.learning_rate if group else None,
        step=group.step if group else 0,
        moments={n: {t.name: to_array(t, files) for t in ts} for n, ts in (group.moments if group else {}).items()},
        properties=content.properties,
    )


def _missing(folder: Path, name: str) -> FileNotFoundError:
    """The error about a folder without a file."""
    others = sorted(p.name for p in folder.glob("*") if p.is_file() and p.suffix != ".onnx")
    fix = f", or the name of its checkpoint: checkpoint={others[0]!r}" if others and name != "eval_model.onnx" else ""
    return FileNotFoundError(
        f"{str(folder)!r} has no file {name!r}: pass a folder that onnxruntime.training.artifacts.generate_artifacts "
        f"has written (of the package onnxruntime-training){fix}"
    )


def _set_parameters(message: Any, tensors: list[Any]) -> None:
    """Turns parameters, which are inputs of the evaluation model, into initializers."""
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
        message.graph.input.remove(value)
    message.graph.initializer.extend(tensors)
