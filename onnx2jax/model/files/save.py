"""Models back into files: a faithful copy with new weights, written all or not at all."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np

from ...errors import (
    ExternalDataError,
    InputNameError,
    InputTypeError,
    ModelError,
    ShardingError,
    known_keywords,
    nearest,
)
from ...eval.values import to_host, widened
from ...ir.file import opened as opened_file
from ...proto import atomic
from ...proto.devices import write_configuration, write_node
from ...proto.files import path_of, read_model
from ...proto.messages import tensors, weights
from ...proto.origin import Opened, nbytes
from ...proto.tensors import EXTERNAL
from ...proto.types import ELEMENT_TYPES, STRING
from ...sharding.processes import in_agreement, writes
from ...sharding.writing import configured
from ..calls.arguments import check_readable, other_shape

PROTOBUF_LIMIT: Final = 2**31 - 1
INLINE_LIMIT: Final = PROTOBUF_LIMIT - 2**20
"""Larger models get external data: other tools may add to a file before they pass it on."""
LARGE: Final = 64 * 1024
"""Bytes from which tensors are aligned to pages, for memory maps and direct reads; others to cache lines."""
PAGE: Final = 4096
CACHE_LINE: Final = 64


@known_keywords
def save(
    model: Any,
    path: str | os.PathLike[str],
    *,
    params: Mapping[str, Any] | None = None,
    state: Any = None,
    external_data: bool | str | None = None,
    size_threshold: int = 1024,
    configuration: str | None = None,
) -> Path:
    """Write a model with new weights to a file.

    Everything else is preserved: nodes, names, versions, unknown fields, and the encoding of every tensor. Options of
    ``convert`` (``static``, ``dims``) are not written.

    Writing is atomic: after a failure, or if the process is killed, the path has the old model or the new one.
    ``path`` may be the file that the model was converted from. A symbolic link at ``path`` is replaced, not followed.
    If weights are sharded over several processes, all of them call this, and the first writes the file.

    Args:
        model: a Model, a Decoder of one file, a TrainingModel, or a source as for ``convert``. Of a Model or Decoder,
            ``params`` are written; of a TrainingModel all variables, those of its algorithms too, so that training of
            the file resumes where this stopped. ONNX has no field for the random key: a checkpoint has.
        path: the file to write.
        params: new weights by their names in ``Model.params``, any initializer included (one of a training graph is
            ``training_info[0].algorithm/name``); NumPy or JAX arrays of the same shape and element type. The others
            keep their values.
        state: the state of the TrainingModel to write; ``model.state`` when left out.
        external_data: None keeps each tensor inside or outside the file, and moves tensors out if the file would
            exceed 2 GiB. True moves them to ``<name of the file>.data``, a string to the file of that name next to the
            model; False moves all of them in. There is at most one data file.
        size_threshold: the smallest initializer in bytes that is moved out.
        configuration: a name under which the placement of a Model on a mesh, its pipeline stages included, is written
            as a device configuration (IR 11), for ``convert(path, device_configuration=name)``. It has the shardings
            of weights, inputs and values of the main graph only.

    Returns:
        The path.

    Raises:
        InputNameError, InputShapeError, InputTypeError: ``params`` or ``state`` does not match the model.
        ExternalDataError: the data file would overwrite one that is not this model's.
        ShardingError: ``configuration`` for a model on one device, or one converted with ``device_configuration``.

    >>> import tempfile, onnx2jax
    >>> model = onnx2jax.convert(onnx2jax.demo_model())
    >>> halved = {name: value / 2 for name, value in model.params.items()}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = onnx2jax.save(model, f"{folder}/halved.onnx", params=halved)
    ...     again = onnx2jax.convert(path)
    >>> all((again.params[name] == halved[name]).all() for name in halved)
    True
    """
    if isinstance(model, str | os.PathLike) and not isinstance(path, str | os.PathLike):
        raise InputTypeError(f"the arguments are swapped: save(model, {str(model)!r})")
    path = path_of(path)
    if path.is_dir():
        raise IsADirectoryError(f"{str(path)!r} is a folder; give the path of a file")
    opened, values = _opened(model, params, state)
    is_writer, mesh = writes(values)
    with in_agreement(mesh, "save"):
        _assign(opened, values)
        if configuration is not None:
            _configure(model, opened.message, configuration)
        if is_writer:
            _write(opened, path, external_data, size_threshold)
    return path


def open_model(model: Any) -> Opened:
    """A model's file with the model's present weights."""
    opened, values = _opened(model, None, None)
    _assign(opened, values)
    return opened


def _opened(model: Any, params: Mapping[str, Any] | None, state: Any) -> tuple[Opened, dict[str, Any]]:
    """A model's file, and new values of weights by name; the arguments are those of ``save``."""
    values: dict[str, Any] = {}
    if not isinstance(params, Mapping | None):
        raise InputTypeError(
            f"params is {type(params).__name__}, not a dict of arrays by name; of a state of finetune: "
            "params=tuned.params(state)"
        )
    if state is not None and not hasattr(model, "init"):
        raise TypeError("a state is written into a TrainingModel; finetune's: save(tuned.to_model(state), path)")
    if hasattr(model, "changed"):  # a Model, a Decoder, or a model that trains
        if model.origin is None:
            raise ModelError(
                "an ONNX file cannot hold the functions of Python that this model has from model.replace. Export it, "
                "which writes a program with them: model.export('folder'); or save the model that replace was called "
                "on, with the weights of this one: save(original, path, params=model.params)"
            )
        opened = model.origin.open()
        values |= model.changed() if state is None else model.changed(state)
        if params and hasattr(model, "spec") and (dtype := model.settings.dtype) is not None:
            # As ``model.params`` are.
            computed = {n: v for n, v in params.items() if getattr(v, "dtype", None) == dtype}
            params = {**params, **model.spec.in_file_types(computed)}
    elif hasattr(model, "to_model"):
        raise TypeError("save takes a model, not finetune's steps: save(tuned.to_model(state), path)")
    else:
        _, message, files = opened_file(model, {})
        opened = Opened(message, files)
    return opened, values | dict(params or {})


