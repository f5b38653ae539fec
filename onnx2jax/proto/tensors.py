"""Converts between TensorProto messages and NumPy arrays."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from ..errors import ModelError
from .external import DENSE_LIMIT, ExternalFiles
from .mapped import load
from .types import ELEMENT_TYPES, STRING, ElementType, to_code

EXTERNAL = 1
DATA_FIELDS: Final = ("raw_data", *sorted({row.field for row in ELEMENT_TYPES.values()}))
MAX_RANK: Final = 64
"""NumPy's limit."""


def to_array(tensor: Any, files: ExternalFiles | None = None, *, lazy: bool = False) -> np.ndarray:
    """A TensorProto as a NumPy array, which shares the memory of the message's bytes if possible.

    Strings become an object array of str; types below 8 bits have one element per byte (ml_dtypes). The result is
    read-only. With ``lazy``, large tensors of a weight's element type stay in their file until ``mapped.load``.

    Raises:
        ModelError: the element type is undefined, an extent is negative, or the amount of data does not match the dims.
        ExternalDataError: see ExternalFiles.
    """
    array = _decode(tensor, files, lazy)
    array.flags.writeable = False
    return array


def _decode(tensor: Any, files: ExternalFiles | None, lazy: bool) -> np.ndarray:
    row = ELEMENT_TYPES.get(tensor.data_type)
    if row is None:
        text = f"tensor {tensor.name!r} has element type {tensor.data_type}, which is undefined"
        raise ModelError(text, rule="TY-01")
    shape = tuple(tensor.dims)
    if any(d < 0 for d in shape):
        raise ModelError(f"tensor {tensor.name!r} has a negative extent in {list(shape)}", rule="TY-24")
    _check_rank(tensor.name, shape)
    if 0 in shape and math.prod(max(d, 1) for d in shape) * row.dtype.itemsize >= 2**63:  # beyond NumPy, though empty
        raise ModelError(f"tensor {tensor.name!r} has extents beyond any memory in {list(shape)}", rule="TY-24")
    if tensor.HasField("segment"):
        raise ModelError(f"tensor {tensor.name!r} is a segment of a larger one; join it when exporting", rule="TD-14")
    count = math.prod(shape)
    external = tensor.data_location == EXTERNAL
    detached = files.detached.get(tensor) if files else None
    used = [field for field in DATA_FIELDS if len(getattr(tensor, field))]
    used[:0] = [] if detached is None else ["raw_data"]
    if len(used) > (not external):
        places = " and in ".join(used if len(used) > 1 else [*used, "an external file"])
        raise ModelError(f"tensor {tensor.name!r} has its data twice: in {places}", rule=("TD-01", "EX-13"))
    if row.dtype == object:
        if external or "raw_data" in used or tensor.HasField("raw_data"):
            raise ModelError(f"tensor {tensor.name!r}: strings belong in string_data", rule="TD-12")
        _expect(tensor, "string_data", len(tensor.string_data), count)
        return _strings(tensor.string_data).reshape(shape)
    nbytes = -(-count * row.bits // 8)
    lazy = lazy and row.bits >= 8 and (row.dtype.kind in "fcV" or row.dtype.itemsize == 1) and row.name != "BOOL"
    if external:
        raw = (files or ExternalFiles(None)).read(tensor, nbytes, lazy=lazy)
    elif detached is not None or tensor.HasField("raw_data"):
        data = tensor.raw_data if detached is None else detached
        _expect(tensor, "raw_data", len(data), nbytes, "bytes")
        if detached is None and files is not None:
            files.hand_out(tensor, data)
        raw = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data if lazy else load(data)
    else:
        return _from_field(tensor, row, count).reshape(shape)
    return _from_bytes(raw, row, count).reshape(shape)


def _check_rank(name: str, shape: tuple[int, ...]) -> None:
    if len(shape) > MAX_RANK:
        raise ModelError(f"tensor {name!r} has rank {len(shape)}, NumPy's limit is {MAX_RANK}", rule="TY-24")


def _from_bytes(raw: np.ndarray, row: ElementType, count: int) -> np.ndarray:
    if row.bits < 8:
        return _unpack(raw, row, count)
    if row.name == "BOOL":
        return raw.view(np.bool_) if (raw <= 1).all() else raw != 0  # rule TY-13: any non-zero byte is true
    little = row.dtype.newbyteorder("<") if row.dtype.kind in "iufc" else row.dtype
    return np.frombuffer(raw, little, count).astype(row.dtype, copy=False)


def _from_field(tensor: Any, row: ElementType, count: int) -> np.ndarray:
    """Elements of the typed field: values, bit patterns, packed, or pairs of real and imaginary (TD-04 to TD-11)."""
    values = getattr(tensor, row.field)
    if row.bits < 8:
        per_entry = 8 // row.bits if row.bits in (2, 4) else 1
        _expect(tensor, row.field, len(values), -(-count // per_entry))
        packed = np.array(values, np.int64).astype(np.uint8)
        return _unpack(packed, row, count) if per_entry > 1 else packed.view(row.dtype)
    pairs = row.dtype.kind == "c"
    _expect(tensor, row.field, len(values), count * (2 if pairs else 1))
    if row.dtype.kind in "biu" or row.field != "int32_data":
        stored = row.dtype.type(0).real.dtype if pairs else row.dtype
        numbers = np.array(values, np.int64 if row.field == "int32_data" else stored)
        return numbers.view(row.dtype) if pairs else numbers.astype(row.dtype, copy=False)
    return np.array(values, np.int64).astype(f"u{row.dtype.itemsize}").view(row.dtype)


def _unpack(packed: np.ndarray, row: ElementType, count: int) -> np.ndarray:
    """Unpack elements of 2, 4 or 6 bits, lowest bits first, into one element per byte."""
    if row.bits == 6:
        bits = np.unpackbits(packed, bitorder="little")[: count * 6].reshape(count, 6)
        return np.packbits(bits, axis=1, bitorder="little").ravel().view(row.dtype)
    shifts = np.arange(0, 8, row.bits, dtype=np.uint8)
    fields = ((packed[:, None] >> shifts) & ((1 << row.bits) - 1)).ravel()[:count]
    if row.dtype.kind in "iV" and row.name.startswith("INT"):
        sign = np.uint8(1 << (row.bits - 1))
        return ((fields ^ sign).astype(np.int8) - np.int8(sign)).astype(row.dtype)
    return fields.astype(row.dtype) if row.name.startswith("UINT") else fields.view(row.dtype)


def _strings(entries: Any) -> np.ndarray:
    result = np.empty(len(entries), object)
    result[:] = [entry.decode("utf-8", "surrogateescape") for entry in entries]
    return result


def _expect(tensor: Any, field: str, count: int, wanted: int, unit: str = "entries") -> None:
    if count != wanted:
        needs = f"with dims {list(tensor.dims)} needs {wanted} {unit} of {field}, but has {count}"
        raise ModelError(f"tensor {tensor.name!r} {needs}", rule="TD-13")


def to_dense(sparse: Any, files: ExternalFiles | None = None) -> np.ndarray:
    """A SparseTensorProto as a dense array; indices are linear [NNZ] or coordinates [NNZ, rank] (rule GR-11)."""
    values = to_array(sparse.values, files)
    shape = tuple(sparse.dims)
    name = sparse.values.name
    if any(d <= 0 for d in shape) or not shape:
        raise ModelError(f"sparse tensor {name!r} needs positive extents, not {list(shape)}", rule="GR-11")
    _check_rank(name, shape)
    if not (files or ExternalFiles(None)).claim(math.prod(shape), values.size):
        raise ModelError(
            f"sparse tensor {name!r} of {values.size} values would have {math.prod(shape)} elements when densified; "
            f"the limit is {DENSE_LIMIT} unless at least one in a thousand is stored",
            rule="GR-11",
        )
    # np.zeros allocates no memory until it is written; an array of empty strings does.
    dense = np.full(shape, "", object) if values.dtype == object else np.zeros(shape, values.dtype)
    if values.size == 0:
        return dense
    indices = to_array(sparse.indices, files)
    if indices.dtype != np.int64:
        raise ModelError(f"sparse tensor {name!r} has indices of type {indices.dtype}, not int64", rule="GR-11")
    if indices.ndim == 2 and indices.shape[1] == len(shape):
        extents, where = np.array(shape), indices
    elif indices.ndim == 1:
        extents, where = np.array([dense.size]), indices[:, None]
    else:
        raise ModelError(f"sparse tensor {name!r} has indices of shape {list(indices.shape)}", rule="GR-11")
    if len(where) != values.size or values.ndim != 1:
        raise ModelError(f"sparse tensor {name!r} has {values.size} values but {len(where)} indices", rule="GR-11")
    if (where < 0).any() or (where >= extents).any():
        raise ModelError(f"sparse tensor {name!r} has an index outside its dims {list(shape)}", rule="GR-11")
    linear = where[:, 0] if len(extents) == 1 else np.ravel_multi_index(tuple(where.T), shape)
    if (np.diff(linear) <= 0).any():
        raise ModelError(f"sparse tensor {name!r} has indices that are not ascending and unique", rule="GR-11")
    dense.reshape(-1)[linear] = values
    return dense


def from_array(array: Any, name: str = "") -> dict[str, Any]:
    """The fields of a TensorProto that holds an array: ``TensorProto(**from_array(x, 'x'))``."""
    array = np.asarray(array)
    code = to_code(array.dtype)
    fields: dict[str, Any] = {"name": name, "data_type": code, "dims": list(array.shape)}
    row = ELEMENT_TYPES[code]
    if code == STRING:
        return fields | {"string_data": to_field(array)}
    if row.bits in (2, 4):
        return fields | {"raw_data": _pack(array, row.bits)}
    if row.bits == 6:
        bits = np.unpackbits(array.ravel().view(np.uint8)[:, None], axis=1, bitorder="little")[:, :6]
        return fields | {"raw_data": np.packbits(bits.ravel(), bitorder="little").tobytes()}
    little = array.astype(array.dtype.newbyteorder("<")) if array.dtype.kind in "iufc" else array
    return fields | {"raw_data": little.tobytes()}


def to_field(array: np.ndarray) -> list[Any]:
    """The entries of the typed field for an array, the inverse of ``to_array``."""
    row = ELEMENT_TYPES[to_code(array.dtype)]
    flat = array.ravel()
    if row.dtype == object:
        return [str(s).encode("utf-8", "surrogateescape") for s in flat]
    if row.bits in (2, 4):
        return list(_pack(array, row.bits))
    if row.dtype.kind == "c":
        return flat.view(flat.real.dtype).tolist()
    if row.dtype.kind == "b":
        return flat.astype(np.uint8).tolist()
    if row.dtype.kind in "iu" or row.field != "int32_data":
        return flat.tolist()
    return flat.view(f"u{row.dtype.itemsize}").tolist()


def _pack(array: np.ndarray, bits: int) -> bytes:
    per_byte = 8 // bits
    codes = array.ravel().view(np.uint8) & np.uint8((1 << bits) - 1)
    codes = np.pad(codes, (0, -codes.size % per_byte)).reshape(-1, per_byte)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return np.bitwise_or.reduce(codes << shifts, axis=1).astype(np.uint8).tobytes()
