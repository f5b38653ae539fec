"""Models of one operator with edge values, extents, ranks and element types as operands.

The operands come from the tables that the suite has for every operator, and from the official cases. What is changed:
elements (NaN, infinities, signed zeros, extreme integers, repeated and out-of-range indices), extents (0 and 1), ranks
(0), and the element type, to any that the schema allows.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnxruntime.capi import onnxruntime_pybind11_state as onnxruntime_state

from onnx2jax.ops import registry
from onnx2jax.proto.types import ELEMENT_TYPES
from tests.support import official
from tests.support.drawing import extremes, is_float
from tests.support.joined import MICROSOFT
from tests.tables.operators import Row

DTYPES = {f"tensor({row.name.lower()})": row.dtype for row in ELEMENT_TYPES.values()}
TEXTS = ["", "nan", "a", "b", "Zoë", "1", "-1"]
IR_VERSION = 10
SPARED_EXTREMES = 0.8
"""Share of changes to operands of sizes and axes that leave out the extremes: shapes of 2^63 elements only raise."""


@dataclass(frozen=True)
class Edge:
    """A model without declared shapes, most of a single node, its inputs, and what was changed in them."""

    name: str
    proto: onnx.ModelProto
    feeds: Mapping[str, Any]
    changes: tuple[str, ...] = ()

    @functools.cached_property
    def node(self) -> onnx.NodeProto:
        return self.proto.graph.node[0]

    @functools.cached_property
    def opset(self) -> int:
        return next((o.version for o in self.proto.opset_import if o.domain == self.node.domain), 1)

    @functools.cached_property
    def operands(self) -> dict[str, str]:
        """The type parameter of each input of a single node that is an operand, by name; "" without a schema."""
        nodes, schema = self.proto.graph.node, _schema(self.node.domain, self.node.op_type, self.opset)
        if len(nodes) != 1 or schema is None or not schema.inputs:
            return dict.fromkeys(self.feeds, "")
        formals = [getattr(f, "type_str", None) or f.typeStr for f in schema.inputs]  # onnx's, onnxruntime's
        names = {n: formals[min(p, len(formals) - 1)] for p, n in enumerate(self.node.input) if n}
        return {n: names.get(n, "") for n in self.feeds}

    @functools.cached_property
    def sizes(self) -> set[str]:
        """Inputs whose values are sizes, axes and the like, which have to be known to compile."""
        operator = registry.resolve(self.node.domain, self.node.op_type, self.opset)
        if operator is None or len(self.proto.graph.node) != 1:
            return set()
        return {n for p, n in enumerate(self.node.input) if operator.parameter(p) in operator.static}

    def types(self, parameter: str) -> list[np.dtype]:
        """Element types that the schema allows for a type parameter."""
        schema = _schema(self.node.domain, self.node.op_type, self.opset)
        assert schema is not None
        allowed = next((c.allowed_type_strs for c in schema.type_constraints if c.type_param_str == parameter), [])
        # stash_type computes float64 in float32, whose roundings differ between the lanes.
        spared = {"tensor(double)"} if "stash_type" in schema.attributes else set()
        return [DTYPES[t] for t in sorted({*allowed} - spared) if t in DTYPES and DTYPES[t] != object]


@functools.cache
def _microsoft() -> dict[str, Any]:
    return {s.name: s for s in onnxruntime_state.get_all_operator_schema() if s.domain == MICROSOFT}


@functools.cache
def _schema(domain: str, name: str, opset: int) -> Any:
    if domain == MICROSOFT:
        return _microsoft().get(name)
    try:
        return onnx.defs.get_schema(name, opset, domain)
    except onnx.defs.SchemaError:
        return None


# ------------------------------------------------------------------------------------------------------- sources


def of_row(row: Row, opset: int) -> Edge:
    """A row of the table of operators at an opset."""
    return _single(row.name, row.inputs, row.outputs, row.attributes, row.domain, opset)


def of_microsoft(name: str, inputs: Sequence[Any], outputs: int, attributes: Mapping[str, Any]) -> Edge:
    """A row of the tables of com.microsoft."""
    return _single(name, inputs, outputs, attributes, MICROSOFT, 1)


def _single(
    name: str, inputs: Sequence[Any], outputs: int, attributes: Mapping[str, Any], domain: str, opset: int
) -> Edge:
    names = [f"x{p}" if x is not None else "" for p, x in enumerate(inputs)]
    feeds = {n: np.asarray(x) for n, x in zip(names, inputs, strict=True) if n}
    tensors = {k: numpy_helper.from_array(v) if isinstance(v, np.ndarray) else v for k, v in attributes.items()}
    node = helper.make_node(name, names, [f"y{p}" for p in range(outputs)], name, domain=domain, **tensors)
    graph = helper.make_graph([node], "edge", [], [onnx.ValueInfoProto(name=n) for n in node.output])
    versions = {"": 17, domain: opset}
    imports = [helper.make_opsetid(d, v) for d, v in versions.items()]
    proto = helper.make_model(graph, opset_imports=imports, ir_version=IR_VERSION)
    return _declared(Edge(f"{domain or 'ai.onnx'}.{name}-{opset}", proto, feeds))


def of_case(case: official.Case) -> Edge:
    """An official case."""
    message, [(inputs, _), *_] = official.load(case)
    proto = onnx.ModelProto()
    proto.CopyFrom(message)
    for end in (*proto.graph.input, *proto.graph.output):
        if end.type.HasField("tensor_type"):
            end.type.tensor_type.ClearField("shape")
    feeds = [np.asarray(x) if isinstance(x, np.generic) else x for x in inputs]
    return Edge(case.name, proto, dict(zip([v.name for v in proto.graph.input], feeds, strict=True)))


def _declared(edge: Edge) -> Edge:
    """The edge whose model declares its inputs' present types, without shapes, and no types of its outputs."""
    proto = onnx.ModelProto()
    proto.CopyFrom(edge.proto)
    declared = {v.name: v for v in edge.proto.graph.input}
    del proto.graph.input[:]
    for name, x in edge.feeds.items():
        if isinstance(x, np.ndarray):
            code = helper.np_dtype_to_tensor_dtype(x.dtype)
            proto.graph.input.append(helper.make_tensor_value_info(name, code, None))
        else:
            proto.graph.input.append(declared[name])
    for out in proto.graph.output:
        if out.type.WhichOneof("value") in (None, "tensor_type"):
            out.ClearField("type")
    return replace(edge, proto=proto)


