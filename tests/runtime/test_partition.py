"""Partitioned graphs: which nodes are compiled and which run on the host, with the same results."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

import onnx2jax
from onnx2jax.errors import KnownValueError
from onnx2jax.ops.registry import Static
from onnx2jax.runtime import cut, partition
from tests.support.models import mlp, model, value

RNG = np.random.default_rng(0)


def kinds(m: onnx2jax.Model) -> list[str]:
    return [row[0] for row in m._runtime.program.rows()]


def reference(proto: onnx.ModelProto, feeds: dict[str, Any]) -> list[Any]:
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return list(session.run(None, feeds))


def detector(*, head: bool = False) -> onnx.ModelProto:
    """Convolution -> scores and boxes -> NonMaxSuppression -> gather the boxes kept [-> a product over them]."""
    constants = {
        "w": RNG.normal(size=(5, 3, 3, 3)).astype(np.float32),
        "flat": np.array([1, 5, -1]),
        "split": np.array([4, 1]),
        "most": np.array([10]),
        "iou": np.float32([0.3]),
        "two": np.array([2]),
        "last": np.array([-1]),
        "head": RNG.normal(size=(4, 2)).astype(np.float32),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Reshape", ["c", "flat"], ["f"]),
        helper.make_node("Split", ["f", "split"], ["b", "scores"], axis=1),
        helper.make_node("Transpose", ["b"], ["boxes"], perm=[0, 2, 1]),
        helper.make_node("NonMaxSuppression", ["boxes", "scores", "most", "iou"], ["kept"], name="nms"),
        helper.make_node("Gather", ["kept", "two"], ["index"], axis=1),
        helper.make_node("Reshape", ["index", "last"], ["row"]),
        helper.make_node("Gather", ["boxes", "row"], ["y" if not head else "chosen"], axis=1),
    ]
    if head:
        nodes.append(helper.make_node("MatMul", ["chosen", "head"], ["y"]))
    return model(nodes, [value("x", np.float32, [1, 3, "h", "w"])], [value("y", np.float32, None)], constants)


def chain(additions: int) -> onnx.ModelProto:
    """x0 = x, x1 = x @ w, and each further one half the sum of the two before, which XLA fuses into one kernel."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["x1"])]
    for n in range(2, additions + 2):
        nodes += [helper.make_node("Add", [f"x{n - 2}" if n > 2 else "x", f"x{n - 1}"], [f"s{n}"])]
        nodes += [helper.make_node("Mul", [f"s{n}", "half"], [f"x{n}"])]
    constants = {"w": RNG.normal(size=(3, 3)).astype(np.float32), "half": np.float32(0.5)}
    last = [value(f"x{additions + 1}", np.float32, [2, 3])]
    return model(nodes, [value("x", np.float32, [2, 3])], last, constants)


def test_a_long_run_of_light_nodes_is_several_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA's time and memory grow with the square of a kernel, and beyond 2000 additions it fails."""
    for module in (cut, partition):
        monkeypatch.setattr(module, "MOST_FUSED", 40)
    short, long = onnx2jax.convert(chain(15)), onnx2jax.convert(chain(25))
    x = RNG.normal(size=(2, 3)).astype(np.float32)
    assert kinds(short) == ["jit"] and kinds(long) == ["jit", "jit"]
    assert long.jitted, "a caller may still have it as one program"
    for m in (short, long):
        w = np.asarray(m.params["w"])
        states = [x, x @ w]
        for _ in range(15 if m is short else 25):
            states = [states[1], (states[0] + states[1]) / 2]
        np.testing.assert_allclose(m(x), states[1], rtol=1e-5)
        np.testing.assert_allclose(m.run(None, {"x": x})[0], states[1], rtol=1e-5)
    assert long.compilations == 2
    assert "host  compiled partitions, called in turn" in long.explain_call(x)
    constants = [helper.make_node("Neg", ["half"], [f"c{n}"]) for n in range(50)]
    total = helper.make_node("Sum", ["x", *(f"c{n}" for n in range(50))], ["y"])
    ends = [value("x", np.float32, [2, 3])], [value("y", np.float32, [2, 3])]
    assert kinds(onnx2jax.convert(model([*constants, total], *ends, {"half": np.float32(0.5)}))) == ["jit"]
    x_gradient = jax.grad(lambda x: long(x).sum())(x)
    np.testing.assert_allclose(x_gradient, (np.eye(3) / 3 + w * 2 / 3).sum(1)[None].repeat(2, 0), rtol=1e-4)


