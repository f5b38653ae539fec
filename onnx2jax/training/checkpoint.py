"""Checkpoints of training states: a single safetensors file, or a folder of steps written by orbax.

Both store the same flat entries, name -> array, with JSON metadata, and are restored against a state of the same
structure. So both support any pytree, and report mismatches in the same way.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding

from .. import compat
from ..errors import CheckpointError, InputTypeError, InputValueError, known_keywords
from ..eval.values import to_host
from ..proto import atomic
from ..proto.files import path_of
from ..sharding.processes import in_agreement, writes
from ..sharding.put import by_parts, put
from .engine import check_not_donated, is_key

T = TypeVar("T")
S = TypeVar("S")

METADATA: Final = "onnx2jax"
"""Name of a checkpoint's metadata: ``entries``, dtype and shape by name; ``keys``, the algorithms of PRNG keys by name;
``position``, as passed by the caller."""
SAFETENSORS_TYPES: Final = {"bool", "float16", "float32", "float64", "bfloat16", "complex64"} | {
    f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)
}
"""The dtypes that safetensors restores as NumPy arrays; others (float8, int4, ...) are stored as bytes."""
ORBAX_TYPES: Final = (
    SAFETENSORS_TYPES | {"complex128"} | {f"float8_{suffix}" for suffix in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")}
)
"""The dtypes that orbax supports; others are stored as bytes."""
OTHER_FORMATS: Final = {".npz", ".npy", ".onnx", ".pt", ".pth", ".pkl", ".pickle", ".h5", ".json", ".msgpack"}
"""Suffixes of files that ``save_checkpoint`` does not write."""


@known_keywords
def save_checkpoint(path: str | os.PathLike[str], state: Any, *, position: Any = None) -> Path:
    """Writes a training state to a safetensors file, atomically.

    With several processes, all call this, and the first gathers and writes the arrays; ``Checkpoints`` does not gather.

    Args:
        path: the file; an existing one is replaced.
        state: any pytree of arrays: a state of TrainingModel, ``finetune`` or optax, or a dict of parameters. A typed
            PRNG key is stored as its data and the name of its algorithm. Each tensor is named by the path of its leaf:
            ``params/fc.weight``.
        position: what else to resume from, such as the position in the data: any JSON value. Scalars of NumPy and JAX
            become numbers.

    Returns:
        The path.

    Raises:
        TypeError: a leaf is not an array, or ``position`` is not a JSON value.
        InputValueError: the path has the suffix of another format, such as .npz.
        ImportError: safetensors is not installed.

    >>> import jax, jax.numpy as jnp, tempfile, onnx2jax
    >>> state = {"w": jnp.arange(3.0), "key": jax.random.key(7)}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = onnx2jax.training.save_checkpoint(f"{folder}/s.safetensors", state, position={"batch": 37})
    ...     again, position = onnx2jax.training.load_checkpoint(path, state)
    >>> position["batch"], bool((again["w"] == state["w"]).all()), bool(again["key"] == state["key"])
    (37, True, True)
    """
    save_file = compat.optional("safetensors.numpy", "checkpoint").save_file
    path = _path(path, "save_checkpoint(path, state)")
    if path.suffix.lower() in OTHER_FORMATS:
        raise InputValueError(
            f"{str(path)!r} has the name of another format, and the file is one of safetensors: "
            f"{str(path.with_suffix('.safetensors'))!r}"
        )
    arrays, metadata = _entries(state, position)
    ours, mesh = writes(arrays)
    with in_agreement(mesh, "save_checkpoint"):
        # Each process gathers. safetensors reads raw pointers, so each array must be C-contiguous.
        gathered = ((name, np.asarray(to_host(value), order="C")) for name, value in arrays.items())
        blocks = {n: v if v.dtype.name in SAFETENSORS_TYPES else _bytes(v) for n, v in gathered if ours}
        if ours:
            with atomic.replacing(path) as file:
                save_file(blocks, file.name, {METADATA: json.dumps(metadata)})
    return path


def _path(path: Any, call: str) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise InputTypeError(f"the first argument is a path, not {type(path).__name__}: {call}")
    return path_of(path)


def load_checkpoint(path: str | os.PathLike[str], like: S) -> tuple[S, Any]:
    """Reads a training state written by ``save_checkpoint``.

    Args:
        path: the file.
        like: a state of the same structure, shapes and dtypes, of arrays or ``jax.ShapeDtypeStruct``; values are
            ignored. Each array gets the sharding of its leaf in ``like``, on any number of devices.

    Returns:
        (state, position). 64-bit types are preserved without ``jax_enable_x64``.

    Raises:
        CheckpointError: the file is damaged, or does not match ``like``; lists all missing and unexpected entries, and
            those of another shape or dtype.
        FileNotFoundError: no such file.
        ImportError: safetensors is not installed.

    >>> import jax, numpy as np, tempfile, onnx2jax
    >>> like = {"w": jax.ShapeDtypeStruct((2,), np.float32)}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = onnx2jax.training.save_checkpoint(f"{folder}/s.safetensors", {"w": np.ones(2, np.float32)})
    ...     onnx2jax.training.load_checkpoint(path, like)
    ({'w': Array([1., 1.], dtype=float32)}, None)
    """
    path = _path(path, "load_checkpoint(path, like)")
    if path.is_dir():
        raise IsADirectoryError(f"{str(path)!r} is a folder; if Checkpoints wrote it: Checkpoints(folder).load(like)")
    with opened(path, "save_checkpoint") as (file, metadata):
        return _restore(str(path), metadata, like, file.get_tensor, file.get_slice)


@contextmanager
def opened(path: str | os.PathLike[str], writer: str) -> Iterator[tuple[Any, Any]]:
    """A safetensors file and the metadata of its checkpoint.

    Raises:
        CheckpointError: the file is damaged, or has no metadata; ``writer`` names what writes such files.
        FileNotFoundError: no such file.
        ImportError: safetensors is not installed.
    """
    safetensors, name = compat.optional("safetensors", "checkpoint"), str(path_of(path))
    try:
        with safetensors.safe_open(name, "numpy") as file:
            metadata = (file.metadata() or {}).get(METADATA)
            if metadata is None:
                raise CheckpointError(f"{name!r} was not written by {writer}")
            try:
                parsed = json.loads(metadata)
            except ValueError as error:
                raise CheckpointError(f"{name} is damaged ({error})") from None
            yield file, parsed
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{name!r} is damaged, or not a safetensors file ({error})") from error


class Checkpoints(AbstractContextManager["Checkpoints"]):
    """A folder of checkpoints by step, written by orbax in the background; keeps the newest few.

    Each step is written atomically. Arrays sharded over devices or processes are written and read by shard, never
    gathered, and may be restored onto another mesh. All processes make the same calls, with a shared folder. Use it in
    a ``with`` statement, or call ``close``.

    Args:
        folder: the folder; created if it does not exist.
        keep: the number of newest steps to keep; None for all.

    Raises:
        InputValueError: ``keep`` is below 1.
        ImportError: orbax is not installed.

    >>> import jax.numpy as jnp, tempfile, onnx2jax
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with onnx2jax.training.Checkpoints(folder, keep=2) as checkpoints:
    ...         for step in (10, 20, 30):
    ...             checkpoints.save(step, {"w": jnp.full(3, float(step))}, position={"batch": step})
    ...         state, position = checkpoints.load({"w": jnp.zeros(3)})
    ...         checkpoints.steps, state["w"].tolist(), position
    ([20, 30], [30.0, 30.0, 30.0], {'batch': 30})
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int | None = 3) -> None:
        if isinstance(keep, bool) or not isinstance(keep, int | np.integer | None) or (keep is not None and keep < 1):
            raise InputValueError(f"keep is {keep!r}; it is a number of checkpoints, 1 or more, or None for all")
        self._orbax = orbax = compat.optional("orbax.checkpoint", "checkpoint")
        self.folder: Path = path_of(folder)
        options = orbax.CheckpointManagerOptions(max_to_keep=keep)
        self._manager = _in_thread(lambda: orbax.CheckpointManager(self.folder.absolute(), options=options))

    @property
    def steps(self) -> list[int]:
        """The available steps, ascending; waits for pending writes."""
        self.wait()
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Any, *, position: Any = None) -> None:
        """Writes a state in the background; returns once its values are copied, so the next step may donate it.

        Args:
            step: the step number, above all existing ones.
            state, position: as in ``save_checkpoint``.

        Raises:
            ValueError: ``step`` is not above the newest one.
            TypeError: a leaf is not an array, or ``position`` is not a JSON value.
        """
        arrays, metadata = _entries(state, position)
        with in_agreement(writes(arrays)[1], "Checkpoints.save") as processes:
            newest = self._manager.latest_step()
            if newest is not None and step <= newest:
                raise ValueError(f"step {step} is not above {newest}, the newest in {str(self.folder)!r}")
            processes.same({"step": step, "newest": newest, "position": metadata["position"]})
        # orbax rejects empty arrays, and unsupported dtypes only later, in the background.
        arrays = {n: a if a.dtype.name in ORBAX_TYPES else _bytes(a) for n, a in arrays.items() if a.size}
        args = self._orbax.args
        parts = {METADATA: args.JsonSave(metadata)} | ({"state": args.PyTreeSave(arrays)} if arrays else {})
        _in_thread(lambda: self._manager.save(step, args=args.Composite(**parts)))

    def load(self, like: S, *, step: int | None = None) -> tuple[S, Any]:
        """Reads a state and its position.

        Args:
            like: as in ``load_checkpoint``.
            step: the step number; defaults to the newest.

        Raises:
            CheckpointError: as in ``load_checkpoint``.
            FileNotFoundError: there is no such step.
        """
        leaves, _ = _leaves(like)
        with in_agreement(writes(leaves)[1], "Checkpoints.load") as processes:
            steps = self.steps
            if not steps or step not in (None, *steps):
                which = "checkpoint" if step is None else f"checkpoint of step {step}"
                available = f"the available steps are {steps}" if steps else "Checkpoints.save has written none there"
                raise FileNotFoundError(f"there is no {which} in {str(self.folder)!r}: {available}")
            number = steps[-1] if step is None else step
            processes.same({"step": number})
        where, args = f"step {number} of {str(self.folder)!r}", self._orbax.args

        def target(leaf: Any) -> Any:
            sharding = _sharding(leaf) if leaf.dtype.name in ORBAX_TYPES else None
            if sharding is None:
                return self._orbax.RestoreArgs(restore_type=np.ndarray)
            return self._orbax.ArrayRestoreArgs(sharding=sharding, global_shape=leaf.shape, dtype=leaf.dtype)

        def read(**parts: Any) -> Any:
            try:
                return _in_thread(lambda: self._manager.restore(number, args=args.Composite(**parts)))
            except Exception as error:  # orbax and tensorstore raise exceptions of any type
                raise CheckpointError(f"{where} cannot be read ({type(error).__name__}: {error})") from error

        metadata = read(**{METADATA: args.JsonRestore()})[METADATA]
        targets = {name: target(leaf) for name, leaf in leaves.items() if leaf.size}
        _check_fits(where, metadata, leaves)
        arrays = {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in leaves.items() if not leaf.size}
        if targets:
            arrays |= read(state=args.PyTreeRestore(restore_args=targets))["state"]
        return _restore(where, metadata, like, arrays.__getitem__)

    def wait(self) -> None:
        """Waits until all pending writes are finished; raises their errors."""
        _in_thread(self._manager.wait_until_finished)

    def close(self) -> None:
        """Finishes pending writes and stops the threads."""
        _in_thread(self._manager.close)

    def __exit__(self, *_: object) -> None:
        self.close()


