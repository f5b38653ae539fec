"""Several processes that run one program: what each of them gives has to be the same, and each hears when it is not.

They tell each other on the notice board of ``jax.distributed.initialize``, without their devices: so a process that
stopped, or never came, is an error of the others, where an exchange between devices would wait for it.
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
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from .. import compat
from ..errors import ProcessError

PATIENCE: Final = 600
"""Seconds that a process waits for the others."""

GLANCE: Final = 2
"""Seconds after which it looks whether they have ended."""

ENDED: Final = "onnx2jax/ended/"
"""Where processes that end say so."""

EQUAL: Final = (
    "NumPy arrays, and JAX's of one process, are the same in all processes; parts that processes have for themselves "
    "go through from_process"
)
"""What to do about arrays that differ."""

_turns: Counter[tuple[int, ...]] = Counter()
"""How often each group of processes has told each other something."""


@functools.lru_cache(64)
def processes(mesh: Mesh) -> tuple[int, ...]:
    """The processes that own the devices of a mesh.

    Raises:
        ProcessError: this process is none of them.

    >>> import jax
    >>> processes(jax.make_mesh((1,), ("data",)))
    (0,)
    """
    found = tuple(sorted({d.process_index for d in mesh.devices.flat}))
    if jax.process_index() not in found:
        raise ProcessError(
            f"the mesh {dict(mesh.shape)} has devices of process {', '.join(map(str, found))} alone, and this is "
            f"process {jax.process_index()} of {jax.process_count()}: make it of all {jax.device_count()} devices, or "
            "of this process's own, jax.local_devices()"
        )
    return found


def several(mesh: Mesh | None) -> bool:
    """Whether the devices of a mesh belong to more than one process."""
    return mesh is not None and len(processes(mesh)) > 1


def writes(arrays: Mapping[str, Any]) -> tuple[bool, Mesh | None]:
    """Whether this process writes a file of arrays, and the mesh whose processes wait for that: of arrays that are
    spread over several processes the first one does, and each those of its own."""
    apart = (v.sharding for v in arrays.values() if isinstance(v, jax.Array) and not v.is_fully_addressable)
    mesh = next((s.mesh for s in apart if isinstance(s, NamedSharding) and isinstance(s.mesh, Mesh)), None)
    return mesh is None or jax.process_index() == processes(mesh)[0], mesh


class Said:
    """What a process says while it works; the others have to say the same."""

    def __init__(self) -> None:
        self.parts: dict[str, Any] = {}

    def same(self, values: Mapping[str, Any]) -> None:
        """Say what has to be the same in all processes."""
        self.parts |= values


@contextmanager
def together(mesh: Mesh | None, what: str, mend: str = "") -> Iterator[Said]:
    """Work that the processes of a mesh do alike: they go on when all of them are done with it, and said the same.

    Args:
        mesh: over devices of several processes; else nothing is exchanged.
        what: the work, in words.
        mend: what to do about differences.

    Raises:
        ProcessError: another process failed in it, said something else, or does not come.
    """
    said = Said()
    if mesh is None or not several(mesh):
        yield said
        return
    try:
        yield said
    except Exception as e:
        exchange(mesh, f"!{type(e).__name__}: {e}"[:2000], what)
        raise
    parts = {name: digest(value) for name, value in said.parts.items()}
    heard = exchange(mesh, json.dumps([what, parts]), what)
    me = jax.process_index()
    for process, text in heard.items():
        if text.startswith("!"):
            raise ProcessError(f"process {process} stopped at {what}: {text[1:]}")
    for process, text in heard.items():
        if text != heard[me]:
            raise ProcessError(_difference(what, process, text, heard[me]) + (f". {mend}" if mend else ""))


def alike(mesh: Mesh | None, what: str, bind: Callable[[], tuple[dict[str, Any], Any]]) -> tuple[dict[str, Any], Any]:
    """Arguments by name and a random key, the same in all processes of a mesh.

    Raises:
        ProcessError: they are not, or ``bind`` failed in another process.
    """
    if mesh is None:
        return bind()
    with together(mesh, what, EQUAL) as said:
        values, key = bind()
        said.same(values | {"rng": key})
    return values, key


def _difference(what: str, process: int, theirs: str, ours: str) -> str:
    me, (there, given), (_, own) = jax.process_index(), json.loads(theirs), json.loads(ours)
    if there != what:
        return (
            f"process {me} is at {what}, and process {process} at {there}: all processes make the same calls in the "
            "same order"
        )
    names = [n for n in own | given if own.get(n) != given.get(n)]
    values = "; ".join(f"{n} is {own.get(n, 'absent')} here, {given.get(n, 'absent')} there" for n in names[:5])
    return f"process {me} and process {process} differ at {what}: {values or 'the order of names'}"


def one_seed(mesh: Mesh | None) -> int:
    """A seed for random numbers, fresh and the same in all processes of a mesh."""
    seed = secrets.randbits(32)
    if mesh is None or not several(mesh):
        return seed
    return int(exchange(mesh, str(seed), "a random key")[processes(mesh)[0]])


def exchange(mesh: Mesh, text: str, what: str) -> dict[int, str]:
    """The texts of all processes of a mesh, by process.

    Raises:
        ProcessError: one of them has ended, or does not come within ``PATIENCE``.
    """
    group, board, me = processes(mesh), compat.noticeboard(), jax.process_index()
    if board is None and len(group) == jax.process_count():
        return dict(enumerate(compat.gathered_texts(text)))  # waits for processes that ended
    if board is None:
        raise ProcessError(f"the mesh is over processes {group} of {jax.process_count()}: make it of all jax.devices()")
    if not _turns:
        atexit.register(_say_goodbye)
    turn = _turns[group] = _turns[group] + 1
    folder = f"onnx2jax/{digest(group)}"
    board.key_value_set(f"{folder}/{turn}/{me}", text)
    heard = {process: _heard(board, f"{folder}/{turn}/{process}", process, what) for process in group}
    # Who is in this turn has read all of the one before.
    if turn > 1:
        board.key_value_delete(f"{folder}/{turn - 1}/{me}")
    return heard


def _heard(board: Any, key: str, process: int, what: str) -> str:
    """What a process says, once it does."""
    for _ in range(PATIENCE // GLANCE):
        try:
            return board.blocking_key_value_get(key, GLANCE * 1000)
        except jax.errors.JaxRuntimeError as e:
            if "DEADLINE_EXCEEDED" not in str(e):
                raise ProcessError(f"process {process} cannot be heard at {what}: {e}") from e
        if any(ended.endswith(f"/{process}") for ended, _ in board.key_value_dir_get(ENDED)):
            raise ProcessError(f"process {process} ended before it came to {what}")
    raise ProcessError(
        f"process {process} did not come to {what} within {PATIENCE} s: all processes make the same calls in the same "
        "order"
    )


def _say_goodbye() -> None:
    """Tell processes that wait for this one that it ends; of one that is killed they hear by its missing heartbeat."""
    board = compat.noticeboard()
    if board is not None:
        with suppress(jax.errors.JaxRuntimeError):
            board.key_value_set(f"{ENDED}{jax.process_index()}", "", allow_overwrite=True)


def digest(value: Any) -> str:
    """What tells values apart, in one line: of arrays type, shape and a checksum, of those of several processes no sum.

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