def test_a_large_program_is_compiled_in_parts_of_equal_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA's time grows faster than its program; layers that are compiled once make no program large."""
    monkeypatch.setattr(cut, "MOST_COMPILED", 20)
    monkeypatch.setattr(partition, "MOST_FUSED", 20)
    nodes = [helper.make_node(("MatMul", "Tanh")[n % 2], [f"x{n}", "w"][: 2 - n % 2], [f"x{n + 1}"]) for n in range(50)]
    weight = RNG.normal(size=(3, 3)).astype(np.float32)
    proto = model(nodes, [value("x0", np.float32, [2, 3])], [value("x50", np.float32, [2, 3])], {"w": weight})
    m, x = onnx2jax.convert(proto), RNG.normal(size=(2, 3)).astype(np.float32)
    assert [len(nodes) for _, nodes in m._runtime.program.stages()] == [17, 17, 16]  # type: ignore[union-attr]
    expected = x
    for _ in range(25):
        expected = np.tanh(expected @ weight)
    np.testing.assert_allclose(m(x), expected, rtol=1e-4)
    assert kinds(m.with_options(scan_layers="calls")) == ["jit"]


def test_a_detector_is_compiled_except_for_its_light_tail() -> None:
    proto = detector()
    m = onnx2jax.convert(proto)
    for _ in range(3):
        x = RNG.normal(size=(1, 3, 8, 8)).astype(np.float32)
        np.testing.assert_allclose(m.run(None, {"x": x})[0], reference(proto, {"x": x})[0], rtol=1e-4, atol=1e-5)
    assert kinds(m) == ["jit", "host"] and m.compilations == 1
    assert not m.jitted
    assert "NonMaxSuppression 'nms' needs the value of 'boxes'" in [why for _, _, why, *_ in m._runtime.program.rows()]


def test_heavy_nodes_after_a_host_node_are_compiled_per_count() -> None:
    proto = detector(head=True)
    m = onnx2jax.convert(proto)
    for _ in range(3):
        x = RNG.normal(size=(1, 3, 8, 8)).astype(np.float32)
        np.testing.assert_allclose(m.run(None, {"x": x})[0], reference(proto, {"x": x})[0], rtol=1e-4, atol=1e-5)
    assert kinds(m) == ["jit", "host", "jit"]


def test_a_transformation_of_a_partitioned_model_raises_with_the_fix() -> None:
    m = onnx2jax.convert(detector())
    with pytest.raises(
        KnownValueError, match=r"(?s)'nms' \(NonMax.*known before.*static=.*max_size={'nms': n}"
    ) as caught:
        jax.jit(m.apply)(m.params, np.zeros((1, 3, 8, 8), np.float32))
    advice = "\nit is computed from: 'x'\nleave out what depends on it: model.cut(outputs=['boxes', 'scores'])"
    assert str(caught.value).endswith(advice)  # x are images, which no caller fixes