def _in_thread(work: Callable[[], T]) -> T:
    """Runs a function in a separate thread, with 64-bit types enabled.

    orbax runs an event loop. If one is already running, as in a notebook, it uses threads outside the 64-bit scope, and
    64-bit arrays would be restored as 32-bit ones.
    """

    def scoped() -> T:
        with compat.enable_x64():
            return work()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(scoped).result()


def _sharding(leaf: Any) -> Any:
    """The sharding of a committed leaf; None for JAX's default device."""
    return getattr(leaf, "sharding", None) if getattr(leaf, "committed", True) else None


def _leaves(state: Any) -> tuple[dict[str, Any], Any]:
    """The leaves of a state by name, and its structure."""
    paths, structure = jax.tree_util.tree_flatten_with_path(state)
    leaves: dict[str, Any] = {}
    for path, leaf in paths:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if not hasattr(leaf, "dtype") or leaf.dtype == object or isinstance(leaf, np.ma.MaskedArray):
            raise TypeError(f"{name!r} of the state is not an array but {type(leaf).__name__} ({leaf!r:.60})")
        if name in leaves:
            raise TypeError(f"two leaves of the state are named {name!r}; rename one of them")
        leaves[name] = leaf
    return leaves, structure


def _type(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"


def _entries(state: Any, position: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arrays of a state by name, and its metadata."""
    check_not_donated(state)
    leaves, _ = _leaves(state)
    try:
        text = json.dumps(position, default=_number)
    except (TypeError, ValueError) as error:
        raise TypeError(f"position ({position!r:.80}) is no JSON value: {error}") from None
    if (plain_position := json.loads(text)) != position:
        raise TypeError(f"position ({position!r:.80}) is changed by JSON to {text:.80}; use lists, and strings as keys")
    keys = {name: str(jax.random.key_impl(leaf)) for name, leaf in leaves.items() if is_key(leaf)}
    metadata = {"entries": {n: _type(leaf) for n, leaf in leaves.items()}, "keys": keys, "position": plain_position}

    def plain(leaf: Any) -> Any:
        if is_key(leaf):
            leaf = jax.random.key_data(leaf)
            return np.asarray(leaf) if leaf.is_fully_addressable else leaf
        return leaf if isinstance(leaf, jax.Array) else np.array(leaf)  # the caller may overwrite a NumPy array

    return {name: plain(leaf) for name, leaf in leaves.items()}, metadata


def _number(value: Any) -> int | float | bool:
    """A scalar of NumPy or JAX as a number."""
    if isinstance(value, np.generic | np.ndarray | jax.Array) and not np.ndim(value):
        return value.item()
    fix = "; use value.tolist()" if hasattr(value, "tolist") else ""
    raise TypeError(f"it has {type(value).__name__} ({value!r:.60}){fix}")


def _bytes(array: Any) -> np.ndarray:
    return np.asarray(to_host(array), order="C").reshape(-1).view(np.uint8)


def _check_fits(where: str, metadata: Any, leaves: Mapping[str, Any]) -> None:
    is_complete = isinstance(metadata, Mapping) and metadata.keys() >= {"entries", "keys", "position"}
    if not is_complete or not all(isinstance(metadata[n], Mapping) for n in ("entries", "keys")):
        raise CheckpointError(f"{where} is damaged: its metadata does not list its entries")
    saved, expected = metadata["entries"], {name: _type(leaf) for name, leaf in leaves.items()}
    names = [n for n in expected | saved if expected.get(n) != saved.get(n)]
    if names:
        lines = [f"{n}: {saved.get(n, 'nothing')} saved, {expected.get(n, 'nothing')} expected" for n in names]
        lines[10:] = [f"and {len(lines) - 10} more"] if len(lines) > 10 else []
        raise CheckpointError(f"{where} does not match the state to load:\n  " + "\n  ".join(lines))


def _restore(
    where: str, metadata: Any, like: S, read: Callable[[str], Any], parts: Callable[[str], Any] | None = None
) -> tuple[S, Any]:
    """(state, position), where ``read(name)`` returns an array, and ``parts(name)`` an object to read slices from."""
    leaves, structure = _leaves(like)
    _check_fits(where, metadata, leaves)

    def placed(name: str, leaf: Any) -> Any:
        sharding = _sharding(leaf)
        if parts and isinstance(sharding, NamedSharding) and leaf.size > 1 and leaf.dtype.name in SAFETENSORS_TYPES:
            part = parts(name)
            if tuple(part.get_shape()) == leaf.shape and part[(slice(1),) * leaf.ndim].dtype == leaf.dtype:
                return by_parts(leaf.shape, leaf.dtype, sharding, part.__getitem__)
        value = read(name)
        if is_key(leaf):
            algorithm = str(metadata["keys"].get(name))
            try:
                value = jax.random.wrap_key_data(value, impl=algorithm)
            except (TypeError, ValueError, KeyError) as error:
                raise CheckpointError(
                    f"{where} is damaged: {name} is not a PRNG key of {algorithm!r} ({error})"
                ) from None
        elif value.dtype == np.uint8 != leaf.dtype and value.nbytes == leaf.size * leaf.dtype.itemsize:
            value = value.view(leaf.dtype).reshape(leaf.shape)
        if (value.dtype, value.shape) != (leaf.dtype, leaf.shape):
            raise CheckpointError(f"{where} is damaged: {name} should be {_type(leaf)}, but is {_type(value)}")
        if isinstance(leaf, np.ndarray | np.generic):
            return value
        return put(value, sharding) if isinstance(sharding, NamedSharding) else jax.device_put(value, sharding)

    with compat.enable_x64():
        return jax.tree.unflatten(structure, [placed(*item) for item in leaves.items()]), metadata["position"]
