"""``save``: exact copies, new weights in the old encoding, external data, atomic writes (rules EX-*)."""

from __future__ import annotations

import gc
import hashlib
import os
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, external_data_helper, helper, numpy_helper

import onnx2jax
from onnx2jax.errors import (
    ExternalDataError,
    InputNameError,
    InputShapeError,
    InputTypeError,
    ModelError,
    UnsupportedError,
)
from onnx2jax.model.files import save
from onnx2jax.proto.messages import TensorProto as OurTensor
from onnx2jax.proto.tensors import from_array, to_array, to_field
from onnx2jax.proto.types import ELEMENT_TYPES
from tests.support.killed import killed
from tests.support.models import mlp, model, text_model, value
from tests.support.official import ROOT, cases

X = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)


def reference(path: Any, **feeds: np.ndarray) -> np.ndarray:
    """The outputs of onnxruntime."""
    (result,) = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, feeds)
    return result


def scaled(params: Any) -> dict[str, Any]:
    return {name: np.asarray(v * 0.5 + 1).astype(v.dtype) for name, v in params.items()}


def entries(tensor: Any) -> dict[str, str]:
    return {e.key: e.value for e in tensor.external_data}


# ---------------------------------------------------------------------------------------------- faithful copies


def assert_copied(message: onnx.ModelProto, folder: Path) -> None:
    data = message.SerializeToString()
    for source in (onnx2jax.convert(data), data):
        path = onnx2jax.save(source, folder / "copy.onnx")
        assert onnx.ModelProto.FromString(path.read_bytes()) == message
        assert list(folder.iterdir()) == [path]


def converted(name: str) -> onnx.ModelProto:
    case = cases()[name]
    if case.url is not None:
        return onnx.load(ROOT.parent / case.url)
    return case.model if case.model is not None else onnx.load(Path(case.model_dir) / "model.onnx")


def test_a_sample_of_official_models_is_copied_exactly(tmp_path: Path) -> None:
    names = sorted(name for name, case in cases().items() if case.kind == "node")
    changed = []
    for name in names[::40]:
        message = converted(name)
        path = onnx2jax.save(message, tmp_path / "copy.onnx")
        if onnx.ModelProto.FromString(path.read_bytes()) != message:
            changed.append(name)
    assert changed == [] and len(names) > 1000


@pytest.mark.long
def test_every_official_model_is_copied_exactly(tmp_path: Path) -> None:
    for name in cases():
        message = converted(name)
        for source in (message, onnx2jax.convert(message)):
            path = onnx2jax.save(source, tmp_path / "copy.onnx")
            assert onnx.ModelProto.FromString(path.read_bytes()) == message, name


