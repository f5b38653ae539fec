"""The static part of a Model: all of it but the values of its parameters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from .. import compat
from ..errors import InputError
from ..eval.settings import Settings
from ..ir.graph import Graph
from ..ops.arrays import is_traced
from ..proto.types import TensorType, ValueInfo
from ..runtime.params import immutable
from ..runtime.partition import StagedProgram
from .calls.arguments import as_param
from .calls.cache_pairs import CacheGrowth
from .calls.outputs import Declarations, field_names
from .spec import Spec

if TYPE_CHECKING:
    from ..runtime.background import Background
    from ..sharding.rules import Placement
    from .devices.pipeline import Pipeline


class Structure:
    """What models share that differ only in the values of parameters: graph, options and programs.

    The auxiliary data of a Model as a pytree: compared by the identity of graph and options, never by values, and
    without the parameters on devices. So models of one ``convert`` share the programs of JAX's transformations.

    Attributes:
        spec: graph and options, with the file's values of parameters.
        names: the names of the leaves, in order.
        program: the partitioned graph: one StagedProgram, or one for each pipeline stage.
        background: its compilations in another thread; None if a call waits for its program.
        fields: output names as Python identifiers.
        declared: compares outputs with their declarations.
        growth: detects KV caches that grow with every call.
        compared: number of compilations when outputs were last compared.
        unpadded: the outputs with the padded variables that axes follow, by these variables and the padded shapes.
    """

    spec: Spec
    names: tuple[str, ...]
    program: StagedProgram | Pipeline
    background: Background | None
    fields: tuple[str, ...]
    declared: Declarations
    growth: CacheGrowth
    compared: int
    unpadded: dict[Any, tuple[ValueInfo, ...]]

    def __init__(self, spec: Spec) -> None:
        self.spec = replace(spec, changes={n: v for n, v in spec.changes.items() if n not in spec.types})
        self.names = tuple(spec.types)
        self._hash = hash(self.names)
        self.program: StagedProgram | Pipeline = program_of(spec.called, spec.settings, spec.placement)
        self.background = _background() if spec.settings.background else None
        self.fields = field_names(v.name for v in spec.outputs)
        self.declared, self.growth, self.compared = Declarations(spec.called.inputs, spec.outputs), CacheGrowth(), 0
        self.unpadded = {}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Structure):
            return NotImplemented
        return self is other or self.spec.differs_only_in_values(other.spec)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"{self.spec.graph.name!r}, {len(self.names)} parameters"

    def checked(self, leaves: Iterable[Any]) -> dict[str, Any] | None:
        """Leaves as new values of parameters; None if a call has to check or trace them.

        That is, unless all are arrays of the types of the parameters, on one device or as the placement has them.
        """
        values: dict[str, Any] = {}
        places = set()
        with compat.enable_x64():
            for name, value in zip(self.names, leaves, strict=True):
                if not isinstance(value, np.ndarray | np.generic | jax.Array) or is_traced(value):
                    return None
                try:
                    array = as_param(name, value, self.type_of(name, value))
                except InputError:
                    return None
                if isinstance(array, jax.Array):
                    places.add(frozenset(array.sharding.device_set) if array.committed else None)
                values[name] = array if isinstance(array, jax.Array) else immutable(array)
        if self.spec.placement is None and (len(places - {None}) > 1 or any(p and len(p) > 1 for p in places)):
            return None
        return values

    def type_of(self, name: str, value: Any) -> TensorType:
        """The type that a new value of a parameter has to have: as it is kept, or that of the file."""
        kept, in_file = self.spec.stored[name], self.spec.types[name]
        return in_file if getattr(value, "dtype", None) == in_file.dtype else kept


def program_of(graph: Graph, settings: Settings, placement: Placement | None) -> StagedProgram | Pipeline:
    """The StagedProgram of a graph, or its Pipeline if the placement has stages."""
    if placement is not None:
        from ..sharding.stages import Staged
        from .devices.pipeline import Pipeline

        if isinstance(placement, Staged):
            return Pipeline(graph, settings, placement)
    return StagedProgram(graph, settings)


def _background() -> Background:
    from ..runtime.background import Background

    return Background()