def test_string_nodes_run_on_the_host_next_to_a_compiled_network() -> None:
    constants = {"w": RNG.normal(size=(4, 3)).astype(np.float32), "names": np.array(["a", "b", "c"], object)}
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["scores"]),
        helper.make_node("ArgMax", ["scores"], ["best"], axis=1, keepdims=0),
        helper.make_node("Gather", ["names", "best"], ["label"]),
    ]
    outputs = [value("label", object, None), value("scores", np.float32, None)]
    outputs[0].type.tensor_type.elem_type = TensorProto.STRING
    m = onnx2jax.convert(model(nodes, [value("x", np.float32, ["n", 4])], outputs, constants))
    x = RNG.normal(size=(5, 4)).astype(np.float32)
    label, scores = m(x)
    assert list(label) == ["abc"[i] for i in np.argmax(x @ constants["w"], 1)]
    assert isinstance(scores, jax.Array) and kinds(m) == ["jit", "host"]


def test_shapes_are_constant_across_partitions() -> None:
    """A partition after a host node reshapes to extents computed from the input's shape before it."""
    constants = {"w": RNG.normal(size=(3, 3)).astype(np.float32), "one": np.array([1])}
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("NonZero", ["m"], ["nz"]),
        helper.make_node("Cast", ["nz"], ["count"], to=TensorProto.FLOAT),
        helper.make_node("ReduceSum", ["count"], ["total"], keepdims=0),
        helper.make_node("Add", ["a", "total"], ["b"]),
        helper.make_node("MatMul", ["b", "w"], ["c"]),
        helper.make_node("Reshape", ["c", "shape"], ["y"]),
    ]
    inputs = [value("x", np.float32, ["n", 3]), value("m", np.float32, ["k", 50])]
    proto = model(nodes, inputs, [value("y", np.float32, None)], constants)
    m = onnx2jax.convert(proto)
    feeds = {"x": RNG.normal(size=(2, 3)).astype(np.float32), "m": RNG.integers(0, 2, (2, 50)).astype(np.float32)}
    np.testing.assert_allclose(m.run(None, feeds)[0], reference(proto, feeds)[0], rtol=1e-5)
    assert kinds(m)[-1] == "jit"


def decoder(steps: int) -> onnx.ModelProto:
    """Greedy decoding: a Loop whose token list grows by one each trip, embedded and summed anew each time."""
    size = 6
    table = RNG.normal(size=(size, 8)).astype(np.float32)
    out = RNG.normal(size=(8, size)).astype(np.float32)
    body_nodes = [
        helper.make_node("Gather", ["table", "tokens"], ["e"]),
        helper.make_node("Tanh", ["e"], ["t"]),
        helper.make_node("ReduceSum", ["t", "axis0"], ["s"], keepdims=1),
        helper.make_node("MatMul", ["s", "out"], ["logits"]),
        helper.make_node("ArgMax", ["logits"], ["next"], axis=1, keepdims=0),
        helper.make_node("Concat", ["tokens", "next"], ["grown"], axis=0),
        helper.make_node("Identity", ["go"], ["go_on"]),
    ]
    inputs = [value("i", np.int64, []), value("go", bool, []), value("tokens", np.int64, ["t"])]
    outputs = [value("go_on", bool, []), value("grown", np.int64, ["u"])]
    body = helper.make_graph(body_nodes, "body", inputs, outputs)
    node = helper.make_node("Loop", ["trips", "", "start"], ["y"], body=body)
    constants = {"table": table, "out": out, "axis0": np.array([0]), "trips": np.array(steps)}
    return model([node], [value("start", np.int64, ["t"])], [value("y", np.int64, None)], constants)


def test_a_loop_with_growing_state_is_not_recompiled_per_length() -> None:
    proto = decoder(32)
    m = onnx2jax.convert(proto)
    feeds = {"start": np.array([1, 2, 3] * 10)}
    np.testing.assert_array_equal(m.run(None, feeds)[0], reference(proto, feeds)[0])
    assert m.compilations <= 8


def test_infinite_cost_does_not_break_explain() -> None:
    m = onnx2jax.convert(detector())
    m(np.zeros((1, 3, 8, 8), np.float32))
    lines = [line for line in m.explain().splitlines() if not line.startswith(" ")]
    assert lines[0].split() == ["stage", "nodes", "why", "here", "compiled", "seconds"] and len(lines) == 3


