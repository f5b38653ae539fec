"""Buckets: pads inputs to a few sizes, so that few shapes are compiled, and slices outputs back.

That is right only where the model masks the padding, which no file declares. So the first call that pads a dimension
variable also runs without padding, and a difference raises BucketError. Both run again with inputs negated: the maximum
of positive numbers does not change when zeros are padded. Where all inputs are constant, as in a warm-up call, nothing
would differ: then both run with integers that vary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import BucketError, InputShapeError, InputTypeError, InputValueError, OnnxError, OperatorError
from ...eval.values import to_host
from ...ir.graph import Graph, Node
from ...ops.arrays import is_traced
from ...proto.types import TensorType, ValueInfo
from .dims import check_dims, checked_extent, named_dims, variables
from .without_strings import lengths_of_lists, without_strings

TOLERANCE: Final = 5e-3
"""Relative to the largest number: covers reordered sums and the 8- and 16-bit roundings that they flip."""


def checked_buckets(inputs: Sequence[ValueInfo], bucket: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """The sizes for each dimension variable, ascending.

    Raises:
        InputNameError, InputTypeError, InputValueError: a key names no dimension, or its value is no list of sizes.
    """
    check_dims("bucket", bucket, named_dims(inputs))
    for name, sizes in bucket.items():
        if isinstance(sizes, str) or not isinstance(sizes, Iterable):
            raise InputTypeError(f"bucket has {name!r}: {sizes!r}; it takes a list of sizes, {{{name!r}: [64, 128]}}")
    buckets = {name: sorted(checked_extent("bucket", name, n) for n in sizes) for name, sizes in bucket.items()}
    if empty := [name for name, sizes in buckets.items() if not sizes or sizes[0] < 1]:
        name = empty[0]
        raise InputValueError(
            f"bucket has {name!r}: {bucket[name]!r}; it takes sizes of 1 or more, {{{name!r}: [1, 4]}}"
        )
    return buckets


def with_names(graph: Graph, bucket: Mapping[str, Sequence[int]]) -> Graph:
    """The graph with names for the inputs' free dimensions without one that are padded."""
    named = named_dims(graph.inputs)
    new = bucket.keys() & (set(variables(named)) - set(variables(graph.inputs)))
    declared = (
        v.reshaped([n if n in new else d for d, n in zip(v.shape or (), named_shape.shape or (), strict=True)])
        for v, named_shape in zip(graph.inputs, named, strict=True)
    )
    return replace(graph, inputs=tuple(declared)) if new else graph


def outputs_with_variables(
    graph: Graph,
    bucket: Mapping[str, Sequence[int]],
    values: Mapping[str, Any],
    padded: Mapping[str, Any],
    extents: Mapping[str, int],
) -> tuple[ValueInfo, ...]:
    """The outputs; axes that they do not declare by a variable of an input have the padded variable that they follow.

    Files leave such an axis open, or give it a name of its own. It follows a variable whose padding changes it by as
    much, alone or with those of equal extents. Abstract evaluation of a graph, in which fixed inputs are initializers,
    pads one after another. A list of maps is declared as a tensor of its length.

    Args:
        graph: what a call evaluates.
        bucket: the sizes by dimension variable.
        values: the call's inputs.
        padded: the inputs, padded by ``pad``.
        extents: the original extents of the padded variables, from ``pad``.
    """
    known = set(variables(graph.inputs))
    if all(v.shape is not None and all(isinstance(d, int) or d in known for d in v.shape) for v in graph.outputs):
        return graph.outputs
    shapes = [(v.shape or (), np.shape(padded[v.name])) for v in graph.inputs if v.name in padded]
    want = {d: n for declared, shape in shapes for d, n in zip(declared, shape, strict=True) if d in extents}
    groups = [{str(d): want[d] for d in group if d in want} for group in equal_extents(extents, bucket)]
    lists = lengths_of_lists(graph)
    plain = _output_shapes(graph, values, {})
    changed = [(next(iter(sizes)), sizes, _output_shapes(graph, values, sizes)) for sizes in groups if sizes]

    def followed(name: str, axis: int) -> str | None:
        extent = plain[name][axis]
        new = [(n, sizes[n], shapes[name][axis]) for n, sizes, shapes in changed if shapes[name][axis] != extent]
        return next((n for n, size, after in new if len(new) == 1 and (extent, after) == (extents[n], size)), None)

    def declared(value: ValueInfo) -> ValueInfo:
        if value.name in lists and value.name in plain:
            return replace(value, type=TensorType(np.dtype(object), (followed(value.name, 0),)))
        shapes = [s.get(value.name) for s in (plain, *(s for *_, s in changed))]
        declared = value.shape if value.shape is not None or shapes[0] is None else [None] * len(shapes[0])
        if (
            declared is None
            or not isinstance(value.type, TensorType)
            or any(s is None or len(s) != len(declared) for s in shapes)
        ):
            return value
        shape = (d if isinstance(d, int) or d in known else followed(value.name, i) for i, d in enumerate(declared))
        return replace(value, type=replace(value.type, shape=tuple(shape)))

    return tuple(map(declared, graph.outputs))


