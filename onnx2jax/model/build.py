"""The spec of an imported model under some options, and of a model under other options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import ShardingError, UnsupportedError, unknown_keywords
from ..ir.graph import Imported
from ..ops.arrays import is_traced
from ..proto.mapped import load
from ..proto.origin import Origin
from ..sharding.processes import Agreement, in_agreement, several
from .options import FILE, REWRITING, Options
from .spec import Source, Spec

if TYPE_CHECKING:
    from ..sharding.rules import Placement
    from .changes.rebatch import Groups


def built(
    imported: Imported,
    options: Options,
    model_type: Any,
    origin: Origin | None,
    agreed: Agreement,
    rewriting: Options | None = None,
    groups: Groups | None = None,
) -> Spec:
    """The spec of an imported model.

    Args:
        options: those of ``convert``.
        model_type: the class Model, for the costs of pipeline stages.
        origin: its file.
        agreed: takes what has to be equal in all processes.
        rewriting: those of the options that have not rewritten the graph yet, where it is derived from a model's.
        groups: those of samples of that model, unless the options change them.
    """
    options = options.of(imported.graph)
    rewritten = (rewriting.of(imported.graph) if rewriting else options).rewritten(imported)
    options.check_layers(rewritten.graph)
    groups = groups or options.groups(rewritten.graph)
    called = rewritten if groups is None else replace(rewritten, graph=groups.over(rewritten.graph))
    placed = _placed(called, options, model_type)
    source = Source(imported, rewritten.graph) if rewriting is None else None
    spec = Spec.of(rewritten, options, placement=placed, groups=groups, source=source, origin=origin)
    agreed.same(_state(spec))
    return spec


def with_options(spec: Spec, keywords: Mapping[str, Any], model_type: Any) -> Spec:
    """The spec with other options, and the same parameter values.

    Raises:
        TypeError: an unknown keyword.
        UnsupportedError: an option that rewrote a graph which has been changed since, or another type of parameters
            whose values have been changed.
    """
    names = [f.name for f in fields(Options)]
    if unknown := sorted(keywords.keys() - {*names}):
        raise TypeError(f"with_options: {unknown_keywords(unknown, names)}")
    options = replace(spec.options, **keywords)
    with in_agreement(options.mesh, "with_options") as agreed:
        if spec.source is not None and spec.source.rewritten is spec.graph:
            new = built(spec.source.imported, options, model_type, spec.origin, agreed)
        else:
            _check_late(spec, keywords)
            late = {*keywords}.intersection((*REWRITING, "static", "bucket"))
            imported, rewriting = spec.imported(spec.graph), options.only(late)
            options = replace(options, dims=keywords.get("dims"), bucket=keywords.get("bucket"))
            groups = None if keywords.keys() & {"rebatch", "static"} else spec.groups
            new = built(imported, options, model_type, spec.origin, agreed, rewriting, groups)
    compare_processes(new)
    other = [n for n in spec.changes if n not in new.types or new.types[n] != spec.types.get(n)]
    if other:
        raise UnsupportedError(
            f"with_options: the values of {', '.join(map(repr, other[:3]))} were changed, and these options store them "
            "otherwise: set them in convert, before with_params"
        )
    return replace(new, changes={n: _kept(new, n, v) for n, v in spec.changes.items()})


def _kept(spec: Spec, name: str, value: Any) -> Any:
    """A changed parameter as it is, or in the file's type where it has that of another compute dtype."""
    from ..runtime.params import immutable

    known = value.dtype in (spec.types[name].dtype, spec.stored[name].dtype) or is_traced(value)
    return value if known else immutable(load(value).astype(spec.types[name].dtype))


def _check_late(spec: Spec, keywords: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for options that cannot change once a graph is derived from a model's."""
    if late := [n for n in keywords if n in (*REWRITING, *FILE) and getattr(spec.options, n) != getattr(Options, n)]:
        raise UnsupportedError(
            f"{late[0]}= has rewritten the graph that this model is derived from: change it before, "
            f"model.with_options({late[0]}=...), and cut or replace then"
        )
    if late := [n for n in keywords if n in FILE and keywords[n] is not None]:
        raise UnsupportedError(f"{late[0]}= is about the graph of a file: pass it to convert, before the graph changes")


def _placed(imported: Imported, options: Options, model_type: Any) -> Placement | None:
    """Shardings of weights and inputs; None on one device."""
    o = options
    chosen = (o.mesh, o.shardings, o.device_configuration, o.devices, o.stages)
    if all(v is None for v in chosen) and o.microbatches == 1:
        return None
    from ..sharding.configurations import by_count, placement
    from ..sharding.stages import Staged
    from .devices.pipeline import costs

    if o.stages is None:
        placed = placement(imported, o.device_configuration, o.devices, o.mesh, o.shardings, None, o.microbatches)
    elif o.device_configuration is not None:
        raise ShardingError("stages= and device_configuration= both define pipeline stages: pass one of them")
    else:
        estimated = partial(costs, model_type, imported)
        placed = by_count(imported, o.stages, o.microbatches, o.mesh, o.shardings, estimated)
    if isinstance(placed, Staged) and several(placed.mesh):
        raise ShardingError("pipeline stages need devices of one process: make the mesh of jax.local_devices()")
    return placed


def process_state(placed: Placement | None, origin: Origin | None, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Values that must be equal in all processes of a mesh, by name; empty for one process."""
    if placed is None or not several(placed.mesh):
        return {}
    return {"the file": origin and origin.digest(), "mesh= or shardings=": str(placed), **arguments}


def _state(spec: Spec) -> dict[str, Any]:
    return process_state(spec.placement, spec.origin, spec.options.shared())


def compare_processes(spec: Spec) -> None:
    """Compare what the processes of a device configuration's mesh have: it is known only once the file is read."""
    if spec.options.mesh is None and spec.placement is not None:
        with in_agreement(spec.placement.mesh, "convert") as agreed:
            agreed.same(_state(spec))
