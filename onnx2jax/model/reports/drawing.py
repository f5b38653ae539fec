"""Draws the main graph as one HTML page with SVG, which needs no network: nodes in layers, grouped by name scopes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, Final

import numpy as np

from ...ir.graph import Graph, Node
from ...proto.types import TensorType
from .layout import layered

ROW: Final = 76
HEIGHT: Final = 30
GAP: Final = 28
MOST_BLOCKS: Final = 120
"""The first view is the deepest with at most this many blocks."""
MOST_LETTERS: Final = 34
"""Letters of a block's title and label."""


@dataclass
class Block:
    """A box of a picture: a node, an input, an output, or all nodes of a scope."""

    title: str
    kind: str
    """One of input, output, node and scope."""
    scope: str = ""
    nodes: list[Node] = field(default_factory=list)
    tooltip: list[str] = field(default_factory=list)

    types: dict[str, None] = field(default_factory=dict)
    """Types of its outputs that other blocks read."""

    @property
    def label(self) -> str:
        """The text below the box: the types of its outputs."""
        first, more = next(iter(self.types), ""), len(self.types) - 1
        first = first if len(first) <= MOST_LETTERS else f"{first[: MOST_LETTERS - 1]}…"
        return f"{first} and {more} more" if more > 0 else first

    @property
    def width(self) -> int:
        return 24 + 8 * min(len(self.title), MOST_LETTERS)

    @property
    def space(self) -> int:
        """The width of the box with its label, and a gap."""
        return max(self.width, 7 * len(self.label)) + GAP


def page(graph: Graph, title: str) -> str:
    """The graph as an HTML page: a picture for each depth of name scopes, one of them visible."""
    types = _types(graph)
    deepest = max((len(scope_of(n)) for n in graph.nodes), default=0)
    pictures: list[tuple[str, int, str]] = []
    seen: set[int] = set()
    for depth in (*range(1, deepest + 1), None):
        blocks, edges = blocks_of(graph, depth, types)
        if len(blocks) not in seen:  # else this depth opens no further scope
            seen.add(len(blocks))
            name = "all nodes" if depth is None else f"{depth}"
            pictures.append((name, len(blocks), svg(blocks, edges, types)))
    shown = max((i for i, (_, count, _) in enumerate(pictures) if count <= MOST_BLOCKS), default=0)
    views = "".join(
        f'<div class="view" {"" if i == shown else "hidden"}>{picture}</div>'
        for i, (_, _, picture) in enumerate(pictures)
    )
    choices = "".join(
        f"<option value='{i}' {'selected' if i == shown else ''}>{name} ({count})</option>"
        for i, (name, count, _) in enumerate(pictures)
    )
    head = f"<b>{escape(title)}</b> <label>depth of scopes <select id='depth'>{choices}</select></label>"
    search = "<input id='search' placeholder='find operators, names' autocomplete='off'> <span id='found'></span>"
    return (
        f"<!DOCTYPE html><html><head><meta charset='utf-8'><title>{escape(title)}</title><style>{STYLE}</style></head>"
        f"<body><header>{head} {search}</header>{views}<script>{SCRIPT}</script></body></html>"
    )


def scope_of(node: Node) -> tuple[str, ...]:
    """The name scope of a node: the parts of its name before the last.

    >>> scope_of(Node("/encoder/layer.0/MatMul", "MatMul", "", 1, (), (), {}, None))
    ('encoder', 'layer.0')
    """
    return tuple(filter(None, re.split("/" if "/" in node.name else r"\.", node.name)))[:-1]


