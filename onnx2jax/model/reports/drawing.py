"""Draws a graph as an SVG picture, for papers.

Nodes are in layers, grouped by name scopes. Branches and bodies of If, Loop and Scan are clusters inside their node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import product
from pathlib import Path
from typing import Final

from ...errors import InputValueError
from ...ir.graph import Graph, Node
from ...proto.types import TensorType, ValueInfo
from .arrays import text_of
from .outline import Item, NodeGroup, Outline, folded, in_order, known_inside, named_graphs, nodes_of
from .table import clipped

ROW: Final = 76
HEIGHT: Final = 30
LINE: Final = 20
"""Between the rows of a stack."""
GAP: Final = 28
PAD: Final = 12
"""Between a node's border and its clusters."""
MOST_BLOCKS: Final = 120
"""A picture is the most detailed with at most this many blocks."""
MOST_LETTERS: Final = 34
"""Letters of a block's title and label."""


def is_picture(path: Path) -> bool:
    """Whether the file is to be an SVG picture rather than an HTML page.

    Raises:
        InputValueError: its name ends otherwise.
    """
    if (suffix := path.suffix.lower()) not in ("", ".html", ".htm", ".svg"):
        raise InputValueError(
            f"{path} would be a {suffix} file; the graph is written as a page (.html) or a picture (.svg)"
        )
    return suffix == ".svg"


@dataclass
class Picture:
    """SVG elements, and the rectangle that they fill."""

    parts: str
    width: int
    height: int
    count: int
    """The number of blocks, those in clusters included."""


@dataclass
class Box:
    """A box of a picture: a node or a stack of them, an input, an output, or all nodes of a scope."""

    titles: list[str]
    """A row each."""
    kind: str
    """One of input, capture (a value of the graph around), output, node and scope."""
    nodes: list[Node] = field(default_factory=list)
    tooltip: list[str] = field(default_factory=list)

    types: dict[str, None] = field(default_factory=dict)
    """Types of its outputs that other blocks read."""
    clusters: list[tuple[str, Picture]] = field(default_factory=list)
    """The graphs of a node, by attribute, if they are drawn inside it."""

    @property
    def label(self) -> str:
        """The text below the box: the types of its outputs."""
        first, more = clipped(next(iter(self.types), ""), MOST_LETTERS), len(self.types) - 1
        return f"{first} and {more} more" if more > 0 else first

    @property
    def width(self) -> int:
        inner = sum(picture.width + PAD for _, picture in self.clusters)
        return max(24 + 8 * min(max(map(len, self.titles)), MOST_LETTERS), inner + PAD if inner else 0)

    @property
    def height(self) -> int:
        rows = HEIGHT + LINE * (len(self.titles) - 1)
        return rows + max((picture.height + 2 * PAD for _, picture in self.clusters), default=0)

    @property
    def space(self) -> int:
        """The width of the box with its label, and a gap."""
        return max(self.width, 7 * len(self.label)) + GAP


def svg(graph: Graph) -> str:
    """The graph as an SVG picture: the most detailed that has at most ``MOST_BLOCKS`` blocks, or else the coarsest."""
    tried: list[Picture] = []
    for bodies, depth in product((True, False), (None, *range(_deepest(graph), -1, -1))):
        tried.append(picture_of(graph, depth, bodies))
        if tried[-1].count <= MOST_BLOCKS:
            break
    picture = min(tried, key=lambda p: p.count)
    size = f"width='{picture.width}' height='{picture.height}'"
    return f"<svg xmlns='http://www.w3.org/2000/svg' {size}><style>{STYLE}</style>{picture.parts}</svg>\n"


def _deepest(graph: Graph) -> int:
    """The number of groups around the deepest item of the outline."""

    def depth(item: Item) -> int:
        return 0 if isinstance(item, int) or item.kind == "stack" else 1 + max(map(depth, item.items))

    return max(map(depth, Outline(graph, folded(graph)).items()), default=0)


def picture_of(
    graph: Graph, depth: int | None, bodies: bool, known: Collection[str] = (), outer: Mapping[str, str] | None = None
) -> Picture:
    """The picture of a graph.

    Args:
        graph: the graph.
        depth: the groups of its outline around which others are opened; repeated layers are one block. None: all.
        bodies: whether the graphs of nodes are drawn inside them.
        known: constants of the graphs around it.
        outer: ``name: type`` of the values of the graphs around it, by name; None for the main graph.
    """
    types = {**(outer or {}), **_types(graph)}
    hidden = folded(graph, known)
    inside = known_inside(graph, hidden, known)
    captures = [] if outer is None else sorted(graph.captures.difference(known))
    blocks, edges = blocks_of(graph, hidden, depth, types, captures)
    for block in blocks:
        if bodies and block.kind == "node":
            named = named_graphs(block.nodes[0])
            block.clusters = [(name, picture_of(body, depth, bodies, inside, types)) for name, body in named]
    return _laid_out(blocks, edges, types)