def test_the_table_groups_equal_nodes() -> None:
    """Nodes that run on the host for the same reason are one row, with their number."""
    path = "/model/blocks.{}/attention/keep_only_what_is_not_masked_by_the_caller/NonZero"
    nodes = [helper.make_node("MatMul", ["x", "x"], ["y"])]
    nodes += [helper.make_node("NonZero", ["y"], [f"found{i}"], name=path.format(i)) for i in range(10)]
    outputs = [value(f"found{i}", np.int64, [2, "found"]) for i in range(10)]
    m = onnx2jax.convert(model(nodes, [value("x", np.float32, ["n", "n"])], outputs))
    m(np.ones((3, 3), np.float32))
    lines = m.explain().splitlines()
    assert max(map(len, lines)) <= 100
    assert "(and 9 more alike)" in " ".join(" ".join(lines).split())
    assert " ".join(lines).count("needs the value") == 1


def masked_mean() -> onnx.ModelProto:
    """x [batch, seq, 4] and mask [batch, seq] -> each row's masked mean, and x doubled."""
    nodes = [
        helper.make_node("Unsqueeze", ["mask", "two"], ["m"]),
        helper.make_node("Mul", ["x", "m"], ["xm"]),
        helper.make_node("ReduceSum", ["xm", "one"], ["total"], keepdims=0),
        helper.make_node("ReduceSum", ["mask", "one"], ["count"], keepdims=1),
        helper.make_node("Div", ["total", "count"], ["mean"]),
        helper.make_node("Add", ["x", "x"], ["twice"]),
    ]
    inputs = [value("x", np.float32, ["batch", "seq", 4]), value("mask", np.float32, ["batch", "seq"])]
    outputs = [value("mean", np.float32, ["batch", 4]), value("twice", np.float32, ["batch", "seq", 4])]
    return model(nodes, inputs, outputs, {"one": np.array([1]), "two": np.array([2])})


def test_buckets_bound_the_number_of_compilations() -> None:
    plain, bucketed = onnx2jax.convert(masked_mean()), onnx2jax.convert(masked_mean(), bucket={"seq": [8, 16]})
    for n in (1, 7, 8, 9, 12):
        x, mask = RNG.normal(size=(2, n, 4)).astype(np.float32), np.ones((2, n), np.float32)
        for ours, expected in zip(bucketed(x, mask), plain(x, mask), strict=True):
            assert ours.shape == expected.shape
            np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)
    assert plain.compilations == 5 and bucketed.compilations == 2
    with pytest.raises(TypeError, match=r"dimension variables are \['batch', 'seq'\]"):
        onnx2jax.convert(masked_mean(), bucket={"sequence": [8]})


def test_recompilation_warning_names_input_and_fix() -> None:
    m = onnx2jax.convert(masked_mean(), warn_after=3)
    with pytest.warns(
        onnx2jax.errors.RecompilationWarning, match=r"compiled 4 times.*'(x|mask)' came in 4 shapes.*bucket="
    ):
        for n in range(1, 6):
            m(np.zeros((1, n, 4), np.float32), np.ones((1, n), np.float32))


@pytest.mark.parametrize("limit", [None, np.array(2**62)])
def test_max_trips_bounds_an_endless_loop(limit: np.ndarray | None) -> None:
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["on"]), helper.make_node("Add", ["s", "s"], ["t"])],
        "body",
        [value("i", np.int64, []), value("go", bool, []), value("s", np.float32, [])],
        [value("on", bool, []), value("t", np.float32, [])],
    )
    node = helper.make_node("Loop", ["n" if limit is not None else "", "c", "x"], ["y"], body=body, name="forever")
    inputs = [value("c", bool, []), value("x", np.float32, [])]
    constants = {} if limit is None else {"n": limit}
    m = onnx2jax.convert(model([node], inputs, [value("y", np.float32, [])], constants), max_trips=100)
    assert float(m(np.bool_(False), np.float32(3))) == 3
    with pytest.raises(onnx2jax.errors.OperatorError, match=r"'forever'.*max_trips \(100\)"):
        m(np.bool_(True), np.float32(1))


