"""A jitted function whose compiled programs a folder keeps for later processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from .. import compat
from .dispatch import DispatchCache, signature_of
from .program_cache import Store


class PersistentJit:
    """A jitted function, compiled ahead of time for each signature of its arguments, or loaded from a store.

    It is the jitted function for programs that cannot be stored, and for arguments without a signature.
    """

    def __init__(self, jitted: Any, store: Store, *, static: int = 0) -> None:
        """``static``: the number of leading arguments that are static."""
        self._jitted, self._store, self._static = jitted, store, static
        self.trace, self.__name__ = jitted.trace, jitted.__name__
        self._programs: DispatchCache[Callable[..., Any]] = DispatchCache()

    def __call__(self, *args: Any) -> Any:
        """The results, as the jitted function returns them."""
        static, dynamic = args[: self._static], args[self._static :]
        if (key := signature_of(static, dynamic)) is None:
            return self._jitted(*args)
        program = self._programs.get(key)
        if program is None:
            compiled = None if compat.checks_values() else self._store.compiled(self._jitted.lower(*args))
            program = partial(self._jitted, *static) if compiled is None else compat.unwrapped(compiled.function)
            self._programs[key] = program
        return program(*dynamic)


def persistent(jitted: Any, store: Store | None, *, static: int = 0) -> Any:
    """The jitted function with a store for its programs; itself without one, since JAX caches programs in memory."""
    return jitted if store is None else PersistentJit(jitted, store, static=static)