def test_every_kind_of_source(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(mlp().SerializeToString())
    for source in (path, str(path), path.read_bytes(), mlp(), onnx2jax.convert(path), onnx2jax.convert(mlp())):
        result = onnx2jax.save(source, tmp_path / "copy.onnx")
        assert result == tmp_path / "copy.onnx"
        assert onnx.load(result) == mlp()
    with pytest.raises(ModelError):
        onnx2jax.save(b"no model", path)
    assert onnx.load(path) == mlp()


def big(dtype: Any = np.float32) -> np.ndarray:
    return np.arange(600).reshape(20, 30).astype(dtype)


def test_unknown_fields_are_kept(tmp_path: Path) -> None:
    message = model([helper.make_node("Add", ["x", "w"], ["y"])], *ends(np.float32), {"w": big()})
    unknown = b"\xaa\xff\x07\x03new"  # field 16373, a string
    node = message.graph.node[0].SerializeToString() + unknown
    message.graph.node[0].ParseFromString(node)
    message.graph.initializer[0].MergeFromString(unknown)
    message.MergeFromString(unknown)
    assert_copied(message, tmp_path)
    path = onnx2jax.save(onnx2jax.convert(message), tmp_path / "copy.onnx", params={"w": big() + 1}, external_data=True)
    assert path.read_bytes().count(b"\x03new") == 3


def ends(dtype: Any) -> Any:
    return [value("x", dtype, [20, 30])], [value("y", dtype, [20, 30])]


def test_a_model_holds_its_weights_once(tmp_path: Path) -> None:
    side = 2048
    ends = [value("x", np.float32, [1, side])], [value("y", np.float32, [1, side])]
    weight = np.ones((side, side), np.float32)
    onnx.save(model([helper.make_node("MatMul", ["x", "w"], ["y"])], *ends, {"w": weight}), tmp_path / "m.onnx")
    gc.collect()
    tracemalloc.start()
    ours = onnx2jax.convert(tmp_path / "m.onnx")
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 1.2 * weight.nbytes
    assert len(ours.origin._serialized) < 1000


# -------------------------------------------------------------------------------------------------- new weights


def test_new_weights_run_in_onnxruntime(tmp_path: Path) -> None:
    ours = onnx2jax.convert(mlp())
    new = scaled(ours.params)
    path = onnx2jax.save(ours, tmp_path / "m.onnx", params=new)
    expected = np.asarray(ours.apply(new, X))
    np.testing.assert_allclose(reference(path, x=X), expected, rtol=1e-6)
    np.testing.assert_array_equal(onnx2jax.convert(path)(X), expected)
    assert not np.allclose(expected, ours(X))


def test_weights_replaced_in_the_model_are_written(tmp_path: Path) -> None:
    ours = onnx2jax.convert(mlp())
    ours = ours.with_params({"w1": jnp.asarray(ours.params["w1"] * 2)})
    path = onnx2jax.save(ours, tmp_path / "m.onnx", params={"b2": np.float32([5, 6])})
    again = onnx2jax.convert(path).params
    np.testing.assert_array_equal(again["w1"], ours.params["w1"])
    np.testing.assert_array_equal(again["b2"], [5, 6])
    np.testing.assert_array_equal(again["w2"], ours.params["w2"])


def test_mismatched_params_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(b"old")
    for params, error, message in [
        ({"w_1": X}, InputNameError, r"'w_1'.*\['w1'"),
        ({"w1": X.astype(np.float64)}, InputTypeError, r"float64.*float32.*value.astype\('float32'\)"),
        ({"w1": X}, InputShapeError, r"shape \[4, 8\], not \[3, 4\]\. .*new_shapes=True"),
        ({"b1": [1.0] * 8}, InputTypeError, "float64"),
    ]:
        for source in (mlp(), onnx2jax.convert(mlp())):
            with pytest.raises(error, match=message):
                onnx2jax.save(source, path, params=params)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_unreadable_params_are_rejected(tmp_path: Path) -> None:
    deleted = jnp.ones((4, 8))
    deleted.delete()
    masked = np.ma.masked_array(np.ones((4, 8), np.float32), True)
    for given, match in ((deleted, "deleted array"), (masked, "masked array.*filled")):
        with pytest.raises(InputTypeError, match=rf"params\['w1'\] is a {match}"):
            onnx2jax.save(mlp(), tmp_path / "m.onnx", params={"w1": given})
    assert not list(tmp_path.iterdir())


def test_64_bit_weights_accept_32_bit_jax_arrays(tmp_path: Path) -> None:
    message = model([helper.make_node("Add", ["x", "w"], ["y"])], *ends(np.float64), {"w": big(np.float64)})
    path = onnx2jax.save(message, tmp_path / "m.onnx", params={"w": jnp.ones((20, 30))})
    np.testing.assert_array_equal(onnx2jax.convert(path).params["w"], np.ones((20, 30)))


def sample(code: int) -> np.ndarray:
    """3 x 5 elements, all different if the type has enough values."""
    dtype = ELEMENT_TYPES[code].dtype
    if dtype == object:
        return np.array([[f"é{i}{j}" for j in range(5)] for i in range(3)], object)
    bits = ELEMENT_TYPES[code].bits
    if bits < 8:
        return to_array(OurTensor(data_type=code, dims=[3, 5], raw_data=bytes(range(1, -(-15 * bits // 8) + 1))))
    numbers = np.arange(15).reshape(3, 5)
    return (numbers - 3j * numbers).astype(dtype) if dtype.kind == "c" else numbers.astype(dtype)


ENCODINGS = [(code, encoding) for code in ELEMENT_TYPES for encoding in ("raw", "typed", "external")]
ENCODINGS = [(c, e) for c, e in ENCODINGS if c != TensorProto.STRING or e == "typed"]  # rule TD-12


def test_every_element_type_in_every_encoding(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for code, encoding in ENCODINGS:
        with subtests.test(msg=f"{ELEMENT_TYPES[code].name}, {encoding}"):
            (folder := tmp_path / f"{code} {encoding}").mkdir()
            assert_saved(code, encoding, folder)


def assert_saved(code: int, encoding: str, folder: Path) -> None:
    """New values of a weight of an element type are written in the encoding of the old ones."""
    row, array = ELEMENT_TYPES[code], sample(code)
    tensor = onnx.TensorProto(name="w", data_type=code, dims=[3, 5])
    zeros = np.full((3, 5), "" if row.dtype == object else 0, row.dtype)
    if encoding == "typed":
        getattr(tensor, row.field).extend(to_field(zeros))
    else:
        tensor.raw_data = from_array(zeros)["raw_data"]
    x = helper.make_tensor_value_info("x", code, [3, 5])
    graph = helper.make_graph([helper.make_node("Identity", ["w"], ["y"])], "g", [x], [x], [tensor])
    graph.output[0].name = "y"
    message = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 28)], ir_version=14)
    path = folder / "m.onnx"
    if encoding == "external":
        (folder / "w.bin").write_bytes(tensor.raw_data)
        external_data_helper.set_external_data(message.graph.initializer[0], "w.bin")
        message.graph.initializer[0].ClearField("raw_data")
    path.write_bytes(message.SerializeToString())

    given = array if row.dtype == object or row.bits in (6, 64, 128) or code == 24 else jnp.asarray(array)
    new = onnx2jax.save(path, folder / "new.onnx", params={"w": given})
    (written,) = onnx.load(new, load_external_data=False).graph.initializer
    assert (written.data_location == TensorProto.EXTERNAL) == (encoding == "external")
    assert written.HasField("raw_data") == (encoding == "raw")
    assert (len(getattr(written, row.field)) > 0) == (encoding == "typed")
    result = onnx2jax.convert(new).graph.initializers["w"]
    assert result.dtype == array.dtype
    assert from_array(result) == from_array(array)
    # onnx, an implementation of its own, reads the same.
    theirs = numpy_helper.to_array(onnx.load(new).graph.initializer[0])
    assert str(theirs.astype(object).tolist()) == str(array.astype(object).tolist())


def test_non_canonical_values_of_other_tensors_are_kept(tmp_path: Path) -> None:
    message = mlp()
    message.graph.initializer.add(name="flags", data_type=TensorProto.BOOL, dims=[2000], raw_data=bytes([2]) * 2000)
    message.graph.initializer.add(name="odd", data_type=TensorProto.INT4, dims=[3], raw_data=b"\x21\xf3")
    path = onnx2jax.save(onnx2jax.convert(message), tmp_path / "m.onnx", params={"b2": np.float32([5, 6])})
    assert list(onnx.load(path).graph.initializer)[4:] == list(message.graph.initializer)[4:]


def with_branches() -> onnx.ModelProto:
    """Weights in two branches of two nodes of one name, in a Constant node, and in a function."""

    def branch(number: int) -> onnx.GraphProto:
        weight = numpy_helper.from_array(np.full(4, number, np.float32), "w")
        return helper.make_graph(
            [helper.make_node("Add", ["x", "w"], ["t"])], "b", [], [value("t", np.float32, [4])], [weight]
        )

    constant = numpy_helper.from_array(np.full(4, 100, np.float32))
    nodes = [
        helper.make_node("If", ["c"], ["p"], name="if", then_branch=branch(1), else_branch=branch(2)),
        helper.make_node("If", ["c"], ["q"], name="if", then_branch=branch(10), else_branch=branch(20)),
        helper.make_node("Constant", [], ["k"], value=constant),
        helper.make_node("F", ["p"], ["f"], domain="my"),
        helper.make_node("Sum", ["f", "q", "k"], ["y"]),
    ]
    body = [helper.make_node("Constant", [], ["h"], value=constant), helper.make_node("Mul", ["a", "h"], ["r"])]
    function = helper.make_function("my", "F", ["a"], ["r"], body, [helper.make_opsetid("", 21)])
    inputs = [value("c", bool, []), value("x", np.float32, [4])]
    return model(nodes, inputs, [value("y", np.float32, [4])], opsets={"my": 1}, functions=[function])


def test_weights_of_branches_constants_and_functions(tmp_path: Path) -> None:
    ours = onnx2jax.convert(with_branches())
    assert len(ours.params) == 6
    x = np.float32([1, 2, 3, 4])
    np.testing.assert_array_equal(ours(np.bool_(True), x), (x + 1) * 100 + x + 10 + 100)
    new = {n: np.full(4, i + 2, np.float32) for i, n in enumerate(sorted(ours.params))}
    path = onnx2jax.save(ours, tmp_path / "m.onnx", params=new)
    again = onnx2jax.convert(path)
    assert {n: v.tolist() for n, v in again.params.items()} == {n: v.tolist() for n, v in new.items()}
    message = onnx.load(path)
    message.graph.node[1].name = "other"  # onnxruntime requires unique names
    for c in (np.bool_(True), np.bool_(False)):
        np.testing.assert_array_equal(reference(message.SerializeToString(), c=np.asarray(c), x=x), again(c, x))
        np.testing.assert_array_equal(ours.apply(new, c, x), again(c, x))


def test_ambiguous_weight_names_are_rejected() -> None:
    """Legal, but one would silently get the other's value."""
    message = with_branches()
    message.graph.initializer.append(numpy_helper.from_array(np.zeros(4, np.float32), "if.then_branch/w"))
    with pytest.raises(UnsupportedError, match=r"'if\.then_branch/w'.*rename"):
        onnx2jax.convert(message)


@pytest.mark.parametrize("coordinates", [False, True], ids=["linear", "coordinates"])
def test_sparse_weights_stay_sparse(coordinates: bool, tmp_path: Path) -> None:
    stored = np.int64([[0, 1], [1, 2]] if coordinates else [1, 5])
    sparse = helper.make_sparse_tensor(
        numpy_helper.from_array(np.float32([3, 4]), "w"), numpy_helper.from_array(stored, "w_indices"), [2, 3]
    )
    ends: Any = [value("x", np.float32, [2, 3])], [value("y", np.float32, [2, 3])]
    message = model([helper.make_node("Add", ["x", "w"], ["y"])], *ends)
    message.graph.sparse_initializer.append(sparse)
    for new in ([[0, 7, 0], [0, 0, 0]], [[1, 7, -0.0], [0, 0, 0]]):
        path = onnx2jax.save(onnx2jax.convert(message), tmp_path / "m.onnx", params={"w": np.float32(new)})
        (result,) = onnx2jax.convert(path).params.values()
        np.testing.assert_array_equal(result, np.float32(new))
        np.testing.assert_array_equal(np.signbit(result), np.signbit(new))
        written = onnx.load(path).graph.sparse_initializer[0]
        assert (len(written.indices.dims) == 2) == coordinates


# ------------------------------------------------------------------------------------------------ external data


def two_weights(folder: Path) -> Path:
    """A model with a weight above 64 KiB, one below, a small one and a tied pair, all in one file, with checksums."""
    message = model(
        [helper.make_node("Sum", ["x", "large", "tied", "twin", "small"], ["y"])],
        [value("x", np.float32, [200, 100])],
        [value("y", np.float32, [200, 100])],
        {
            "large": np.arange(20000).reshape(200, 100).astype(np.float32),
            "tied": np.arange(100).astype(np.float32),
            "twin": np.arange(100).astype(np.float32),
            "small": np.float32([1]),
        },
    )
    data = b"".join(t.raw_data for t in message.graph.initializer if t.name != "twin")
    offset = 0
    (folder / "weights.bin").write_bytes(data)
    for tensor in message.graph.initializer:
        size = len(tensor.raw_data)
        if tensor.name == "twin":
            offset -= size
        external_data_helper.set_external_data(
            tensor, "weights.bin", offset, size, checksum=hashlib.sha1(data).hexdigest().upper()
        )
        tensor.ClearField("raw_data")
        offset += size
    path = folder / "m.onnx"
    path.write_bytes(message.SerializeToString())
    return path


def test_external_data_is_copied(tmp_path: Path) -> None:
    path = two_weights(tmp_path)
    (tmp_path / "other").mkdir()
    ours = onnx2jax.convert(path, verify_checksums=True)
    new = onnx2jax.save(ours, tmp_path / "other" / "n.onnx", params={"small": np.float32([2])})
    assert sorted(p.name for p in new.parent.iterdir()) == ["n.onnx", "n.onnx.data"]
    tensors = {t.name: t for t in onnx.load(new, load_external_data=False).graph.initializer}
    assert {entries(t)["location"] for t in tensors.values()} == {"n.onnx.data"}
    assert entries(tensors["tied"]) == entries(tensors["twin"])
    assert int(entries(tensors["large"])["offset"]) % 4096 == 0
    assert all(int(entries(t)["offset"]) % 64 == 0 for t in tensors.values())
    again = onnx2jax.convert(new, verify_checksums=True)
    x = np.ones((200, 100), np.float32)
    np.testing.assert_array_equal(again(x), ours(x) + 1)
    np.testing.assert_allclose(reference(new, x=x), again(x))


def test_unknown_external_data_entries_are_kept(tmp_path: Path) -> None:
    path = two_weights(tmp_path)
    message = onnx.load(path, load_external_data=False)
    message.graph.initializer[0].external_data.add(key="note", value="kept")
    path.write_bytes(message.SerializeToString())
    new = onnx2jax.save(onnx2jax.convert(path), tmp_path / "n.onnx")
    assert entries(onnx.load(new, load_external_data=False).graph.initializer[0])["note"] == "kept"


def test_new_value_for_one_of_two_tied_weights(tmp_path: Path) -> None:
    ours = onnx2jax.convert(two_weights(tmp_path))
    new = onnx2jax.save(ours, tmp_path / "n.onnx", params={"tied": np.zeros(100, np.float32)})
    again = onnx2jax.convert(new).params
    assert not again["tied"].any()
    np.testing.assert_array_equal(again["twin"], ours.params["twin"])


def test_checksums_are_verified_on_request(tmp_path: Path) -> None:
    path = two_weights(tmp_path)
    with (tmp_path / "weights.bin").open("r+b") as file:
        file.write(b"\x01")
    onnx2jax.convert(path)
    with pytest.raises(ExternalDataError, match="EX-12"):
        onnx2jax.convert(path, verify_checksums=True)


def test_moving_weights_out_and_back_in(tmp_path: Path) -> None:
    message = model([helper.make_node("Add", ["x", "w"], ["y"])], *ends(np.float32), {"w": big(), "s": np.float32([1])})
    out = onnx2jax.save(message, tmp_path / "out.onnx", external_data="weights.bin")
    w, s = onnx.load(out, load_external_data=False).graph.initializer
    assert entries(w)["location"] == "weights.bin" and not w.HasField("raw_data")
    assert s == message.graph.initializer[1]
    np.testing.assert_array_equal(reference(out, x=big()), 2 * big())
    back = onnx2jax.save(onnx2jax.convert(out), tmp_path / "back.onnx", external_data=False)
    assert onnx.load(back) == message
    low = onnx2jax.save(message, tmp_path / "low.onnx", external_data=True, size_threshold=0)
    assert all(t.external_data for t in onnx.load(low, load_external_data=False).graph.initializer)
    np.testing.assert_array_equal(onnx2jax.convert(low)(big()), 2 * big())


def test_no_data_file_without_external_tensors(tmp_path: Path) -> None:
    onnx2jax.save(mlp(), tmp_path / "m.onnx", external_data=True)
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]


def test_a_model_too_large_for_protobuf_gets_external_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = model([helper.make_node("Add", ["x", "w"], ["y"])], *ends(np.float32), {"w": big()})
    monkeypatch.setattr(save, "INLINE_LIMIT", 2000)
    for source in (message, onnx2jax.convert(message)):
        path = onnx2jax.save(source, tmp_path / "m.onnx")
        assert path.stat().st_size < 1000
        np.testing.assert_array_equal(onnx2jax.convert(path)(big()), 2 * big())
    monkeypatch.setattr(save, "PROTOBUF_LIMIT", 2000)
    with pytest.raises(ModelError, match="size_threshold"):
        onnx2jax.save(path, path, external_data=False)


@pytest.mark.parametrize("name", ["", "..", "sub/data", "../data", "/data", "m.onnx", "a\\b"])
def test_invalid_data_file_names_are_rejected(name: str, tmp_path: Path) -> None:
    with pytest.raises(ExternalDataError, match=r"next to 'm\.onnx'"):
        onnx2jax.save(mlp(), tmp_path / "m.onnx", external_data=name, size_threshold=0)


def test_the_data_of_another_model_is_not_overwritten(tmp_path: Path) -> None:
    two_weights(tmp_path)
    before = (tmp_path / "weights.bin").read_bytes()
    with pytest.raises(ExternalDataError, match="another model"):
        onnx2jax.save(mlp(), tmp_path / "n.onnx", external_data="weights.bin", size_threshold=0)
    assert (tmp_path / "weights.bin").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.onnx", "weights.bin"]


def test_external_data_of_attributes_and_sparse_tensors(tmp_path: Path) -> None:
    numbers = np.arange(4, dtype=np.float32)
    (tmp_path / "data").write_bytes(numbers.tobytes() + np.int64([1, 3]).tobytes())
    constant = TensorProto(name="c", data_type=TensorProto.FLOAT, dims=[4])
    values = TensorProto(name="s", data_type=TensorProto.FLOAT, dims=[2])
    indices = TensorProto(data_type=TensorProto.INT64, dims=[2])
    for tensor, offset, length in ((constant, 0, 16), (values, 8, 8), (indices, 16, 16)):
        tensor.raw_data = b"0"  # the helper asks for it
        external_data_helper.set_external_data(tensor, "data", offset, length)
        tensor.ClearField("raw_data")
    nodes = [helper.make_node("Constant", [], ["c"], value=constant), helper.make_node("Sum", ["x", "c", "s"], ["y"])]
    message = model(nodes, [value("x", np.float32, [4])], [value("y", np.float32, [4])])
    message.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [4]))
    (tmp_path / "m.onnx").write_bytes(message.SerializeToString())
    ours = onnx2jax.convert(tmp_path / "m.onnx")
    new = onnx2jax.save(ours, tmp_path / "n.onnx", params={"s": np.float32([9, 0, 0, 0])})
    (tmp_path / "data").unlink()
    np.testing.assert_array_equal(onnx2jax.convert(new)(numbers), numbers * 2 + [9, 0, 0, 0])


# --------------------------------------------------------------------------------------------- all or nothing


def test_overwriting_the_file_that_the_model_maps(tmp_path: Path) -> None:
    path = two_weights(tmp_path)
    ours = onnx2jax.convert(path)
    x = np.ones((200, 100), np.float32)
    before = np.asarray(ours(x))
    for bias in (5, 6):
        assert onnx2jax.save(ours, path, params={"small": np.float32([bias])}, external_data="weights.bin") == path
        np.testing.assert_array_equal(onnx2jax.convert(path)(x), before + bias - 1)
        np.testing.assert_array_equal(ours.params["large"].ravel(), np.arange(20000))
        np.testing.assert_array_equal(ours.params["small"], [1])
        gc.collect()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.onnx", "weights.bin"]


@pytest.mark.parametrize(
    ("existing", "step"),
    [(e, s) for e in (True, False) for s in ("write", "fsync", "replace 0", "replace 1")],
)
def test_a_failed_save_keeps_the_old_files(
    existing: bool, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = two_weights(tmp_path)
    path = source if existing else tmp_path / "new.onnx"
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    counter = iter(range(10))

    def broken(original: Any, at: int) -> Any:
        def call(*args: Any) -> Any:
            if next(counter) == at:
                raise OSError("no space left")
            return original(*args)

        return call

    if step == "write":
        monkeypatch.setattr(save, "_serialized", broken(save._serialized, 0))
    elif step == "fsync":
        monkeypatch.setattr(os, "fsync", broken(os.fsync, 0))
    else:
        monkeypatch.setattr(os, "replace", broken(os.replace, int(step[-1])))
    with pytest.raises(OSError, match="no space"):
        onnx2jax.save(onnx2jax.convert(source), path, params=NEW, external_data="weights.bin" if existing else None)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


NEW = {"small": np.float32([9])}


def test_data_that_cannot_be_renamed_keeps_its_provisional_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = two_weights(tmp_path)

    def full(*_: Any) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch, pytest.warns(UserWarning, match=r"stays in 'weights\.bin\.\w{8}': no space"):
        patch.setattr(shutil, "copyfileobj", full)
        onnx2jax.save(onnx2jax.convert(path), path, params=NEW, external_data="weights.bin")
    assert len(list(tmp_path.iterdir())) == 3
    assert onnx2jax.convert(path).params["small"] == 9
    onnx2jax.save(onnx2jax.convert(path), path, params={"small": np.float32([10])}, external_data="weights.bin")
    assert {p.name for p in tmp_path.iterdir()} == {"m.onnx", "weights.bin"}
    assert onnx2jax.convert(path).params["small"] == 10


@pytest.mark.parametrize("before", ["nothing", "all inside", "the same data file", "another data file"])
def test_save_is_atomic_when_interrupted(before: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = model([helper.make_node("Add", ["x", "w"], ["y"])], *ends(np.float32), {"w": big()})
    names = {"all inside": False, "the same data file": "data", "another data file": "other"}
    met = set()
    for at in range(60):
        folder = tmp_path / str(at)
        folder.mkdir()
        path = folder / "m.onnx"
        if before != "nothing":
            onnx2jax.save(message, path, external_data=names[before])

        def save_new(path: Path = path) -> object:
            return onnx2jax.save(message, path, params={"w": big() + 1}, external_data="data")

        ended = killed(monkeypatch, at, save_new)
        if path.exists():
            w = onnx2jax.convert(path).params["w"]
            met.add(float((w - big()).max()))
            np.testing.assert_array_equal(w - big(), np.full_like(w, max(met)))
        else:
            assert before == "nothing"
        if not ended:
            break
        if before == "the same data file":  # the next save removes leftover files that are recognisably its own
            save_new()
            assert {p.name for p in folder.iterdir() if p.suffix != ".tmp"} >= {"m.onnx", "data"}
            np.testing.assert_array_equal(onnx2jax.convert(path).params["w"], big() + 1)
    else:
        raise AssertionError("the save never came to its end")
    assert met == ({1} if before == "nothing" else {0, 1}) and at > 5
    assert sorted(p.name for p in folder.iterdir()) == sorted({"m.onnx", "data", str(names.get(before) or "data")})


KILLED = """
import os, random, signal, sys, time, warnings
warnings.simplefilter("ignore")  # JAX does not like os.fork
import numpy as np, onnx2jax
path, rounds = sys.argv[1], int(sys.argv[2])
model = onnx2jax.convert(path)
w = model.params["w"]
for i in range(rounds):
    child = os.fork()
    if not child:
        for k in range(1, 10_000):
            onnx2jax.save(model, path, params={"w": np.full_like(w, k)}, external_data="data")
    time.sleep(random.uniform(0.001, 0.06))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    now = onnx2jax.convert(path).params["w"]
    assert (now == now[0]).all(), now
print(sorted(n for n in os.listdir(os.path.dirname(path))))
"""


@pytest.mark.extended
def test_save_is_atomic_under_sigkill(tmp_path: Path) -> None:
    message = model([helper.make_node("Add", ["x", "w"], ["y"])], *ends(np.float32), {"w": 0 * big()})
    path = onnx2jax.save(message, tmp_path / "m.onnx", external_data="data")
    done = subprocess.run([sys.executable, "-c", KILLED, path, "40"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_symlink_is_replaced_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "blob"
    target.write_bytes(b"precious")
    path = tmp_path / "m.onnx"
    path.symlink_to(target)
    onnx2jax.save(mlp(), path)
    assert target.read_bytes() == b"precious"
    assert not path.is_symlink() and onnx.load(path) == mlp()


def test_permissions_of_the_replaced_file_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(b"")
    path.chmod(0o640)
    onnx2jax.save(mlp(), path)
    assert path.stat().st_mode & 0o777 == 0o640


def test_saving_to_a_folder_raises(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        onnx2jax.save(mlp(), tmp_path)


def test_trained_weights_are_saved(tmp_path: Path) -> None:
    ours = onnx2jax.convert(mlp())
    step = jax.jit(jax.grad(lambda params: ours.apply(params, X).sum()))
    new = jax.tree.map(lambda v, g: v - 0.1 * g, ours.params, step(ours.params))
    path = onnx2jax.save(ours, tmp_path / "m.onnx", params=new)
    np.testing.assert_allclose(reference(path, x=X), ours.apply(new, X), rtol=1e-5, atol=1e-6)


def test_bfloat16_weights(tmp_path: Path) -> None:
    w = np.ones((20, 30), ml_dtypes.bfloat16)
    x = helper.make_tensor_value_info("x", TensorProto.BFLOAT16, [20, 30])
    y = helper.make_tensor_value_info("y", TensorProto.BFLOAT16, [20, 30])
    message = model([helper.make_node("Add", ["x", "w"], ["y"])], [x], [y])
    message.graph.initializer.add(**from_array(w, "w"))
    path = onnx2jax.save(
        onnx2jax.convert(message), tmp_path / "m.onnx", params={"w": jnp.full((20, 30), 3, jnp.bfloat16)}
    )
    assert onnx2jax.convert(path).params["w"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(onnx2jax.convert(path)(w).astype(np.float32), np.full((20, 30), 4))


def test_equally_sized_buffers_are_written_separately(tmp_path: Path) -> None:
    """They are identified by name, not by memory address, which Python reuses."""
    names = [f"w{i}" for i in range(40)]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [4]) for n in "xy")
    tensors = [TensorProto(name=n, data_type=TensorProto.FLOAT, dims=[4]) for n in names]
    for tensor in tensors:
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=f"#{tensor.name}")
    graph = helper.make_graph([helper.make_node("Sum", ["x", *names], ["y"])], "g", [x], [y], tensors)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    buffers = {f"#{n}": np.full(4, 2.0**i % 1021, np.float32) for i, n in enumerate(names)}
    saved = onnx2jax.convert(onnx2jax.save(onnx2jax.convert(proto, buffers=buffers), tmp_path / "m.onnx"))
    for name in names:
        np.testing.assert_array_equal(saved.params[name], buffers[f"#{name}"])


def test_a_part_of_a_model_is_saved_tuned_or_not(tmp_path: Path) -> None:
    """Types of inner values are inferred, and weights in branches of a node without a name keep theirs."""
    text = """parts (float[n, 3] x, bool flag) => (float[n, 3] y, float[n, 3] z)
    <float[3, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9}> {
        a = MatMul(x, w) lost = Neg(x)
        b = If (flag) <
            then_branch = t () => (float[n, 3] r) <float[3] c = {1, 2, 3}> { r = Add(a, c) },
            else_branch = e () => (float[n, 3] r) { r = Identity(a) } >
        y = Tanh(b) z = Relu(lost) }"""
    whole = onnx2jax.convert(text_model(text))
    x = np.float32([[0.5, 1, -2], [3, 2, 1]])
    part = whole.cut(inputs="a", outputs="b").with_params({"b.then_branch/c": np.float32([3, 2, 1])})
    path = onnx2jax.save(part, tmp_path / "part.onnx")
    session = onnxruntime.InferenceSession(path)
    feeds = {"a": x, "flag": np.array(True)}
    assert {i.name: i.shape for i in session.get_inputs()} == {"a": ["n", 3], "flag": []}
    np.testing.assert_array_equal(session.run(None, feeds)[0], x + np.float32([3, 2, 1]))
    np.testing.assert_array_equal(onnx2jax.convert(path)(**feeds), part(**feeds))
    head = onnx2jax.save(whole.cut(outputs="lost").simplified(), tmp_path / "head.onnx")
    assert [n.op_type for n in onnx2jax.convert(head).graph.nodes] == ["Neg"]
    joined = onnx2jax.join(whole.cut(outputs="a"), part, {"a": "a"})
    np.testing.assert_allclose(joined(x, True), x @ np.asarray(whole.params["w"]) + np.float32([3, 2, 1]))