def _opened(items: Iterable[Item], depth: int | None) -> Iterator[Item]:
    """The items that are blocks, if groups are opened down to a depth."""
    for item in items:
        if isinstance(item, int) or item.kind == "stack" or depth == 0 or (depth is not None and item.kind == "repeat"):
            yield item
        else:
            yield from _opened(item.items, depth and depth - 1)


def blocks_of(
    graph: Graph, hidden: frozenset[int], depth: int | None, types: Mapping[str, str], captures: Sequence[str] = ()
) -> tuple[list[Box], dict[tuple[int, int], list[str]]]:
    """The blocks, and the values that pass along each edge between two of them.

    Args:
        graph: the graph.
        hidden: indices of nodes that are not drawn.
        depth: see ``picture_of``.
        types: the types of values, as text by name.
        captures: values of the graphs around it that it reads.
    """
    required = (v for v in graph.inputs if v.name not in graph.initializers)
    blocks = [Box([v.name], "input", tooltip=[str(v)]) for v in required]
    blocks += [Box([n], "capture", tooltip=[f"{types.get(n, n)}, of the graph around"]) for n in captures]
    producers = {b.titles[0]: i for i, b in enumerate(blocks)}
    for item in _opened(Outline(graph, hidden).items(), depth):
        nodes = [graph.nodes[i] for i in nodes_of(item) if i not in hidden]
        if not nodes:
            continue
        producers.update((n, len(blocks)) for node in nodes for n in node.outputs if n)
        if isinstance(item, NodeGroup) and item.kind != "stack":
            times = f" × {len(item.items)}" if item.kind == "repeat" else ""
            counts = Counter(node.op_type for node in nodes).most_common(12)
            tooltip = [f"{len(nodes)} nodes", *(f"{n} {count}" for n, count in counts)]
            blocks.append(Box([f"{item.title}{times}"], "scope", nodes, tooltip))
        else:
            tooltip = [line for node in nodes for line in _described(node, types)]
            blocks.append(Box([node.op_type for node in nodes], "node", nodes, tooltip))
    blocks += [Box([v.name], "output", tooltip=[str(v)]) for v in graph.outputs]
    edges: dict[tuple[int, int], list[str]] = {}
    for end, block in enumerate(blocks):
        reads = block.titles if block.kind == "output" else [n for node in block.nodes for n in node.reads]
        for name in dict.fromkeys(reads):
            start = producers.get(name)
            if start is not None and start != end:
                edges.setdefault((start, end), []).append(name)
    return blocks, edges


def _described(node: Node, types: Mapping[str, str]) -> Iterator[str]:
    """The lines of a node's tooltip."""
    yield str(node)
    yield from (f"{n} = {clipped(text_of(v), 80)}" for n, v in node.attributes.items())
    yield from (f"reads {types.get(n, n)}" for n in node.reads)
    yield from (f"writes {types.get(n, n)}" for n in node.outputs if n)


def _types(graph: Graph) -> dict[str, str]:
    """``name: type`` of the values with a known type, by name."""
    constants = (ValueInfo(n, TensorType(v.dtype, v.shape)) for n, v in graph.initializers.items())
    every = (*graph.value_info.values(), *graph.inputs, *graph.outputs, *constants)
    return {v.name: str(v) for v in every if v.type is not None}


def _laid_out(
    blocks: Sequence[Box], edges: Mapping[tuple[int, int], Sequence[str]], types: Mapping[str, str]
) -> Picture:
    """The picture of blocks in layers, with their output types below them, and edges as curves."""
    for (start, _), names in edges.items():
        blocks[start].types |= {types[n].removeprefix(f"{n}: "): None for n in names if n in types}
    layers = layered(len(blocks), edges)
    wide = [sum(blocks[b].space for b in layer) for layer in layers]
    middle = max(wide, default=0) / 2 + GAP
    x, y, top = [0.0] * len(blocks), [0] * len(blocks), GAP
    for layer, width in zip(layers, wide, strict=True):
        left = middle - width / 2
        for b in layer:
            x[b], y[b] = left + blocks[b].space / 2, top
            left += blocks[b].space
        top += max(blocks[b].height for b in layer) + ROW - HEIGHT
    parts = []
    for (start, end), names in edges.items():
        up = y[end] <= y[start]
        a, b = (y[start], y[end] + blocks[end].height) if up else (y[start] + blocks[start].height, y[end])
        path = f"M{x[start]:.0f} {a}C{x[start]:.0f} {a + ROW // 2} {x[end]:.0f} {b - ROW // 2} {x[end]:.0f} {b}"
        tooltip = escape("\n".join(types.get(n, n) for n in names))
        parts.append(f"<g class='edge{' up' * up}'><title>{tooltip}</title><path d='{path}'/></g>")
    for i, block in enumerate(blocks):
        parts.append(_drawn(block, x[i] - block.width / 2, y[i]))
    count = len(blocks) + sum(picture.count for block in blocks for _, picture in block.clusters)
    return Picture("".join(parts), round(2 * middle), top, count)