def sources(rows: Iterable[Row], microsoft: Iterable[tuple[Any, ...]], cases: Iterable[Any]) -> Iterator[Edge]:
    """Every row at every opset that changes its schema, every row of com.microsoft, and every official case."""
    for row in rows:
        yield from (of_row(row, opset) for opset in row.opsets())
    yield from (of_microsoft(*row) for row in microsoft)
    yield from map(of_case, cases)


# ------------------------------------------------------------------------------------------------------- changes


def changed(edge: Edge, rng: random.Random) -> Edge:
    """The edge with one or two changes of its operands."""
    kinds: list[Callable[[Edge, random.Random], Edge]] = [_values, _indices, _extent, _type, _scalar]
    first = rng.choices(kinds, (4, 2, 2, 3, 1))[0]
    for change in dict.fromkeys([first, *([_values] if rng.random() < 0.6 else [])]):
        edge = change(edge, rng)
    return edge


def _arrays(edge: Edge) -> list[str]:
    return [n for n, x in edge.feeds.items() if isinstance(x, np.ndarray) and x.size]


def _with(edge: Edge, change: str, feeds: Mapping[str, Any]) -> Edge:
    return _declared(replace(edge, feeds={**edge.feeds, **feeds}, changes=(*edge.changes, change)))


def _placed(x: np.ndarray, values: Sequence[Any], rng: random.Random) -> np.ndarray:
    """A copy with one element, some or all replaced by values."""
    x = np.array(x)
    count = rng.choice([1, 1, 2, max(1, x.size // 4), x.size])
    places = rng.sample(range(x.size), min(count, x.size))
    for place in places:
        x.flat[place] = rng.choice(values)
    return x


def _values(edge: Edge, rng: random.Random) -> Edge:
    """Extreme elements in some operands."""
    feeds = {}
    for name in rng.sample(names := _arrays(edge), rng.randint(min(1, len(names)), len(names))):
        x = edge.feeds[name]
        if x.dtype == object:
            values: list[Any] = TEXTS
        elif x.dtype.kind == "c":
            parts = [np.nan, np.inf, -0.0, 1.0, 0.0]
            values = [complex(a, b) for a in parts for b in parts]
        elif name in edge.sizes and rng.random() < SPARED_EXTREMES:
            values = [v for v in (-2, -1, 0, 1, 2, 3) if v >= 0 or x.dtype.kind != "u"]
        else:
            values = _extremes(x.dtype)
        feeds[name] = _placed(x, values, rng)
    return _with(edge, f"values of {', '.join(feeds)}", feeds)


def _extremes(dtype: np.dtype) -> list[Any]:
    """Extreme integers; floats whose products and reciprocals neither overflow nor are subnormal, and special ones."""
    if not is_float(dtype) or dtype.itemsize == 1:
        return [*extremes(dtype)]
    large = 2.0 ** (ml_dtypes.finfo(dtype).maxexp // 2 - 4)
    found = [np.inf, 0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, large, 1 / large]
    return [*np.array([np.nan, *found, *(-v for v in found)]).astype(dtype)]


def _indices(edge: Edge, rng: random.Random) -> Edge:
    """Integers at, below and beyond the extents of the operands, and repeated ones."""
    extents = {n for x in edge.feeds.values() if isinstance(x, np.ndarray) for n in x.shape}
    near = sorted({v for n in extents for v in (n - 1, n, n + 1, -n, -n - 1)})
    feeds = {}
    for name in _arrays(edge):
        x = edge.feeds[name]
        if x.dtype.kind in "iu" and x.dtype.itemsize > 1:
            values = [v for v in near if v >= 0 or x.dtype.kind == "i"] if rng.random() < 0.6 else [x.flat[0]]
            feeds[name] = _placed(x, values, rng) if values else x
    return _with(edge, f"indices {', '.join(feeds)}", feeds) if feeds else _values(edge, rng)


def _extent(edge: Edge, rng: random.Random) -> Edge:
    """An extent that becomes 0 or 1 in every operand, or in one."""
    extents = sorted({n for name in _arrays(edge) for n in edge.feeds[name].shape if n > 1})
    if not extents:
        return _values(edge, rng)
    old, new = rng.choice(extents), rng.choice([0, 1])
    names = [n for n in _arrays(edge) if old in edge.feeds[n].shape]
    if rng.random() < 0.3:
        names = [rng.choice(names)]
    feeds = {}
    for name in names:
        x = edge.feeds[name]
        feeds[name] = x[tuple(slice(new) if n == old else slice(None) for n in x.shape)].copy()
    return _with(edge, f"extent {old} -> {new} of {', '.join(names)}", feeds)


def _scalar(edge: Edge, rng: random.Random) -> Edge:
    """One operand, or every one, of rank 0."""
    names = [n for n in _arrays(edge) if edge.feeds[n].ndim]
    if not names:
        return _values(edge, rng)
    return with_scalars(edge, names if rng.random() < 0.5 else [rng.choice(names)])


def with_scalars(edge: Edge, names: Sequence[str]) -> Edge:
    """The edge with the first element of some operands in their place."""
    feeds = {n: np.array(edge.feeds[n].reshape(-1)[0], edge.feeds[n].dtype) for n in names}
    return _with(edge, f"rank 0 of {', '.join(names)}", feeds)


def _type(edge: Edge, rng: random.Random) -> Edge:
    """Another element type for all operands of one type parameter."""
    parameters = {edge.operands[n] for n in _arrays(edge)} - {""}
    choices = {p: edge.types(p) for p in sorted(parameters)}
    choices = {p: types for p, types in choices.items() if len(types) > 1}
    if not choices:
        return _values(edge, rng)
    parameter = rng.choice([*choices])
    dtype = rng.choice(choices[parameter])
    names = [n for n, p in edge.operands.items() if p == parameter and isinstance(edge.feeds[n], np.ndarray)]
    if any(edge.feeds[n].dtype == object for n in names):
        return _values(edge, rng)
    with np.errstate(all="ignore"):
        feeds = {n: np.abs(edge.feeds[n]) if _unsigned(dtype) else edge.feeds[n] for n in names}
        return _with(edge, f"{parameter} is {dtype}", {n: _cast(x, dtype) for n, x in feeds.items()})


def _cast(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Through float32 between the short types, which NumPy does not convert to each other."""
    wide = x.astype(np.float32) if "V" in (x.dtype.kind, dtype.kind) and x.dtype.kind != "c" else x
    return np.asarray(wide.astype(dtype))  # NumPy makes a scalar of the absolute value of an array of rank 0


def _unsigned(dtype: np.dtype) -> bool:
    return dtype.name.startswith("uint")
