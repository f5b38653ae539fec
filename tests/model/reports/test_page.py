"""The page of ``Model.draw``: its data, which a browser draws (tests/model/reports/test_browser.py)."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import numpy as np
import onnx
import pytest
from onnx import helper

import onnx2jax
from onnx2jax.errors import InputNameError, InputTypeError
from onnx2jax.model.reports import page
from onnx2jax.model.reports.arrays import figures, histogram, picture
from onnx2jax.model.reports.comparison import Comparison, Difference, Verification
from onnx2jax.model.reports.outline import Outline
from tests.support.models import mlp, model, text_model, value

NAME = "</script><script>alert(1)</script>'\"&é"
LAYERS = 12
SIZE = 1300


@cache
def network() -> onnx.ModelProto:
    """1,300 nodes: twelve layers alike, shape arithmetic, an If whose branch calls a function, and a name of markup."""
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"], name="/embed/Shape"),
        helper.make_node("Gather", ["shape", "zero"], ["rows"], name="/embed/Gather"),
        helper.make_node("Concat", ["rows", "minus"], ["target"], name="/embed/Concat", axis=0),
        helper.make_node("Reshape", ["x", "target"], ["h0"], name="/embed/Reshape"),
    ]
    for k in range(LAYERS):
        a, b = f"h{k}", f"h{k + 1}"
        nodes += [
            helper.make_node("MatMul", [a, "w"], [f"{b}.q"], name=f"/layer.{k}/attn/MatMul"),
            helper.make_node("Add", [f"{b}.q", "bias"], [f"{b}.s"], name=f"/layer.{k}/attn/Add"),
        ]
        count = (SIZE - 4 - 3 - 3 * LAYERS) // LAYERS
        names = [f"{b}.s", *(f"{b}.m{i}" for i in range(count))]
        nodes += [
            helper.make_node("Neg", [u], [v], name=f"/layer.{k}/mlp/block.{i // 8}/Neg_{i}")
            for i, (u, v) in enumerate(pairwise(names))
        ]
        nodes.append(helper.make_node("Add", [a, names[-1]], [b], name=f"/layer.{k}/Add"))
    last = f"h{LAYERS}"
    call = helper.make_node("Double", [last], ["twice"], domain="l", name="call")
    keep = helper.make_node("Relu", [last], ["kept"], name="keep")
    branches = {
        "then_branch": helper.make_graph([call], "then", [], [value("twice", np.float32, None)]),
        "else_branch": helper.make_graph([keep], "else", [], [value("kept", np.float32, None)]),
    }
    nodes += [
        helper.make_node("If", ["go"], ["z"], name="If", **branches),
        helper.make_node("Relu", ["z"], ["y"], name=NAME),
        helper.make_node("Identity", ["y"], ["again"], name="again"),
    ]
    opset = [helper.make_opsetid("", 21)]
    double = helper.make_function("l", "Double", ["a"], ["b"], [helper.make_node("Add", ["a", "a"], ["b"])], opset)
    inputs = [value("x", np.float32, ["batch", 8]), value("go", np.bool_, [])]
    outputs = [value("y", np.float32, ["batch", 8]), value("again", np.float32, ["batch", 8])]
    weights = {
        "w": np.eye(8, dtype=np.float32),
        "bias": np.arange(8, dtype=np.float32),
        "zero": np.array([0]),
        "minus": np.array([-1]),
    }
    return model(nodes, inputs, outputs, weights, opsets={"l": 1}, functions=[double])


def data(path: Path) -> dict[str, Any]:
    """The JSON in a page."""
    (text,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', path.read_text(), re.DOTALL)
    found: dict[str, Any] = json.loads(text)
    return found


def drawn(made: onnx.ModelProto, folder: Path, **options: Any) -> dict[str, Any]:
    return data(onnx2jax.convert(made).draw(folder / "page.html", **options))


def titles(items: list[Any], nodes: list[dict[str, Any]]) -> list[Any]:
    """An outline as text: operators, and [kind, title, items] of groups; folded nodes are left out."""
    found: list[Any] = []
    for item in items:
        if isinstance(item, int):
            found += [] if nodes[item].get("folded") else [nodes[item]["name"].rpartition("/")[2]]
        elif "items" in item:
            found.append([item["kind"], item["title"], titles(item["items"], nodes)])
    return found


def named(found: dict[str, Any], name: str) -> dict[str, Any]:
    (node,) = (n for n in found["nodes"] if n["name"] == name)
    return dict(node)


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return drawn(network(), tmp_path_factory.mktemp("page"))


def test_a_page_is_self_contained(tmp_path: Path) -> None:
    """No address, nothing to load, and a policy that forbids both."""
    text = onnx2jax.convert(mlp()).draw(tmp_path / "page.html").read_text()
    assert "://" not in text
    assert not re.search(r"\b(src|href)\s*=|@import|\bfetch\(|url\(", text)
    assert "default-src 'none'" in text


def test_names_are_no_markup(tmp_path: Path) -> None:
    path = onnx2jax.convert(network()).draw(tmp_path / "page.html")
    assert path.read_text().count("<script") == 2
    assert named(data(path), NAME)["outputs"] == ["y"]


def test_layers_alike_are_one_repeat(facts: dict[str, Any]) -> None:
    graph, nodes = facts["graphs"][0], facts["nodes"]
    (repeat,) = (i for i in graph["items"] if isinstance(i, dict) and i["kind"] == "repeat")
    assert (repeat["title"], len(repeat["items"])) == ("layer.0 … layer.11", LAYERS)
    kind, title, inside = titles([repeat["items"][3]], nodes)[0]
    assert (kind, title) == ("layer", "layer.3")
    assert [i if isinstance(i, str) else i[:2] for i in inside] == [["stack", "MatMul"], ["scope", "mlp"], "Add"]


def test_shape_arithmetic_is_folded(facts: dict[str, Any]) -> None:
    assert [n["name"] for n in facts["nodes"] if n.get("folded")] == [
        f"/embed/{n}" for n in ("Shape", "Gather", "Concat")
    ]


def test_types_are_inferred_with_dimension_variables(facts: dict[str, Any]) -> None:
    values = facts["graphs"][0]["values"]
    assert values["h5"]["type"] == "float32[batch, 8]"
    assert values["target"]["type"] == "int64[2]"


def test_graphs_of_nodes_are_numbered(facts: dict[str, Any]) -> None:
    """Branches by attribute, and the function that one calls."""
    graphs = named(facts, "If")["graphs"]
    assert [name for name, _ in graphs] == ["then_branch", "else_branch"]
    ((_, body),) = named(facts, "call")["graphs"]
    assert [i["title"] for i in facts["graphs"][body]["items"] if isinstance(i, dict)] == ["a", "b"]


def test_a_node_has_its_operator_costs_and_attributes(tmp_path: Path) -> None:
    m = onnx2jax.convert(onnx2jax.demo_model())
    found, costs = data(m.draw(tmp_path / "page.html", dims={"batch": 2})), m.summary(dims={"batch": 2}).nodes[3]
    node = named(found, "conv2")
    operator = found["operators"][node["type"]]
    assert (operator["name"], operator["kind"], operator["inputs"]) == ("Conv", "product", ["X", "W", "B"])
    assert node["attributes"]["kernel_shape"] == "(3, 3)"
    assert (node["parameters"], node["flops"]) == (costs.parameters, costs.flops)
    assert found["operators"][named(found, "relu1")["type"]]["document"] == "max(X, 0); the derivative at 0 is 0."
    weight = found["graphs"][0]["values"]["conv2.weight"]
    assert weight["parameter"] and len(weight["histogram"]) == 32 and weight["figures"]["size"] == 32 * 16 * 9
    assert found["sizes"] == {"image": "float32[2, 1, 8, 8]"}


def test_a_page_shows_values_and_times_of_a_call(tmp_path: Path) -> None:
    m = onnx2jax.convert(text_model("g (float[n, 2] x) => (float[n, 2] y) { r = Relu (x)  y = Log (r) }"))
    x = np.float32([[1, -2], [3, -4]])
    profile = onnx2jax.model.reports.profile.Profile(
        [onnx2jax.model.reports.profile.NodeTime("y", "Log", 2e-6, 0.75, ("r",))], {"Log": 2e-6}, 3e-6, 0.0, 1, "cpu"
    )
    found = data(m.draw(tmp_path / "page.html", inputs=x, profile=profile))
    values = found["graphs"][0]["values"]
    assert values["r"]["figures"] == {"size": 4, "zeros": 0.5, "min": "0", "max": "3", "mean": "1"}
    assert values["y"]["figures"] == {"size": 4, "zeros": 0.25, "inf": 2, "min": "0", "max": "1.099", "mean": "0.5493"}
    assert values["x"]["picture"]["signed"] and not values["r"]["picture"]["signed"]
    assert (named(found, "y")["seconds"], named(found, "y")["fused"]) == (2e-6, ["r"])
    with pytest.raises(InputNameError, match="no input 'z'"):
        m.draw(tmp_path / "page.html", inputs={"z": x})
    with pytest.raises(InputTypeError, match="a dict by name"):
        onnx2jax.convert(network()).draw(tmp_path / "page.html", inputs=x)


def test_a_page_shows_the_first_difference(tmp_path: Path) -> None:
    m = onnx2jax.convert(mlp())
    bad = Comparison("r", "float32[1, 8]", "float32[1, 8]", 0.5, 0.1, False, "0.5 too large", "")
    first = Difference(str(m.graph.nodes[1]), "r", bad, {})
    found = data(m.draw(tmp_path / "page.html", verification=Verification("onnxruntime", {}, {"inputs": [bad]}, first)))
    assert named(found, "act")["differs"] == "r: 0.5 too large"
    assert found["graphs"][0]["values"]["r"]["differs"] == "0.5 too large"
    assert [n["name"] for n in found["nodes"] if "differs" in n] == ["act"]


def test_a_node_shows_the_rule_that_it_breaks(tmp_path: Path) -> None:
    made = mlp()
    made.graph.value_info.append(value("r", np.float32, ["batch", 9]))
    found = drawn(made, tmp_path)
    assert [(n["name"], f["rule"]) for n in found["nodes"] for f in n.get("findings", ())] == [("act", "GR-20")]
    assert found["findings"] == []


def test_a_model_on_a_mesh_shows_shardings(tmp_path: Path) -> None:
    mesh = jax.make_mesh((1,), ("data",))
    m = onnx2jax.convert(mlp(), mesh=mesh, shardings={"w1": jax.sharding.PartitionSpec("data")})
    found = data(m.draw(tmp_path / "page.html"))
    values = found["graphs"][0]["values"]
    assert (values["w1"]["sharding"], values["w2"]["sharding"]) == ("P('data',)", "replicated")
    assert found["mesh"] == {"data": 1}


def test_scopes_come_from_weights_or_notes_of_the_exporter(tmp_path: Path) -> None:
    """Where names of nodes have none: ``encoder.0.weight`` of a product, and torch's metadata."""
    nodes = [
        helper.make_node("MatMul", ["x", "encoder.0.weight"], ["a"], name="MatMul_0"),
        helper.make_node("Relu", ["a"], ["b"], name="Relu_1"),
        helper.make_node("MatMul", ["b", "head.out.weight"], ["y"], name="MatMul_2"),
    ]
    weights = {n: np.eye(2, dtype=np.float32) for n in ("encoder.0.weight", "head.out.weight")}
    ends = [value("x", np.float32, [2, 2])], [value("y", np.float32, [2, 2])]
    found = drawn(model(nodes, *ends, weights), tmp_path)
    assert titles(found["graphs"][0]["items"], found["nodes"]) == [
        ["stack", "MatMul", ["MatMul_0", "Relu_1"]],
        "MatMul_2",
    ]
    notes = [["encoder", "encoder.0", "linear"], ["encoder", "encoder.0", "act"], ["encoder", "encoder.1", "linear"]]
    for node, names in zip(nodes, notes, strict=True):
        node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=str(["", *names]))
    assert Outline(onnx2jax.convert(model(nodes, *ends, weights)).graph, frozenset()).paths == [
        ("encoder", "0"),
        ("encoder", "0"),
        ("encoder", "1"),
    ]


