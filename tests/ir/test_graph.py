"""Reachability in a graph: ancestors, descendants, and nodes between values."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from onnx2jax.ir.derivatives import between
from onnx2jax.ir.graph import Node, ancestors, descendants


@st.composite
def sequences(draw: st.DrawFn) -> list[Node]:
    """Nodes of one or two outputs, each reading some of the values before it, or the inputs "x" and "y"."""
    names, nodes = ["x", "y"], []
    for i in range(draw(st.integers(1, 8))):
        inputs = draw(st.lists(st.sampled_from([*names, ""]), max_size=3))
        outputs = draw(st.sampled_from([(f"v{i}",), ("", f"v{i}"), (f"v{i}", f"w{i}")]))
        nodes.append(Node(f"n{i}", "Any", "", 1, tuple(inputs), outputs, {}, None))
        names += filter(None, outputs)
    return nodes


def paths(nodes: list[Node], start: str, end: str) -> list[list[tuple[Node, str]]]:
    """Every path from one value to another, by exhaustive search: nodes, each with the output that the path takes."""
    if start == end:
        return [[]]
    steps = [(n, v) for n in nodes if start in n.reads for v in n.outputs if v]
    return [[(n, v), *rest] for n, v in steps for rest in paths(nodes, v, end)]


@given(st.data())
def test_reachability_is_the_existence_of_a_path(data: st.DataObject) -> None:
    nodes = data.draw(sequences())
    made = [(n, v) for n in nodes for v in n.outputs if v]
    start, other, end = (data.draw(st.sampled_from(["x", "y", *(v for _, v in made)])) for _ in range(3))
    assert ancestors(nodes, [end]) == list(dict.fromkeys(n for n, v in made if paths(nodes, v, end)))
    assert descendants(nodes, [start]) == list(dict.fromkeys(n for n, v in made if any(paths(nodes, start, v))))
    starts = {start, other}
    kept = [way for s in starts for way in paths(nodes, s, end) if not starts & {v for _, v in way}]
    assert between(starts, end, nodes) == [n for n in nodes if any(n is step for way in kept for step, _ in way)]


def test_each_node_is_visited_once() -> None:
    """In a ladder the number of paths doubles with every step."""
    nodes = [Node(f"n{i}", "Add", "", 1, (f"v{i}", f"v{i}"), (f"v{i + 1}",), {}, None) for i in range(1000)]
    asked: list[Node] = []
    assert ancestors(nodes, ["v1000"], reads=lambda n: asked.append(n) or n.inputs) == nodes
    assert len(asked) == len(nodes)
    assert descendants(nodes, ["v500"]) == nodes[500:]
    assert ancestors(nodes, ["v1000"], roots=["v500"]) == nodes[500:]
