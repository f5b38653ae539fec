"""Multi-process programs: checks that all processes pass equal values, and raises in all of them if not.

Processes communicate through the coordination service of ``jax.distributed.initialize`` rather than their devices, so
that a process that stopped or is missing raises an error in the others, where a collective would hang.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from .. import compat
from ..errors import ProcessError, ShardingError

TIMEOUT: Final = 600
"""Seconds that a process waits for the others."""

POLL: Final = 2
"""Seconds between checks whether one of them has ended."""

ENDED: Final = "onnx2jax/ended/"
"""Prefix of the keys that processes set when they end."""

EQUAL: Final = (
    "NumPy arrays, and JAX arrays of one process, must be equal in all processes; pass each process's own rows through "
    "from_process"
)
"""How to fix arrays that differ."""

_turns: Counter[tuple[int, ...]] = Counter()
"""The number of exchanges of each group of processes."""


@functools.lru_cache(64)
def processes(mesh: Mesh) -> tuple[int, ...]:
    """The processes that own the devices of a mesh; this one for devices that programs are only compiled for.

    Raises:
        ProcessError: this process is not one of them.

    >>> import jax
    >>> processes(jax.make_mesh((1,), ("data",)))
    (0,)
    """
    if compat.compiles_only(mesh.devices.flat[0]):
        return (jax.process_index(),)
    owners = tuple(sorted({d.process_index for d in mesh.devices.flat}))
    if jax.process_index() not in owners:
        raise ProcessError(
            f"the mesh {dict(mesh.shape)} has devices of process {', '.join(map(str, owners))} only, and this is "
            f"process {jax.process_index()} of {jax.process_count()}: make it of all {jax.device_count()} devices, or "
            "of this process's own, jax.local_devices()"
        )
    return owners


def several(mesh: Mesh | None) -> TypeGuard[Mesh]:
    """Whether the devices of a mesh belong to more than one process."""
    check_mesh(mesh)
    return mesh is not None and len(processes(mesh)) > 1


def check_mesh(mesh: Any) -> None:
    """Raise ShardingError if a caller passes no Mesh; the message makes one of the extents that were meant."""
    if isinstance(mesh, Mesh | None):
        return
    if isinstance(mesh, Mapping):
        shape, names = tuple(mesh.values()), tuple(mesh)
    else:
        shape = tuple(mesh) if isinstance(mesh, list | tuple) else (mesh,)
        if not 0 < len(shape) < 3 or not all(isinstance(n, int) for n in shape):
            shape = (jax.device_count(),)
        names = ("data", "model")[: len(shape)]
    make = f"jax.make_mesh({shape}, {names})"
    raise ShardingError(f"mesh is {mesh!r:.60}, which is no jax.sharding.Mesh: mesh={make}")


def writes(arrays: Mapping[str, Any]) -> tuple[bool, Mesh | None]:
    """Whether this process writes a file of arrays, and the mesh whose processes wait for it.

    The first process writes arrays that are sharded over several processes; each process writes its own ones.
    """
    remote = (v.sharding for v in arrays.values() if isinstance(v, jax.Array) and not v.is_fully_addressable)
    mesh = next((s.mesh for s in remote if isinstance(s, NamedSharding) and isinstance(s.mesh, Mesh)), None)
    return mesh is None or jax.process_index() == processes(mesh)[0], mesh


class Agreement:
    """Values that have to be equal in all processes."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def same(self, values: Mapping[str, Any]) -> None:
        """Add values that have to be equal in all processes."""
        self.values |= values


@contextmanager
def in_agreement(mesh: Mesh | None, what: str, fix: str = "") -> Iterator[Agreement]:
    """A section that all processes of a mesh execute; they continue when all have finished it with equal values.

    Args:
        mesh: over devices of several processes; otherwise nothing is exchanged.
        what: the section's name in messages.
        fix: how to fix differences.

    Raises:
        ProcessError: another process failed in the section, has different values, or does not reach it.
    """
    agreement = Agreement()
    if not several(mesh):
        yield agreement
        return
    try:
        yield agreement
    except Exception as e:
        exchange(mesh, f"!{type(e).__name__}: {e}"[:2000], what)
        raise
    parts = {name: digest(value) for name, value in agreement.values.items()}
    texts = exchange(mesh, json.dumps([what, parts]), what)
    me = jax.process_index()
    for process, text in texts.items():
        if text.startswith("!"):
            raise ProcessError(f"process {process} stopped at {what}: {text[1:]}")
    for process, text in texts.items():
        if text != texts[me]:
            raise ProcessError(_difference(what, process, text, texts[me]) + (f". {fix}" if fix else ""))


