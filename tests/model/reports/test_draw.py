"""``Model.draw`` and the card that notebooks show."""

from __future__ import annotations

import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import onnx
import pytest
from onnx import helper

import onnx2jax
from onnx2jax import cli
from onnx2jax.model.reports import drawing
from onnx2jax.model.reports.layout import layered
from tests.support.models import cut_in_the_middle, mlp, model, text_model, value

SVG = "{http://www.w3.org/2000/svg}"


def pictures(path: Path) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(p) for p in re.findall(r"<svg.*?</svg>", path.read_text(), re.DOTALL)]


def boxes(picture: ElementTree.Element) -> list[tuple[str, float, float, float]]:
    """Titles of the blocks, left, right and top."""
    found = []
    for g in picture.iter(f"{SVG}g"):
        if "block" in g.attrib["class"]:
            left, top = map(float, re.findall(r"[-\d.]+", g.attrib["transform"]))
            (rect,), (text, _) = g.iter(f"{SVG}rect"), g.iter(f"{SVG}text")
            found.append((text.text or "", left, left + float(rect.attrib["width"]), top))
    return found


def chain(names: list[str]) -> onnx.ModelProto:
    """x -> Relu -> ... -> y, nodes of the given names."""
    values = ["x", *(f"v{i}" for i in range(len(names) - 1)), "y"]
    nodes = [helper.make_node("Relu", [a], [b], name=n) for a, b, n in zip(values, values[1:], names, strict=False)]
    made = model(nodes, [value("x", np.float32, ["n", 3])], [value("y", np.float32, ["n", 3])])
    made.graph.value_info.append(value("v0", np.float32, ["n", 3]))
    return made


