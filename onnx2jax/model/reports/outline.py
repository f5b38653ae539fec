"""The outline of a graph: its nodes in a tree of name scopes, repeated layers, stacks and parts, for a first view.

Constant and shape arithmetic is folded: those nodes belong to the nodes that read their results.
"""

from __future__ import annotations

import ast
import heapq
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise, takewhile
from typing import Final

from ...ir.graph import Graph, Node, descendants
from ...ir.layers import FEWEST, repeated

MOST_ROWS: Final = 8
"""Nodes of a stack."""
MOST_BLOCKS: Final = 30
"""A scope with more blocks is divided into parts."""
ALIKE: Final = 2
"""More inputs, or outputs, of names that differ only in numbers are one block."""

DEEPEST: Final = 24
"""Nested scopes; deeper ones are one."""

Path = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class NodeGroup:
    """Several nodes that are one block until it is opened.

    Attributes:
        kind: "scope"; "repeat", whose items are its layers; "layer"; "part", of consecutive blocks; or "stack": a node
            and those that only its results pass through, drawn as rows of one block.
        title: its name.
        items: indices of nodes, and groups, in graph order.
    """

    kind: str
    title: str
    items: tuple[int | NodeGroup, ...]

    @cached_property
    def nodes(self) -> tuple[int, ...]:
        """Indices of all nodes inside."""
        return tuple(i for item in self.items for i in nodes_of(item))


Item = int | NodeGroup


def nodes_of(item: Item) -> tuple[int, ...]:
    """Indices of the nodes of an item."""
    return (item,) if isinstance(item, int) else item.nodes


def folded(graph: Graph, known: Collection[str] = ()) -> frozenset[int]:
    """Indices of the nodes that compute constants, or values that shapes determine, for other nodes.

    Args:
        graph: the graph.
        known: values of the graphs around that are constants.
    """
    outputs = {v.name for v in graph.outputs}
    values, indices = {*known, *graph.initializers}, set()
    for i, node in enumerate(graph.nodes):
        is_plain = not node.bodies and "rng" not in node.operator.fixtures
        if is_plain and (node.op_type in ("Shape", "Size") or values.issuperset(node.reads)):
            values.update(node.outputs)
            if outputs.isdisjoint(node.outputs):
                indices.add(i)
    return frozenset(indices) if len(indices) < len(graph.nodes) else frozenset()


def scope_of(node: Node) -> Path:
    """The name scope of a node: as torch's exporter notes it, or the parts of its name before the last.

    >>> scope_of(Node("/encoder/layer.0/MatMul", "MatMul", "", 1, (), (), {}, None))
    ('encoder', 'layer.0')
    """
    if noted := node.metadata.get("pkg.torch.onnx.name_scopes"):
        try:
            names = [str(n) for n in ast.literal_eval(noted) if n]
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            names = []
        if len(names) > 1:  # each is a prefix of the next, the last is the node's own
            return (names[0], *(n.removeprefix(f"{a}.") for a, n in pairwise(names[:-1])))[:DEEPEST]
    path = tuple(filter(None, re.split("/" if "/" in node.name else r"\.", node.name)))[:-1]
    return path[: -1 if path[-1:] == (node.op_type,) else None][:DEEPEST]  # p2o.Conv.3 is node 3 of its operator


def scopes(graph: Graph) -> list[Path]:
    """The scope of each node; by the names of its weights where all names of nodes have the same."""
    paths = [scope_of(node) for node in graph.nodes]
    if len({*paths}) > 1:
        return paths
    heavy = [i for i, node in enumerate(graph.nodes) if node.operator.heavy]
    of_weights = {}
    for i in heavy:
        names = (n for n in graph.nodes[i].inputs if n in graph.initializers and "." in n.strip("."))
        if name := next(names, ""):
            of_weights[i] = tuple(filter(None, re.split(r"[./]", name)))[:-2]
    if 2 * len(of_weights) < len(heavy) or len({*of_weights.values()}) < 2:
        return paths
    paths = []
    of_values: dict[str, Path] = {}
    for i, node in enumerate(graph.nodes):
        paths.append(of_weights.get(i, _common([of_values[n] for n in node.inputs if n in of_values])))
        of_values |= {n: paths[i] for n in node.outputs if n}
    return paths