def sized(op_type: str, inputs: list[str], outputs: list[str], **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op_type, inputs, outputs, name="it", **attributes)


SIZED: dict[str, tuple[onnx.NodeProto, list[Any], list[str]]] = {
    "NonZero": (sized("NonZero", ["x"], ["y"]), [np.float32([[0, 1, 2], [3, 0, 0]])], ["y"]),
    "Compress": (
        sized("Compress", ["x", "c"], ["y"], axis=1),
        [np.float32([[0, 1, 2], [3, 4, 5]]), np.array([True, False, True])],
        ["y"],
    ),
    "Unique": (sized("Unique", ["x"], ["y", "", "inverse"]), [np.float32([3, 1, 3, 2, 1])], ["y", "inverse"]),
}


@pytest.mark.parametrize("case", SIZED)
def test_max_size_pads_results_returns_counts_and_gives_one_program(case: str) -> None:
    node, arrays, outputs = SIZED[case]
    names = [n for n in node.input if n]
    inputs = [value(n, a.dtype, a.shape) for n, a in zip(names, arrays, strict=True)]
    types = {"y": np.int64 if case == "NonZero" else np.float32, "inverse": np.int64}
    proto = model([node], inputs, [value(n, types[n], None) for n in outputs])
    expected = onnx2jax.convert(proto)(*arrays)
    m = onnx2jax.convert(proto, max_size={"it": 4})
    padded = jax.jit(m.apply)({}, *arrays)
    count = int(padded[-1])
    assert m.outputs[-1].name == "it/count"
    first = expected[0] if len(outputs) > 1 else expected
    axis = 0 if case == "Unique" else 1
    np.testing.assert_array_equal(np.take(padded[0], range(count), axis), first)
    assert padded[0].shape[axis] == 4 and count == first.shape[axis]
    if case == "Unique":
        np.testing.assert_array_equal(padded[1], expected[1])
    with pytest.raises(ValueError, match=rf"'it' has {count} results, more than its max_size \(1\)"):
        onnx2jax.convert(proto, max_size={"it": 1})(*arrays)


@pytest.mark.parametrize(
    ("node", "shapes"),
    [
        (sized("NonZero", ["x"], ["y"]), [(0,)]),
        (sized("Compress", ["x", "c"], ["y"], axis=0), [(0, 3), (0,)]),
        (sized("Unique", ["x"], ["y", "first", "", "counts"], axis=0), [(0, 3)]),
        (sized("NonMaxSuppression", ["x", "c", "limit"], ["y"]), [(1, 3, 4), (1, 0, 3)]),
    ],
    ids=lambda case: getattr(case, "op_type", ""),
)
def test_max_size_pads_what_is_empty_with_zeros(node: onnx.NodeProto, shapes: list[Any]) -> None:
    condition = np.bool_ if node.op_type == "Compress" else np.float32
    arrays = [np.zeros(s, t) for s, t in zip(shapes, (np.float32, condition), strict=False)]
    inputs = [value(n, a.dtype, a.shape) for n, a in zip(node.input, arrays, strict=False)]
    kind = np.float32 if node.op_type in ("Compress", "Unique") else np.int64
    outputs = [value(n, kind if n == "y" else np.int64, None) for n in node.output if n]
    m = onnx2jax.convert(model([node], inputs, outputs, {"limit": np.int64([2])}), max_size={"it": 2})
    *padded, count = map(np.asarray, m(*arrays))
    assert count == 0 and all(2 in v.shape and not np.any(v) for v in padded)