def blocks_of(
    graph: Graph, depth: int | None, types: Mapping[str, str]
) -> tuple[list[Block], dict[tuple[int, int], list[str]]]:
    """The blocks, and the values that pass along each edge between two of them.

    Args:
        graph: the graph.
        depth: the depth of scopes whose nodes, and those of deeper scopes, are one block; None for a block a node.
        types: the types of values, as text by name.
    """
    blocks = [
        Block(v.name, "input", tooltip=[str(v)]) for v in graph.inputs if v.name not in graph.initializers
    ]  # others have defaults
    producers = {b.title: i for i, b in enumerate(blocks)}
    scopes: dict[tuple[str, ...], int] = {}
    homes: list[int] = []
    for node in graph.nodes:
        scope = scope_of(node)
        grouped = depth is not None and len(scope) >= depth
        home = scopes.setdefault(scope[:depth], len(blocks)) if grouped else len(blocks)
        if home == len(blocks):
            kind, name = ("scope", "/".join(scope[:depth])) if grouped else ("node", "/".join(scope))
            blocks.append(Block(name if grouped else node.op_type, kind, name))
        blocks[home].nodes.append(node)
        homes.append(home)
        producers.update((n, home) for n in node.outputs if n)
    for block in blocks:
        _describe(block, types)
    edges: dict[tuple[int, int], list[str]] = {}

    def join(name: str, end: int) -> None:
        start = producers.get(name)
        if start is not None and start != end and name not in edges.setdefault((start, end), []):
            edges[start, end].append(name)

    for node, home in zip(graph.nodes, homes, strict=True):
        for name in node.reads:
            join(name, home)
    for value in graph.outputs:
        blocks.append(Block(value.name, "output", tooltip=[str(value)]))
        join(value.name, len(blocks) - 1)
    return blocks, edges


def _describe(block: Block, types: Mapping[str, str]) -> None:
    """Set a block's tooltip; a scope of one node becomes the node."""
    if block.kind == "scope":
        counts = Counter(n.op_type for n in block.nodes)
        block.tooltip = [f"{len(block.nodes)} nodes", *(f"{n} {count}" for n, count in counts.most_common(12))]
        if len(block.nodes) == 1:
            block.title, block.kind = block.nodes[0].op_type, "node"
    for node in block.nodes[: 1 if len(block.nodes) == 1 else 0]:
        block.tooltip = [str(node), *(f"{n} = {_short(v)}" for n, v in node.attributes.items())]
        block.tooltip += [f"reads {types.get(n, n)}" for n in node.reads]
        block.tooltip += [f"writes {types.get(n, n)}" for n in node.outputs if n]


def _short(value: Any) -> str:
    if isinstance(value, Graph):
        return f"graph of {len(value.nodes)} nodes"
    text = f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) and value.size > 8 else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _types(graph: Graph) -> dict[str, str]:
    """``name: type`` of the values with a known type, by name."""
    known = {**graph.value_info, **{v.name: v for v in (*graph.inputs, *graph.outputs)}}
    found = {n: f"{n}: {v.type}" for n, v in known.items() if v.type is not None}
    return found | {n: f"{n}: {TensorType(v.dtype, v.shape)}" for n, v in graph.initializers.items()}


def svg(blocks: Sequence[Block], edges: Mapping[tuple[int, int], Sequence[str]], types: Mapping[str, str]) -> str:
    """The picture: blocks in layers with their output types below them, and edges as curves."""
    for (start, _), names in edges.items():
        blocks[start].types |= {types[n].removeprefix(f"{n}: "): None for n in names if n in types}
    layers = layered(len(blocks), edges)
    wide = [sum(blocks[b].space for b in layer) for layer in layers]
    middle = max(wide, default=0) / 2 + GAP
    x, y = [0.0] * len(blocks), [0] * len(blocks)
    for row, layer in enumerate(layers):
        left = middle - wide[row] / 2
        for b in layer:
            x[b], y[b] = left + blocks[b].space / 2, GAP + row * ROW
            left += blocks[b].space
    parts = []
    for (start, end), names in edges.items():
        up = y[end] <= y[start]
        a, b = (y[start], y[end] + HEIGHT) if up else (y[start] + HEIGHT, y[end])
        path = f"M{x[start]:.0f} {a}C{x[start]:.0f} {a + ROW // 2} {x[end]:.0f} {b - ROW // 2} {x[end]:.0f} {b}"
        tooltip = escape("\n".join(types.get(n, n) for n in names))
        parts.append(f"<g class='edge{' up' * up}'><title>{tooltip}</title><path d='{path}'/></g>")
    for i, block in enumerate(blocks):
        parts.append(_drawn(block, x[i] - block.width / 2, y[i]))
    size = f"width='{2 * middle:.0f}' height='{len(layers) * ROW + GAP}'"
    return f"<svg xmlns='http://www.w3.org/2000/svg' {size}>{''.join(parts)}</svg>"


