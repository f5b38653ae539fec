"""An optimised program for one signature, and how it is bound to parameter values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import jax
import numpy as np
from jax.extend.core import jaxpr_as_fun

from .. import compat
from .cpu import pipeline
from .cpu.hoist_params import Prepared
from .cpu.inline_dispatch import synchronous
from .cpu.numpy_executor import Small, small
from .dispatch import BoundCall
from .memory import trim_heap
from .params import DeviceParams
from .values import to_device, unaliased

MUCH: Final = 1 << 26
"""Bytes of hoisted values after which freed memory is given back to the system."""


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
    """A jitted function's program for one signature, its parameter-only subexpressions hoisted."""

    def __init__(
        self,
        jitted: Any,
        constants: Any,
        *args: Any,
        options: pipeline.Options = pipeline.Options(),  # noqa: B008  (frozen)
        kept: Kept | None = None,
    ) -> None:
        """
        Args:
            jitted: takes a static key, parameters and the other arguments.
            constants: that key.
            *args: parameters by name, and the other arguments; their types will do.
            options: which passes run. Folding BatchNorm raises ``Unfoldable`` for some parameter values.
            kept: what another process wrote, loaded: used in place of tracing.
        """
        self._jitted, self._constants, self.options = jitted, constants, options
        self._types = jax.tree.map(_as_type, args)
        self._names = sorted(args[0])
        self._split: Prepared | None = None
        """The program, until it is compiled."""
        self._small: Small | None = None
        """The program as NumPy calls, where dispatch would cost more than the computation."""
        self._unfolded: Executable | None = None
        if kept is None:
            traced = jitted.trace(constants, *args)
            self._split = self._as_split(traced)
            assert self._split.main is not None
            if not options.portable and options.platform == "cpu":
                self._small = small(self._split.main, len(self._split.handed))
            kept = Kept(jax.tree.map(lambda _: 0, traced.out_info), replace(self._split, main=None), None)
        assert kept.prepared is not None
        self._results, self._prepared = kept.results, kept.prepared
        self.structure = jax.tree.structure(self._results)
        is_flat = isinstance(self._results, list) and jax.tree_util.all_leaves(self._results)
        self._structure = None if is_flat else self.structure

        def main(hoisted: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
            # Traced again after jax.clear_caches or in another configuration: then from the start.
            first, self._split = self._split, None
            now = first or self._as_split(self._jitted.trace(self._constants, *self._types))
            results = jaxpr_as_fun(now.main)(*hoisted, *leaves)
            return unaliased(map(to_device, results), (*hoisted, *leaves))  # NumPy's in jax.disable_jit

        main.__name__ = jitted.__name__  # profiles show it
        self._whole: Any = jax.jit(main)
        """What can be lowered, or was compiled."""
        self.main: Callable[..., list[Any]] = self._whole
        self._code = kept.code
        """Code read from ``cache_dir``: XLA would omit functions when it serialises what was loaded."""
        if kept.compiled is not None:
            self._use(kept.compiled)

    def unfolded(self) -> Executable:
        """The same program without BatchNorm folded into convolutions."""
        if self._unfolded is None:
            own = self._jitted, self._constants, *self._types
            self._unfolded = Executable(*own, options=self.options.skipping("fold_batchnorm"))
        return self._unfolded

    def hoisted(self, params: DeviceParams) -> list[Any]:
        """What the program takes in place of the parameters.

        Raises:
            Unfoldable: a folded scale would leave the range of float32.
        """
        hoisted = params.hoisted.get(self)
        if hoisted is None:
            with compat.outside():
                hoisted = params.hoisted[self] = self._prepared.prepare(self._names, params)
            if sum(v.nbytes for v in hoisted) > MUCH:
                trim_heap()  # the parameters they were computed from
        return hoisted

    def bind(self, params: DeviceParams, leaves: Sequence[Any], names: Sequence[str], as_numpy: bool) -> BoundCall:
        """The program with a model's parameters, for arguments like these.

        Args:
            params: the parameters.
            leaves: the arrays of the other arguments.
            names: their names.
            as_numpy: return NumPy arrays.
        """
        hoisted = self.hoisted(params)
        if not as_numpy or self.options.platform != "cpu":
            return BoundCall(partial(self.main, hoisted), names, "compiled", self._structure)
        run, path = self._to_host(hoisted, list(map(np.asarray, leaves)))
        if all(isinstance(v, np.ndarray) for v in leaves):
            return BoundCall(run, names, path, self._structure)
        return BoundCall(lambda leaves: run(list(map(np.asarray, leaves))), names, path, self._structure)

    def _to_host(self, hoisted: list[Any], leaves: list[np.ndarray]) -> tuple[Callable[[Any], list[Any]], str]:
        """The program from and to NumPy arrays, in the caller's thread where that is faster; and how it runs."""
        if self._small is not None:
            return self._small.bound(hoisted), "numpy"
        whole, main = self._whole, self.main
        is_new = hasattr(whole, "lower")
        run = synchronous(whole.lower(hoisted, leaves) if is_new else whole, hoisted, self._code)
        if run is not None:
            return run, "inline"
        if is_new:
            trim_heap()  # compiling takes 40 to 100 MB, and the call is about to take its own

        def waiting(leaves: Sequence[Any]) -> list[Any]:
            return list(map(np.asarray, main(hoisted, leaves)))

        return waiting, "compiled"

    def kept(self, params: DeviceParams, leaves: list[Any]) -> Kept | None:
        """What another process can use; None where the program's code only serves this one.

        It is compiled for these arguments, and what is compiled serves calls here, too.
        """
        compiled, dumped = compiled_to_keep(self._whole, self.hoisted(params), leaves)
        if compiled is not None:
            self._use(compiled)
        return None if dumped is None else replace(self.plan, code=dumped)

    @property
    def plan(self) -> Kept:
        """What another process needs in place of tracing."""
        return Kept(self._results, self._prepared, None)

    def _use(self, compiled: Any) -> None:
        self._whole, self.main = compiled, unless_configured(compiled, self.main)

    def _as_split(self, traced: Any) -> Prepared:
        count = len(jax.tree.leaves(self._types[0]))
        return pipeline.run(traced.jaxpr, count, self.options)


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


def _is_weak(value: Any) -> bool:
    """Whether JAX would give its element type up beside another; keys and NumPy's arrays do not say."""
    return getattr(value, "weak_type", False)


def _as_type(value: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(value.shape, value.dtype, weak_type=_is_weak(value))