def test_scopes_alike_with_others_between_are_no_repeat(tmp_path: Path) -> None:
    """ln_1 -> attn -> ln_2: as one block, it would read what it computes."""
    names = ["/ln_1/a", "/ln_1/b", "/attn/a", "/attn/b", "/ln_2/a", "/ln_2/b"]
    values = ["x", *"abcde", "y"]
    weights = {"w": np.eye(2, dtype=np.float32)}
    nodes = [
        helper.make_node("MatMul", [a, "w"], [b], name=n) for n, (a, b) in zip(names, pairwise(values), strict=True)
    ]
    found = drawn(model(nodes, [value("x", np.float32, [1, 2])], [value("y", np.float32, [1, 2])], weights), tmp_path)
    assert titles(found["graphs"][0]["items"], found["nodes"]) == [
        ["scope", n, ["a", "b"]] for n in ("ln_1", "attn", "ln_2")
    ]


def test_many_blocks_are_parts_divided_where_few_values_pass(tmp_path: Path) -> None:
    """Seventy products without scopes, of different widths so that no layers are alike."""
    names, widths = ["x", *(f"v{i}" for i in range(69)), "y"], [2 + i for i in range(71)]
    nodes = [helper.make_node("MatMul", [a, f"w{i}"], [b]) for i, (a, b) in enumerate(pairwise(names))]
    weights = {f"w{i}": np.zeros((widths[i], widths[i + 1]), np.float32) for i in range(70)}
    ends = [value("x", np.float32, [1, widths[0]])], [value("y", np.float32, [1, widths[-1]])]
    found = drawn(model(nodes, *ends, weights), tmp_path)
    groups = [i for i in found["graphs"][0]["items"] if isinstance(i, dict) and i["kind"] == "part"]
    assert 4 <= len(groups) <= 12
    assert groups[0]["title"].startswith("1: ") and groups[0]["title"].endswith(" MatMul")


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (
            np.float32([np.nan, np.inf, 0, 2]),
            {"size": 4, "zeros": 0.25, "nan": 1, "inf": 1, "min": "0", "max": "2", "mean": "1"},
        ),
        (np.array([True, False]), {"size": 2, "zeros": 0.5, "min": "0", "max": "1", "mean": "0.5"}),
        (np.zeros((0, 3)), None),
        (np.array(["a"], object), None),
        ([1, 2], None),
    ],
)
def test_figures_of_arrays(array: Any, expected: dict[str, Any] | None) -> None:
    assert figures(array) == expected


def test_histograms_and_pictures_of_extremes() -> None:
    """Spans beyond float64, one value alone, NaN, and planes side by side."""
    assert sum(histogram(np.array([-1.7e308, 1.7e308, 0.0]))) == 300
    assert histogram(np.full(3, np.nan)) == histogram(np.ones(5)) == []
    assert picture(np.float32(1)) is None
    shown = picture(np.full((1, 2, 3, 3), np.nan, np.float32))
    assert shown is not None and (shown["width"], shown["height"]) == (6, 3)
    wide = picture(np.array([[-1.7e308, 1.7e308]]))
    assert wide is not None and wide["signed"]


def test_the_script_is_valid_javascript(tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node to read JavaScript with")
    script = tmp_path / "script.js"
    script.write_text("".join(map(page._file, page.SCRIPTS)))
    subprocess.run([node, "--check", script], check=True)
