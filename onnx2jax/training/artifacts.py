"""Loads the artifacts of onnxruntime's on-device training: evaluation model, checkpoint and optimizer.

Checkpoints are FlatBuffers files whose tensors become TensorProto. Tables are read by slot, the position of a field in
onnxruntime's schema (ort_training_checkpoint.fbs, and ort.fbs for Tensor), so no generated code is needed.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from .. import compat
from ..errors import ModelError, UnsupportedError
from ..model.convert import convert
from ..model.model import Model
from ..proto.external import ExternalFiles
from ..proto.files import path_of, read_model, read_regular
from ..proto.messages import TensorProto
from ..proto.origin import nbytes
from ..proto.tensors import EXTERNAL, to_array

IDENTIFIER: Final = b"ODTC"
VERSIONS: Final = (1, 2)
"""Version 2 adds fields for omitted values and for values in a separate file."""


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


@dataclass(frozen=True)
class Group:
    """The parameters of one optimizer: parameter -> its state tensors, named by role."""

    name: str
    step: int
    learning_rate: float
    moments: dict[str, list[Any]]


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint; tensors are TensorProto messages, large ones with external data."""

    trained: list[Any]
    frozen: list[Any]
    groups: list[Group]
    properties: dict[str, int | float | str]


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint.

    Raises:
        ModelError: the file is not a checkpoint, is damaged, has an unsupported version, or has no values.
        FileNotFoundError: the file does not exist.
        ImportError: flatbuffers is not installed.
    """
    library = compat.optional("flatbuffers", "artifacts")
    label = f"checkpoint {str(path)!r}"
    data = read_regular(path, label)
    if data[4:8] != IDENTIFIER:
        text = f"its identifier is {data[4:8]!r}, not {IDENTIFIER!r}"
        raise ModelError(f"{label} is not a checkpoint of onnxruntime: {text}")
    try:
        return _checkpoint(_Table(library, data, int.from_bytes(data[:4], "little")), f"{path.name}.data")
    except ModelError as error:
        raise ModelError(f"{label}: {error}") from error
    except (struct.error, ValueError, TypeError, OverflowError) as error:  # reads beyond the file
        raise ModelError(f"{label} is damaged ({error})") from error


def _checkpoint(root: _Table, data: str) -> Checkpoint:
    version, module, bag = root.number(0, "Int32"), root.table(1), root.table(3)
    if version not in VERSIONS:
        raise ModelError(f"its version is {version}; supported are {VERSIONS}")
    if module is None or module.number(2, "Bool"):
        raise ModelError("it has names of parameters without values (a nominal checkpoint); load the full checkpoint")
    groups = [_group(table, data) for table in root.tables(2)]
    trained, frozen = ([_tensor(t, data) for t in module.tables(slot)] for slot in (0, 1))
    properties = {
        entry.text(0): entry.number(1, kind) if kind else entry.text(1)
        for slot, kind in enumerate(("Int64", "Float32", None))
        for entry in (bag.tables(slot) if bag else ())
    }
    return Checkpoint(trained, frozen, groups, properties)


def _group(table: _Table, data: str) -> Group:
    moments = {state.text(0): [_tensor(t, data) for t in state.tables(1)] for state in table.tables(3)}
    return Group(table.text(0), table.number(1, "Int64"), table.number(2, "Float32"), moments)


def _tensor(table: _Table, data: str) -> Any:
    tensor = TensorProto(name=table.text(0), data_type=table.number(3, "Int32"), dims=table.numbers(2, "Int64"))
    size, offset = nbytes(tensor), table.number(6, "Int64", -1)
    if offset >= 0:
        tensor.data_location = EXTERNAL
        for key, value in (("location", data), ("offset", offset), ("length", size)):
            tensor.external_data.add(key=key, value=str(value))
        return tensor
    tensor.raw_data = table.numbers(4, "Uint8").tobytes()
    if len(tensor.raw_data) != size:
        raise ModelError(
            f"tensor {tensor.name!r} with dims {list(tensor.dims)} needs {size} bytes, but has {len(tensor.raw_data)}"
        )
    return tensor


class _Table:
    """A table of a FlatBuffers file; invalid offsets raise."""

    def __init__(self, library: Any, data: bytes, position: int) -> None:
        self._library, self._data, self._kinds = library, data, library.number_types
        self._table = library.table.Table(data, position)
        # The only signed offset; all others are forward.
        vtable = position - self._table.Get(self._kinds.SOffsetTFlags, position)
        if vtable < 0:
            raise ModelError(f"it is damaged: the table at byte {position} has its fields at byte {vtable}")

    def _at(self, slot: int) -> int:
        """The offset of a field in the table; 0 if it is omitted."""
        return self._table.Offset(4 + 2 * slot)

    def number(self, slot: int, kind: str, default: int = 0) -> Any:
        flags, at = getattr(self._kinds, f"{kind}Flags"), self._at(slot)
        return self._table.Get(flags, self._table.Pos + at) if at else default

    def numbers(self, slot: int, kind: str) -> np.ndarray:
        flags, at = getattr(self._kinds, f"{kind}Flags"), self._at(slot)
        return self._table.GetVectorAsNumpy(flags, at) if at else np.zeros(0, np.uint8)

    def text(self, slot: int) -> str:
        return self.numbers(slot, "Uint8").tobytes().decode()

    def table(self, slot: int) -> _Table | None:
        at = self._at(slot)
        return _Table(self._library, self._data, self._table.Indirect(self._table.Pos + at)) if at else None

    def tables(self, slot: int) -> Iterator[_Table]:
        if at := self._at(slot):
            start = self._table.Vector(at)
            for i in range(self._table.VectorLen(at)):
                yield _Table(self._library, self._data, self._table.Indirect(start + 4 * i))
