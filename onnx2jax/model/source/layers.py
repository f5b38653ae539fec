"""Repeated layers: runs of statements that differ in their parameters alone become one function, called in a loop."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile, zip_longest
from typing import Any, Final

import numpy as np

from ...ir.graph import Graph, Node
from ...ir.layers import Layers, repeated
from ...ops.registry import Operator
from ...proto.messages import unused_name
from ...proto.types import ValueInfo
from .code import CONSTANT, EXTENT, FUNCTION, MARK, PARAM, Block, Statement, mark, references

_HEAVY, _LIGHT = (Operator("onnx2jax.source", "Statement", 1, len, variadic="xs", heavy=h) for h in (True, False))


@dataclass(eq=False, kw_only=True)
class Loop(Statement):
    """``for i in range(count): carries = layer(params, i, *carries, *shared)``.

    Attributes:
        count: the number of layers.
        layer: the function, at the top of the module.
        starts: references of the carries before the first layer.
        carries: references of the carries, which each layer sets.
        arguments: the text of the other arguments.
        columns: lists of values, one for each layer, by reference.
        rows: references of lists of results, by reference; "" for one that nothing reads.
        names: tables of parameters whose names do not count up.
    """

    count: int
    layer: Block
    starts: tuple[str, ...]
    carries: tuple[str, ...]
    arguments: tuple[str, ...]
    columns: Mapping[str, tuple[str, ...]]
    rows: Mapping[str, tuple[str, ...]]

    def reads(self) -> set[str]:
        read = {*self.starts, *(r for a in self.arguments for r in references(a))} - self.columns.keys() - {INDEX}
        return read.union(*self.columns.values())


SHORT: Final = 10
"""Statements below which two layers stay as they are."""
INDEX: Final = "layer index"
"""The reference of a loop's variable."""


def rolled(
    statements: Sequence[Statement],
    results: Sequence[str],
    params: Mapping[str, Any],
    tables: dict[str, tuple[str, ...]],
) -> list[Statement]:
    """The statements with a Loop in place of each run of layers.

    Args:
        statements: of one function.
        results: references that it returns.
        params: types of parameters by key.
        tables: filled with the names of parameters that do not count up with the layers.
    """
    nodes = {_node(i, s): s for i, s in enumerate(statements)}
    inits = {PARAM + n: np.broadcast_to(np.zeros((), v.dtype), v.shape) for n, v in params.items()}
    graph = Graph("source", "", (), tuple(map(ValueInfo, results)), inits, tuple(nodes))
    new: dict[Node, Statement | None] = {**nodes}
    for run in repeated(graph):
        loop = _loop(run, nodes, tables) if run.count > 2 or len(run.template) >= SHORT else None
        if loop is not None:
            new |= dict.fromkeys(run.nodes) | {run.nodes[0]: loop}
    return [s for s in new.values() if s is not None]


def _node(i: int, statement: Statement) -> Node:
    """A statement as a node, so that runs of them are found like those of a graph's nodes."""
    reads = references(statement.text)
    functions = [r for r in reads if r.startswith(FUNCTION)]
    text = MARK.sub(lambda m: m.group(0) if m.group(1).startswith((FUNCTION, EXTENT)) else "?", statement.text)
    kind = f"{text} {len(statement.outputs)} {statement.target}"
    operands = tuple(r for r in reads if r not in functions and not r.startswith(EXTENT))
    unable = {"blocks": i} if statement.blocks else {}
    target = _HEAVY if statement.heavy else _LIGHT
    return Node(f"{i}", kind, "onnx2jax.source", 1, operands, statement.outputs, unable, target)