def test_a_page_is_self_contained(tmp_path: Path) -> None:
    text = onnx2jax.convert(mlp()).draw(tmp_path / "page.html").read_text()
    assert set(re.findall(r"\w+://[^'\" <]*", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"\b(src|href|@import|fetch|url)\b", text)


def test_blocks_are_layered_without_overlap(tmp_path: Path) -> None:
    branches = [helper.make_node("Relu", ["x"], [f"a{i}"]) for i in range(5)]
    nodes = [*branches, helper.make_node("Sum", [f"a{i}" for i in range(5)], ["y"])]
    m = onnx2jax.convert(model(nodes, [value("x", np.float32, [2])], [value("y", np.float32, [2])]))
    (picture,) = pictures(m.draw(tmp_path / "page.html"))
    found = boxes(picture)
    assert [t for t, *_ in sorted(found, key=lambda b: b[3])] == ["x", *["Relu"] * 5, "Sum", "y"]
    for row in {b[3] for b in found}:
        spans = sorted((left, right) for _, left, right, top in found if top == row)
        assert all(a[1] < b[0] for a, b in pairwise(spans))


def test_labels_show_types(tmp_path: Path) -> None:
    """The declared types of the input and of one value."""
    (picture,) = pictures(onnx2jax.convert(chain(["a", "b", "c"])).draw(tmp_path / "page.html"))
    types = [t.text or "" for t in picture.iter(f"{SVG}text") if t.get("class") == "type"]
    assert types == ["float32[n, 3]", "float32[n, 3]", "", "float32[n, 3]", ""]


@pytest.mark.parametrize(
    ("names", "views"),
    [
        (["a", "b", "c"], [["Relu", "Relu", "Relu"]]),
        (["/e/q/0", "/e/q/1", "/e/r/2", "/d/3"], [["e", "Relu"], ["e/q", "Relu", "Relu"], ["Relu"] * 4]),
        (["m.0.a", "m.0.b", "m.1.a", "m.1.b"], [["m"], ["m/0", "m/1"], ["Relu"] * 4]),
        (["a/0", "b/1", "a/2", "b/3"], [["a", "b"], ["Relu"] * 4]),  # two scopes in a cycle
    ],
)
def test_scopes_are_boxes(tmp_path: Path, names: list[str], views: list[list[str]]) -> None:
    found = pictures(onnx2jax.convert(chain(names)).draw(tmp_path / "page.html"))
    assert [[t for t, *_ in boxes(p) if t not in "xy"] for p in found] == views


def test_names_are_escaped(tmp_path: Path) -> None:
    """In titles, attributes, or the script."""
    name = "</script><script>alert(1)</script>'\"&/n"
    page = onnx2jax.convert(chain([name, "b"])).draw(tmp_path / "page.html")
    assert page.read_text().count("<script>") == 1
    assert all(boxes(p) for p in pictures(page))


def test_operators_are_found_by_names(tmp_path: Path) -> None:
    (picture,) = pictures(onnx2jax.convert(mlp()).draw(tmp_path / "page.html"))
    words = {g.attrib["data-words"] for g in picture.iter(f"{SVG}g") if "node" in g.attrib["class"]}
    assert "gemm gemm hidden h" in words
    titles = "\n".join(t.text or "" for t in picture.iter(f"{SVG}title"))
    assert "reads w1: float32[4, 8]" in titles


def test_the_script_is_valid_javascript(tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node to read JavaScript with")
    (tmp_path / "script.js").write_text(drawing.SCRIPT)
    subprocess.run([node, "--check", tmp_path / "script.js"], check=True)


def test_a_thousand_nodes(tmp_path: Path) -> None:
    """Deep and wide, with a few nodes per scope; the first view fits a page."""
    names = [f"/layer.{i // 40}/part.{i % 40 // 8}/n{i}" for i in range(1000)]
    found = pictures(onnx2jax.convert(chain(names)).draw(tmp_path / "page.html"))
    assert [len(boxes(p)) for p in found] == [27, 127, 1002]


NESTED = """nested (float[n] x, bool go) => (float[n] y) <float[1] w = {2}, int64 trips = {3}, bool more = {1}> {
    big = Mul (x, w)
    y = If (go) <
        then_branch = a () => (float[n] a_out) {
            a_out = Loop (trips, more, big) <
                body = turn (int64 i, bool on, float[n] s) => (bool on_out, float[n] t) {
                    on_out = Identity (on)  t = Mul (s, w) }> },
        else_branch = b () => (float[n] b_out) { b_out = Relu (x) }>
}"""


def test_branches_and_bodies_are_clusters_in_their_node(tmp_path: Path) -> None:
    """A value of the graph around is a block of the body; weights are not, as in the main graph."""
    page = onnx2jax.convert(text_model(NESTED)).draw(tmp_path / "page.html")
    closed, opened = pictures(page)
    assert [t for t, *_ in boxes(closed)] == ["x", "go", "Mul", "If", "y"]
    assert re.findall(r"<option.*?(selected|)>(.*?)</option>", page.read_text()) == [
        ("", "all nodes (5)"),
        ("selected", "all nodes, bodies open (18)"),
    ]

    def blocks(parent: ElementTree.Element) -> list[str]:
        return [f"{g.attrib['class']} {g.findtext(f'{SVG}text')}" for g in parent if "block" in g.get("class", "")]

    found = {g.findtext(f"{SVG}text"): blocks(g) for g in opened.iter(f"{SVG}g") if g.get("class") == "cluster"}
    assert found == {
        "then_branch": ["block capture big", "block node open Loop", "block output a_out"],
        "else_branch": ["block capture x", "block node Relu", "block output b_out"],
        "body": [
            *(f"block input {n}" for n in ("i", "on", "s")),
            *("block node Identity", "block node Mul"),
            *("block output on_out", "block output t"),
        ],
    }


def test_clusters_are_inside_their_node_and_blocks_inside_clusters(tmp_path: Path) -> None:
    opened = pictures(onnx2jax.convert(text_model(NESTED)).draw(tmp_path / "page.html"))[-1]

    def size(g: ElementTree.Element) -> tuple[float, float]:
        rect = g.find(f"{SVG}rect")
        assert rect is not None
        return float(rect.attrib["width"]), float(rect.attrib["height"])

    pairs = [(g, inner) for g in opened.iter(f"{SVG}g") for inner in g if inner.get("transform")]
    assert len(pairs) == 3 + 13  # clusters in nodes, and blocks in clusters
    for g, inner in pairs:
        (left, top), (width, height) = map(float, re.findall(r"[-\d.]+", inner.attrib["transform"])), size(inner)
        assert left >= 0 and top >= 0 and left + width <= size(g)[0] and top + height <= size(g)[1]


def test_search_finds_nodes_of_a_closed_body(tmp_path: Path) -> None:
    (closed, _) = pictures(onnx2jax.convert(text_model(NESTED)).draw(tmp_path / "page.html"))
    words = [g.attrib["data-words"] for g in closed.iter(f"{SVG}g") if "closed" in g.attrib["class"]]
    assert len(words) == 1 and "relu" in words[0] and "loop" in words[0] and "on_out" in words[0]


def test_edges_point_down_except_in_cycles() -> None:
    rng = np.random.default_rng(0)
    edges = {(int(a), int(b)) for a, b in rng.integers(0, 60, (200, 2)) if a < b}
    rows = {b: i for i, layer in enumerate(layered(60, edges)) for b in layer}
    assert all(rows[a] < rows[b] for a, b in edges)
    assert sorted(rows) == list(range(60))
    circle = layered(4, [(0, 1), (1, 2), (2, 1), (2, 3)])
    assert circle == [[0], [1], [2], [3]]


def test_layer_orders_avoid_crossings() -> None:
    """0 to 3 above 7 to 4."""
    assert layered(8, [(i, 7 - i) for i in range(4)]) in ([[0, 1, 2, 3], [7, 6, 5, 4]], [[3, 2, 1, 0], [4, 5, 6, 7]])


def test_the_command_draws_unsupported_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    strange = model(
        [helper.make_node("Strange", ["x"], ["y"], domain="com.example")],
        [value("x", np.float32, [2])],
        [value("y", np.float32, [2])],
        opsets={"com.example": 1},
    )
    onnx.save(strange, tmp_path / "m.onnx")
    assert cli.main(["draw", str(tmp_path / "m.onnx"), str(tmp_path / "page.html")]) == 0
    assert "page.html" in capsys.readouterr().out
    assert "Strange" in [t for t, *_ in boxes(pictures(tmp_path / "page.html")[0])]


def test_a_notebook_shows_a_card() -> None:
    m = onnx2jax.convert(mlp())
    text = m._repr_html_()
    for part in ("x", "float32[batch, 4]", "ai.onnx 21", "Gemm", "4 parameters, 232 bytes", "w1", "float32[4, 8]"):
        assert part in text
    assert "stages" not in text
    cut = onnx2jax.convert(cut_in_the_middle())
    cut(np.ones((2, 4), np.float32))
    assert "stages" in cut._repr_html_()
    assert "needs the value" in cut._repr_html_() or "NonZero" in cut._repr_html_()
