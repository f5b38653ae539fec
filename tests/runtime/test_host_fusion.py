"""Host nodes over floating-point arrays run as one list of NumPy calls after a few calls of a signature."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import onnx2jax
from onnx2jax.errors import OperatorError
from onnx2jax.runtime import host_plan, partition
from onnx2jax.runtime.host_plan import FEW_CALLS
from tests.support.models import model, value

X = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
ML = "ai.onnx.ml"


def classifier(**options: Any) -> onnx2jax.Model:
    """A scaler, a linear classifier with string labels, softmax, and a map for each row."""
    weights = np.random.default_rng(1).normal(size=(3, 4)).ravel().tolist()
    nodes = [
        helper.make_node("Scaler", ["x"], ["scaled"], domain=ML, offset=[0.1, 0.2, 0.3, 0.4], scale=[2.0]),
        helper.make_node(
            *("LinearClassifier", ["scaled"], ["label", "scores"]), domain=ML, coefficients=weights,
            intercepts=[0.1, 0.2, 0.3], classlabels_strings=["a", "b", "c"], post_transform="SOFTMAX",
        ),
        helper.make_node("Normalizer", ["scores"], ["shares"], domain=ML, norm="L1"),
        helper.make_node("ZipMap", ["shares"], ["maps"], domain=ML, classlabels_strings=["a", "b", "c"]),
    ]  # fmt: skip
    ends = [value("label", object, None), onnx.ValueInfoProto(name="maps")]
    proto = model(nodes, [value("x", np.float32, ["n", 4])], ends)
    proto.opset_import.append(helper.make_opsetid(ML, 3))
    return onnx2jax.convert(proto, **options)


@pytest.fixture
def numbers_of_nodes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the runs that are fused."""
    found: list[int] = []
    original = host_plan._fused

    def noting(run: Any, *others: Any) -> Any:
        step = original(run, *others)
        found.extend([len(run)] * (step is not None))
        return step

    monkeypatch.setattr(host_plan, "_fused", noting)
    return found


def test_fused_nodes_compute_what_the_single_ones_do(numbers_of_nodes: list[int]) -> None:
    m, plain = classifier(), classifier(optimize={"skip": ["fuse_host_nodes"]})
    for k in range(FEW_CALLS + 4):
        x = np.random.default_rng(k).normal(size=(3, 4)).astype(np.float32)
        (label, maps), (wanted, shares) = m.run(None, {"x": x}), plain.run(None, {"x": x})
        assert label.tolist() == wanted.tolist()
        for row, other in zip(maps, shares, strict=True):
            assert row == pytest.approx(other, rel=1e-6)
    assert numbers_of_nodes == [3]  # the lookup of labels, between them, does not part them


def test_each_signature_has_its_own() -> None:
    m, plain = classifier(), classifier(optimize=False)
    for _ in range(FEW_CALLS + 2):
        for rows in (1, 2, 3):
            maps, wanted = m.run("maps", {"x": X[:rows]})[0], plain.run("maps", {"x": X[:rows]})[0]
            assert [r == pytest.approx(w, rel=1e-6) for r, w in zip(maps, wanted, strict=True)] == [True] * rows


WORDS = {"one": 1.0, "two": 2.0, "minus": -3.0, "four": 4.0}


def selected() -> onnx2jax.Model:
    """Float nodes over the words whose number is above zero, how many depends on data; then some by index."""
    table = {"keys_strings": list(WORDS), "values_floats": list(WORDS.values())}
    nodes = [
        helper.make_node("LabelEncoder", ["words"], ["x"], domain=ML, **table),
        helper.make_node("Greater", ["x", "zero"], ["above"]),
        helper.make_node("Compress", ["x", "above"], ["few"]),
        helper.make_node("Mul", ["few", "two"], ["double"]),
        helper.make_node("Sub", ["double", "one"], ["less"]),
        helper.make_node("Gather", ["less", "at"], ["y"]),
    ]
    constants = {"zero": np.float32(0), "two": np.float32(2), "one": np.float32(1)}
    ends = [value("less", np.float32, None), value("y", np.float32, None)]
    proto = model(nodes, [value("words", object, [4]), value("at", np.int64, [1])], ends, constants)
    proto.opset_import.append(helper.make_opsetid(ML, 3))
    return onnx2jax.convert(proto)


def test_shapes_that_depend_on_data_run_the_single_nodes(numbers_of_nodes: list[int]) -> None:
    m, at, rng = selected(), np.array([0]), np.random.default_rng(0)
    for _ in range(FEW_CALLS + 12):
        words = np.array(["one", *rng.choice(list(WORDS), 3)], object)
        x = np.float32([WORDS[w] for w in words])
        less, y = m.run(None, {"words": words, "at": at})
        np.testing.assert_array_equal(less, 2 * x[x > 0] - 1)
        np.testing.assert_array_equal(y, [1.0])
    assert numbers_of_nodes[-1] == 2  # Mul and Sub


