"""``Model.draw`` as an SVG picture, the card that notebooks show, and the commands ``draw`` and ``view``."""

from __future__ import annotations

import base64
import html
import re
import webbrowser
import zlib
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import onnx
import pytest
from onnx import helper

import onnx2jax
from onnx2jax import cli
from onnx2jax.model.reports.drawing import layered
from onnx2jax.model.reports.page import PageFacts, page
from tests.support.models import cut_in_the_middle, mlp, model, text_model, value

SVG = "{http://www.w3.org/2000/svg}"


def picture(made: onnx.ModelProto, folder: Path) -> ElementTree.Element:
    return ElementTree.fromstring(onnx2jax.convert(made).draw(folder / "picture.svg").read_text())


def boxes(svg: ElementTree.Element) -> list[tuple[str, float, float, float]]:
    """Titles of the blocks, left, right and top."""
    found = []
    for g in svg.iter(f"{SVG}g"):
        if "block" in g.attrib["class"]:
            left, top = map(float, re.findall(r"[-\d.]+", g.attrib["transform"]))
            rect, titles = g.find(f"{SVG}rect"), [t.text or "" for t in g.findall(f"{SVG}text") if not t.get("class")]
            assert rect is not None
            found.append((", ".join(titles), left, left + float(rect.attrib["width"]), top))
    return found


def chain(names: list[str]) -> onnx.ModelProto:
    """x -> Gemm -> ... -> y, nodes of the given names."""
    values = ["x", *(f"v{i}" for i in range(len(names) - 1)), "y"]
    nodes = [
        helper.make_node("Gemm", [a, "w"], [b], name=n) for a, b, n in zip(values, values[1:], names, strict=False)
    ]
    weights = {"w": np.eye(3, dtype=np.float32)}
    made = model(nodes, [value("x", np.float32, ["n", 3])], [value("y", np.float32, ["n", 3])], weights)
    made.graph.value_info.append(value("v0", np.float32, ["n", 3]))
    return made


def test_blocks_are_layered_without_overlap(tmp_path: Path) -> None:
    branches = [helper.make_node("Relu", ["x"], [f"a{i}"]) for i in range(5)]
    nodes = [*branches, helper.make_node("Sum", [f"a{i}" for i in range(5)], ["y"])]
    found = boxes(picture(model(nodes, [value("x", np.float32, [2])], [value("y", np.float32, [2])]), tmp_path))
    assert [t for t, *_ in sorted(found, key=lambda b: b[3])] == ["x", *["Relu"] * 5, "Sum", "y"]
    for row in {b[3] for b in found}:
        spans = sorted((left, right) for _, left, right, top in found if top == row)
        assert all(a[1] < b[0] for a, b in pairwise(spans))


def test_labels_show_types_and_tooltips_operands(tmp_path: Path) -> None:
    """The declared types of the input and of one value."""
    svg = picture(chain(["a", "b", "c"]), tmp_path)
    types = [t.text or "" for t in svg.iter(f"{SVG}text") if t.get("class") == "type"]
    assert types == ["float32[n, 3]", "float32[n, 3]", "", "float32[n, 3]", ""]
    assert "reads w: float32[3, 3]" in "\n".join(t.text or "" for t in svg.iter(f"{SVG}title"))


def test_a_picture_has_few_blocks(tmp_path: Path) -> None:
    """A thousand nodes: as many scopes are opened as fit, and layers that are alike are one block."""
    names = [f"/layer.{i // 40}/part.{i % 40 // 8}/n{i}" for i in range(1000)]
    assert [t for t, *_ in boxes(picture(chain(names), tmp_path))] == ["x", "layer.0 … layer.24 × 25", "y"]


