"""The options of ``convert`` about running, in a module that imports no interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from ..ir.graph import Node
    from ..ops.registry import Shards
    from .layers import How


class PlaceValue(Protocol):
    """Applies sharding constraints to values."""

    def __call__(self, node: Node, names: Sequence[str], values: Sequence[Any]) -> list[Any]:
        """The values of a node's inputs or outputs, with their sharding constraints."""

    def shards(self, node: Node, /) -> Shards:
        """The number of shards of a node's weights."""


@dataclass(frozen=True)
class Settings:
    """Options of ``convert`` about running. Two are equal if they lead to the same computation."""

    max_trips: int | None = None
    """Iterations after which a Loop raises; None for no limit."""
    loop_cond: str = "onnx"
    """Whose meaning the condition of a Loop's body has without condition input: "onnx" (ignored) or "onnxruntime"."""
    warn_after: int = field(default=16, compare=False)
    """Compilations of one program after which a RecompilationWarning names the input and the fix."""
    place: PlaceValue | None = None
    """Applies sharding constraints to the values at a node."""
    optimize: bool = True
    """Whether passes rewrite programs before XLA compiles them (see jaxpr/pipeline.py)."""
    skip: frozenset[str] = frozenset()
    """Passes that do not run (see jaxpr/pipeline.py)."""
    dtype: np.dtype | None = None
    """The type in which floats are computed; None for the types of the file (see ir/precision.py)."""
    scan_layers: How = None
    """Whether repeated layers are one loop, or calls of one function (see eval/layers.py)."""
    platform: str = ""
    """The platform for which programs are traced, a name in ``lax.platform_dependent``; "" for any."""
    is_traced: bool = False
    """Whether every call is one of a caller's transformation, whose values functions of ``Model.replace`` may hold."""
    annotate: bool = field(default=False, compare=False)
    """Whether profiles also name host nodes, at 1 to 2 us each."""
    cache_dir: Path | None = field(default=None, compare=False)
    """The folder of compiled programs for later processes (see runtime/program_cache.py)."""
    background: bool = field(default=False, compare=False)
    """Whether calls are evaluated in NumPy while a thread compiles their program (see runtime/background.py)."""
    warned: set[str] = field(default_factory=set, compare=False)
    """The operators that have raised a DeviationWarning."""