def _drawn(block: Box, left: float, top: int) -> str:
    rows, middle = "", f"{block.width / 2:.0f}"
    for k, title in enumerate(block.titles):
        shown = title if len(title) <= MOST_LETTERS else f"…{title[1 - MOST_LETTERS :]}"
        rows += f"<text x='{middle}' y='{HEIGHT * 2 // 3 + k * LINE}'>{escape(shown)}</text>"
    label = f"<text class='type' x='{middle}' y='{block.height + 12}'>{escape(block.label)}</text>"
    hidden = any(node.graphs for node in block.nodes) and not block.clusters
    state = " open" if block.clusters else " closed" if hidden and block.kind == "node" else ""
    return (
        f"<g class='block {block.kind}{state}' transform='translate({left:.0f},{top})'>"
        f"<title>{escape(chr(10).join(block.tooltip))}</title>"
        f"<rect width='{block.width}' height='{block.height}' rx='5'/>"
        f"{rows}{label}{_clusters(block)}</g>"
    )


def _clusters(block: Box) -> str:
    """The graphs of a node beside each other, each with a border and the attribute's name."""
    parts, left = [], (block.width - sum(picture.width + PAD for _, picture in block.clusters) + PAD) // 2
    for name, picture in block.clusters:
        parts.append(
            f"<g class='cluster' transform='translate({left},{HEIGHT + PAD // 2})'>"
            f"<rect width='{picture.width}' height='{picture.height}' rx='5'/>"
            f"<text x='8' y='16'>{escape(name)}</text>{picture.parts}</g>"
        )
        left += picture.width + PAD
    return "".join(parts)


STYLE: Final = """
text{text-anchor:middle;font:13px ui-monospace,monospace;fill:#222}
.edge path{fill:none;stroke:#99a}
.edge.up path{stroke-dasharray:4}
.type{font-size:11px;fill:#556;stroke:#fff;stroke-width:4px;paint-order:stroke}
.block>rect{fill:#e8eefc;stroke:#5b7bc4}
.input>rect,.output>rect{fill:#e6f5e6;stroke:#4c9a4c}
.capture>rect{fill:#fff;stroke:#5b7bc4;stroke-dasharray:4}
.scope>rect{fill:#fdf3dc;stroke:#c79a2e;stroke-width:2}
.closed>rect{stroke-width:3}
.cluster>rect{fill:#fff;stroke:#99a}
.cluster>text{text-anchor:start;fill:#556}
"""


SWEEPS: Final = 6


def layered(count: int, edges: Collection[tuple[int, int]]) -> list[list[int]]:
    """Blocks 0 to count - 1 in layers, from left to right.

    Edges point down, except those that close a cycle, which blocks of several nodes can form.

    >>> layered(4, [(0, 1), (0, 2), (1, 3), (2, 3), (0, 3)])
    [[0], [1, 2], [3]]
    >>> layered(2, [(0, 1), (1, 0)])
    [[0], [1]]
    """
    rank = {block: i for i, block in enumerate(in_order(count, edges))}
    depth = [0] * count  # the length of the longest path to each block
    for start, end in sorted(edges, key=lambda edge: rank[edge[0]]):
        if rank[start] < rank[end]:
            depth[end] = max(depth[end], depth[start] + 1)
    layers: list[list[int]] = [[] for _ in range(max(depth, default=-1) + 1)]
    above: list[list[int]] = [[] for _ in range(count)]
    below: list[list[int]] = [[] for _ in range(count)]
    for block, row in enumerate(depth):
        layers[row].append(block)
    for start, end in edges:
        if depth[start] < depth[end]:
            below[start].append(end)
            above[end].append(start)
    place = [0.0] * count
    for layer in layers:
        _put(layer, place)
    for sweep in range(SWEEPS):
        near = below if sweep % 2 else above
        for layer in reversed(layers) if sweep % 2 else layers:
            weight = {b: sum(place[n] for n in near[b]) / len(near[b]) if near[b] else place[b] for b in layer}
            layer.sort(key=weight.__getitem__)
            _put(layer, place)
    return layers


def _put(layer: Sequence[int], place: list[float]) -> None:
    """Set the blocks' horizontal places, centred at 0."""
    for i, block in enumerate(layer):
        place[block] = i - (len(layer) - 1) / 2
