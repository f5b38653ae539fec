"""A Model never changes: no attribute can be set, copies share all of it, pickles have all but what is compiled."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any, Final, Self

import numpy as np

from ..ir.graph import Graph, read_constants

BEGUN: Final = frozenset(
    ("_program", "_calls", "_declared", "_compared", "_growth", "_fields", "_on_devices", "_unpadded", "_showing")
)
"""What a model begins anew in another process."""


class Frozen:
    """How a Model is copied and pickled, and why it cannot be changed."""

    graph: Graph
    params: Any
    _changes: dict[str, Any]
    _begin: Callable[[], None]

    def __setattr__(self, name: str, value: Any) -> None:
        if "_program" in vars(self):
            raise AttributeError(
                f"a Model does not change, so {name} cannot be set; one with other weights: "
                "model.with_params({name: w})"
            )
        super().__setattr__(name, value)

    def __deepcopy__(self, _: dict[int, Any]) -> Self:
        return self  # nothing in it changes

    def __getstate__(self) -> dict[str, Any]:
        """What pickle keeps: all but what is compiled, and what lies on devices."""
        kept = {**vars(self), "params": self.params}
        return {n: dict(v) if isinstance(v, MappingProxyType) else v for n, v in kept.items() if n not in BEGUN}

    def __setstate__(self, state: dict[str, Any]) -> None:
        views = ("optional", "opsets", "metadata", "static")
        vars(self).update({n: MappingProxyType(v) if n in views else v for n, v in state.items()})
        for array in (*read_constants(self.graph).values(), *self._changes.values()):
            if isinstance(array, np.ndarray):
                array.flags.writeable = False  # pickle forgets
        self._begin()

    def __copy__(self) -> Self:
        new = object.__new__(type(self))
        vars(new).update(vars(self))
        return new
