"""Random models that mix static, traced and data-dependent nodes, strings, sequences, loops, and scopes in scopes.

Every number is a small integer, so that floats are exact and every runtime gives the same bits. A graph grows by
pieces, each of a few nodes, that take values of one kind and make values of another, whatever the extents are:

    M  float32 [rows, 4], from -8 to 8        V  int64 [n], from -8 to 8        I  int64, from 0 to 6
    R  float32 [4]        B  bool        T  strings [n]        S  a sequence of M        O  an optional M
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

Draw = Callable[[st.SearchStrategy[Any]], Any]
Tensor = helper.make_tensor_type_proto
MATRIX, INTS = Tensor(TensorProto.FLOAT, [None, 4]), Tensor(TensorProto.INT64, [None])
TYPES = {
    "M": MATRIX,
    "V": INTS,
    "I": Tensor(TensorProto.INT64, []),
    "B": Tensor(TensorProto.BOOL, []),
    "T": Tensor(TensorProto.STRING, [None]),
    "S": helper.make_sequence_type_proto(Tensor(TensorProto.FLOAT, None)),
    "R": Tensor(TensorProto.FLOAT, [4]),
    "O": helper.make_optional_type_proto(MATRIX),
}
WORDS = ("a", "b c", "", "d")
MOST_ROWS, DEEPEST = 12, 3
Pool = dict[str, list[str]]


@dataclass
class Scope:
    """A graph builder, with values by kind."""

    draw: Draw
    model: Model
    pool: Pool
    depth: int = 0
    nodes: list[onnx.NodeProto] = field(default_factory=list)

    def add(self, op: str, *inputs: str, n: int = 1, domain: str = "", **attributes: Any) -> Any:
        """Add a node; returns the name of its output, or names of several."""
        names = [self.model.fresh(op) for _ in range(n)]
        self.nodes.append(helper.make_node(op, inputs, names, name=names[0], domain=domain, **attributes))
        return names[0] if n == 1 else names

    def constant(self, value: Any, dtype: Any = np.int64) -> str:
        return str(self.add("Constant", value=numpy_helper.from_array(np.array(value, dtype))))

    def keep(self, kind: str, name: str) -> str:
        self.pool.setdefault(kind, []).append(name)
        return name

    def pick(self, kind: str) -> str:
        """A value of a kind, often the newest; created if there is none."""
        if not self.pool.get(kind):
            return self.keep(kind, self.made(kind))
        names = self.pool[kind][::-1]
        return names[self.draw(st.integers(0, min(len(names) - 1, 3)))]

    def made(self, kind: str) -> str:
        match kind:
            case "M":
                return self.constant(np.arange(8).reshape(2, 4) - 3, np.float32)
            case "V":
                return self.constant([3, 1, 1])
            case "I":
                return self.constant(self.draw(st.integers(0, 4)))
            case "B":
                return self.constant(self.draw(st.booleans()), bool)
            case "T":
                return self.constant(WORDS, object)
            case "S":
                return str(self.add("SequenceConstruct", self.pick("M"), self.pick("M")))
            case _:
                return str(self.add("Optional", self.pick("M")))

    def bounded(self, name: str) -> str:
        """A matrix with numbers clipped to the range of M."""
        return str(self.add("Clip", name, self.constant(-8, np.float32), self.constant(8, np.float32)))

    def short(self, name: str) -> str:
        """A matrix cut to at most MOST_ROWS rows."""
        return str(self.add("Slice", name, self.constant([0]), self.constant([MOST_ROWS])))

    def count(self, name: str) -> str:
        """An integer as I."""
        return str(self.add("Mod", name, self.constant(7)))

    def as_vector(self, name: str) -> str:
        return str(self.add("Reshape", name, self.constant([1])))

    def as_scalar(self, name: str) -> str:
        return str(self.add("Reshape", name, self.constant([], np.int64)))

    def row_sums(self, m: str) -> str:
        return str(self.add("ReduceSum", m, self.constant([1]), keepdims=0))

    def row_total(self, m: str) -> str:
        return str(self.add("ReduceSum", m, self.constant([0]), keepdims=0))

    def nonempty(self, m: str) -> str:
        return str(self.add("Concat", self.constant([[1, -2, 3, 0]], np.float32), self.short(m), axis=0))

    def inner(self, formals: Sequence[tuple[str, str]], pieces: int, *, captures: bool = True) -> Scope:
        """A scope inside this one, with formals (kind, name)."""
        pool = {k: list(v) for k, v in self.pool.items()} if captures else {}
        scope = Scope(self.draw, self.model, pool, self.depth + 1)
        for kind, name in formals:
            scope.keep(kind, name)
        scope.grow(pieces)
        return scope

    def graph(self, formals: Sequence[tuple[str, str]], results: Sequence[tuple[str, str]]) -> onnx.GraphProto:
        """This scope as a graph attribute; its outputs have new names."""
        outputs = [(kind, self.add("Identity", name)) for kind, name in results]
        ends = [[helper.make_value_info(n, TYPES[k]) for k, n in names] for names in (formals, outputs)]
        return helper.make_graph(self.nodes, self.model.fresh("graph"), *ends)

    def grow(self, pieces: int) -> None:
        nested = NESTED if self.depth < DEEPEST else []
        for _ in range(pieces):
            piece = self.draw(st.sampled_from([*PIECES, *PIECES, *nested, *nested, *nested]))
            piece(self)


@dataclass
class Model:
    """State shared by all scopes of a model."""

    functions: list[onnx.FunctionProto] = field(default_factory=list)
    beyond: bool = False
    """Whether it has features that the reference evaluator gets wrong: nested scopes, functions, optionals."""
    names: int = 0

    def fresh(self, stem: str) -> str:
        self.names += 1
        return f"{stem}_{self.names}"


# ------------------------------------------------------------------------------------------- traced pieces


def product(s: Scope) -> None:
    own = not s.pool.get("W") or s.draw(st.booleans())
    w = s.constant(np.eye(4)[::-1] + np.eye(4, k=2), np.float32) if own else s.pick("W")
    s.keep("M", s.bounded(s.add("MatMul", s.pick("M"), w)))


def elementwise(s: Scope) -> None:
    s.keep("M", s.add(s.draw(st.sampled_from(["Relu", "Neg", "Abs", "Identity"])), s.pick("M")))


def sum_of_rows(s: Scope) -> None:
    total = s.add("ReduceSum", s.pick("M"), s.constant([0]), keepdims=1)
    s.keep("M", s.bounded(s.add("Add", s.pick("M"), s.bounded(total))))


def joined(s: Scope) -> None:
    s.keep("M", s.short(s.add("Concat", s.pick("M"), s.pick("M"), axis=0)))


def question(s: Scope) -> None:
    total = s.add("ReduceSum", s.pick("M"), keepdims=0)
    s.keep("B", s.add("Greater", total, s.constant(s.draw(st.integers(-4, 4)), np.float32)))


def compared(s: Scope) -> None:
    s.keep("B", s.add("Less", s.pick("I"), s.pick("I")))


# ------------------------------------------------------------------------------------------- static pieces


def rows(s: Scope) -> None:
    shape = s.add("Shape", s.pick("M"))
    s.keep("I", s.count(s.add("Gather", shape, s.constant(0))))


def sliced(s: Scope) -> None:
    start, end = s.as_vector(s.pick("I")), s.as_vector(s.pick("I"))
    where = s.draw(st.sampled_from([(s.constant([0]), end), (start, s.constant([2**63 - 1])), (start, end)]))
    s.keep("M", s.add("Slice", s.pick("M"), *where, s.constant([0])))


def tiled(s: Scope) -> None:
    times = s.add("Mod", s.as_vector(s.pick("I")), s.constant([3]))
    s.keep("M", s.short(s.add("Tile", s.pick("M"), s.add("Concat", times, s.constant([1]), axis=0))))


def expanded(s: Scope) -> None:
    shape = s.add("Concat", s.as_vector(s.pick("I")), s.constant([4]), axis=0)
    s.keep("M", s.add("Expand", s.constant([[1, 2, 3, 4]], np.float32), shape))


def filled(s: Scope) -> None:
    shape = s.add("Concat", s.as_vector(s.pick("I")), s.constant([4]), axis=0)
    s.keep("M", s.add("ConstantOfShape", shape, value=numpy_helper.from_array(np.float32([2]))))


def ranged(s: Scope) -> None:
    s.keep("V", s.add("Range", s.constant(0), s.pick("I"), s.constant(1)))


def reshaped(s: Scope) -> None:
    m = s.pick("M")
    shape = s.add("Concat", s.add("Mul", s.add("Shape", m, end=1), s.constant([2])), s.constant([2]), axis=0)
    halves = s.add("Reshape", m, shape)
    back = s.add("Concat", s.add("Shape", m, end=1), s.constant([4]), axis=0)
    s.keep("M", s.add("Reshape", s.add("Neg", halves), back))


def widened(s: Scope) -> None:
    v = s.add("Cast", s.pick("V"), to=TensorProto.FLOAT)
    column = s.add("Unsqueeze", v, s.constant([1]))
    s.keep("M", s.short(s.add("Expand", column, s.constant([1, 4]))))


# ------------------------------------------------------------------------------------ data-dependent pieces


def non_zero(s: Scope) -> None:
    places = s.add("NonZero", s.row_sums(s.pick("M")))
    flat = s.keep("V", s.add("Reshape", places, s.constant([-1])))
    s.keep("I", s.count(s.add("Squeeze", s.add("Shape", flat), s.constant([0]))))


def gathered(s: Scope) -> None:
    m = s.pick("M")
    places = s.add("Reshape", s.add("NonZero", s.row_sums(m)), s.constant([-1]))
    s.keep("M", s.add("Gather", m, places, axis=0))


def compressed(s: Scope) -> None:
    m = s.pick("M")
    s.keep("M", s.add("Compress", m, s.add("Greater", s.row_sums(m), s.constant(0, np.float32)), axis=0))


def unique(s: Scope) -> None:
    kind = s.draw(st.sampled_from(["M", "V"]))
    outputs = s.add("Unique", s.pick("V") if kind == "V" else s.row_sums(s.pick("M")), n=4)
    s.keep("V", s.add("Cast", outputs[s.draw(st.integers(0, 3))], to=TensorProto.INT64))


def top(s: Scope) -> None:
    x = s.row_sums(s.pick("M"))
    k = s.add("Min", s.as_vector(s.pick("I")), s.add("Shape", x))
    values, _ = s.add("TopK", x, k, n=2)
    s.keep("V", s.add("Cast", values, to=TensorProto.INT64))


def suppressed(s: Scope) -> None:
    m = s.pick("M")
    boxes = s.add("Unsqueeze", m, s.constant([0]))
    n = s.add("Squeeze", s.add("Shape", m, end=1), s.constant([0]))
    order = s.add("Cast", s.add("Range", s.constant(0), n, s.constant(1)), to=TensorProto.FLOAT)
    scores = s.add("Unsqueeze", order, s.constant([0, 1]))
    kept = s.add("NonMaxSuppression", boxes, scores, s.as_vector(s.pick("I")), s.constant([0.4567], np.float32))
    s.keep("V", s.add("Gather", kept, s.constant(2), axis=1))


def value_as_count(s: Scope) -> None:
    total = s.add("ReduceSum", s.add("Abs", s.pick(s.draw(st.sampled_from("MV")))), keepdims=0)
    s.keep("I", s.count(s.add("Cast", total, to=TensorProto.INT64)))


# ------------------------------------------------------------------------- sequences, optionals and strings


def sequence(s: Scope) -> None:
    match s.draw(st.integers(0, 3)):
        case 0:
            s.keep("S", s.add("SequenceConstruct", s.pick("M"), s.pick("M")))
        case 1:
            s.keep("S", s.add("SequenceInsert", s.pick("S"), s.pick("M")))
        case 2:
            s.keep("S", s.add("SplitToSequence", s.nonempty(s.pick("M")), s.constant(2), axis=0))
        case 3:
            s.keep("S", s.add("SequenceInsert", s.pick("S"), s.pick("M"), s.constant(0)))


def element(s: Scope) -> None:
    grown = s.add("SequenceInsert", s.pick("S"), s.pick("M"))
    at = s.add("Mod", s.pick("I"), s.add("SequenceLength", grown))
    s.keep("M", s.add("SequenceAt", grown, at))


def unsequenced(s: Scope) -> None:
    grown = s.add("SequenceInsert", s.pick("S"), s.pick("M"))
    s.keep("M", s.short(s.add("ConcatFromSequence", grown, axis=0)))


def length(s: Scope) -> None:
    s.keep("I", s.count(s.add("SequenceLength", s.pick("S"))))


def optional(s: Scope) -> None:
    s.model.beyond = True
    o = s.keep("O", s.add("Optional", s.pick("M")))
    s.keep("B", s.add("OptionalHasElement", o))
    s.keep("M", s.add("OptionalGetElement", o))


def words(s: Scope) -> None:
    match s.draw(st.integers(0, 4)):
        case 0:
            s.keep("T", s.add("Cast", s.pick("V"), to=TensorProto.STRING))
        case 1:
            s.keep("T", s.add("StringConcat", s.pick("T"), s.constant(["x"], object)))
        case 2:
            end = s.as_vector(s.pick("I"))
            s.keep("T", s.add("Slice", s.pick("T"), s.constant([0]), end))
        case 3:
            joined = s.add("Concat", s.pick("T"), s.pick("T"), axis=0)
            s.keep("T", s.add("Slice", joined, s.constant([0]), s.constant([MOST_ROWS])))
        case 4:
            s.keep("T", s.add("Gather", s.constant(WORDS, object), s.add("Mod", s.pick("V"), s.constant([4]))))


def numbers_of_words(s: Scope) -> None:
    match s.draw(st.integers(0, 3)):
        case 0:
            codes = {"keys_strings": list(WORDS), "values_int64s": [1, 2, -3, 0], "default_int64": 4}
            s.keep("V", s.add("LabelEncoder", s.pick("T"), domain="ai.onnx.ml", **codes))
        case 1:
            s.keep("V", s.add("StringSplit", s.pick("T"), n=2)[1])
        case 2:
            same = s.add("Equal", s.pick("T"), s.constant("d", object))
            s.keep("V", s.add("Cast", same, to=TensorProto.INT64))
        case 3:
            shape = s.add("Shape", s.pick("T"))
            s.keep("I", s.count(s.add("Squeeze", shape, s.constant([0]))))


# ------------------------------------------------------------------------------------------- nested pieces


def branch(s: Scope) -> None:
    """If, whose branches return the same kinds, of any extents."""
    s.model.beyond = True
    kinds = s.draw(st.sampled_from(["M", "MI", "V", "T", "B", "MB"]))
    cond = s.pick("B")
    graphs = []
    for _ in range(2):
        inside = s.inner([], s.draw(st.integers(1, 3)))
        graphs.append(inside.graph([], [(k, inside.pick(k)) for k in kinds]))
    names = s.add("If", cond, n=len(kinds), then_branch=graphs[0], else_branch=graphs[1])
    for kind, name in zip(kinds, names if len(kinds) > 1 else [names], strict=True):
        s.keep(kind, name)


def loop(s: Scope) -> None:
    """Loop in every mode: with and without trip count and condition, data-dependent or not, states and scan outputs."""
    s.model.beyond = True
    kinds = s.draw(st.sampled_from(["M", "MI", "I", "MV", "MS", "T", "MB"]))
    scans = s.draw(st.sampled_from(["", "R", "I", "RI", "B"]))
    starts = [s.pick(k) for k in kinds]
    trips = {
        "data": lambda: s.pick("I"),
        "constant": lambda: s.constant(s.draw(st.integers(0, 5))),
        "endless": lambda: s.constant(2**40),
        "none": lambda: "",
    }
    how = s.draw(st.sampled_from(list(trips)))
    conditions = ["constant", "data"] + ["none"] * (how in ("data", "constant"))
    cond = s.draw(st.sampled_from(conditions))
    M = trips[how]()
    cond = {"none": lambda: "", "constant": lambda: s.constant(True, bool), "data": lambda: s.pick("B")}[cond]()
    formals = [("I", s.model.fresh("i")), ("B", s.model.fresh("go")), *((k, s.model.fresh(k)) for k in kinds)]
    inside = s.inner(formals, s.draw(st.integers(1, 3)))
    going = inside.add("Less", formals[0][1], inside.constant(s.draw(st.integers(0, 5))))
    if s.draw(st.booleans()):
        going = inside.add("And", going, inside.pick("B"))
    if not cond:  # then the body's condition is ignored, but not by onnxruntime
        going = inside.constant(True, bool)
    results = [("B", going), *((k, inside.pick(k)) for k in kinds)]
    for kind in scans:
        value = inside.pick("M" if kind == "R" else kind)
        if kind == "R":
            value = inside.bounded(inside.row_total(value))
        results.append((kind, value))
    body = inside.graph(formals, results)
    names = s.add("Loop", M, cond, *starts, n=max(len(kinds) + len(scans), 1), body=body)
    names = names if isinstance(names, list) else [names]
    for kind, name in zip([*kinds, *(f"{k}s" for k in scans)], names, strict=True):
        match kind:
            case "Rs":
                s.keep("M", s.short(name))
            case "Is":
                s.keep("V", name)
            case "Bs":
                s.keep("V", s.add("Cast", name, to=TensorProto.INT64))
            case _:
                s.keep(kind, name)


def scan(s: Scope) -> None:
    """Scan over rows, from either end."""
    s.model.beyond = True
    formals = [("R", s.model.fresh("state")), ("R", s.model.fresh("row"))]
    inside = s.inner([], s.draw(st.integers(0, 2)))
    total = inside.bounded(inside.add("Add", formals[0][1], formals[1][1]))
    if s.draw(st.booleans()):
        total = inside.bounded(inside.add("Add", total, inside.bounded(inside.row_total(inside.pick("M")))))
    body = inside.graph(formals, [("R", total), ("R", formals[0][1])])
    directions = {f"scan_{k}_directions": [s.draw(st.integers(0, 1))] for k in ("input", "output")}
    start = s.constant([1, 0, -1, 2], np.float32)
    last, states = s.add("Scan", start, s.nonempty(s.pick("M")), n=2, body=body, num_scan_inputs=1, **directions)
    s.keep("M", s.add("Unsqueeze", last, s.constant([0])))
    s.keep("M", states)


def function(s: Scope) -> None:
    """A call of a model-local function with inner graphs."""
    s.model.beyond = True
    formals = [("M", s.model.fresh("m")), ("I", s.model.fresh("k")), ("B", s.model.fresh("b"))]
    operands = [s.pick(k) for k, _ in formals]
    inside = s.inner(formals, s.draw(st.integers(1, 3)), captures=False)
    outputs = [(k, inside.add("Identity", inside.pick(k))) for k in "MI"]
    name = s.model.fresh("Function")
    imports = [helper.make_opsetid(d, v) for d, v in OPSETS.items()]
    ends = [n for _, n in formals], [n for _, n in outputs]
    s.model.functions.append(helper.make_function("test", name, *ends, inside.nodes, imports))
    for kind, result in zip("MI", s.add(name, *operands, n=2, domain="test"), strict=True):
        s.keep(kind, result)


PIECES = [
    *(product, product, elementwise, sum_of_rows, joined, question, compared),
    *(rows, sliced, tiled, expanded, filled, ranged, reshaped, widened),
    *(non_zero, gathered, compressed, unique, top, suppressed, value_as_count),
    *(sequence, element, unsequenced, length, optional, words, numbers_of_words),
]
NESTED = [branch, branch, loop, loop, loop, scan, function]
OPSETS = {"": 21, "ai.onnx.ml": 4, "test": 1}
INPUTS = {"M": "x", "I": "k", "B": "b", "T": "t"}


@st.composite
def models(draw: Draw) -> tuple[onnx.ModelProto, bool]:
    """A random model, and whether the reference evaluator is unreliable for it."""
    shared = Model()
    scope = Scope(draw, shared, {k: [n] for k, n in INPUTS.items()} | {"W": ["w"]})
    scope.grow(draw(st.integers(2, 7)))
    made = [k for k in "MVIBTS" if scope.pool.get(k)]
    wanted = draw(st.sets(st.sampled_from(made), min_size=1, max_size=3))
    names = {k: scope.pool[k][-1] for k in made if k in wanted}
    inputs = [helper.make_value_info(n, TYPES[k]) for k, n in INPUTS.items()]
    results = [helper.make_value_info(scope.add("Identity", n), TYPES[k]) for k, n in names.items()]
    w = numpy_helper.from_array((np.eye(4, k=1) - np.eye(4, k=-1)).astype(np.float32), "w")
    graph = helper.make_graph(scope.nodes, "random", inputs, results, [w])
    imports = [helper.make_opsetid(d, v) for d, v in OPSETS.items()]
    proto = helper.make_model(graph, opset_imports=imports, functions=shared.functions, ir_version=10)
    return proto, shared.beyond


@st.composite
def feeds(draw: Draw) -> dict[str, np.ndarray]:
    """Inputs of such a model."""
    n = draw(st.integers(0, 3))
    numbers = draw(st.lists(st.integers(-3, 3), min_size=4 * n, max_size=4 * n))
    words = draw(st.lists(st.sampled_from(WORDS), max_size=3))
    return {
        "x": np.array(numbers, np.float32).reshape(n, 4),
        "k": np.array(draw(st.integers(0, 4))),
        "b": np.array(draw(st.booleans())),
        "t": np.array(words, object),
    }