def _write(opened: Opened, path: Path, external_data: bool | str | None, size_threshold: int) -> None:
    message_tensors = list(tensors(opened.message))
    external = _external(opened, message_tensors, external_data, size_threshold)
    if not external:
        with atomic.replacing(path) as file:
            file.write(_serialized(opened, message_tensors))
        return
    data, older = _data_path(path, external_data if isinstance(external_data, str) else f"{path.name}.data")

    def message(placed: Mapping[Path, Path]) -> bytes:
        for tensor in external:
            _set(tensor, location=placed[data].name)
        return _serialized(opened, message_tensors)

    atomic.replace_all(path, {data: partial(_write_data, opened, external)}, message)
    for file in older:  # left by a killed save
        file.unlink(missing_ok=True)


def _configure(model: Any, message: Any, name: str) -> None:
    """Write a model's placement into its message, as a device configuration."""
    placement = getattr(model, "placement", None)
    if placement is None:
        raise ShardingError(
            f"configuration={name!r} names the placement of a model on a mesh: save(convert(..., mesh=mesh), path, ...)"
        )
    configuration, annotations = configured(model.graph, model.params, placement, name)
    write_configuration(message, configuration)
    for node in message.graph.node:
        if annotation := annotations.get((node.op_type, tuple(node.output))):
            write_node(node, name, annotation)


def _assign(opened: Opened, values: Mapping[str, Any]) -> None:
    of_file = dict(weights(opened.message))
    for name, tensor in of_file.items():
        if name not in values:
            continue
        sparse = not hasattr(tensor, "data_type")
        dtype = ELEMENT_TYPES[(tensor.values if sparse else tensor).data_type].dtype
        array = _checked(name, values[name], dtype, tuple(tensor.dims))
        if sparse:
            _assign_sparse(opened, tensor, array)
        else:
            opened.assign(tensor, array)
    for name in values.keys() - of_file.keys():
        near = nearest(name, of_file)
        raise InputNameError(f"params has {name!r}, but no tensor of the file has that name; there are {near}")


