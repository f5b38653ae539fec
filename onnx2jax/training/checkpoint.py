"""Checkpoints of a training state: one file by safetensors, or a series of steps in a folder by orbax.

Both hold the same flat entries, name -> array, and a text about them, and are read against a state of the same
structure. So neither knows what the state is made of, and what does not fit is said in the same words.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding

from .. import compat
from ..errors import CheckpointError
from ..proto import atomic
from ..runtime.values import to_host
from ..sharding.processes import together, writes
from ..sharding.put import by_parts, put
from .engine import check_not_used_up, is_key

T = TypeVar("T")
S = TypeVar("S")

ABOUT: Final = "onnx2jax"
"""Where a checkpoint says what it holds: ``entries``, their types by name; ``keys``, the random keys among them with
their algorithms; ``position``, as it was given."""
READ_BACK: Final = {"bool", "float16", "float32", "float64", "bfloat16", "complex64"} | {
    f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)
}
"""The types that safetensors gives back as NumPy arrays. Of others (float8, int4, ...) the file holds the bytes."""
IN_ORBAX: Final = READ_BACK | {"complex128"} | {f"float8_{x}" for x in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")}
"""The types that orbax holds; of others, too, the bytes."""


def save_checkpoint(path: str | os.PathLike[str], state: Any, *, position: Any = None) -> Path:
    """Write a training state to a safetensors file, whole or not at all.

    Of several processes all call this, and the first gathers and writes; ``Checkpoints`` gathers nothing.

    Args:
        path: the file; one that is there is replaced.
        state: any pytree of arrays: a state of TrainingModel or ``finetune``, one of optax, a dict of parameters.
            Typed random keys are written as their data and the name of their algorithm. Every tensor has the path of
            its leaf as name: ``params/fc.weight``.
        position: what else to resume from, such as the place in the data: anything that JSON holds.

    Returns:
        The path.

    Raises:
        TypeError: a leaf is no array, or JSON cannot hold ``position``.
        ImportError: safetensors is not installed.

    >>> import jax, jax.numpy as jnp, tempfile, onnx2jax
    >>> state = {"w": jnp.arange(3.0), "key": jax.random.key(7)}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = onnx2jax.save_checkpoint(f"{folder}/s.safetensors", state, position={"epoch": 2, "batch": 37})
    ...     again, position = onnx2jax.load_checkpoint(path, state)
    >>> position["batch"], bool((again["w"] == state["w"]).all()), bool(again["key"] == state["key"])
    (37, True, True)
    """
    save_file = compat.optional("safetensors.numpy", "checkpoint").save_file
    path = Path(path)
    arrays, about = _entries(state, position)
    ours, mesh = writes(arrays)
    with together(mesh, "save_checkpoint"):
        blocks = {}
        for name, value in arrays.items():
            # Pointers go to safetensors, so each array has to be one block in order.
            block = np.asarray(to_host(value), order="C")
            if ours:
                blocks[name] = block if block.dtype.name in READ_BACK else _bytes(block)
        if ours:
            with atomic.replacing(path) as file:
                save_file(blocks, file.name, {ABOUT: json.dumps(about)})
    return path


def load_checkpoint(path: str | os.PathLike[str], like: S) -> tuple[S, Any]:
    """Read a training state that ``save_checkpoint`` wrote.

    Args:
        path: the file.
        like: a state of the same structure, shapes and types, whose values do not count; ``jax.ShapeDtypeStruct``
            will do. Each array is put where the one in ``like`` lies: a sharded state comes back sharded, on as many
            devices as ``like`` uses, however many wrote it.

    Returns:
        The state, and the position that was saved. 64-bit types survive without ``jax_enable_x64``.

    Raises:
        CheckpointError: the file is damaged, or does not fit ``like``: every entry that is missing, too many, or of
            another shape or type is named.
        FileNotFoundError: no such file.
        ImportError: safetensors is not installed.

    >>> import jax, numpy as np, tempfile, onnx2jax
    >>> like = {"w": jax.ShapeDtypeStruct((2,), np.float32)}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = onnx2jax.save_checkpoint(f"{folder}/s.safetensors", {"w": np.ones(2, np.float32)})
    ...     onnx2jax.load_checkpoint(path, like)
    ({'w': Array([1., 1.], dtype=float32)}, None)
    """
    safetensors, path = compat.optional("safetensors", "checkpoint"), Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{str(path)!r} is a folder; a series of checkpoints: Checkpoints(folder).load(like)")
    try:
        with safetensors.safe_open(path, "numpy") as file:
            about = (file.metadata() or {}).get(ABOUT)
            if about is None:
                raise CheckpointError(f"{str(path)!r} was not written by save_checkpoint")
            return _restored(str(path), _parsed(str(path), about), like, file.get_tensor, file.get_slice)
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{str(path)!r} is damaged, or no safetensors file ({error})") from error


class Checkpoints:
    """A folder of checkpoints by step, written by orbax while training goes on; the newest few are kept.

    Each step appears whole or not at all. Arrays that are spread over devices or processes are written and read in
    pieces, never gathered, and may be read onto another mesh. All processes make the same calls, over one folder.
    Use it in a ``with`` statement, or call ``close``.

    Args:
        folder: where they are, made when it is not there.
        keep: how many of the newest steps stay; None for all.

    Raises:
        ImportError: orbax is not installed.

    >>> import jax.numpy as jnp, tempfile, onnx2jax
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with onnx2jax.Checkpoints(folder, keep=2) as checkpoints:
    ...         for step in (10, 20, 30):
    ...             checkpoints.save(step, {"w": jnp.full(3, float(step))}, position={"batch": step})
    ...         state, position = checkpoints.load({"w": jnp.zeros(3)})
    ...         checkpoints.steps, state["w"].tolist(), position
    ([20, 30], [30.0, 30.0, 30.0], {'batch': 30})
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int | None = 3) -> None:
        self._orbax = orbax = compat.optional("orbax.checkpoint", "checkpoint")
        self.folder = Path(folder)
        options = orbax.CheckpointManagerOptions(max_to_keep=keep)
        self._manager = _apart(lambda: orbax.CheckpointManager(self.folder.absolute(), options=options))

    @property
    def steps(self) -> list[int]:
        """The steps that can be loaded, ascending."""
        self.wait()
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Any, *, position: Any = None) -> None:
        """Write a state, in the background: returns once its values are taken, so the next step may donate it.

        Args:
            step: its number, above those of the steps that are there.
            state, position: as in ``save_checkpoint``.

        Raises:
            ValueError: ``step`` is not above the newest one.
            TypeError: a leaf is no array, or JSON cannot hold ``position``.
        """
        arrays, about = _entries(state, position)
        with together(writes(arrays)[1], "Checkpoints.save") as said:
            newest = self._manager.latest_step()
            if newest is not None and step <= newest:
                raise ValueError(f"step {step} is not above {newest}, the newest in {str(self.folder)!r}")
            said.same({"step": step, "newest": newest, "position": position})
        # orbax refuses empty arrays, and types that it does not hold only later, in the background.
        arrays = {n: a if a.dtype.name in IN_ORBAX else _bytes(a) for n, a in arrays.items() if a.size}
        args = self._orbax.args
        parts = {ABOUT: args.JsonSave(about)} | ({"state": args.PyTreeSave(arrays)} if arrays else {})
        _apart(lambda: self._manager.save(step, args=args.Composite(**parts)))

    def load(self, like: S, *, step: int | None = None) -> tuple[S, Any]:
        """Read a state and its position.

        Args:
            like: as in ``load_checkpoint``.
            step: which; the newest when left out.

        Raises:
            CheckpointError: as in ``load_checkpoint``.
            FileNotFoundError: no such step, or none at all.
        """
        leaves, _ = _leaves(like)
        with together(writes(leaves)[1], "Checkpoints.load") as said:
            steps = self.steps
            if not steps or step not in (None, *steps):
                known = f"the steps there are {steps}"
                raise FileNotFoundError(f"no checkpoint {step or ''} in {str(self.folder)!r}; {known}")
            number = steps[-1] if step is None else step
            said.same({"step": number})
        where, args = f"step {number} of {str(self.folder)!r}", self._orbax.args

        def target(leaf: Any) -> Any:
            sharding = _sharding(leaf) if leaf.dtype.name in IN_ORBAX else None
            if sharding is None:
                return self._orbax.RestoreArgs(restore_type=np.ndarray)
            return self._orbax.ArrayRestoreArgs(sharding=sharding, global_shape=leaf.shape, dtype=leaf.dtype)

        def read(**parts: Any) -> Any:
            try:
                return _apart(lambda: self._manager.restore(number, args=args.Composite(**parts)))
            except Exception as error:  # orbax and tensorstore raise whatever they meet
                raise CheckpointError(f"{where} cannot be read ({type(error).__name__}: {error})") from error

        about = read(**{ABOUT: args.JsonRestore()})[ABOUT]
        targets = {name: target(leaf) for name, leaf in leaves.items() if leaf.size}
        _check(where, about, leaves)
        arrays = {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in leaves.items() if not leaf.size}
        if targets:
            arrays |= read(state=args.PyTreeRestore(restore_args=targets))["state"]
        return _restored(where, about, like, arrays.__getitem__)

    def wait(self) -> None:
        """Until all that was saved is on the disk; raises what went wrong there."""
        _apart(self._manager.wait_until_finished)

    def close(self) -> None:
        """Finish writing and let the threads go."""
        _apart(self._manager.close)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _apart(work: Callable[[], T]) -> T:
    """Done in a thread of its own, with 64-bit types.

    orbax runs an event loop; where one is running, as in a notebook, it would move to threads that know no such
    scope, and 64-bit arrays would come back as 32-bit ones.
    """

    def scoped() -> T:
        with compat.enable_x64():
            return work()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(scoped).result()


