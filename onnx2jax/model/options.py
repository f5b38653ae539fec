"""The options of ``convert``, which a model keeps."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, Self

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from .. import compat
from ..errors import InputNameError, InputTypeError, InputValueError, UnsupportedError, names_list
from ..eval.settings import Settings
from ..ir import layers
from ..ir.graph import Graph, Imported
from ..proto.files import path_of
from ..runtime import cache_folder
from ..sharding.put import Devices

if TYPE_CHECKING:
    from ..sharding.plans import Plan
    from ..sharding.rules import Placement
    from .changes.rebatch import Groups

REWRITING: Final = ("max_size", "weights", "dtype", "outputs", "float32")
"""Options that rewrite the graph."""
FILE: Final = ("device_configuration", "devices")
"""Options about device configurations, which only the graph of a file has."""
PER_PROCESS: Final = ("warn_after", "cache_dir", "mesh", "shardings", "devices")
"""Options that may differ between the processes of a mesh, or whose result they compare."""


DICTS: Final = {
    "dims": {"batch": 8},
    "static": {"shape": [1, 8]},
    "bucket": {"batch": [1, 4]},
    "rebatch": {"x": 0},
    "max_size": {"nms": 100},
}
"""Options that are dicts by name, and an example of each."""
INTEGERS: Final = ("max_trips", "warn_after", "microbatches")
"""Options that are integers."""


@dataclass(frozen=True, eq=False)
class Options(Devices):
    """The keywords of ``convert``, documented there."""

    # shapes
    dims: Mapping[str, int] | None = None
    static: Mapping[str, Any] | None = None
    bucket: Mapping[str, Sequence[int]] | None = None
    rebatch: bool | Mapping[str, int] = False
    max_size: Mapping[str, int] | None = None
    max_trips: int | None = None
    # numbers
    dtype: Any = None
    float32: str | Iterable[str] = ()
    outputs: Literal["declared", "compute"] = "declared"
    weights: Any = None
    # execution
    optimize: bool | Mapping[str, Sequence[str]] = True
    scan_layers: bool | Literal["calls"] | None = None
    background_compile: bool = False
    cache_dir: str | os.PathLike[str] | bool | None = True
    warn_after: int = 16
    platform: str | None = None
    # devices
    mesh: Mesh | None = None
    shardings: Mapping[str, PartitionSpec] | str | Plan | None = None
    stages: int | None = None
    microbatches: int = 1
    device_configuration: str | None = None
    devices: Mapping[Any, jax.Device] | Sequence[jax.Device] | None = None
    # reading
    loop_cond: Literal["onnx", "onnxruntime"] = "onnx"

    def __post_init__(self) -> None:
        self._check_types()
        if isinstance(self.float32, bool) or not isinstance(self.float32, Iterable):
            raise InputTypeError(
                f"float32 is {self.float32!r}; it names the nodes that stay in float32 under dtype=: "
                "float32=['encoder/norm*']. For a whole model: dtype='float32'"
            )
        object.__setattr__(self, "float32", tuple(names_list(self.float32)))
        if not isinstance(self.cache_dir, bool | None):
            object.__setattr__(self, "cache_dir", path_of(self.cache_dir))
        for f in fields(self):  # the caller may change a dict later
            if isinstance(value := getattr(self, f.name), dict):
                object.__setattr__(self, f.name, MappingProxyType(dict(value)))
        if self.loop_cond not in ("onnx", "onnxruntime"):
            raise InputNameError(f"loop_cond is {self.loop_cond!r}; it is 'onnx' or 'onnxruntime'")
        if self.scan_layers not in (True, False, "calls", None):
            raise InputValueError(f"scan_layers is {self.scan_layers!r}; it is True, False, 'calls' or None")
        if self.platform not in (None, *compat.PLATFORMS):
            raise InputValueError(f"platform is {self.platform!r}; it is one of {', '.join(compat.PLATFORMS)}, or None")
        if both := [n for n in self.bucket or () if n in (self.dims or ())]:
            raise InputNameError(f"dims fixes {both}, which bucket pads: leave {both[0]!r} out of one of them")
        _ = self.skipped, self.compute_dtype

    def _check_types(self) -> None:
        """Raise InputTypeError for an option that is no dict or no integer, and takes nothing else."""
        for name, example in DICTS.items():
            value, default = getattr(self, name), getattr(Options, name)
            if not isinstance(value, Mapping | type(default)):
                other = " or True" if default is False else ""
                raise InputTypeError(f"{name} is {value!r:.60}; it is a dict{other}: {name}={example}")
        for name in INTEGERS:
            value, default = getattr(self, name), getattr(Options, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer | type(default)):
                raise InputTypeError(f"{name} is {value!r:.60}; it is an integer")

    @cached_property
    def skipped(self) -> frozenset[str] | None:
        """The passes that do not run over programs; None if none runs."""
        if isinstance(self.optimize, bool):
            return frozenset() if self.optimize else None
        from ..jaxpr import pipeline

        return pipeline.skipped(self.optimize)

    @cached_property
    def compute_dtype(self) -> np.dtype | None:
        """The type in which floats are computed; None for the types of the file."""
        if not self._narrows:
            return None
        from .changes.dtype import compute_dtype

        return compute_dtype(self.dtype, self.outputs)

    @property
    def _narrows(self) -> bool:
        return self.dtype is not None or self.outputs != "declared" or bool(self.float32)

    def of(self, graph: Graph) -> Self:
        """These options for a graph: dtype="float32" is None where the graph has no narrower floats."""
        if self.compute_dtype is None or self.compute_dtype != np.float32:  # np.dtype("float64") equals None
            return self
        from ..ir.widening import has_narrower

        return self if has_narrower(graph, self.compute_dtype) else replace(self, dtype=None)

    def rewritten(self, imported: Imported) -> Imported:
        """The imported model with its graph rewritten as the options say; what does that is imported where it is."""
        if self.bucket:
            from .calls.buckets import with_names

            imported = replace(imported, graph=with_names(imported.graph, self.bucket))
        if self.max_size:
            from .changes.max_size import with_max_size

            imported = with_max_size(imported, self.max_size)
        if isinstance(self.weights, str) and self.weights == "packed":
            from .changes.pack import with_packed

            imported = with_packed(imported)
        elif self.weights is not None:
            from .changes.unpack import with_weights

            imported = with_weights(imported, self.weights)
        if self._narrows:
            from .changes.dtype import with_dtype

            imported = with_dtype(imported, self.compute_dtype, self.outputs == "compute", names_list(self.float32))
        return imported

    def groups(self, graph: Graph) -> Groups | None:
        """How a call maps the graph over groups of samples; None without ``rebatch``."""
        if not self.rebatch:
            return None
        from .changes.rebatch import Groups

        return Groups.of(graph, self.rebatch, self.static or {})

    def settings(self, placed: Placement | None) -> Settings:
        """What evaluation and dispatch read of them."""
        return Settings(
            self.max_trips,
            self.loop_cond,
            self.warn_after,
            placed.constrain if placed else None,
            self.skipped is not None,
            self.skipped or frozenset(),
            self.compute_dtype,
            self.scan_layers,
            self.platform or "",
            cache_dir=cache_folder.folder(self.cache_dir),
            background=self.background_compile,
        )

    def check_layers(self, graph: Graph) -> None:
        """Raise UnsupportedError if layers are to be scanned or called, and the graph repeats none."""
        graphs = list(graph.walk())
        if self.scan_layers and not any(map(layers.repeated, graphs)):
            largest = max(graphs, key=lambda g: len(g.nodes))
            raise UnsupportedError(
                f"scan_layers={self.scan_layers!r} finds no repeated layers in {graph.name!r}: "
                f"{layers.first_difference(largest)}. Leave out scan_layers="
            )

    def shared(self) -> dict[str, Any]:
        """Options that are equal in all processes of a mesh, by keyword."""
        return {f"{f.name}=": getattr(self, f.name) for f in fields(self) if f.name not in PER_PROCESS}

    def only(self, names: Iterable[str]) -> Self:
        """These of the options, and the others at their defaults."""
        return type(self)(**{n: getattr(self, n) for n in names})
