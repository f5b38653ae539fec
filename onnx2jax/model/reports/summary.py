"""Outputs, parameters, FLOPs and bytes of each node of a model, for given input shapes, by tracing."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import jax
import numpy as np

from ... import compat
from ...errors import KnownValueError, OnnxError, OperatorError
from ...ir.graph import Graph, Node
from ...jaxpr.program import Equation, Program
from ...printed import Printed
from ...proto.types import HOST_ONLY, TensorType, ValueInfo
from ...sharding.stages import Staged
from ..caches import step_extents
from ..calls.dims import checked_dims, named_dims, variables
from ..changes.parts import node_outputs, with_graph, with_outputs
from .comparison import described
from .samples import random_values
from .table import scaled, table
from .verify import OURS, isolated, specialised

ARRAYS: Final = (np.ndarray, jax.Array, jax.ShapeDtypeStruct)
MARK: Final = "onnx2jax node "
MOVES: Final = frozenset(
    (
        *("bitcast_convert_type", "broadcast_in_dim", "concatenate", "convert_element_type", "copy", "copy_p"),
        *("device_put", "dynamic_slice", "dynamic_update_slice", "gather", "iota", "pad", "reshape", "rev", "select_n"),
        *("slice", "split", "squeeze", "stop_gradient", "transpose"),
    )
)
"""Primitives that only move numbers."""
SIZES: Final = (64, 128, 256, 512, 1024)
"""Extents that are tried where 1 is too small."""
MOST_TRACED: Final = 20_000
"""Nodes that are traced in search of them: some 20 seconds."""


@dataclass(frozen=True)
class NodeSummary:
    """The outputs and costs of a node.

    Attributes:
        name, operator: of the node.
        outputs: types by name, as ``float32[1, 8]``.
        parameters: number of elements of ``model.params`` that it reads.
        flops: floating-point operations, a multiply-add being two; None if the node runs on the host. A loop whose
            trips depend on data counts one trip, a condition its most expensive branch.
        bytes: bytes read and written, weights included.
    """

    name: str
    operator: str
    outputs: Mapping[str, str]
    parameters: int
    flops: int | None
    bytes: int


@dataclass(frozen=True, repr=False)
class Summary(Printed):
    """The result of ``Model.summary``; printed as a table.

    Attributes:
        inputs: types of the inputs, by name.
        nodes: the nodes of the main graph, in order.
        parameters, parameter_bytes: elements and bytes of all weights, each counted once.
        flops: the sum over the nodes that are compiled.
    """

    inputs: Mapping[str, str]
    nodes: Sequence[NodeSummary]
    parameters: int
    parameter_bytes: int
    flops: int

    def rows(self) -> Iterator[tuple[str, ...]]:
        """The table, without its head."""
        for n in self.nodes:
            shapes = ", ".join(n.outputs.values())
            flops = "host" if n.flops is None else short(n.flops)
            yield n.name, n.operator, shapes, short(n.parameters) if n.parameters else "", flops, short(n.bytes)

    @property
    def total(self) -> str:
        """The sums in a line."""
        inputs = ", ".join(f"{n}: {t}" for n, t in self.inputs.items())
        return (
            f"{len(self.nodes)} nodes; {self.parameters:,} parameters, {self.parameter_bytes:,} bytes; "
            f"{short(self.flops)} FLOPs for {inputs or 'no inputs'}"
        )

    def to_json(self) -> str:
        """All of it."""
        return json.dumps(asdict(self), indent=2)

    def __str__(self) -> str:
        return f"{table([HEAD, *self.rows()], width=120)}\n{self.total}"


HEAD: Final = ("node", "operator", "outputs", "parameters", "FLOPs", "bytes")


def short(number: float) -> str:
    """A number with three significant digits and a unit prefix.

    >>> short(950), short(1234567), short(2e12)
    ('950', '1.23 M', '2 T')
    """
    return scaled(number, ("", " k", " M", " G", " T"))


def summary(model: Any, inputs: Mapping[str, Any], dims: Mapping[str, int] | None) -> Summary:
    """See ``Model.summary``."""
    dims = dims or {}
    try:
        feeds, types, flops = _evaluated(model, inputs, dims)
    except OperatorError as e:
        fix = ""
        likely = step_extents(model, dims)
        if sizes := larger_sizes(model, inputs, dims, likely):
            fix = f"\nExtents of 1 may be too small: model.summary(dims={ {**dims, **sizes} })"
        raise OperatorError(f"{e}{fix}") from e.__cause__
    types = {n: _typed(v) for n, v in {**feeds, **model.static, **model.graph.initializers}.items()} | types
    counts = {n: math.prod(t.shape) for n, t in model.types.items()}
    rows = []
    for i, node in enumerate(model.graph.nodes):
        parameters = sum(counts[n] for n in _weights(model, node))
        size = sum(types[n][1] for n in {*node.reads, *node.outputs} if n in types)
        outputs = {n: types[n][0] if n in types else "?" for n in node.outputs if n}
        rows.append(NodeSummary(node.name, node.op_type, outputs, parameters, flops.get(i, 0), size))
    return Summary(
        {n: described(v) for n, v in feeds.items()},
        rows,
        sum(counts.values()),
        sum(counts[n] * t.dtype.itemsize for n, t in model.types.items()),
        sum(row.flops or 0 for row in rows),
    )


Types = dict[str, tuple[str, int]]
"""The type of each value as text, and its bytes."""


def _evaluated(
    model: Any, inputs: Mapping[str, Any], dims: Mapping[str, int]
) -> tuple[dict[str, Any], Types, Mapping[int, int | None]]:
    """The inputs, the types of values by name, and the FLOPs of nodes by position, None for those on the host."""
    feeds = feeds_of(model, inputs, dims, abstract=True)
    marked = mark(model.graph)
    # Tracing needs no devices; a model with pipeline stages would be several programs.
    placement = None if isinstance(model.placement, Staged) else model.placement
    options = {"max_size": model.spec.max_size, "placement": placement}

    def in_one_program(fixed: Mapping[str, Any]) -> tuple[dict[str, Any], Types, Counter[int]]:
        shown = with_outputs(with_graph(model, marked, fixed, **options), node_outputs(marked))
        return feeds, *traced(shown, None, {n: v for n, v in feeds.items() if n not in fixed}, marked.nodes)

    with unmarked(model.graph):
        try:
            return in_one_program({})
        except KnownValueError:
            feeds = feeds_of(model, inputs, dims)
            if model.spec.groups is None:
                return feeds, *_partitioned(model, marked, feeds)
            axes = model.spec.groups.inputs  # one program for each value of the inputs that all samples share
            return in_one_program({n: feeds[n] for n, axis in axes.items() if axis is None and n in feeds})


@contextmanager
def unmarked(graph: Graph) -> Iterator[None]:
    """Errors name the nodes of a graph that ``mark`` has renamed as the graph does."""
    try:
        yield
    except OnnxError as e:
        e.message = re.sub(f"{MARK}(\\d+)", lambda match: graph.nodes[int(match[1])].name, e.message)
        raise


def larger_sizes(
    model: Any, inputs: Mapping[str, Any], dims: Mapping[str, int], likely: Mapping[str, int]
) -> dict[str, int] | None:
    """Extents for free dimensions with which the model can be evaluated; {} if none are found.

    Those that are ``likely`` come first, then SIZES: for all inner dimensions, for one, and for the batch, which is
    rarely too small. None if the inputs leave no dimension free, or 1 is not the problem.
    """
    named = named_dims(model.inputs)
    names = [d for d in variables(v for v in named if v.name not in inputs) if d not in dims]
    if not names or _fits(model, inputs, dims):
        return None
    firsts = {v.shape[0] for v in named if v.shape}
    inner = tuple(n for n in names if n not in firsts)
    groups = dict.fromkeys([inner, *((n,) for n in inner), tuple(names), *((n,) for n in names)])
    tries = [{n: size for n, size in likely.items() if n in names}] if likely else []
    tries += [dict.fromkeys(group, size) for group in groups if group for size in SIZES]
    most = max(MOST_TRACED // sum(len(g.nodes) for g in model.graph.walk()), 1)
    return next((sizes for sizes in tries[:most] if _fits(model, inputs, {**dims, **sizes})), {})


def _fits(model: Any, inputs: Mapping[str, Any], dims: Mapping[str, int]) -> bool:
    try:
        _evaluated(model, inputs, dims)
    except Exception:  # whatever fails with these extents, they are no advice
        return False
    return True


def feeds_of(
    model: Any, inputs: Mapping[str, Any], dims: Mapping[str, int], *, abstract: bool = False
) -> dict[str, Any]:
    """Arrays for the inputs: those given, or random ones of the shape that is given or declared.

    With ``abstract``, ``jax.ShapeDtypeStruct`` in place of random numbers: they take no memory.
    """
    named = named_dims(model.inputs)
    dims = checked_dims(dims, named)
    feeds: dict[str, Any] = {}
    wanted: dict[str, ValueInfo] = {}
    for info in (*named, *model.optional.values()):
        value = inputs.get(info.name)
        if value is None and info.name in model.optional:
            continue
        feeds[info.name] = value
        if value is None:
            wanted[info.name] = info.reshaped([dims.get(d, 1) if isinstance(d, str) else d for d in info.shape or ()])
        elif isinstance(value, tuple | jax.ShapeDtypeStruct):
            shape = value if isinstance(value, tuple) else value.shape
            dtype = getattr(value, "dtype", getattr(info.type, "dtype", None))
            is_free = info.shape is None and dtype is not None
            kind = TensorType(np.dtype(dtype), shape) if is_free else info.reshaped(shape).type
            wanted[info.name] = replace(info, type=kind)
    for name, info in wanted.items():
        feeds[name], dtype = None, getattr(info.type, "dtype", None)
        if abstract and info.shape is not None and dtype not in HOST_ONLY:
            feeds[name] = jax.ShapeDtypeStruct([d if isinstance(d, int) else 1 for d in info.shape], dtype)
    return feeds | random_values((v for n, v in wanted.items() if feeds[n] is None), np.random.default_rng(0))


def traced(
    shown: Any, params: Mapping[str, Any] | None, feeds: Mapping[str, Any], nodes: Sequence[Node]
) -> tuple[Types, Counter[int]]:
    """The types of the outputs of a model by name, and the FLOPs of its nodes by position.

    Args:
        shown: a model whose nodes are named by ``MARK`` and their position.
        params: its parameters, or their shapes and dtypes; those of its own when None.
        feeds: inputs by name, or their shapes and dtypes.
        nodes: the nodes that are counted.
    """
    flops: Counter[int] = Counter()
    names = [v.name for v in shown.outputs]
    rng = jax.random.key(0) if shown.graph.draws else None
    arrays = {n: v for n, v in feeds.items() if isinstance(v, ARRAYS) and v.dtype != object}
    others = {n: v for n, v in feeds.items() if n not in arrays}
    types: Types = {}

    def call(params: Any, arrays: Mapping[str, Any]) -> None:
        results = shown.apply(params, **arrays, **others, rng=rng)
        results = (results,) if len(names) == 1 else results
        types.update(zip(names, map(_typed, results), strict=True))  # here, because a jaxpr cannot return strings

    if params is None:
        params = {n: jax.ShapeDtypeStruct(t.shape, t.dtype) for n, t in shown.types.items()}
    with compat.enable_x64():
        jaxpr = jax.make_jaxpr(call)(params, arrays)
    for owner, count in _counted(Program.of(jaxpr), None, 1):
        if owner is not None and owner < len(nodes):
            flops[owner] += count
    return types, flops


def _partitioned(model: Any, marked: Graph, feeds: Mapping[str, Any]) -> tuple[Types, dict[int, int | None]]:
    """``traced`` for a model that needs the host: types from a run, FLOPs by tracing nodes one by one."""
    shown = with_outputs(model, node_outputs(marked))
    names = [v.name for v in shown.outputs]
    values = dict(zip(names, shown.run(None, {n: v for n, v in feeds.items() if n not in model.static}), strict=True))
    scope = {**feeds, **model.static, **values}
    alone = isolated(marked, [n for n in names if n in marked.defines], scope)
    flops: dict[int, int | None] = {}
    for i, node in enumerate(alone.nodes):
        operands = {n: scope[n] for n in sorted(node.reads) if n in scope}
        graph = replace(
            alone,
            nodes=(node,),
            inputs=tuple(map(ValueInfo, operands)),
            outputs=tuple(ValueInfo(n) for n in node.outputs if n.endswith(OURS)),
            initializers={n: v for n, v in alone.initializers.items() if n in node.reads},
        )
        try:
            part, others = specialised(model, graph, operands)
            flops[i] = traced(part, None, others, alone.nodes)[1][i]
        except (KnownValueError, TypeError):  # the node needs the host; TypeError for strings
            flops[i] = None
    return {n: _typed(v) for n, v in values.items()}, flops


def _counted(program: Program, owner: int | None, times: int) -> Iterator[tuple[int | None, int]]:
    """The FLOPs of each equation, with the position of the node that it was traced from."""
    for equation in program.equations:
        node = owner if owner is not None else node_of(str(equation.scope))
        kind, inner = equation.name, equation.inner
        if kind == "cond":
            branches = [list(_counted(b, node, times)) for b in inner]
            yield from max(branches, key=lambda b: sum(n for _, n in b), default=[])
        elif inner:
            trips = times * equation.params.get("length", 1) if kind == "scan" else times
            for part in inner:
                yield from _counted(part, node, trips)
        else:
            yield node, times * _flops(equation, kind)


def mark(graph: Graph) -> Graph:
    """The graph with nodes named by position, so that a scope in which one is traced names it whatever its name."""
    return replace(graph, nodes=tuple(replace(n, name=f"{MARK}{i}") for i, n in enumerate(graph.nodes)))


def node_of(stack: str) -> int | None:
    """The position of the node in a stack of named scopes; None if it has none."""
    _, mark, rest = stack.partition(MARK)
    digits = rest.split("/")[0].rstrip(")")
    return int(digits) if mark and digits.isdecimal() else None


def _flops(equation: Equation, kind: str) -> int:
    size = sum(_size(v.aval) for v in equation.outputs)
    if kind == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        return 2 * size * math.prod(equation.inputs[0].aval.shape[a] for a in contracted)
    if kind == "conv_general_dilated":
        kernel = equation.inputs[1].aval
        return 2 * size * (_size(kernel) // max(1, kernel.shape[equation.params["dimension_numbers"].rhs_spec[0]]))
    if kind.startswith(("reduce", "arg", "scatter")):
        return max(map(_size, (v.aval for v in equation.inputs)), default=0)
    return 0 if kind in MOVES or kind.startswith("random_") else size


def _size(aval: Any) -> int:
    return math.prod(getattr(aval, "shape", ()))


def _typed(value: Any) -> tuple[str, int]:
    """The type of a value as text, and its bytes."""
    arrays = (v for v in jax.tree.leaves(value) if hasattr(v, "dtype"))
    return described(value), sum(math.prod(v.shape) * v.dtype.itemsize for v in arrays)


def _weights(model: Any, node: Node) -> set[str]:
    """The parameters that a node reads, those of its inner graphs included."""
    inside = {g.key(n) for body in node.bodies for g in body.walk() for n in g.initializers}
    return {n for n in {*node.reads, *inside} if n in model.types}