def _sharding(leaf: Any) -> Any:
    """Where a leaf lies; None for wherever JAX puts things."""
    return getattr(leaf, "sharding", None) if getattr(leaf, "committed", True) else None


def _put(value: Any, sharding: Any) -> Any:
    return put(value, sharding) if isinstance(sharding, NamedSharding) else jax.device_put(value, sharding)


def _leaves(state: Any) -> tuple[dict[str, Any], Any]:
    """The leaves of a state by name, and its structure."""
    paths, structure = jax.tree_util.tree_flatten_with_path(state)
    leaves: dict[str, Any] = {}
    for path, leaf in paths:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if not hasattr(leaf, "dtype") or leaf.dtype == object or isinstance(leaf, np.ma.MaskedArray):
            raise TypeError(f"{name!r} of the state is no array but {type(leaf).__name__} ({leaf!r:.60})")
        if name in leaves:
            raise TypeError(f"two leaves of the state are named {name!r}; give them names that differ without '/'")
        leaves[name] = leaf
    return leaves, structure


def _type(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"


def _entries(state: Any, position: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is written of a state: arrays by name, and what is said about them."""
    check_not_used_up(state)
    leaves, _ = _leaves(state)
    text = json.dumps(position)
    if json.loads(text) != position:
        raise TypeError(f"position ({position!r:.80}) comes back from JSON as {text:.80}; use lists, and texts as keys")
    keys = {name: str(jax.random.key_impl(leaf)) for name, leaf in leaves.items() if is_key(leaf)}
    about = {"entries": {n: _type(leaf) for n, leaf in leaves.items()}, "keys": keys, "position": position}

    def plain(leaf: Any) -> Any:
        if is_key(leaf):
            leaf = jax.random.key_data(leaf)
            return np.asarray(leaf) if leaf.is_fully_addressable else leaf
        return leaf if isinstance(leaf, jax.Array) else np.array(leaf)  # its owner may write into a NumPy array

    return {name: plain(leaf) for name, leaf in leaves.items()}, about


def _bytes(array: Any) -> np.ndarray:
    return np.asarray(to_host(array), order="C").reshape(-1).view(np.uint8)


def _parsed(where: str, about: str) -> Mapping[str, Any]:
    """The text about a checkpoint, as JSON."""
    try:
        parsed: Mapping[str, Any] = json.loads(about)
        return parsed
    except ValueError as error:
        raise CheckpointError(f"{where} is damaged ({error})") from None


def _check(where: str, about: Mapping[str, Any], leaves: Mapping[str, Any]) -> None:
    is_whole = isinstance(about, Mapping) and about.keys() >= {"entries", "keys", "position"}
    if not is_whole or not all(isinstance(about[n], Mapping) for n in ("entries", "keys")):
        raise CheckpointError(f"{where} is damaged: it does not say which entries it holds")
    saved, wanted = about["entries"], {name: _type(leaf) for name, leaf in leaves.items()}
    names = [n for n in wanted | saved if wanted.get(n) != saved.get(n)]
    if names:
        lines = [f"{n}: {saved.get(n, 'nothing')} saved, {wanted.get(n, 'nothing')} wanted" for n in names]
        lines[10:] = [f"and {len(lines) - 10} more"] if len(lines) > 10 else []
        raise CheckpointError(f"{where} does not fit the state it is loaded for:\n  " + "\n  ".join(lines))


def _key(where: str, name: str, data: Any, algorithm: str) -> Any:
    try:
        return jax.random.wrap_key_data(data, impl=algorithm)
    except (TypeError, ValueError, KeyError) as error:
        raise CheckpointError(f"{where} is damaged: {name} is no random key of {algorithm!r} ({error})") from None


def _restored(
    where: str, about: Mapping[str, Any], like: S, read: Callable[[str], Any], parts: Callable[[str], Any] | None = None
) -> tuple[S, Any]:
    """The state of which ``read`` gives the arrays by name, and ``parts`` some of one at an index; its position."""
    leaves, structure = _leaves(like)
    _check(where, about, leaves)

    def placed(name: str, leaf: Any) -> Any:
        sharding = _sharding(leaf)
        if parts and isinstance(sharding, NamedSharding) and leaf.size > 1 and leaf.dtype.name in READ_BACK:
            part = parts(name)
            fits = tuple(part.get_shape()) == leaf.shape
            if fits and part[(slice(1),) * leaf.ndim].dtype == leaf.dtype:
                return by_parts(leaf.shape, leaf.dtype, sharding, part.__getitem__)
        value = read(name)
        if is_key(leaf):
            return _put(_key(where, name, value, str(about["keys"].get(name))), sharding)
        if value.dtype == np.uint8 != leaf.dtype and value.nbytes == leaf.size * leaf.dtype.itemsize:
            value = value.view(leaf.dtype).reshape(leaf.shape)
        if (value.dtype, value.shape) != (leaf.dtype, leaf.shape):
            raise CheckpointError(f"{where} says that {name} is {_type(leaf)}, but it is {_type(value)}")
        return value if isinstance(leaf, np.ndarray | np.generic) else _put(value, sharding)

    with compat.enable_x64():
        return jax.tree.unflatten(structure, [placed(*item) for item in leaves.items()]), about["position"]