def test_max_size_of_a_detector_under_jit_and_vmap() -> None:
    proto = detector()
    m, plain = onnx2jax.convert(proto, max_size={"nms": 12}), onnx2jax.convert(proto)
    images = RNG.normal(size=(3, 1, 3, 8, 8)).astype(np.float32)
    boxes, counts = jax.jit(jax.vmap(m.apply, (None, 0)))(m.params, images)
    assert boxes.shape[2] == 12
    for image, found, count in zip(images, boxes, counts, strict=True):
        np.testing.assert_allclose(found[:, : int(count)], plain(image), rtol=1e-5, atol=1e-6)
    proto.graph.input.append(value("count", np.int64, []))
    next(n for n in proto.graph.node if n.name == "nms").input[2] = "count"
    m = onnx2jax.convert(proto, max_size={"nms": 12})
    with pytest.raises(KnownValueError, match="max_output_boxes_per_class") as caught:
        jax.jit(m.apply)(m.params, images[0], np.array(3))
    assert "max_size" not in str(caught.value)  # it is given
    assert "\nit is computed from: 'count': convert(..., static={'count': value})" in str(caught.value)
    with pytest.raises(TypeError, match=r"can take a size are \['nms'\]"):
        onnx2jax.convert(proto, max_size={"conv": 3})


def collatz() -> onnx.ModelProto:
    """The Collatz sequence of x: the trip count depends on its value, and each trip yields a row."""
    nodes = [
        helper.make_node("Mod", ["s", "two"], ["odd"]),
        helper.make_node("Cast", ["odd"], ["is_odd"], to=TensorProto.BOOL),
        helper.make_node("Mul", ["s", "three"], ["s3"]),
        helper.make_node("Add", ["s3", "one"], ["up"]),
        helper.make_node("Div", ["s", "two"], ["down"]),
        helper.make_node("Where", ["is_odd", "up", "down"], ["next"]),
        helper.make_node("Greater", ["next", "one"], ["go_on"]),
        helper.make_node("Identity", ["next"], ["row"]),
    ]
    inputs = [value("i", np.int64, []), value("go", bool, []), value("s", np.int64, [])]
    outputs = [value("go_on", bool, []), value("next", np.int64, []), value("row", np.int64, [])]
    body = helper.make_graph(nodes, "body", inputs, outputs)
    node = helper.make_node("Loop", ["most", "c", "x"], ["last", "rows"], body=body, name="fall")
    constants = {
        "one": np.array(1),
        "two": np.array(2),
        "three": np.array(3),
        "most": np.array(100),
        "c": np.array(True),
    }
    ends = [value("last", np.int64, None), value("rows", np.int64, None)]
    return model([node], [value("x", np.int64, [])], ends, constants)


def test_a_data_dependent_loop_stacks_scan_outputs() -> None:
    rows = [22, 11, 34, 17, 52, 26, 13, 40, 20, 10, 5, 16, 8, 4, 2, 1]
    last, found = onnx2jax.convert(collatz())(np.array(7))
    assert int(last) == 1 and found.tolist() == rows
    m = onnx2jax.convert(collatz(), max_size={"fall": 20})
    last, padded, count = jax.jit(jax.vmap(lambda x: m.apply({}, x)))(np.array([7, 8]))
    assert count.tolist() == [16, 3] and last.tolist() == [1, 1]
    assert padded[0, :16].tolist() == rows and padded[1, :3].tolist() == [4, 2, 1]
    with pytest.raises(ValueError, match="16 results, more than its max_size"):
        onnx2jax.convert(collatz(), max_size={"fall": 5})(np.array(7))


def test_concurrent_calls_of_a_partitioned_model() -> None:
    """Two threads may partition the graph at once, each with its own shapes."""
    proto = detector(head=True)
    images = [RNG.normal(size=(1, 3, 8 + i % 3, 8)).astype(np.float32) for i in range(24)]
    expected = [reference(proto, {"x": x})[0] for x in images]
    m = onnx2jax.convert(proto)
    with ThreadPoolExecutor(8) as pool:
        for ours, wanted in zip(pool.map(lambda x: m.run(None, {"x": x})[0], images), expected, strict=True):
            np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=1e-5)


