"""A program optimised for the CPU, for one signature, and the weights that it is called with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import jax
import numpy as np
from jax.extend.core import jaxpr_as_fun

from ... import compat
from ...ops.arrays import is_traced
from ..jit import on_several_devices
from ..memory import give_back
from ..values import to_device
from . import vnni
from .images import by_images
from .integers import in_integers
from .layout import channels_last
from .once import computed_once
from .prepare import Made, Prepared, split
from .rows import rows_by_rows
from .small import Small, small
from .synchronous import Synchronous, synchronous

MUCH: Final = 1 << 26
"""Bytes of weights."""


class Weights(Mapping[str, Any]):
    """A model's parameters on its devices, by name, put there when first asked for; and what is prepared of them.

    Programs that prepare the same of the same weights share it. A weight that programs take in another form alone is
    read for that, and not kept.

    Attributes:
        types: shapes and dtypes.
        on_one_cpu: whether all of them lie, or would lie, on one CPU.
        folds: whether convolutions may take over the scale of what follows them: until it is found that some cannot.
    """

    def __init__(
        self, types: Mapping[str, jax.ShapeDtypeStruct], read: Callable[[str], Any], place: Callable[[str, Any], Any]
    ) -> None:
        """``read`` gives the values of a parameter, in memory or in its file; ``place`` puts them on a device."""
        self.types, self.read = dict(types), read
        self._place, self._placed = place, dict[str, Any]()
        self.prepared: dict[Executable, list[Any]] = {}
        self.synchronous: dict[Executable, Synchronous] = {}
        """Programs with these weights that take and give NumPy arrays."""
        self.straight: dict[Any, Any] = {}
        """Programs of a part of a graph with these weights, by the part and the kinds of arrays it takes."""
        self.made, self.folds = Made(), True
        self.elsewhere: dict[Any, Weights] = {}
        """Some of them on other devices, by who wants them there."""
        first = [self[n] for n in list(self.types)[:1]]
        devices = [v.devices() for v in first]
        self.on_one_cpu = all(len(d) == 1 and next(iter(d)).platform == "cpu" for d in devices)

    def beside(self, prefix: str, other: Weights, names: Sequence[str]) -> Weights:
        """These and some of another model's, before whose names a prefix stands."""
        theirs = {prefix + n: n for n in names if n in other}

        def read(name: str) -> Any:
            return other.read(theirs[name]) if name in theirs else self.read(name)

        def place(name: str, value: Any) -> Any:
            return other[theirs[name]] if name in theirs else self._place(name, value)

        return Weights(self.types | {n: other.types[own] for n, own in theirs.items()}, read, place)

    def __getitem__(self, name: str) -> Any:
        if name not in self._placed:
            if name not in self.types:
                raise KeyError(name)
            with compat.outside():  # inside a jit or shard_map of the caller's own, it would make tracers
                self._placed.setdefault(name, self._place(name, self.read(name)))
        return self._placed[name]

    def on_host(self) -> dict[str, np.ndarray]:
        """Those that a program was given already, as NumPy arrays that share their memory, where that is a CPU's."""
        return {n: np.asarray(v) for n, v in self._placed.items()} if self.on_one_cpu else {}

    def __iter__(self) -> Iterator[str]:
        return iter(self.types)

    def __len__(self) -> int:
        return len(self.types)

    def __contains__(self, name: object) -> bool:
        return name in self.types


@dataclass(frozen=True)
class Kept:
    """An Executable as another process can use it, to be pickled; or a part of one.

    Attributes:
        results: a tree like that of its results, with numbers in place of arrays.
        prepared: what weights alone decide.
        code: the program's as JAX writes it; None where it is part of another program.
        compiled: the code as a function, once it is loaded.
    """

    results: Any
    prepared: Prepared | None
    code: Any
    compiled: Any = None

    def loaded(self) -> Kept:
        """The same with the code, if there is some, as a function."""
        return self if self.code is None else replace(self, compiled=compat.load_compiled(self.code))


