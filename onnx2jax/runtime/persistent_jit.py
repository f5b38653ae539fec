"""A jitted function whose compiled programs a folder keeps for later processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from .. import compat
from .program_cache import Store


class PersistentJit:
    """A jitted function, compiled ahead of time for each signature of its arguments, or loaded from a store.

    For concrete arguments. Without a store, and for programs that cannot be kept, it is the jitted function.
    """

    def __init__(self, jitted: Any, store: Store | None, *, static: int = 0) -> None:
        """``static``: the number of leading arguments that are static."""
        self._jitted, self._store, self._static = jitted, store, static
        self.trace, self.__name__ = jitted.trace, jitted.__name__
        self._programs: dict[Any, Callable[..., Any]] = {}

    def __call__(self, *args: Any) -> Any:
        """The results, as the jitted function returns them."""
        if self._store is None or compat.checks_values():
            return self._jitted(*args)
        static, dynamic = args[: self._static], args[self._static :]
        leaves, structure = jax.tree.flatten(dynamic)
        key = static, structure, tuple(map(_type, leaves)), compat.trace_context()
        program = self._programs.get(key)
        if program is None:
            compiled = self._store.compiled(self._jitted.lower(*args))
            program = partial(self._jitted, *static) if compiled is None else compat.unwrapped(compiled.function)
            self._programs[key] = program
        return program(*dynamic)


def _type(value: Any) -> Any:
    if isinstance(value, jax.Array):
        weak = getattr(value, "weak_type", False)  # random keys have none
        return value.dtype, value.shape, weak, value.sharding, value.committed
    return (value.dtype, value.shape) if isinstance(value, np.ndarray | np.generic) else type(value)