def equal_arguments(
    mesh: Mesh | None, what: str, bind: Callable[[], tuple[dict[str, Any], Any]]
) -> tuple[dict[str, Any], Any]:
    """The arguments by name and the random key from ``bind``, checked to be equal in all processes of a mesh.

    Raises:
        ProcessError: they differ, or ``bind`` failed in another process.
    """
    if mesh is None:
        return bind()
    with in_agreement(mesh, what, EQUAL) as agreement:
        values, key = bind()
        agreement.same(values | {"rng": key})
    return values, key


def _difference(what: str, process: int, theirs: str, ours: str) -> str:
    me, (there, other), (_, local) = jax.process_index(), json.loads(theirs), json.loads(ours)
    if there != what:
        return (
            f"process {me} is at {what}, and process {process} at {there}: all processes make the same calls in the "
            "same order"
        )
    names = [n for n in local | other if local.get(n) != other.get(n)]
    values = "; ".join(f"{n} is {local.get(n, 'absent')} here, {other.get(n, 'absent')} there" for n in names[:5])
    return f"process {me} and process {process} differ at {what}: {values or 'the order of names'}"


def one_seed(mesh: Mesh | None) -> int:
    """A fresh random seed, equal in all processes of a mesh."""
    seed = secrets.randbits(32)
    return int(exchange(mesh, str(seed), "a random key")[processes(mesh)[0]]) if several(mesh) else seed


def exchange(mesh: Mesh, text: str, what: str) -> dict[int, str]:
    """The texts of all processes of a mesh, by process.

    Raises:
        ProcessError: one of them has ended, or does not take part within ``TIMEOUT``.
    """
    group, board, me = processes(mesh), compat.noticeboard(), jax.process_index()
    if board is None and len(group) == jax.process_count():
        return dict(enumerate(compat.gathered_texts(text)))  # waits for processes that ended
    if board is None:
        raise ProcessError(f"the mesh is over processes {group} of {jax.process_count()}: make it of all jax.devices()")
    if not _turns:
        atexit.register(_announce_end)
    turn = _turns[group] = _turns[group] + 1
    folder = f"onnx2jax/{digest(group)}"
    board.key_value_set(f"{folder}/{turn}/{me}", text)
    texts = {process: _receive(board, f"{folder}/{turn}/{process}", process, what) for process in group}
    # A process in this exchange has read all texts of the previous one.
    if turn > 1:
        board.key_value_delete(f"{folder}/{turn - 1}/{me}")
    return texts


def _receive(board: Any, key: str, process: int, what: str) -> str:
    """Wait for the text of a process."""
    for _ in range(TIMEOUT // POLL):
        try:
            return board.blocking_key_value_get(key, POLL * 1000)
        except jax.errors.JaxRuntimeError as e:
            if "DEADLINE_EXCEEDED" not in str(e):
                raise ProcessError(f"cannot receive from process {process} at {what}: {e}") from e
        if any(ended.endswith(f"/{process}") for ended, _ in board.key_value_dir_get(ENDED)):
            raise ProcessError(f"process {process} ended before {what}")
    raise ProcessError(
        f"process {process} did not reach {what} within {TIMEOUT} s: all processes make the same calls in the same "
        "order"
    )


def _announce_end() -> None:
    """Tell waiting processes that this one ends; a killed process is detected by its missing heartbeat."""
    board = compat.noticeboard()
    if board is not None:
        with suppress(jax.errors.JaxRuntimeError):
            board.key_value_set(f"{ENDED}{jax.process_index()}", "", allow_overwrite=True)


def digest(value: Any) -> str:
    """A one-line digest of a value: type, shape and checksum of an array (no checksum across processes).

    >>> import numpy as np
    >>> digest(np.zeros((2, 3), "float32"))
    'float32[2, 3] 9d908ecfb6b256de'
    """
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return f"{value.dtype}{list(value.shape)} {getattr(value.sharding, 'spec', '')}"
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return digest(jax.random.key_data(value))
    if isinstance(value, jax.Array | np.ndarray | np.generic) and value.dtype != object:
        array = np.asarray(value, order="C")
        return f"{array.dtype}{list(array.shape)} {_sum(array.reshape(-1).view(np.uint8))}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{k!r}: {digest(v)}' for k, v in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(digest, value))}]"
    text = repr(value.tolist() if isinstance(value, np.ndarray) else value)
    return text if len(text) < 100 else _sum(text.encode())


def _sum(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