class Executable:
    """A jitted function's program for one signature: what weights alone decide is prepared, the rest is compiled."""

    def __init__(
        self, jitted: Any, key: Any, *args: Any, portable: bool = False, folds: bool = False, kept: Kept | None = None
    ) -> None:
        """``jitted`` takes a static key, weights (their types will do), and the other arguments.

        A ``portable`` one calls nothing that other processes cannot. One that ``folds`` cannot be prepared of all
        weights: then ``Unfoldable`` is raised. What was ``kept`` of it, loaded, is used without tracing.
        """
        self._jitted, self._key, self._portable, self._folds = jitted, key, portable, folds
        self._types = jax.tree.map(_as_type, args)
        self._names = sorted(args[0])
        self._split: Prepared | None = None
        """The program, until it is compiled."""
        self._small: Small | None = None
        """The program as calls of NumPy, where that is faster."""
        if kept is None:
            traced = jitted.trace(key, *args)
            self._split = self._as_split(traced)
            assert self._split.main is not None
            if not portable:
                self._small = small(self._split.main, len(self._split.handed))
            kept = Kept(jax.tree.map(lambda _: 0, traced.out_info), replace(self._split, main=None), None)
        assert kept.prepared is not None
        self._results, self._prepared = kept.results, kept.prepared
        self.structure = jax.tree.structure(self._results)
        self.is_flat = isinstance(self._results, list) and jax.tree_util.all_leaves(self._results)
        """Whether the results are those of the program as they come."""

        def main(handed: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
            # Traced a second time when the context differs, such as the precision of products: then the whole is too.
            first, self._split = self._split, None
            now = first or self._as_split(self._jitted.trace(self._key, *self._types))
            return list(map(to_device, jaxpr_as_fun(now.main)(*handed, *leaves)))  # NumPy's in jax.disable_jit

        main.__name__ = jitted.__name__  # profiles show it
        self._whole: Any = jax.jit(main)
        """What can be lowered, or was compiled."""
        self.main: Callable[..., list[Any]] = self._whole
        self._code = kept.code
        """Where it was read: what is compiled from it is not written again, for XLA would leave its functions out."""
        if kept.compiled is not None:
            self._use(kept.compiled)

    def __call__(self, weights: Weights, leaves: list[Any], on_host: bool = False) -> Any:
        """The results, from a model's weights and the leaves of the other arguments.

        ``on_host``: NumPy's arrays, given and returned.
        """
        if on_host:
            results: list[Any] = self.on_host(weights, leaves)(leaves)
        else:
            results = self.main(self.handed(weights), leaves)
        return jax.tree.unflatten(self.structure, results)

    def handed(self, weights: Weights) -> list[Any]:
        """What the program takes in place of weights."""
        handed = weights.prepared.get(self)
        if handed is None:
            with compat.outside():
                handed = weights.prepared[self] = self._prepared.prepare(self._names, weights)
            if sum(v.nbytes for v in handed) > MUCH:
                give_back()  # of what they were prepared from
        return handed

    def kept(self, weights: Weights, leaves: list[Any]) -> Kept | None:
        """What another process can use; None where the program's code only serves this one.

        It is compiled for these arguments, and what is compiled serves calls here, too.
        """
        compiled, dumped = compiled_to_keep(self._whole, self.handed(weights), leaves)
        if compiled is not None:
            self._use(compiled)
        return None if dumped is None else replace(self.plan, code=dumped)

    @property
    def plan(self) -> Kept:
        """What another process needs in place of tracing."""
        return Kept(self._results, self._prepared, None)

    def on_host(self, weights: Weights, leaves: list[Any]) -> Synchronous:
        """The program with a model's weights for NumPy arrays like these: in the caller's thread, where that pays."""
        if self not in weights.synchronous:
            whole, handed = self._whole, self.handed(weights)

            def waiting(leaves: Sequence[Any]) -> list[np.ndarray]:
                return list(map(np.asarray, self.main(handed, leaves)))

            if self._small is not None:
                run: Synchronous | None = self._small.bound(handed)
            else:
                is_new = hasattr(whole, "lower")
                run = synchronous(whole.lower(handed, leaves) if is_new else whole, handed, self._code)
                if is_new and run is None:
                    give_back()  # of what compiling took: 40 to 100 MB, and the call is about to take its own
            weights.synchronous[self] = waiting if run is None else unless_configured(run, waiting)
        return weights.synchronous[self]

    @property
    def is_small(self) -> bool:
        """Whether NumPy runs it for callers who want NumPy arrays."""
        return self._small is not None

    def _use(self, compiled: Any) -> None:
        self._whole, self.main = compiled, unless_configured(compiled, self.main)

    def _as_split(self, traced: Any) -> Prepared:
        count = len(jax.tree.leaves(self._types[0]))
        weights = [i < count for i in range(len(traced.jaxpr.in_avals))]
        onednn = not self._portable and vnni.is_served()
        program = rows_by_rows(
            channels_last(in_integers(traced.jaxpr), weights, onednn=onednn, folds=self._folds), weights
        )
        parts = split(vnni.with_vnni(program, weights) if onednn else program, weights)
        if parts.main is None:
            return parts
        return replace(parts, main=by_images(computed_once(parts.main), len(parts.handed)))


def compiled_to_keep(jitted: Any, *args: Any) -> tuple[Callable[..., Any] | None, Any]:
    """A jitted function compiled for these arguments, and the same to be pickled.

    Nothing where its code would only serve this process; nothing to be pickled where JAX cannot.
    """
    lowered = jitted.lower(*args)
    if "custom_call" in lowered.as_text():  # of code of this process, or of libraries that lowering makes ready
        return None, None
    compiled = lowered.compile()
    return compiled, compat.dump_compiled(compiled)


def unless_configured(compiled: Callable[..., Any], otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """What was compiled, for calls with JAX configured as it is now; ``otherwise`` compiles for others."""
    configuration = compat.configuration()

    def call(*args: Any) -> Any:
        return (compiled if compat.configuration() == configuration else otherwise)(*args)

    return call


def signature(leaves: Sequence[Any]) -> tuple[Any, ...] | None:
    """What tells programs apart: shapes and dtypes. None where a value is traced or lies on several devices."""
    if is_traced(leaves) or on_several_devices(leaves):
        return None
    return tuple((v.shape, v.dtype, _is_weak(v)) for v in leaves)


def _is_weak(value: Any) -> bool:
    """Whether JAX would give its element type up beside another; keys and NumPy's arrays do not say."""
    return getattr(value, "weak_type", False)


def _as_type(value: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(value.shape, value.dtype, weak_type=_is_weak(value))