def _loop(run: Layers, nodes: Mapping[Node, Statement], tables: dict[str, tuple[str, ...]]) -> Loop | None:
    """The loop of a run of layers; None if a constant in a file differs between them."""
    template = [nodes[n] for n in run.template]
    names, columns = _columns(run, tables)
    if any("(" in t and "\x02" + CONSTANT in t for t in names.values()):
        return None
    before, after = ([c[i] for c in run.carries] for i in (1, 2))
    inner = {*(o for s in template for o in s.outputs), *names, *columns, *before}
    outside = dict.fromkeys(r for s in template for r in references(s.text) if r not in inner)
    shared = [r for r in outside if not r.startswith((PARAM, CONSTANT, EXTENT, FUNCTION))]
    last = [*map(mark, [*shared, *(r for r in outside if r.startswith(EXTENT))])]
    first = ["params"] if names or any(r.startswith(PARAM) for r in outside) else []
    first += [mark(INDEX)] if names else []

    def text(statement: Statement) -> str:
        return MARK.sub(lambda m: names.get(m.group(1), m.group(0)), statement.text)

    formals = ", ".join([*first, *map(mark, [*before, *columns]), *last])
    body = [replace(s, text=text(s)) for s in template]
    block = Block(FUNCTION + f"layer {run.nodes[0].name}", _hint(template, names), formals, body)
    block.result = ", ".join(map(mark, [*after, *run.rows]))
    block.docstring = f"One of {run.count} layers."
    carries = tuple(last or f"{n}\x04last" for n, last in zip(after, run.last, strict=True))
    lists = {c: f"{c}\x04list" for c in columns}
    items = [f"{mark(name)}[{mark(INDEX)}]" for name in lists.values()]
    return Loop(
        (*carries, *(n for row in run.rows.values() for n in row if n)),
        "",
        heavy=True,
        node=template[0].node,
        count=run.count,
        layer=block,
        starts=tuple(start for start, _, _ in run.carries),
        carries=carries,
        arguments=(*first, *map(mark, carries), *items, *last),
        columns={lists[c]: v for c, v in columns.items()},
        rows=dict(run.rows),
    )


def _columns(run: Layers, tables: dict[str, tuple[str, ...]]) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    """What differs between layers: (texts of parameters and stored constants, lists of values), by reference."""
    names: dict[str, str] = {}
    columns: dict[str, tuple[str, ...]] = {}
    for name, values in run.columns.items():
        if all(v.startswith(PARAM) for v in values):
            names[name] = _indexed([v.removeprefix(PARAM) for v in values], tables)
        elif any(v.startswith((PARAM, CONSTANT)) for v in values):
            names[name] = f"({', '.join(map(mark, values))})[{mark(INDEX)}]"
        else:
            columns[name] = values
    return names, columns


def _indexed(names: Sequence[str], tables: dict[str, tuple[str, ...]]) -> str:
    """The parameter of a layer: by an f-string where the names count up, and otherwise from a table."""
    texts = [_counted(column) for column in zip_longest(*(re.split(r"(\d+)", n) for n in names), fillvalue="")]
    if None not in texts and not any(c in names[0] for c in '{}"\\'):
        return f'params[f"{"".join(filter(None, texts))}"]'
    key = next((k for k, v in tables.items() if v == tuple(names)), None)
    if key is None:
        key = unused_name(re.sub(r"\W+", "_", names[0].rpartition("/")[2]).strip("_") or "weight", tables)
        tables[key] = tuple(names)
    return f'params[WEIGHTS["{key}"][{mark(INDEX)}]]'


def _counted(parts: Sequence[str]) -> str | None:
    """Parts of the names of all layers as one text of an f-string; None where they neither count up nor are equal."""
    if len({*parts}) == 1:
        return parts[0]
    if not (parts[0].isdigit() and parts[1].isdigit()):
        return None
    start, step = int(parts[0]), int(parts[1]) - int(parts[0])
    if step < 0 or any(part != str(start + step * i) for i, part in enumerate(parts)):
        return None
    count = mark(INDEX) if step == 1 else f"{step} * {mark(INDEX)}"
    return f"{{{start} + {count}}}" if start else f"{{{count}}}"


def _hint(template: Sequence[Statement], names: Mapping[str, str]) -> str:
    """A name for the layer: what its parameters, or else its nodes, have in common before the number of the layer."""
    texts = [t[9:].partition("{")[0] for t in names.values() if t.startswith('params[f"') and ".{\x02" in t]
    paths = [t.split(".") for t in texts] or [n.node.name.split("/")[:-1] for n in template if n.node is not None]
    common = takewhile(lambda parts: len({*parts}) == 1, zip(*paths, strict=False))
    words = [w.lower() for parts in common for w in re.findall(r"[A-Za-z_]*[A-Za-z]+", parts[0])]
    name = "_".join([w for w in words if w not in ("model", "module", "self", "onnx", "inner")][-2:])
    return name if len(name) > 2 else "layer"
