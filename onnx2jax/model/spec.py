"""The frozen data of a Model, from which its runtime is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import numpy as np

from ..eval.settings import Settings
from ..ir import analysis
from ..ir.casts import bounded
from ..ir.graph import Graph, Imported, read_constants
from ..proto.mapped import load
from ..proto.origin import Origin
from ..proto.types import TensorType, ValueInfo
from .calls import arguments, buckets
from .calls.dims import with_dims
from .options import Options

DEFAULT: Final = Options()


class Source(NamedTuple):
    """An imported model, and the graph that the options of ``convert`` made of it."""

    imported: Imported
    rewritten: Graph


if TYPE_CHECKING:
    from ..sharding.rules import Placement
    from .changes.rebatch import Groups


@dataclass(frozen=True, eq=False)
class Spec:
    """A model's graph, parameters and the options of ``convert``.

    Attributes:
        graph: the frozen graph.
        inputs: the required inputs, in order.
        optional: inputs that have a default, by name.
        opsets: version of each operator set that the model imports.
        metadata: the file's metadata, as strings.
        options: those of ``convert``.
        settings: what evaluation and dispatch read of the options.
        source: what the graph was made of by the options; None for a graph that was derived from a model's.
        static: values of fixed inputs: private, read-only arrays.
        bucket: sizes to which dimension variables are padded, ascending.
        max_size: sizes to which nodes with data-dependent shapes are padded.
        origin: the file, for ``save``.
        placement: shardings of parameters and inputs over a mesh; None on one device.
        groups: how a call maps the graph over groups of samples; None without ``rebatch``.
        changes: new values of parameters, by name; the others are the file's.
        types: shape and dtype of each parameter in the file, by name.
    """

    graph: Graph
    inputs: tuple[ValueInfo, ...]
    optional: Mapping[str, ValueInfo]
    opsets: Mapping[str, int]
    metadata: Mapping[str, str]
    options: Options
    settings: Settings = field(default_factory=Settings)
    source: Source | None = None
    static: Mapping[str, np.ndarray] = field(default_factory=dict)
    bucket: Mapping[str, list[int]] = field(default_factory=dict)
    max_size: Mapping[str, int] = field(default_factory=dict)
    origin: Origin | None = None
    placement: Placement | None = None
    groups: Groups | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    types: Mapping[str, TensorType] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.types:
            read_constants(self.graph, self.parameters)
            types = {n: TensorType(v.dtype, v.shape) for n, v in self.parameters.items()}
            object.__setattr__(self, "types", types)
        for f in fields(self):
            if isinstance(value := getattr(self, f.name), dict):
                object.__setattr__(self, f.name, MappingProxyType(value))

    @classmethod
    def of(
        cls,
        imported: Imported,
        options: Options = DEFAULT,
        *,
        settings: Settings | None = None,
        placement: Placement | None = None,
        groups: Groups | None = None,
        **fields: Any,
    ) -> Self:
        """The spec of an imported model, whose graph the options have rewritten.

        Raises:
            InputError: ``static``, ``dims`` or ``bucket`` do not match the inputs.
        """
        graph = imported.graph
        groups = groups or options.groups(graph)
        called = graph if groups is None else groups.over(graph)
        declared = with_dims(called.inputs, options.dims or {})
        fixed = arguments.fixed_inputs(declared, options.static or {}, options.compute_dtype)
        free = [v for v in declared if v.name not in fixed]
        # Below IR 4 every weight is listed as an input; such an entry declares a constant (rule GR-06).
        has_defaults = imported.ir_version >= 4
        return cls(
            graph,
            tuple(v for v in free if v.name not in graph.initializers),
            {v.name: v for v in free if has_defaults and v.name in graph.initializers},
            imported.opsets,
            imported.metadata,
            replace(options, static=fixed),
            options.settings(placement) if settings is None else settings,
            static=fixed,
            bucket=buckets.checked_buckets(declared, options.bucket or {}),
            max_size=dict(options.max_size or {}),
            placement=placement,
            groups=groups,
            **fields,
        )

    def with_graph(self, graph: Graph, static: Mapping[str, Any] | None = None, **fields: Any) -> Self:
        """The spec of another graph over the same parameters; bucket, max_size and origin are dropped unless passed.

        Args:
            graph: its inputs take the declarations of this spec's inputs of the same name.
            static: more inputs to fix.
            **fields: fields of the spec.
        """
        imported = self.imported(graph)
        names = {v.name for v in imported.graph.inputs}
        fixed = {n: v for n, v in {**self.static, **(static or {})}.items() if n in names}
        sizes = {n: fields.pop(n, None) for n in ("bucket", "max_size")}
        options = replace(self.options, static=fixed, dims=None, **sizes)
        kept = {n: getattr(self, n) for n in ("settings", "placement", "groups")} | {"changes": dict(self.changes)}
        new = type(self).of(imported, options, **{**kept, **fields})
        declared = {v.name: v for v in self.inputs}
        inputs = tuple(declared.get(v.name, v) for v in new.inputs)
        return replace(new, inputs=inputs, changes={n: v for n, v in new.changes.items() if n in new.types})

    def imported(self, graph: Graph) -> Imported:
        """A graph over these parameters as if it had been imported, with this spec's declarations of inputs.

        With ``groups``, whose calls have other extents, the graph keeps its own.
        """
        declared = {v.name: v for v in (*self.inputs, *self.optional.values())}
        weights = {v.name for v in self.graph.inputs} - declared.keys() - self.static.keys()  # below IR 4
        declared = {} if self.groups else declared
        inputs = tuple(declared.get(v.name, v) for v in graph.inputs if v.name not in weights)
        return Imported(replace(graph, inputs=inputs), self.opsets, self.metadata, ir_version=4)

    @cached_property
    def parameters(self) -> Mapping[str, np.ndarray]:
        """The file's values of the parameters, in memory or mapped."""
        return analysis.parameters(self.graph)

    @cached_property
    def stored(self) -> Mapping[str, TensorType]:
        """Shape and dtype of each parameter as it is kept: in a narrow compute dtype if all readers take it so."""
        dtype = self.settings.dtype
        if dtype is None:
            return self.types
        from ..ir.precision import parameters_in

        stored = parameters_in(self.graph, dtype)
        return {n: TensorType(dtype, t.shape) if n in stored else t for n, t in self.types.items()}

    @property
    def converted(self) -> frozenset[str]:
        """The parameters that are kept in the compute dtype, although the file has another type."""
        return frozenset(n for n, t in self.stored.items() if t is not self.types[n])

    def as_stored(self, name: str, value: Any) -> Any:
        """A value of a parameter in the dtype in which it is kept."""
        dtype = self.stored[name].dtype
        return value if value.dtype == dtype else bounded(load(value), dtype).astype(dtype)

    def over(self, graph: Graph) -> Graph:
        """What a call evaluates of a graph derived from this one: with ``groups``, one node that maps it over them."""
        return graph if self.groups is None else self.groups.over(graph)

    def of_group(self) -> Self:
        """The spec of a model that runs one group of samples; itself without ``groups``."""
        names = {v.name for v in self.inputs}
        inputs = tuple(v for v in self.graph.inputs if v.name in names)
        return self if self.groups is None else replace(self, groups=None, inputs=inputs)

    @cached_property
    def called(self) -> Graph:
        """What a call evaluates."""
        return self.over(self.graph)

    @property
    def with_static(self) -> Graph:
        """What a call evaluates, with the fixed inputs as initializers, for abstract evaluation."""
        return replace(self.called, initializers={**self.called.initializers, **self.static})

    def in_file_types(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Values of parameters by name, cast to the file's element types."""
        types = self.types  # without integer variables of a TrainingModel
        dtypes = {n: types[n].dtype if n in types else v.dtype for n, v in values.items()}
        return {n: v if v.dtype == dtypes[n] else v.astype(dtypes[n]) for n, v in values.items()}

    @property
    def outputs(self) -> tuple[ValueInfo, ...]:
        """The outputs, in order."""
        return self.called.outputs

    def differs_only_in_values(self, other: Spec) -> bool:
        """Whether it equals another spec in everything but parameter values."""
        names = (f.name for f in fields(self) if f.name != "changes")
        return all(getattr(self, n) is getattr(other, n) for n in names)

    def __getstate__(self) -> dict[str, Any]:
        return {f.name: dict(v) if isinstance(v := getattr(self, f.name), Mapping) else v for f in fields(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, MappingProxyType(value) if isinstance(value, dict) else value)
        arrays = (*read_constants(self.graph).values(), *self.changes.values(), *self.static.values())
        for array in arrays:
            if isinstance(array, np.ndarray):
                array.flags.writeable = False  # pickle does not keep the flag