def _common(paths: Sequence[Path]) -> Path:
    """The longest common prefix."""
    same = takewhile(lambda parts: len({*parts}) == 1, zip(*paths, strict=False))
    return tuple(parts[0] for parts in same)


class Outline:
    """The outline of one graph."""

    def __init__(self, graph: Graph, hidden: frozenset[int]) -> None:
        """``hidden``: the nodes that are folded."""
        self.graph, self.hidden = graph, hidden
        self.paths = scopes(graph)
        self.outputs = {v.name for v in graph.outputs}
        self.readers: dict[str, set[int]] = defaultdict(set)
        for i, node in enumerate(graph.nodes):
            for name in node.reads:
                self.readers[name].add(i)
        self.drawn = {v.name for v in graph.inputs if v.name not in graph.initializers} | graph.captures
        self.drawn |= {n for i, node in enumerate(graph.nodes) if i not in hidden for n in node.outputs if n}

    def items(self) -> tuple[Item, ...]:
        """The tree."""
        return self._level(range(len(self.graph.nodes)), 0)

    def _level(self, indices: Sequence[int], depth: int) -> tuple[Item, ...]:
        """The items of some nodes, whose scopes agree up to a depth."""
        inside: dict[str, list[int]] = defaultdict(list)
        for i in indices:
            if len(self.paths[i]) > depth:
                inside[self.paths[i][depth]].append(i)
        direct = [i for i in indices if len(self.paths[i]) <= depth]
        scopes = [self._scope(name, members, depth + 1) for name, members in inside.items()]
        return self._parts(self._flattened([*self._repeated_scopes(scopes), *self._flat(direct)]))

    def _scope(self, name: str, indices: Sequence[int], depth: int) -> NodeGroup:
        """A scope; with the only scope inside it, it is one."""
        items = self._level(indices, depth)
        inner = self._only(items)
        if isinstance(inner, NodeGroup) and inner.kind == "scope":
            rest = (item for item in items if item is not inner)
            return NodeGroup("scope", f"{name}/{inner.title}", (*rest, *inner.items))
        return NodeGroup("scope", name, items)

    def _only(self, items: Sequence[Item]) -> Item | None:
        """The only item that is drawn; None if there are several, or none."""
        drawn = [item for item in items if item not in self.hidden]
        return drawn[0] if len(drawn) == 1 else None

    def _flattened(self, items: Sequence[Item]) -> list[Item]:
        """The items in graph order, scopes of one node, or one stack, as that."""
        flat: list[Item] = []
        for item in items:
            inner = item.items if isinstance(item, NodeGroup) and item.kind == "scope" else ()
            only = self._only(inner)
            is_one = isinstance(only, int) or (only is not None and only.kind == "stack")
            flat += inner if is_one or (inner and self.hidden.issuperset(inner)) else [item]
        return sorted(flat, key=lambda item: nodes_of(item)[0])

    def _flat(self, indices: Sequence[int]) -> list[Item]:
        """Nodes without further scopes: repeated layers, stacks, single nodes."""
        shown = {self.graph.nodes[i]: i for i in indices if i not in self.hidden}
        items: list[Item] = [i for i in indices if i in self.hidden]
        repeats = set[int]()
        runs = repeated(self.graph.extract([*shown], ())) if len(shown) >= 2 * FEWEST else ()
        for run in runs:
            members, period = [shown[n] for n in run.nodes], len(run.template)
            if not self._returns({*members}):
                layers = (self._stacks(members[k * period : (k + 1) * period]) for k in range(run.count))
                groups = tuple(NodeGroup("layer", str(k), tuple(layer)) for k, layer in enumerate(layers))
                items.append(NodeGroup("repeat", "layers", groups))
                repeats.update(members)
        return [*items, *self._stacks([i for i in shown.values() if i not in repeats])]

    def _stacks(self, indices: Sequence[int]) -> list[Item]:
        """Nodes with those behind them that read nothing else, if only the last result is read elsewhere."""
        items: list[Item] = []
        free = set(indices)
        for i in indices:
            if i not in free:
                continue
            rows, ends = [i], 1
            while len(rows) < MOST_ROWS and not self.graph.nodes[i].bodies:
                results = {n for r in rows for n in self.graph.nodes[r].outputs if n}
                readers = sorted({r for n in results for r in self.readers[n] & free} - {*rows})
                following = next((r for r in readers if self._follows(r, results)), None)
                if following is None:
                    break
                rows.append(following)
                if self._leaving(rows) <= {*self.graph.nodes[following].outputs}:
                    ends = len(rows)
            free.difference_update(rows[:ends])
            items.append(i if ends == 1 else NodeGroup("stack", self.graph.nodes[i].op_type, tuple(rows[:ends])))
        return items

    def _follows(self, index: int, results: Collection[str]) -> bool:
        """Whether a light node reads some results and no other values."""
        node = self.graph.nodes[index]
        is_light = not node.bodies and node.target is not None and not node.operator.heavy
        return is_light and all(n in results for n in node.reads if n in self.drawn)

    def _leaving(self, indices: Collection[int]) -> set[str]:
        """Results of nodes that others read, folded nodes excepted, or that are outputs."""
        inside = {*indices, *self.hidden}
        names = (n for i in indices for n in self.graph.nodes[i].outputs if n)
        return {n for n in names if n in self.outputs or self.readers[n] - inside}

    # ------------------------------------------------------------------------------------------------ repeats and parts

    def _repeated_scopes(self, scopes: Sequence[NodeGroup]) -> list[NodeGroup]:
        """Scopes whose names differ only in numbers, and whose nodes are alike, as one."""
        items: list[NodeGroup] = []
        runs: dict[object, list[NodeGroup]] = defaultdict(list)
        for scope in scopes:
            title, drawn = re.sub(r"\d+", "#", scope.title), [i for i in scope.nodes if i not in self.hidden]
            is_numbered = drawn and title != scope.title
            runs[(title, self._signature(drawn)) if is_numbered else scope].append(scope)
        for group in runs.values():
            if len(group) == 1 or self._returns({i for layer in group for i in layer.nodes}):
                items += group
                continue
            layers = tuple(replace(layer, kind="layer") for layer in group)
            items.append(NodeGroup("repeat", f"{group[0].title} … {group[-1].title}", layers))
        return items

    def _returns(self, indices: set[int]) -> bool:
        """Whether some nodes read what others compute from their results: as one block, these would be a cycle."""
        inside = [self.graph.nodes[i] for i in indices - self.hidden]
        outside = [node for i, node in enumerate(self.graph.nodes) if i not in indices and i not in self.hidden]
        readers = descendants(outside, [n for node in inside for n in node.outputs])
        computed = {n for node in readers for n in node.outputs}
        return any(not computed.isdisjoint(node.reads) for node in inside)

    def _signature(self, indices: Sequence[int]) -> tuple[object, ...]:
        """What scopes have in common that are drawn once: operators, and which of them read which."""
        nodes = [self.graph.nodes[i] for i in indices]
        places = {name: (k, j) for k, node in enumerate(nodes) for j, name in enumerate(node.outputs) if name}
        return tuple(
            (n.domain, n.op_type, tuple(places.get(name, name in self.drawn) for name in n.inputs)) for n in nodes
        )

    def _parts(self, items: Sequence[Item]) -> tuple[Item, ...]:
        """Many items as parts, divided where fewest values pass."""
        if sum(item not in self.hidden for item in items) <= MOST_BLOCKS:
            return tuple(items)
        items = self._ordered(items)
        shown = [k for k, item in enumerate(items) if item not in self.hidden]
        crossing = self._crossing(items)
        size = max(6, min(20, round(len(shown) ** 0.5)))
        ends, start = [], 0
        while len(shown) - start > 1.5 * size:
            choices = range(start + size // 2, start + size * 3 // 2)
            best = min(choices, key=lambda c: (crossing[shown[c]], abs(c - start - size)))
            ends.append(shown[best])
            start = best
        bounds = [0, *ends, len(items)]
        parts = [tuple(items[a:b]) for a, b in pairwise(bounds)]
        return tuple(NodeGroup("part", f"{k}: {self._described(part)}", part) for k, part in enumerate(parts, 1))

    def _ordered(self, items: Sequence[Item]) -> list[Item]:
        """Items after those that they read, except in cycles, otherwise in the same order."""
        home = {i: k for k, item in enumerate(items) for i in nodes_of(item)}
        reads = ((k, r) for i, k in home.items() for n in self.graph.nodes[i].outputs for r in self.readers[n])
        edges = {(k, home[r]) for k, r in reads if r in home}
        return [items[k] for k in in_order(len(items), edges)]

    def _described(self, items: Sequence[Item]) -> str:
        """The products among some items, or else the most frequent operators."""
        nodes = [self.graph.nodes[i] for item in items for i in nodes_of(item) if i not in self.hidden]
        heavy = [n for n in nodes if n.operator.heavy]
        counts = Counter(n.op_type for n in heavy or nodes).most_common(2)
        return ", ".join(f"{count} {name}" if count > 1 else name for name, count in counts)

    def _crossing(self, items: Sequence[Item]) -> list[int]:
        """For each item, how many values computed before it are read from it on."""
        home = {i: k for k, item in enumerate(items) for i in nodes_of(item) if i not in self.hidden}
        change = Counter[int]()
        for i, k in home.items():
            for name in self.graph.nodes[i].outputs:
                last = max((home[r] for r in self.readers[name] if r in home), default=k)
                if last > k:
                    change[k + 1] += 1
                    change[last + 1] -= 1
        return [*accumulate(change[k] for k in range(len(items)))]


def in_order(count: int, edges: Collection[tuple[int, int]]) -> list[int]:
    """The numbers below ``count``, each after those from which edges lead to it; of a cycle the lowest comes first.

    >>> in_order(4, [(3, 0), (1, 2), (2, 1)])
    [3, 0, 1, 2]
    """
    after: dict[int, list[int]] = defaultdict(list)
    for start, end in edges:
        if start != end:
            after[start].append(end)
    missing = Counter(end for ends in after.values() for end in ends)
    ready = [k for k in range(count) if not missing[k]]
    rest, order = iter(range(count)), dict[int, None]()
    while len(order) < count:
        first = heapq.heappop(ready) if ready else next(k for k in rest if k not in order)
        order[first] = None
        for end in after[first]:
            missing[end] -= 1
            if not missing[end] and end not in order:
                heapq.heappush(ready, end)
    return [*order]


def alike(names: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Names by title: those that differ only in numbers share one, if they are many.

    >>> alike(["x", *(f"past.{i}.key" for i in range(6))])[1][0]
    'past.*.key'
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        groups[re.sub(r"\d+", "*", name)].append(name)
    blocks = []
    for title, group in groups.items():
        blocks += [(title, group)] if len(group) > ALIKE else [(n, [n]) for n in group]
    return blocks


def known_inside(graph: Graph, hidden: Collection[int], known: Iterable[str]) -> set[str]:
    """The constants that graphs inside of a graph may capture."""
    return {*known, *graph.initializers, *(n for i in hidden for n in graph.nodes[i].outputs)}


def named_graphs(node: Node) -> list[tuple[str, Graph]]:
    """The graphs among a node's attributes, by name; of an If, then_branch first."""
    groups = ((name, v if isinstance(v, tuple) else (v,)) for name, v in node.attributes.items())
    graphs = [(name, graph) for name, values in groups for graph in values if isinstance(graph, Graph)]
    return sorted(graphs, key=lambda pair: pair[0] == "else_branch")