def _checked(name: str, value: Any, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    check_readable(value, f"params[{name!r}]")
    array = np.asarray(to_host(value))
    if isinstance(value, jax.Array):
        array = widened(array, dtype)
    if dtype == object and array.dtype.kind in "UT":
        array = array.astype(object)
    if array.dtype != dtype:
        raise InputTypeError(
            f"params[{name!r}] is {array.dtype}, the file has {dtype}; nothing is cast silently. "
            f"Convert it: value.astype({str(dtype)!r})"
        )
    if array.shape != shape:
        raise other_shape(name, array.shape, shape)
    return array


def _assign_sparse(opened: Opened, sparse: Any, array: np.ndarray) -> None:
    """Write new values at the stored indices; if others are not zero, write new indices in the same format."""
    indices, shape = opened.array(sparse.indices), array.shape
    linear = indices if indices.ndim == 1 else np.ravel_multi_index(tuple(indices.T), shape)
    flat = np.ascontiguousarray(array).reshape(-1)
    stored = np.zeros(flat.size, np.bool_)
    stored[linear] = True
    # Compares bits, because -0.0 is not the implicit zero.
    filled = flat != "" if array.dtype == object else flat[:, None].view(np.uint8).any(axis=1)
    if (filled & ~stored).any():
        linear = np.flatnonzero(filled)
        opened.assign(sparse.indices, linear if indices.ndim == 1 else np.stack(np.unravel_index(linear, shape), 1))
    opened.assign(sparse.values, flat[linear])


def _external(
    opened: Opened, message_tensors: list[tuple[Any, str]], external_data: bool | str | None, threshold: int
) -> list[Any]:
    """The tensors to write to the data file; the others are in the message."""
    if external_data is False:
        for tensor, _ in message_tensors:
            if tensor.data_location == EXTERNAL:
                data = bytes(opened.data(tensor))
                tensor.ClearField("external_data")
                tensor.ClearField("data_location")
                opened.put(tensor, data)
        return []
    move = external_data is not None or _size(opened, message_tensors) > INLINE_LIMIT

    def is_external(tensor: Any, field: str) -> bool:
        # Only initializers are moved: few runtimes support external data in attributes.
        movable = move and field == "initializer" and tensor.data_type not in (0, STRING)
        return tensor.data_location == EXTERNAL or (movable and nbytes(tensor) >= max(threshold, 1))

    return [t for t, field in message_tensors if is_external(t, field)]


def _write_data(opened: Opened, external: list[Any], file: Any) -> None:
    """Write tensors to the data file, shared regions once; their location is set later."""
    shared: dict[tuple[str, int, int], int] = {}
    for tensor in external:
        data = np.frombuffer(opened.data(tensor), np.uint8)
        mapped = tensor.data_location == EXTERNAL and opened.get(tensor) is None
        _, start = opened.files.locate(tensor, data.size) if mapped else (None, 0)
        region = _location(tensor), start, data.size
        if mapped and region in shared:
            offset = shared[region]
        else:
            end, align = file.tell(), PAGE if data.size >= LARGE else CACHE_LINE
            offset = -(-end // align) * align
            file.write(bytes(offset - end))
            file.write(data)
            if mapped:
                shared[region] = offset
        opened.take(tensor)
        for field in ("raw_data", ELEMENT_TYPES[tensor.data_type].field):
            tensor.ClearField(field)
        if tensor.data_location != EXTERNAL:
            tensor.ClearField("external_data")  # it had no meaning there (rule EX-14)
        tensor.data_location = EXTERNAL
        _set(tensor, location="", offset=str(offset), length=str(data.size))
    sums = [t for t in external if any(e.key == "checksum" for e in t.external_data)]
    if sums:
        file.flush()
        file.seek(0)
        checksum = hashlib.file_digest(file, lambda: hashlib.sha1(usedforsecurity=False)).hexdigest()
        for tensor in sums:
            _set(tensor, checksum=checksum)


def _location(tensor: Any) -> str:
    return next((e.value for e in tensor.external_data if e.key == "location"), "")


def _set(tensor: Any, **entries: str) -> None:
    for key, value in entries.items():
        entry = next((e for e in tensor.external_data if e.key == key), None) or tensor.external_data.add(key=key)
        entry.value = value


def _data_path(path: Path, name: str) -> tuple[Path, list[Path]]:
    """A model's data file, and those left by killed saves of it (see ``atomic.replace_all``)."""
    if Path(name).name != name or "\\" in name or name in ("", "..", path.name):
        raise ExternalDataError(f"external_data is {name!r}; give the name of a file next to {path.name!r}")
    target = path.with_name(name)
    ours = [n for n in os.listdir(path.parent) if n == name or atomic.is_provisional(n, name)]
    used = _locations(path).intersection(ours) if ours else set()
    if name in ours and not used:
        raise ExternalDataError(
            f"the data would overwrite {str(target)!r}, which {path.name!r} does not use now; it may belong to "
            "another model. Remove it, or name another file: save(..., external_data='name')"
        )
    return target, [path.with_name(n) for n in used if n != name]


def _locations(path: Path) -> set[str]:
    """The data files of the model at a path; empty if there is none."""
    try:
        message = read_model(path)
    except (ModelError, OSError):
        return set()
    return {_location(tensor) for tensor, _ in tensors(message)} - {""}


def _size(opened: Opened, message_tensors: list[tuple[Any, str]]) -> int:
    """Bytes of the message, including tensors in memory that are not external."""
    inside = [t for t, _ in message_tensors if t.data_location != EXTERNAL and opened.get(t) is not None]
    return opened.message.ByteSize() + sum(map(nbytes, inside))


def _serialized(opened: Opened, message_tensors: list[tuple[Any, str]]) -> bytes:
    size = _size(opened, message_tensors)
    if size > PROTOBUF_LIMIT:
        raise ModelError(
            f"the model would have {size} bytes without its data file, protobuf's limit is 2 GiB; "
            "move more out: save(..., external_data=True, size_threshold=0)"
        )
    for tensor, _ in message_tensors:
        opened.attach(tensor)
    return opened.message.SerializeToString()
