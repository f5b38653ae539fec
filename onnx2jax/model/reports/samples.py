"""Sample inputs for a model: the test data next to its file, or random numbers."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from ...errors import InputTypeError, ModelError
from ...proto.files import path_of
from ...proto.messages import MapProto, OptionalProto, SequenceProto, TensorProto
from ...proto.tensors import to_array
from ...proto.types import MapType, OptionalType, SequenceType, TensorType, ValueInfo

MOST: Final = 2**27
"""Elements of all random inputs of a model; in float64, from which they are rounded, 1 GiB."""
MOST_STRINGS: Final = 2**20
"""Strings among them: each is an object of Python to every node that reads it."""
MESSAGES: Final[dict[type, Any]] = {SequenceType: SequenceProto, OptionalType: OptionalProto, MapType: MapProto}
"""Messages of test data, by the type of the value; of other types TensorProto."""


def random_values(inputs: Iterable[ValueInfo], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random values for inputs, by name: normal floats, integers 0 and 1, valid as masks and indices, or "a".

    Free extents are 1.

    Raises:
        InputTypeError: one is no tensor of a declared rank, or they have too many elements in all.
    """
    wanted, count = {}, 0
    for info in inputs:
        if not isinstance(info.type, TensorType) or info.type.shape is None:
            raise InputTypeError(
                f"input {info} has no shape to fill at random: give the inputs, {{{info.name!r}: ...}}"
            )
        shape = tuple(d if isinstance(d, int) else 1 for d in info.type.shape)
        wanted[info.name] = shape, info.type.dtype
        size, most = math.prod(shape), MOST_STRINGS if info.type.dtype == object else MOST
        if (count := count + size) > MOST or size > most:
            others = f", {count:,} with those before it" if count > size else ""
            raise InputTypeError(
                f"input {info} has {size:,} elements{others}, and random values are made for at most {most:,}: give "
                f"the inputs, {{{info.name!r}: array}}, or choose smaller extents (dims={{name: size}}, "
                "--dim name=size, or those in the file)"
            )
    return {name: _random(shape, dtype, rng) for name, (shape, dtype) in wanted.items()}


def _random(shape: tuple[int, ...], dtype: np.dtype, rng: np.random.Generator) -> np.ndarray:
    if dtype == object:
        return np.full(shape, "a", object)
    if dtype.kind in "biu" or dtype.name.startswith(("int", "uint")):  # ml_dtypes' int4 has kind "V"
        return rng.integers(0, 2, shape).astype(dtype)
    return rng.standard_normal(shape).astype(dtype)


def in_types(feeds: Mapping[str, Any], declared: Iterable[ValueInfo]) -> dict[str, Any]:
    """The inputs with tensors as NumPy arrays of the declared types."""
    types = {v.name: v.type.dtype for v in declared if isinstance(v.type, TensorType)}
    return {n: np.asarray(v, types[n]) if n in types else v for n, v in feeds.items()}


def data_sets(folder: str | os.PathLike[str]) -> list[Path]:
    """The folders of test data in a folder, or the folder itself if it is one.

    Each contains ``input_0.pb``, ``output_0.pb`` and so on, the format of ONNX's own tests and its model zoo.
    """
    folder = path_of(folder)
    if any(folder.glob("input_*.pb")) or any(folder.glob("output_*.pb")):
        return [folder]
    return sorted(p for p in folder.glob("test_data_set_*") if p.is_dir())


def read_values(folder: Path, what: str, declared: Sequence[ValueInfo]) -> dict[str, Any]:
    """The inputs or outputs in a folder of test data, by the name in each file, or else by its position.

    Args:
        folder: one of ``data_sets``.
        what: "input" or "output".
        declared: the model's inputs or outputs.

    Raises:
        ModelError: a file does not contain a value of the declared type.
    """
    values: dict[str, Any] = {}
    names = {v.name for v in declared}
    for path in sorted(folder.glob(f"{what}_*.pb"), key=lambda p: (len(p.name), p.name)):
        place = path.stem.removeprefix(f"{what}_")
        if not place.isdecimal() or int(place) >= len(declared):
            raise ModelError(f"{path} is for an {what} that the model does not have; its {what}s are {sorted(names)}")
        info = declared[int(place)]
        name, value = read_value(info, path)
        values[name if name in names else info.name] = value
    return values


def read_value(info: ValueInfo, path: Path) -> tuple[str, Any]:
    """The name and the value in a file of test data.

    Raises:
        ModelError: the file does not contain a value of the input's type.
    """
    message = MESSAGES.get(type(info.type), TensorProto)
    try:
        read = message.FromString(path.read_bytes())
        return read.name, _value(read)
    except (ModelError, OSError):
        raise
    except Exception as e:
        raise ModelError(f"{path} contains no value for {info}: {e}") from e


def _value(message: Any) -> Any:
    match message.DESCRIPTOR.name:
        case "TensorProto":
            return to_array(message)
        case "SequenceProto":
            return [_value(v) for field, values in message.ListFields() if field.message_type for v in values]
        case "OptionalProto":
            return next((_value(v) for field, v in message.ListFields() if field.message_type), None)
        case "MapProto":
            keys = [k.decode() for k in message.string_keys] or list(message.keys)
            return dict(zip(keys, _value(message.values), strict=True))
        case other:
            raise ModelError(f"{other} is no value of test data")