def _output_shapes(graph: Graph, values: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """The shapes of outputs as far as they are known, for the call's inputs with other sizes of some variables.

    That of a list of maps is the shape of the scores that it contains.
    """
    from ...eval.abstract import Extents, abstract_values, primes

    lists, graph = lengths_of_lists(graph), without_strings(graph)
    extents, inputs = Extents(primes()), []
    for v in graph.inputs:
        if v.shape is not None and v.name in values:
            pairs = [(d, sizes.get(str(d), n)) for d, n in zip(v.shape, np.shape(values[v.name]), strict=True)]
            extents.update({d: n for d, n in pairs if isinstance(d, str)})
            v = v.reshaped([n for _, n in pairs])
        inputs.append(v)
    abstract = abstract_values(replace(graph, inputs=tuple(inputs)), extents)
    read = {v.name: lists.get(v.name, v.name) for v in graph.outputs}
    return {n: abstract[value].shape for n, value in read.items() if value in abstract}


def equal_extents(extents: Mapping[str, int], bucket: Mapping[str, Sequence[int]]) -> tuple[tuple[str, ...], ...]:
    """The padded variables, those of equal sizes and extents in one group: they may be one dimension."""
    groups = dict[Any, tuple[str, ...]]()
    for name, extent in extents.items():
        key = (extent, *bucket[name])
        groups[key] = (*groups.get(key, ()), name)
    return tuple(groups.values())


def pad(
    inputs: Sequence[ValueInfo], values: dict[str, Any], bucket: Mapping[str, list[int]]
) -> tuple[dict[str, Any], dict[str, int]]:
    """Inputs zero-padded (strings: empty) to the next size of their bucket, and original extents by variable.

    An extent beyond the largest size is not padded; if an input is traced, none is.

    Raises:
        InputShapeError: dimensions without a name in the file that have equal sizes on one axis differ.
    """
    if is_traced(values):
        return values, {}
    extents: dict[str, int] = {}
    padded = dict(values)
    first: dict[tuple[int, tuple[int, ...]], tuple[str, int]] = {}
    for declared in inputs:
        shape = declared.shape or ()
        if not bucket.keys() & set(shape):
            continue
        array = np.asarray(to_host(values[declared.name]))
        widths = []
        for axis, (name, have) in enumerate(zip(shape, array.shape, strict=True)):
            if isinstance(name, str) and name in bucket and _is_unnamed(declared, axis):
                other, extent = first.setdefault((axis, tuple(bucket[name])), (name, have))
                if have != extent:
                    raise InputShapeError(
                        f"bucket= has equal sizes for {other!r} and {name!r}, whose extents are {extent} and {have}: "
                        "give other sizes to dimensions that may differ"
                    )
            want = next((n for n in bucket.get(name, ()) if n >= have), have) if isinstance(name, str) else have
            widths.append((0, want - have))
            if want != have:
                extents[str(name)] = have
        nothing = "" if array.dtype == object else 0
        padded[declared.name] = np.pad(array, widths, constant_values=nothing)
    return padded, extents


def _is_unnamed(value: ValueInfo, axis: int) -> bool:
    """Whether a dimension has the name that ``named_dims`` gives, rather than one of the file."""
    return str((value.shape or ())[axis]).rstrip("_") == f"{value.name}_{axis}".rstrip("_")


@contextmanager
def blaming_padding(
    inputs: Sequence[ValueInfo],
    values: Mapping[str, Any],
    bucket: Mapping[str, Sequence[int]],
    extents: Mapping[str, int],
) -> Iterator[None]:
    """Raises operator errors as BucketError: inputs are padded. Arguments as ``pad`` takes and returns them."""
    try:
        yield
    except OperatorError as e:
        equal = dict[str, list[int]]()
        for v in named_dims(inputs):
            for name, extent in zip(v.shape or (), np.shape(values[v.name]), strict=True):
                if isinstance(name, str) and name not in bucket and extent in extents.values():
                    equal[name] = next(list(bucket[n]) for n, have in extents.items() if have == extent)
        also = f" and not {_quoted(equal)}, of equal extent: add {equal} to bucket=, or" if equal else ":"
        fix = "remove from bucket= the variables that the model does not mask"
        raise BucketError(f"{e}\nbucket= pads {_quoted(extents)}{also} {fix}") from e


def unpad(outputs: Sequence[ValueInfo], results: tuple[Any, ...], extents: Mapping[str, int]) -> tuple[Any, ...]:
    """Outputs sliced back to the original extents of the dimension variables that they declare.

    NumPy slices: JAX would compile a slice for each extent.
    """
    ends = [[extents.get(d) if isinstance(d, str) else None for d in v.shape or ()] for v in outputs]
    return tuple(map(_sliced, results, ends))


def _sliced(result: Any, ends: Sequence[int | None]) -> Any:
    if isinstance(result, list):  # of maps
        return result[slice(*ends)] if ends else result
    return (result if is_traced(result) else np.asarray(to_host(result)))[tuple(map(slice, ends))]


def verify_padding(
    graph: Graph,
    run: Callable[[Graph, dict[str, Any]], Sequence[Any]],
    call: Callable[[dict[str, Any]], Sequence[Any]],
    values: dict[str, Any],
    padded: dict[str, Any],
    results: Sequence[Any],
    extents: Mapping[str, int],
) -> bool:
    """Whether a call shows that padding changes no output; with constant floating-point inputs it does not.

    Args:
        graph: the model's.
        run: computes the outputs of a graph from its inputs.
        call: computes the outputs of the model from padded inputs, sliced back.
        values: the call's inputs.
        padded: the inputs, padded by ``pad``.
        results: the outputs for ``padded``, sliced back.
        extents: the original extents, from ``pad``.

    Raises:
        BucketError: padding changes an output.
    """
    _require_equal(graph, run, values, padded, results, run(graph, values), extents)
    read = [v.name for v in graph.inputs if v.name in values and set(v.shape or ()) & set(extents)]
    feeds = {n: np.asarray(to_host(values[n])) for n in read}
    if not any(map(_varies, feeds.values())):
        varied = {n: _varied(v, np.shape(padded[n])) for n, v in feeds.items() if v.dtype.kind in "iub"}
        if not any(map(_varies, varied.values())):
            return False
        values, padded = values | varied, padded | {n: _padded(v, np.shape(padded[n])) for n, v in varied.items()}
        try:
            results, wanted = call(padded), run(graph, values)
        except OnnxError:  # an index beyond its table, say
            return False
        _require_equal(graph, run, values, padded, results, wanted, extents)
        return True
    negated = {n for n, v in feeds.items() if jnp.issubdtype(v.dtype, jnp.floating) and not np.isin(v, (0, 1)).all()}
    if negated:  # inputs of only 0 and 1 may be masks
        values = values | {n: -feeds[n] for n in negated}  # in NumPy, as the caller may be inside a jit
        padded = padded | {n: -padded[n] for n in negated}
        wanted = run(graph, values)
        if all(map(_is_finite, wanted)):
            _require_equal(graph, run, values, padded, call(padded), wanted, extents)
    return True


def shortened(
    inputs: Sequence[ValueInfo], feeds: Mapping[str, Any], bucket: Mapping[str, Sequence[int]]
) -> dict[str, Any]:
    """The feeds of a call that pads, one entry shorter where the size of a bucket is met; empty if none is."""
    shorter = dict[str, Any]()
    for declared in inputs:
        axes = {i: bucket[d] for i, d in enumerate(declared.shape or ()) if isinstance(d, str) and d in bucket}
        for i, sizes in axes.items():
            value = shorter.get(declared.name, feeds[declared.name])
            end = np.shape(value)[i] - 1
            if end > 0 and end + 1 in sizes and end not in sizes:
                shorter[declared.name] = value[(slice(None),) * i + (slice(end),)]
    return {**feeds, **shorter} if shorter else {}


def _varies(value: np.ndarray) -> bool:
    return value.size > 0 and bool((value != value.flat[0]).any())


def _varied(value: np.ndarray, padded: Sequence[int]) -> np.ndarray:
    """Constant integers with a neighbour in half of the places; the first of each padded axis stays, as in masks."""
    changes = np.random.default_rng(0).integers(0, 2, value.shape).astype(bool)
    for axis, (have, want) in enumerate(zip(value.shape, padded, strict=True)):
        if have != want:
            changes[(slice(None),) * axis + (0,)] = False
    other = ~value if value.dtype.kind == "b" else np.where(value > 0, value - 1, value + 1)
    return np.where(changes, other, value).astype(value.dtype)


def _padded(value: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    return np.pad(value, [(0, n - have) for have, n in zip(value.shape, shape, strict=True)])


def _require_equal(
    graph: Graph, run: Any, values: dict[str, Any], padded: dict[str, Any], results: Sequence[Any],
    wanted: Sequence[Any], extents: Mapping[str, int],
) -> None:  # fmt: skip
    names = _quoted(extents)
    for output, ours, want in zip(graph.outputs, results, wanted, strict=True):
        if not is_close(ours, want):
            is_masked = is_close(_corner(ours, want), want)
            node = None if is_masked else _first_differing(graph, run, values, padded, output.name)
            raise BucketError(
                f"bucket= pads {names}, and output {output.name!r} differs without padding: {difference(ours, want)}. "
                f"{f'The difference begins at {node}. ' if node else ''}"
                f"{'Only an axis of the extent of a variable is sliced' if is_masked else 'The model must mask it'}: "
                f"remove {names} from bucket="
            )


def _is_finite(result: Any) -> bool:
    arrays = (np.asarray(to_host(v)) for v in jax.tree.leaves(result))
    return all(bool(np.isfinite(v).all()) for v in arrays if jnp.issubdtype(v.dtype, jnp.inexact))


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def is_close(ours: Any, want: Any) -> bool:
    """Whether two results are numerically equal within TOLERANCE."""
    pairs = [[np.asarray(to_host(v)) for v in jax.tree.leaves(r)] for r in (ours, want)]
    return len(pairs[0]) == len(pairs[1]) and all(map(_same, *pairs))


def _same(ours: np.ndarray, want: np.ndarray) -> bool:
    if ours.shape != want.shape or not jnp.issubdtype(want.dtype, jnp.inexact):
        return np.array_equal(ours, want)
    wide = np.complex128 if want.dtype.kind == "c" else np.float64
    ours, want = ours.astype(wide), want.astype(wide)
    scale = np.abs(want[np.isfinite(want)]).max(initial=0)
    return np.allclose(ours, want, rtol=0, atol=TOLERANCE * scale + 1e-7, equal_nan=True)


def _first_differing(graph: Graph, run: Any, values: dict[str, Any], padded: dict[str, Any], name: str) -> Node | None:
    """The first node on the way to a value whose output differs but whose operands do not."""
    producers = {n: node for node in graph.nodes for n in node.outputs if n}
    every = replace(graph, outputs=tuple(map(ValueInfo, producers)))
    both = zip(producers, run(every, padded), run(every, values), strict=True)
    other = {n for n, ours, want in both if not is_close(_corner(ours, want), want)} | {name}
    node = None
    while name in other and name in producers:
        node = producers[name]
        name = next((n for n in node.reads if n in other), "")
    return node


def _corner(ours: Any, want: Any) -> Any:
    """A value sliced to the unpadded shape."""
    if np.ndim(ours) != np.ndim(want):
        return ours
    return np.asarray(to_host(ours))[tuple(map(slice, np.shape(want)))]


def difference(ours: Any, want: Any) -> str:
    """The difference between two results, in words."""
    if np.shape(ours) != np.shape(want):
        return f"its shape is {list(np.shape(ours))} instead of {list(np.shape(want))}"
    if not jnp.issubdtype(np.asarray(want).dtype, jnp.inexact):
        return "its values differ"
    ours, want = (np.asarray(r).astype(np.complex128) for r in (ours, want))
    return f"it differs by {np.nanmax(np.abs(ours - want)):.3g}, with values up to {np.nanmax(np.abs(want)):.3g}"
