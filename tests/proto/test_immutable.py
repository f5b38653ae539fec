"""Immutability of arrays, judged by the owner of their memory."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from onnx2jax.proto.mapped import ALIGNMENT, File, is_immutable, owned


def frozen(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def mapped(access: int) -> Callable[[Path], Any]:
    def made(path: Path) -> Any:
        with path.open("r+b") as file:
            return mmap.mmap(file.fileno(), 0, access=access)

    return made


IMMUTABLE: dict[str, Callable[[Path], Any]] = {
    "bytes": lambda _: b"12345678",
    "an array over bytes": lambda _: np.frombuffer(b"12345678", np.float32)[1:].reshape(1, 1).T,
    "a memoryview of bytes": lambda _: memoryview(memoryview(b"12345678"))[2:],
    "a map for reading": mapped(mmap.ACCESS_READ),
    "an array over a map for reading": lambda p: np.frombuffer(mapped(mmap.ACCESS_READ)(p), np.uint8)[3:],
    "a memmap for reading": lambda p: np.memmap(p, np.uint8, "r")[1:],
    "an array of JAX's": lambda _: jnp.ones(4),
    "a view of an array of JAX's": lambda _: np.asarray(jnp.ones(4))[1:].view(np.int32),
    "a file read by the package": lambda p: File(os.open(p, os.O_RDONLY), "f").read_runs([1], 4)[1:],
    "an owned copy": lambda _: owned(np.ones(3))[1:],
}
MUTABLE: dict[str, Callable[[Path], Any]] = {
    "an array": lambda _: np.ones(4),
    "a read-only array": lambda _: frozen(np.ones(4)),
    "a broadcast view": lambda _: np.broadcast_to(np.ones(1), 3),
    "a read-only view": lambda _: frozen(np.ones(4)[1:]),
    "a bytearray": lambda _: bytearray(8),
    "a read-only memoryview of a bytearray": lambda _: memoryview(bytearray(8)).toreadonly(),
    "an array over it": lambda _: np.frombuffer(memoryview(bytearray(8)).toreadonly(), np.float32),
    "a map for writing": mapped(mmap.ACCESS_WRITE),
    "a private map": mapped(mmap.ACCESS_COPY),
    "a memmap for writing": lambda p: frozen(np.memmap(p, np.uint8, "r+")[1:]),
    "an array through DLPack": lambda _: np.from_dlpack(np.ones(4)),
    "a list": lambda _: [1, 2],
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "data").write_bytes(bytes(range(64)))
    return tmp_path / "data"


@pytest.mark.parametrize("name", IMMUTABLE)
def test_immutable_memory(name: str, path: Path) -> None:
    assert is_immutable(IMMUTABLE[name](path))


@pytest.mark.parametrize("name", MUTABLE)
def test_mutable_memory(name: str, path: Path) -> None:
    assert not is_immutable(MUTABLE[name](path))


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3).T,
        np.float32(3).reshape(()),
        np.zeros((0, 2), np.int64),
        np.array(["a", None], object),
        np.ones((2, 2), ml_dtypes.bfloat16),
        np.broadcast_to(np.float32(1), (3, 2)),
    ],
    ids=lambda a: f"{a.dtype}{list(a.shape)}",
)
def test_an_owned_copy_is_equal_read_only_and_aligned(array: np.ndarray) -> None:
    copy = owned(array)
    assert type(copy) is np.ndarray and is_immutable(copy) and not copy.flags.writeable
    assert copy.dtype == array.dtype and owned(copy) is copy
    np.testing.assert_array_equal(copy, array)
    assert array.dtype.hasobject or copy.ctypes.data % ALIGNMENT == 0 or not copy.size


def test_immutable_arrays_are_not_copied() -> None:
    for array in (np.frombuffer(b"12345678", np.uint8), np.asarray(jnp.ones(4))):
        assert owned(array) is array