def test_nodes_whose_shapes_depend_on_data_stay_single(recwarn: pytest.WarningsRecorder) -> None:
    table = {"keys_strings": list(WORDS), "values_floats": [0.0, 2.0, -3.0, 0.0]}
    nodes = [
        helper.make_node("LabelEncoder", ["words"], ["x"], domain=ML, **table),
        helper.make_node("NonZero", ["x"], ["y"]),
    ]
    proto = model(nodes, [value("words", object, [4])], [value("y", np.int64, None)])
    proto.opset_import.append(helper.make_opsetid(ML, 3))
    m = onnx2jax.convert(proto)
    for _ in range(FEW_CALLS + 2):
        np.testing.assert_array_equal(m.run(None, {"words": np.array(list(WORDS), object)})[0], [[1, 2]])
    assert not recwarn.list


def test_indices_are_still_checked() -> None:
    m, words = selected(), np.array(["one", "two", "minus", "four"], object)
    for _ in range(FEW_CALLS + 2):
        np.testing.assert_array_equal(m.run(None, {"words": words, "at": np.array([2])})[1], [7])
    with pytest.raises(OperatorError, match="are outside"):
        m.run(None, {"words": words, "at": np.array([3])})


def test_results_are_the_callers_own() -> None:
    m, feeds = selected(), {"words": np.array(["one", "two", "two", "four"], object), "at": np.array([1])}
    for _ in range(FEW_CALLS + 4):
        (result, _) = m.run(None, feeds)
        np.testing.assert_array_equal(result, [1, 3, 3, 7])
        result[:] = 0


def test_threads_share_a_fused_chain() -> None:
    m, (wanted,) = classifier(), classifier(optimize=False).run("maps", {"x": X})
    found: list[bool] = []

    def work() -> None:
        for _ in range(9):
            (maps,) = m.run("maps", {"x": X})
            found.append(all(row == pytest.approx(other, rel=1e-6) for row, other in zip(maps, wanted, strict=True)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 36


def test_partitions_are_bound_to_their_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product between host nodes; another number of words finds the program anew."""
    rng = np.random.default_rng(0)
    table = {"keys_strings": list(WORDS), "values_floats": list(WORDS.values())}
    nodes = [
        helper.make_node("LabelEncoder", ["words"], ["x"], domain=ML, **table),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    w = rng.normal(size=(4, 300)).astype(np.float32)
    proto = model(nodes, [value("words", object, ["n", 4])], [value("y", np.float32, None)], {"w": w})
    proto.opset_import.append(helper.make_opsetid(ML, 3))
    m, lookups = onnx2jax.convert(proto), []
    original = partition._Host.run_partition
    monkeypatch.setattr(partition._Host, "run_partition", lambda *a: lookups.append(1) or original(*a))
    for rows in (2, 3, 2, 3):
        for _ in range(FEW_CALLS + 3):
            words = rng.choice(np.array(list(WORDS), object), (rows, 4))
            x = np.vectorize(WORDS.get)(words).astype(np.float32)
            np.testing.assert_allclose(m.run(None, {"words": words})[0], x @ w, rtol=1e-5, atol=1e-5)
    assert len(lookups) == 2 * (FEW_CALLS + 1)  # the first call of a signature, and those before it is bound


def test_nodes_around_one_without_a_numpy_program_are_fused(numbers_of_nodes: list[int]) -> None:
    """A cast to integers, whose values beyond their range NumPy and XLA convert differently."""
    nodes = [
        helper.make_node("Exp", ["x"], ["a"]),
        helper.make_node("Cast", ["x"], ["whole"], to=onnx.TensorProto.INT64),
        helper.make_node("Neg", ["a"], ["b"]),
        helper.make_node("Unique", ["whole"], ["unique"]),
        helper.make_node("Abs", ["b"], ["c"]),
    ]
    ends = [value("c", np.float32, None), value("unique", np.int64, None)]
    m = onnx2jax.convert(model(nodes, [value("x", np.float32, [3, 4])], ends))
    for k in range(FEW_CALLS + 3):
        x = X * k
        c, unique = m.run(None, {"x": x})
        np.testing.assert_allclose(c, np.exp(x), rtol=1e-6)
        np.testing.assert_array_equal(unique, np.unique(x.astype(np.int64)))
    assert max(numbers_of_nodes) == 3