def test_a_failed_call_does_not_change_the_model() -> None:
    proto = detector(head=True)
    m = onnx2jax.convert(proto)
    x = RNG.normal(size=(1, 3, 8, 8)).astype(np.float32)
    for _ in range(2):
        with pytest.raises(onnx2jax.errors.OperatorError, match="does not fit"):
            m(np.zeros((1, 3, 0, 8), np.float32))
        np.testing.assert_allclose(m.run(None, {"x": x})[0], reference(proto, {"x": x})[0], rtol=1e-4, atol=1e-5)


def test_buckets_pad_strings_with_empty_strings() -> None:
    constants = {"w": RNG.normal(size=(4, 3)).astype(np.float32), "names": np.array(["a", "b", "c"], object)}
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["scores"]),
        helper.make_node("ArgMax", ["scores"], ["best"], axis=1, keepdims=0),
        helper.make_node("Gather", ["names", "best"], ["name"]),
        helper.make_node("StringConcat", ["t", "name"], ["label"]),
    ]
    t, label = (helper.make_tensor_value_info(n, TensorProto.STRING, ["n"]) for n in ("t", "label"))
    proto = model(nodes, [value("x", np.float32, ["n", 4]), t], [label], constants)
    m = onnx2jax.convert(proto, bucket={"n": [4, 8]})
    for n in (1, 3, 4, 7):
        feeds = {"x": RNG.normal(size=(n, 4)).astype(np.float32), "t": np.array(["k"] * n, object)}
        assert m.run(None, feeds)[0].tolist() == reference(proto, feeds)[0].tolist()
    assert m.compilations == 2


def test_the_first_call_inside_checkpoint() -> None:
    m, x = onnx2jax.convert(mlp()), np.ones((2, 4), np.float32)
    gradient = jax.jit(jax.grad(lambda p: jax.checkpoint(m.apply)(p, x).sum()))(m.params)
    expected = jax.jit(jax.grad(lambda p: m.apply(p, x).sum()))(m.params)
    np.testing.assert_allclose(gradient["w1"], expected["w1"], rtol=1e-5)


def test_attribute_computations_are_cached_per_node_and_function_call():
    made = []

    def doubled(factor: float) -> float:
        made.append(factor)
        return 2 * factor

    @onnx2jax.ops.op("TimesTwice", domain="com.example", replace=True)
    def times_twice(x: Static, *, factor: float, once: Any) -> Any:
        return x * once(doubled, factor)

    inner = helper.make_node("TimesTwice", ["x"], ["y"], domain="com.example")
    inner.attribute.append(onnx.AttributeProto(name="factor", type=onnx.AttributeProto.FLOAT, ref_attr_name="factor"))
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("com.example", 1), helper.make_opsetid("local", 1)]
    function = helper.make_function("local", "F", ["x"], ["y"], [inner], imports, ["factor"])
    nodes = [
        helper.make_node("TimesTwice", ["x"], ["a"], domain="com.example", factor=1.0),
        helper.make_node("TimesTwice", ["x"], ["b"], domain="com.example", factor=2.0),
        helper.make_node("F", ["x"], ["c"], domain="local", factor=3.0),
        helper.make_node("F", ["x"], ["d"], domain="local", factor=4.0),
    ]
    outputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1]) for n in "abcd"]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])], outputs)
    m = onnx2jax.convert(helper.make_model(graph, opset_imports=imports, functions=[function], ir_version=10))
    for x in (1, 10):
        assert [float(y[0]) for y in m(np.float32([x]))] == [2 * x, 4 * x, 6 * x, 8 * x]
    assert (made.count(1), made.count(2)) == (1, 1)
