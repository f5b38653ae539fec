"""An optimised program for one signature, and how it is bound to parameter values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from .. import compat, progress
from ..eval.values import to_device, unaliased
from ..jaxpr import pipeline
from ..jaxpr.const_eval import Unfoldable
from ..jaxpr.passes.any.hoist_params import SplitProgram
from ..jaxpr.program import as_function
from .dispatch import BoundCall
from .inline_dispatch import bound, is_short, is_small, synchronous
from .memory import trim_heap
from .numpy_executor import NumpyProgram, numpy_program, without_warnings
from .params import DeviceParams, device_of
from .program_cache import Kept, Store, load_or_compile

TRIM_BYTES: Final = 1 << 26
"""Bytes of hoisted values after which freed memory is given back to the system."""


def traced_for(options: pipeline.Passes, jitted: Any, *args: Any) -> Any:
    """A jitted function, traced for the platform on which passes run; these lower its convolutions."""
    with compat.on_platform(options.platform, keeps_convolutions=True):
        return jitted.trace(*args)


class Executable:
    """A jitted function's program for one signature, its parameter-only subexpressions hoisted."""

    def __init__(
        self,
        jitted: Any,
        constants: Any,
        *args: Any,
        options: pipeline.Passes = pipeline.Passes(),  # noqa: B008  (frozen)
        kept: Kept | None = None,
        store: Store | None = None,
    ) -> None:
        """
        Args:
            jitted: a function of a static key, parameters by name, and other arguments.
            constants: the static key.
            *args: the parameters and the other arguments, or their types.
            options: which passes run. Folding BatchNorm raises ``Unfoldable`` for some parameter values.
            kept: the state that another process wrote, loaded: used in place of tracing.
            store: keeps what the traced program compiles to.
        """
        self._jitted, self._constants, self.options, self._store = jitted, constants, options, store
        # Random keys and NumPy arrays have no weak type.
        self._types = jax.tree.map(
            lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype, weak_type=getattr(v, "weak_type", False)), args
        )
        self._names = sorted(args[0])
        self._split: SplitProgram | None = None
        """The program, until it is compiled."""
        self.result_types: Sequence[Any] | None = None
        """Of its flat results, where the program was traced."""
        self._numpy: NumpyProgram | None = None
        """The program as NumPy calls, where dispatch would cost more than the computation."""
        self._unfolded: Executable | None = None
        compiler_options = None
        if kept is None:
            with progress.stage(f"tracing {jitted.__name__}"):
                traced = traced_for(options, jitted, constants, *args)
                self._split = pipeline.run(traced.jaxpr, len(self._names), options)
            assert self._split.main is not None
            self.result_types = self._split.main.out_avals
            compiler_options = pipeline.compiler_options(self._split.main, options)
            if not options.portable and options.platform == "cpu":
                self._numpy = numpy_program(self._split.main, len(self._split.hoisted))
            kept = Kept(jax.tree.map(lambda _: 0, traced.out_info), replace(self._split, main=None), None)
        assert kept.split is not None
        self._hoisting, self.structure = kept.split, jax.tree.structure(kept.results)
        self.plan = Kept(kept.results, kept.split, None)
        """The state that spares another process tracing."""

        def main(hoisted: Sequence[Any], leaves: Sequence[Any], donated: Sequence[Any] = ()) -> list[Any]:
            # Traced again after jax.clear_caches or in another configuration: then from the start.
            first, self._split = self._split, None
            if first is None:
                again = traced_for(options, self._jitted, self._constants, *self._types)
                first = pipeline.run(again.jaxpr, len(self._names), options)
            arguments = *hoisted, *leaves, *donated
            return unaliased(map(to_device, as_function(first.main)(*arguments)), arguments)  # NumPy in disable_jit

        main.__name__ = jitted.__name__  # profiles show it
        self._whole: Any = jax.jit(main, donate_argnums=2, compiler_options=compiler_options)
        """A jitted function, or a compiled one."""
        self.main: Any = jax.jit(main)
        """For callers who may trace it: a jitted function with options of its own cannot be nested."""
        self._code = kept.code
        """Code read from ``cache_dir``: XLA would omit functions when it serialises what was loaded."""
        self._inline = kept.compiled if kept.is_inline else None
        if kept.compiled is not None and not kept.is_inline:
            self._whole = kept.compiled

    def unfolded(self) -> Executable:
        """The same program without BatchNorm folded into convolutions."""
        if self._unfolded is None:
            program = self._jitted, self._constants, *self._types
            self._unfolded = Executable(*program, options=self.options.skipping("fold_batchnorm"), store=self._store)
        return self._unfolded

    def hoisted(self, params: DeviceParams, names: Sequence[str] = ()) -> list[Any]:
        """The hoisted values, which the program takes in place of the parameters; computed once.

        Args:
            params: the parameters.
            names: of those that it takes; by default the names that it was traced with.

        Raises:
            Unfoldable: a folded scale would leave the range of float32.
        """
        key = (self, *names) if names else self
        hoisted = params.hoisted.get(key)
        if hoisted is None:
            with compat.outside(), progress.stage(f"precomputing weights of {self._jitted.__name__}"):
                hoisted = params.hoisted[key] = self._hoisting.hoisted_arguments(names or self._names, params)
            if sum(v.nbytes for v in hoisted) > TRIM_BYTES:
                trim_heap()  # the parameters they were computed from
        return hoisted

    def bind(self, params: DeviceParams, leaves: Sequence[Any], names: Sequence[str], as_numpy: bool) -> BoundCall:
        """The program bound to a model's parameters, for arguments of one signature.

        Args:
            params: the parameters.
            leaves: the other arguments.
            names: their names.
            as_numpy: return NumPy arrays.
        """
        try:
            hoisted = self.hoisted(params)
        except Unfoldable:  # scales beyond the range of float32
            return self.unfolded().bind(params, leaves, names, as_numpy)
        if not as_numpy or self.options.platform != "cpu":
            return BoundCall(partial(self._compiled(hoisted, leaves), hoisted), names, "compiled", self.structure)
        run, path = self._to_host(hoisted, list(map(np.asarray, leaves)))
        if all(isinstance(v, np.ndarray) for v in leaves):
            return BoundCall(run, names, path, self.structure)
        return BoundCall(lambda leaves: run(list(map(np.asarray, leaves))), names, path, self.structure)

    def _to_host(self, hoisted: list[Any], leaves: list[np.ndarray]) -> tuple[Callable[[Any], list[Any]], str]:
        """The program as a function from and to NumPy arrays, and its path: "numpy", "inline" or "compiled"."""
        if self._numpy is not None:
            return without_warnings(self._numpy.bound(hoisted)), "numpy"
        if self._inline is not None:
            return bound(self._inline, hoisted), "inline"
        whole, is_new = self._whole, hasattr(self._whole, "lower")
        run = synchronous(whole.lower(hoisted, leaves) if is_new else whole, hoisted, self._code, self._store)
        if run is not None:
            return run, "inline"
        compiled = self._compiled(hoisted, leaves)
        if is_new:
            trim_heap()  # compiling takes 40 to 100 MB, and the call is about to take its own

        def waiting(leaves: Sequence[Any]) -> list[Any]:
            return list(map(np.asarray, compiled(hoisted, leaves)))

        return waiting, "compiled"

    def _compiled(self, hoisted: list[Any], leaves: Sequence[Any]) -> Callable[..., list[Any]]:
        """The program compiled for these arguments.

        jit would look it up by JAX's configuration, which the Signature holds, and would have to be called in 64-bit
        mode: entering that scope, and finding the program in another context than the caller's, takes 2 of 10 us.
        """
        whole = self._whole if self._inline is None else self._loaded
        is_new = hasattr(whole, "lower")
        return compat.unwrapped(load_or_compile(whole.lower(hoisted, leaves), self._store) if is_new else whole)

    @cached_property
    def _loaded(self) -> Any:
        """The program from ``cache_dir`` for JAX's arrays, loaded with the first: few processes need it for both."""
        return compat.load_compiled(self._code)

    def lowered(self, params: DeviceParams, leaves: list[Any]) -> Any:
        """The program lowered for these arguments and any others of their types; None where NumPy runs it."""
        if self._numpy is not None:
            return None  # traced sooner than a program is loaded
        return self._whole.lower(self.hoisted(params), leaves)

    def lowered_by_types(self, device: Any, donated: int) -> Any:
        """The program lowered for a device before its arguments exist, of which calls overwrite the last."""
        assert self._split is not None and self._split.main is not None
        placed = None if device == device_of(()) else SingleDeviceSharding(device)  # would commit results to it
        types = [jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=placed) for t in self._split.main.in_avals]
        hoisted, kept = len(self._split.hoisted), len(types) - donated
        return self._whole.lower(types[:hoisted], types[hoisted:kept], types[kept:])

    def compile(self, lowered: Any, write: Callable[[Kept], Any] | None) -> None:
        """Compile what was lowered, for all calls; in any thread. ``write`` keeps the state for another process.

        A program that no other process can use is left to the call.
        """
        compiled = portable(lowered, None if write else self._store)
        if compiled is not None:
            self._whole = compiled
            if write is not None and (code := compat.dump_compiled(compiled)) is not None:
                write(replace(self.plan, code=code, is_inline=is_short(compiled) and is_small(code)))


def portable(lowered: Any, store: Store | None = None) -> Callable[..., Any] | None:
    """A lowered function compiled; None if its code is bound to this process, or an argument has 4 bits."""
    if compat.has_narrow_arguments(lowered) or "custom_call" in lowered.as_text():
        return None  # code of this process, or of libraries that lowering makes ready
    compiled: Callable[..., Any] = load_or_compile(lowered, store)
    return compiled
