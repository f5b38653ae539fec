"""A function jitted twice, so that what a caller traces neither counts nor is met again by a model's own programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import compat


class Jitted:
    """The jitted functions of one function, by whether a caller traces it.

    JAX caches the traces of each. A trace made while somebody replaces functions of JAX, as jax2onnx does in an export,
    has operations that nobody else can compile: then, and afterwards, the function is jitted anew.
    """

    def __init__(self, make: Callable[[bool], Any]) -> None:
        """``make(foreign)`` jits the function, for callers' traces or for this package's own programs."""
        self._make = make
        self._made: dict[bool, tuple[list[Any], Any]] = {}

    def __call__(self, foreign: bool) -> Any:
        """The jitted function for a caller's trace, or for a program of this package."""
        functions, made = compat.functions(), self._made.get(foreign)
        if made is None or made[0] != functions:
            made = self._made[foreign] = functions, self._make(foreign)
        return made[1]