def _drawn(block: Block, left: float, top: int) -> str:
    title = block.title if len(block.title) <= MOST_LETTERS else f"…{block.title[1 - MOST_LETTERS :]}"
    label = f"<text class='type' x='{block.width / 2:.0f}' y='{HEIGHT + 12}'>{escape(block.label)}</text>"
    words = " ".join([block.title, *(f"{n.op_type} {n.name} {' '.join(n.outputs)}" for n in block.nodes)]).lower()
    return (
        f'<g class=\'block {block.kind}\' data-words="{escape(words)}" data-scope="{escape(block.scope)}" '
        f"transform='translate({left:.0f},{top})'><title>{escape(chr(10).join(block.tooltip))}</title>"
        f"<rect width='{block.width}' height='{HEIGHT}' rx='5'/>"
        f"<text x='{block.width / 2:.0f}' y='{HEIGHT * 2 // 3}'>{escape(title)}</text>{label}</g>"
    )


STYLE: Final = """
body{margin:0;font:13px system-ui,sans-serif;color:#222;background:#fff}
header{position:sticky;top:0;left:0;padding:8px 12px;background:#f4f4f6;border-bottom:1px solid #ccc;z-index:1}
header>*{margin-right:14px}
.view{overflow:auto;height:calc(100vh - 50px)}
svg{display:block;margin:auto}
text{text-anchor:middle;font:13px ui-monospace,monospace}
.edge path{fill:none;stroke:#99a}
.edge.up path{stroke-dasharray:4}
.type{font-size:11px;fill:#556;stroke:#fff;stroke-width:4px;paint-order:stroke}
.edge:hover path{stroke:#000;stroke-width:2}
.block rect{fill:#e8eefc;stroke:#5b7bc4}
.input rect,.output rect{fill:#e6f5e6;stroke:#4c9a4c}
.scope rect{fill:#fdf3dc;stroke:#c79a2e;stroke-width:2}
.scope{cursor:pointer}
.match rect{fill:#ffd54d;stroke:#b00;stroke-width:2}
"""
SCRIPT: Final = """
const views = [...document.querySelectorAll('.view')], depth = document.getElementById('depth')
const search = document.getElementById('search'), found = document.getElementById('found')
let matches = [], at = -1
const shown = () => views[depth.value]
const go = block => block && block.scrollIntoView({block: 'center', inline: 'center'})
function find() {
  const text = search.value.trim().toLowerCase()
  for (const block of document.querySelectorAll('.match')) block.classList.remove('match')
  matches = text ? [...shown().querySelectorAll('.block')].filter(b => b.dataset.words.includes(text)) : []
  for (const block of matches) block.classList.add('match')
  found.textContent = text ? matches.length + ' found' : ''
  at = -1
}
function choose() {
  views.forEach((view, i) => view.hidden = i != depth.value)
  find()
}
depth.addEventListener('change', choose)
search.addEventListener('input', find)
search.addEventListener('keydown', e => {
  if (e.key == 'Enter' && matches.length) go(matches[at = (at + 1) % matches.length])
})
document.addEventListener('click', e => {
  const scope = e.target.closest('.scope')
  if (!scope || depth.value == views.length - 1) return
  depth.value = +depth.value + 1
  choose()
  go([...shown().querySelectorAll('.block')].find(b => (b.dataset.scope + '/').startsWith(scope.dataset.scope + '/')))
})
go(shown().querySelector('.block'))
"""