def test_a_layer_and_its_activation_are_one_block(tmp_path: Path) -> None:
    assert [t for t, *_ in boxes(picture(mlp(), tmp_path))] == ["x", "Gemm, Relu", "MatMul, Add", "y"]


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

    def blocks(parent: ElementTree.Element) -> list[str]:
        return [f"{g.attrib['class']} {g.findtext(f'{SVG}text')}" for g in parent if "block" in g.get("class", "")]

    svg = picture(text_model(NESTED), tmp_path)
    found = {g.findtext(f"{SVG}text"): blocks(g) for g in svg.iter(f"{SVG}g") if g.get("class") == "cluster"}
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
    svg = picture(text_model(NESTED), tmp_path)

    def size(g: ElementTree.Element) -> tuple[float, float]:
        rect = g.find(f"{SVG}rect")
        assert rect is not None
        return float(rect.attrib["width"]), float(rect.attrib["height"])

    pairs = [(g, inner) for g in svg.iter(f"{SVG}g") for inner in g if inner.get("transform")]
    assert len(pairs) == 3 + 13  # clusters in nodes, and blocks in clusters
    for g, inner in pairs:
        (left, top), (width, height) = map(float, re.findall(r"[-\d.]+", inner.attrib["transform"])), size(inner)
        assert left >= 0 and top >= 0 and left + width <= size(g)[0] and top + height <= size(g)[1]


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
    for name in ("page.html", "picture.svg"):
        assert cli.main(["draw", str(tmp_path / "m.onnx"), str(tmp_path / name)]) == 0
        assert name in capsys.readouterr().out
        assert "Strange" in (tmp_path / name).read_text()
    assert '"rule":"MV-10"' in (tmp_path / "page.html").read_text()


def test_the_command_view_opens_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With values of inner nodes for random inputs; a picture has none."""
    shown: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda address: shown.append(address) or True)
    onnx.save(mlp(), tmp_path / "m.onnx")
    page = tmp_path / "page.html"
    assert cli.main(["view", str(tmp_path / "m.onnx"), "--random", "--page", str(page)]) == 0
    assert shown == [page.as_uri()]
    assert '"picture"' in page.read_text()
    assert cli.main(["draw", str(tmp_path / "m.onnx"), str(tmp_path / "x.svg"), "--random"]) == 2
    assert "a picture shows the graph alone" in capsys.readouterr().err
    for command in (["draw", "m.onnx", "x.pdf"], ["view", "m.onnx", "--page", "x.pdf"]):
        assert cli.main([str(tmp_path / a) if "." in a else a for a in command])
        assert "x.pdf would be a .pdf file; the graph is written as a page (.html) or a picture (.svg)" in (
            capsys.readouterr().err
        )
    assert not (tmp_path / "x.pdf").exists()


def test_a_notebook_shows_a_card_and_the_page() -> None:
    m = onnx2jax.convert(mlp())
    text = m._repr_html_()
    for part in ("x", "float32[batch, 4]", "ai.onnx 21", "Gemm", "4 parameters, 232 bytes", "w1", "float32[4, 8]"):
        assert part in text
    (packed,) = re.findall(r"<iframe srcdoc='(.*?)' sandbox='allow-scripts'", text)
    (data,) = re.findall(r'atob\("(.*?)"\)', html.unescape(packed))
    unpacked = zlib.decompress(base64.b64decode(data)).decode()
    assert unpacked == page(m, PageFacts()) and len(text) < len(unpacked) / 2
    assert "stages" not in text
    cut = onnx2jax.convert(cut_in_the_middle())
    cut(np.ones((2, 4), np.float32))
    assert "stages" in cut._repr_html_()
    assert "needs the value" in cut._repr_html_() or "NonZero" in cut._repr_html_()


def test_results_show_their_text_at_a_prompt_and_in_a_notebook(tmp_path: Path) -> None:
    """The last value of a cell, and of a line at a prompt, is the table and no constructor of it."""
    m, x = onnx2jax.convert(mlp()), np.ones((2, 4), np.float32)
    path = m.export(tmp_path / "exported", dims={"batch": 2}, platforms=["cpu"])
    onnx2jax.save(m, tmp_path / "m.onnx")
    results = m.summary(x), m.verify(x), onnx2jax.check(tmp_path / "m.onnx"), onnx2jax.load_exported(path)
    for result, says in zip(results, ("FLOPs", "compared with", "no findings", "ExportedModel:"), strict=True):
        assert says in repr(result) == str(result)
        assert result._repr_html_() == f"<pre style='white-space:pre;overflow-x:auto'>{html.escape(str(result))}</pre>"
