"""``Model.profile``: time by node, from XLA's profiler."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import onnx
import pytest
from onnx import helper

import onnx2jax
from onnx2jax import cli
from onnx2jax.errors import InputShapeError, UnsupportedError
from onnx2jax.model.reports.profile import NodeTime, Profile, _spent
from onnx2jax.model.reports.summary import MARK
from onnx2jax.proto import xspace
from tests.support.models import cut_in_the_middle, mlp, model, value


@pytest.fixture(scope="module")
def heavy() -> Profile:
    """x [64, 128] @ [128, 128], its tangent, @ [128, 2]."""
    rng = np.random.default_rng(0)
    weights = {n: rng.normal(size=(128, k)).astype(np.float32) for n, k in (("large", 128), ("small", 2))}
    nodes = [
        helper.make_node("MatMul", ["x", "large"], ["h"], name="/layer 0/a node 7"),  # empty names are supported
        helper.make_node("Tanh", ["h"], ["t"], name="between"),
        helper.make_node("MatMul", ["t", "small"], ["y"], name="last"),
    ]
    ends = [value("x", np.float32, ["n", 128])], [value("y", np.float32, ["n", 2])]
    return onnx2jax.convert(model(nodes, *ends, weights)).profile(np.ones((64, 128), np.float32), calls=3)


def test_times_are_attributed_to_nodes_and_operators(heavy: Profile) -> None:
    found = {n.name: n for n in heavy.nodes}
    assert found["/layer 0/a node 7"].seconds > 0 and found["last"].seconds > 0
    assert sum(n.share for n in heavy.nodes) == pytest.approx(1)
    assert [n.seconds for n in heavy.nodes] == sorted((n.seconds for n in heavy.nodes), reverse=True)
    assert heavy.operators["MatMul"] == pytest.approx(found["/layer 0/a node 7"].seconds + found["last"].seconds)
    assert heavy.call > 0
    assert not any(n.host for n in heavy.nodes)


def test_fused_nodes_are_listed() -> None:
    """Three additions are one operation."""
    nodes = [helper.make_node("Add", [a, "x"], [b], name=f"to {b}") for a, b in (("x", "a"), ("a", "b"), ("b", "y"))]
    m = onnx2jax.convert(model(nodes, [value("x", np.float32, ["n"])], [value("y", np.float32, ["n"])]))
    (only,) = m.profile(np.ones(9, np.float32), calls=1).nodes
    assert (only.name, only.fused) == ("to y", ["to a", "to b"])


def test_host_nodes_are_profiled() -> None:
    found = onnx2jax.convert(cut_in_the_middle()).profile(np.ones((2, 4), np.float32), calls=2)
    assert {n.operator for n in found.nodes if n.host} >= {"NonZero"}
    assert {n.operator for n in found.nodes if not n.host} >= {"MatMul"}


def test_a_loop_is_counted_once() -> None:
    """XLA records a loop and its operations, but a fusion only as a whole."""
    trace = xspace.Trace(
        [xspace.Execution("f", n, start, end) for n, start, end in (("while", 0, 10), ("dot", 1, 4), ("sum", 5, 9))],
        [(f"{MARK}2", 20, 22)],
        {
            "f": {
                "while": xspace.Instruction("while", f"jit(f)/{MARK}1/while", ("dot", "add")),
                "dot": xspace.Instruction("dot", f"jit(f)/{MARK}1/while/body/dot", ()),
                "sum": xspace.Instruction("fusion", "", ("add",)),
                "add": xspace.Instruction("add", f"jit(f)/{MARK}0/add", ()),
            }
        },
    )
    assert [*_spent(trace)] == [(2, 2, (), True), (1, 3, [], False), (0, 4, [0], False)]


def test_profiling_a_constant_model_raises() -> None:
    nodes = [helper.make_node("Add", ["a", "a"], ["y"])]
    m = onnx2jax.convert(model(nodes, [], [value("y", np.float32, [2])], {"a": np.ones(2, np.float32)}))
    with pytest.raises(UnsupportedError, match="names no node of the model"):
        m.profile(calls=1)


def test_invalid_profile_arguments_are_rejected() -> None:
    m = onnx2jax.convert(mlp())
    with pytest.raises(InputShapeError):
        m.profile(np.ones((2, 5), np.float32))
    with pytest.raises(ValueError, match="calls is 0"):
        m.profile(np.ones((2, 4), np.float32), calls=0)


def test_text_and_chart() -> None:
    rows = [NodeTime(f"<{i}>", "Relu", (31 - i) * 1e-5, (31 - i) / 496, ("a", "b", "c", "d")) for i in range(31)]
    found = Profile(rows, {"Relu": 496e-5}, 0.01, 0, 5, "cpu")
    text = str(found)
    assert text.splitlines()[1].split(maxsplit=5) == ["<0>", "Relu", "310", "us", "6.2%", "a, b, c and 1 more"]
    assert "6 more nodes" in text
    assert "5 calls of 10 ms on cpu; in nodes 4.96 ms" in text
    assert json.loads(found.to_json())["nodes"][0]["seconds"] == pytest.approx(31e-5)
    charts = [ElementTree.fromstring(s) for s in re.findall("<svg.*?</svg>", found._repr_html_(), re.DOTALL)]
    widths = [float(r.attrib["width"]) for r in charts[0].iter("{http://www.w3.org/2000/svg}rect")]
    assert (len(charts), len(widths), widths[0]) == (2, 25, 400)
    assert widths == sorted(widths, reverse=True)


def test_work_on_other_threads_is_attributed() -> None:
    """The call of an operation ends after 1 us, its work after 5."""
    space = xspace._message("XSpace")()
    plane = space.planes.add(name="/host:CPU")
    for number, name in enumerate(("dot", "end: dot", "hlo_op", "hlo_module", "program_id", "_p", "_c"), 1):
        plane.event_metadata.add(key=number).value.name = name
        plane.stat_metadata.add(key=number).value.name = name
    line = plane.lines.add(name="a thread", timestamp_ns=1000)
    begun = line.events.add(metadata_id=1, offset_ps=0, duration_ps=1_000_000)
    begun.stats.add(metadata_id=3, reference=1)
    begun.stats.add(metadata_id=4, text="jit_f")
    begun.stats.add(metadata_id=5, uint64=3)
    begun.stats.add(metadata_id=6, uint64=77)
    line.events.add(metadata_id=2, offset_ps=5_000_000).stats.add(metadata_id=7, uint64=77)
    (ran,) = xspace.read_trace(space.SerializeToString(), "node ").executions
    assert (ran.program, ran.name) == ("jit_f(3)", "dot")
    assert ran.end - ran.start == pytest.approx(5e-6)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = [helper.make_node("MatMul", ["calls", "w"], ["y"], name="product")]  # named like an argument
    ends = [value("calls", np.float32, ["n", 4])], [value("y", np.float32, ["n", 2])]
    onnx.save(model(nodes, *ends, {"w": np.ones((4, 2), np.float32)}), tmp_path / "m.onnx")
    assert cli.main(["profile", str(tmp_path / "m.onnx"), "--dim", "n=8", "--calls", "2"]) == 0
    out = capsys.readouterr().out
    assert "product  MatMul" in out
    assert "2 calls of" in out
    assert cli.main(["profile", str(tmp_path / "m.onnx"), "--calls", "0"]) == 2
