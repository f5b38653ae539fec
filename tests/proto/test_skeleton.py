"""Large files of which protobuf parses all but the weights (proto/files.py)."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnx2jax
from onnx2jax.errors import ExternalDataError, ModelError
from onnx2jax.proto import files
from onnx2jax.proto.mapped import is_lazy

W = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32)
X = np.ones((1, 256), np.float32)


@pytest.fixture(autouse=True)
def every_file_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LARGE_FILE", 0)


def model(*weights: TensorProto) -> onnx.ModelProto:
    """Matrix products with the weights, and a small bias."""
    values = ["x", *(f"h{i}" for i in range(len(weights)))]
    nodes = [helper.make_node("MatMul", [values[i], w.name], [values[i + 1]]) for i, w in enumerate(weights)]
    nodes.append(helper.make_node("Add", [values[-1], "b"], ["y"]))
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", 256]) for n in "xy")
    b = numpy_helper.from_array(np.full(256, 0.5, np.float32), "b")
    graph = helper.make_graph(nodes, "g", [x], [y], [*weights, b], doc_string="text", value_info=[])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8, producer_name="us")


def raw(name: str = "w", array: np.ndarray = W, **more: Any) -> TensorProto:
    tensor = numpy_helper.from_array(array, name)
    tensor.MergeFrom(TensorProto(**more))
    return tensor


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "m.onnx"
    path.write_bytes(model(raw(), raw("v", 2 * W)).SerializeToString())
    return path


def test_weights_stay_in_the_file_until_they_are_needed(path: Path) -> None:
    m = onnx2jax.convert(path)
    assert is_lazy(m.graph.initializers["w"]) and not is_lazy(m.graph.initializers["b"])
    np.testing.assert_allclose(m(X), X @ W @ (2 * W) + 0.5, rtol=1e-4, atol=1e-3)
    np.testing.assert_array_equal(m.params["v"], 2 * W)
    assert not m.params["v"].flags.writeable and not is_lazy(m.graph.initializers["v"])


@pytest.mark.parametrize("external", [False, True])
def test_saving_keeps_the_file_unchanged(external: bool, path: Path, tmp_path: Path) -> None:
    before = onnx.load(path)
    new = onnx2jax.save(onnx2jax.convert(path), tmp_path / "new.onnx", external_data=external, size_threshold=0)
    after = onnx.load(new)
    if external:
        assert (tmp_path / "new.onnx.data").stat().st_size > 2 * W.nbytes
        for tensor in after.graph.initializer:
            del tensor.external_data[:]
            tensor.ClearField("data_location")
    assert after == before
    changed = onnx2jax.save(onnx2jax.convert(path), tmp_path / "changed.onnx", params={"w": W + 1})
    np.testing.assert_array_equal(numpy_helper.to_array(onnx.load(changed).graph.initializer[0]), W + 1)


def test_it_can_be_saved_over_itself(path: Path) -> None:
    m = onnx2jax.convert(path)
    for factor in (3, 5):
        onnx2jax.save(m, path, params={"v": factor * W})
        np.testing.assert_array_equal(onnx2jax.convert(path).params["v"], factor * W)
        np.testing.assert_array_equal(m.params["v"], 2 * W)


def test_a_file_that_changes_is_an_error(path: Path) -> None:
    changed, empty = onnx2jax.convert(path), onnx2jax.convert(path)
    data = path.read_bytes()
    path.write_bytes(b"")
    with pytest.raises(ExternalDataError, match=r"'m\.onnx' was changed after the model was converted"):
        empty(X)
    path.write_bytes(data)
    os.utime(path, ns=(1, 1))
    with pytest.raises(ExternalDataError, match="convert the model again"):
        changed.params  # noqa: B018


@pytest.mark.skipif(os.name != "posix", reason="Windows does not remove open files")
def test_a_removed_file_stays_readable(path: Path) -> None:
    m = onnx2jax.convert(path)
    path.unlink()
    np.testing.assert_array_equal(m.params["w"], W)


def test_a_pickled_model_needs_no_file(path: Path) -> None:
    m = onnx2jax.convert(path)
    data = pickle.dumps(m)
    wanted = np.asarray(m(X))
    path.unlink()
    again = pickle.loads(data)
    np.testing.assert_array_equal(again(X), wanted)
    assert onnx.load_from_string(onnx2jax.save(again, path).read_bytes()).graph.initializer[0].raw_data == W.tobytes()


def test_a_file_object_works_for_several_calls(path: Path) -> None:
    file = onnx2jax.read(path)
    assert onnx2jax.check(file).ok
    a, b = onnx2jax.convert(file), onnx2jax.convert(file)
    assert onnx2jax.check(file).ok
    np.testing.assert_array_equal(a(X), b(X))
    np.testing.assert_array_equal(onnx2jax.convert(path, strict=True)(X), a(X))


def test_invalid_files_raise_the_same_errors_as_small_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = model(raw()).SerializeToString()
    twice = raw(float_data=[1.0] * W.size)
    outside = raw(data_location=TensorProto.EXTERNAL)
    outside.external_data.add(key="location", value="w.bin")
    repeated = raw().SerializeToString() + TensorProto(raw_data=bytes(W.nbytes)).SerializeToString()
    length = raw()
    length.raw_data = W.tobytes() + b"\0"
    cases = {
        "truncated": whole[:-1],
        "cut in the weight": whole[: len(whole) // 2],
        "followed by rubbish": whole + b"\x0b\xff",
        "a length beyond the end": whole[:40] + b"\x3a\xff\xff\xff\x7f",
        "data in two fields": model(twice).SerializeToString(),
        "data here and outside": model(outside).SerializeToString(),
        "too long": model(length).SerializeToString(),
        "strings": model(raw(data_type=TensorProto.STRING)).SerializeToString(),
        "no model": bytes(100_000),
    }

    def said(path: Path) -> str:
        with pytest.raises(ModelError) as caught:
            onnx2jax.convert(path)
        return str(caught.value)

    for name, data in cases.items():
        path = tmp_path / f"{name}.onnx"
        path.write_bytes(data)
        in_parts = said(path)
        with monkeypatch.context() as patch:
            patch.setattr(files, "LARGE_FILE", 2**40)
            assert in_parts == said(path), name
    # The last occurrence of a non-repeated field counts, as in protobuf.
    single = model(raw())
    del single.graph.initializer[:]
    graph = single.graph.SerializeToString() + b"\x2a" + _varint(len(repeated)) + repeated
    graph += onnx.GraphProto(
        initializer=[numpy_helper.from_array(np.full(256, 0.5, np.float32), "b")]
    ).SerializeToString()
    single.ClearField("graph")
    (tmp_path / "last.onnx").write_bytes(single.SerializeToString() + b"\x3a" + _varint(len(graph)) + graph)
    np.testing.assert_array_equal(onnx2jax.convert(tmp_path / "last.onnx").params["w"], 0)


def _varint(n: int) -> bytes:
    return bytes([n & 0x7F | 0x80]) + _varint(n >> 7) if n >= 0x80 else bytes([n])
