"""Rules EX: external data."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, helper

import onnx2jax
from onnx2jax.errors import ExternalDataError, ExternalDataNotFoundError, ModelError
from tests.support.cases import MAIN, F, X, parse, rule, rules_of, same

ADD = MAIN + " { y = Add (x, w) }"
W = F([3, 4])


def tensor(code: int = TensorProto.FLOAT, dims: Any = (2,), name: str = "w", **entries: str) -> TensorProto:
    result = TensorProto(name=name, data_type=code, dims=dims, data_location=TensorProto.EXTERNAL)
    for key, value in ({"location": "w.bin"} | entries).items():
        result.external_data.add(key=key, value=value)
    return result


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder with its data, and more data outside."""
    inside = tmp_path / "model"
    (inside / "sub").mkdir(parents=True)
    for path in (inside / "w.bin", inside / "sub" / "w.bin", inside / "a..b", tmp_path / "outside.bin"):
        path.write_bytes(W.tobytes())
    return inside


def stored(folder: Path, made: TensorProto, text: str = ADD) -> Path:
    (folder / "m.onnx").write_bytes(parse(text, lambda m: m.graph.initializer.append(made)).SerializeToString())
    return folder / "m.onnx"


def loads(folder: Path, made: TensorProto, **kwargs: Any) -> None:
    path = stored(folder, made)
    assert onnx2jax.check(path, **kwargs).ok, onnx2jax.check(path, **kwargs)
    same(onnx2jax.convert(path, **kwargs)(X), X + W)


def refused(folder: Path, made: TensorProto, rule_id: str, error: type[Exception] = ExternalDataError) -> None:
    path = stored(folder, made)
    with pytest.raises(error, match=rule_id):
        onnx2jax.convert(path)
    assert rule_id in rules_of(path), onnx2jax.check(path)


@rule("EX-01", "EX-04")
@pytest.mark.parametrize("location", ["w.bin", "sub/w.bin", "./w.bin", "sub/../w.bin", "a..b"])
def test_locations_start_at_the_models_folder(folder: Path, location: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")  # the onnx package refuses a..b, onnxruntime accepts it
    loads(folder, tensor(location=location))


@rule("EX-01")
def test_a_model_without_a_file_has_no_folder(folder: Path) -> None:
    data = stored(folder, tensor()).read_bytes()
    with pytest.raises(ExternalDataError, match="external_data_dir"):
        onnx2jax.convert(data)
    same(onnx2jax.convert(data, external_data_dir=folder)(X), X + W)


@rule("EX-02")
def test_a_location_is_required(folder: Path) -> None:
    refused(folder, tensor(location=""), "EX-02")
    missing = tensor()
    del missing.external_data[:]
    refused(folder, missing, "EX-02")


@rule("EX-03")
@pytest.mark.parametrize("location", ["/etc/passwd", "C:\\w.bin", "\\\\server\\w.bin"])
def test_absolute_paths_are_refused(folder: Path, location: str) -> None:
    refused(folder, tensor(location=location), "EX-03")


@rule("EX-04")
@pytest.mark.parametrize("location", ["../outside.bin", "sub/../../outside.bin", ".."])
def test_paths_out_of_the_folder_are_refused(folder: Path, location: str) -> None:
    path = stored(folder, tensor(location=location))
    with pytest.raises(ExternalDataError, match="EX-04"):
        onnx2jax.convert(path)
    assert rules_of(path) == {"EX-03"}  # of two rules that one check enforces, the first is named


@rule("EX-05")
def test_links_are_followed_only_when_asked(folder: Path) -> None:
    (folder / "link").symlink_to(folder.parent / "outside.bin")
    (folder / "folder").symlink_to(folder.parent, target_is_directory=True)
    for location in ("link", "folder/outside.bin"):
        refused(folder, tensor(location=location), "EX-05")
        loads(folder, tensor(location=location), follow_links=True)
    # A link that stays inside is harmless: onnxruntime follows it, the onnx package refuses it.
    (folder / "inner").symlink_to(folder / "w.bin")
    path = stored(folder, tensor(location="inner"))
    same(onnx2jax.convert(path)(X), X + W)
    assert rules_of(path) == {"EX-05"}
    with pytest.raises(ModelError, match="EX-05"):
        onnx2jax.convert(path, strict=True)


@rule("EX-06")
def test_hard_links_are_followed_only_when_asked(folder: Path) -> None:
    os.link(folder.parent / "outside.bin", folder / "hard")  # onnxruntime follows it
    refused(folder, tensor(location="hard"), "EX-06")
    loads(folder, tensor(location="hard"), follow_links=True)


@rule("EX-07")
def test_only_regular_files_are_read(folder: Path) -> None:
    os.mkfifo(folder / "fifo")
    for location in ("fifo", "sub"):
        refused(folder, tensor(location=location), "EX-07")
    (folder / "zero").symlink_to("/dev/zero")
    with pytest.raises(ExternalDataError, match="EX-07"):
        onnx2jax.convert(stored(folder, tensor(location="zero")), follow_links=True)


@rule("EX-08")
def test_a_file_that_becomes_a_link_while_it_is_opened_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, open_file = stored(folder, tensor()), os.open

    def swapped(name: Any, *args: Any, **kwargs: Any) -> int:
        if str(name).endswith("w.bin"):
            Path(name).unlink()
            Path(name).symlink_to(folder.parent / "outside.bin")
        return open_file(name, *args, **kwargs)

    monkeypatch.setattr(os, "open", swapped)
    with pytest.raises(ExternalDataError, match=r"EX-05|EX-08"):
        onnx2jax.convert(path)


@rule("EX-09")
@pytest.mark.parametrize("key", ["offset", "length"])
@pytest.mark.parametrize("value", ["-1", "abc", "0x8", "1.0", "٣"])
def test_offset_and_length_are_decimal(folder: Path, key: str, value: str) -> None:
    refused(folder, tensor(**{key: value}), "EX-09")


@rule("EX-10", "EX-11")
@pytest.mark.parametrize(
    ("entries", "rule_id"),
    [
        ({"offset": "100"}, "EX-10"),
        ({"offset": "4", "length": "8"}, "EX-10"),
        ({"offset": "9" * 30}, "EX-10"),
        ({"length": str(2**60)}, "EX-11"),
        ({"length": "4"}, "EX-11"),
        ({"length": "16"}, "EX-11"),
    ],
)
def test_bounds_are_checked_before_anything_is_read(folder: Path, entries: dict[str, str], rule_id: str) -> None:
    refused(folder, tensor(**entries), rule_id)


@rule("EX-10")
def test_huge_dims_of_a_small_file_are_refused(folder: Path) -> None:
    refused(folder, tensor(dims=[2**40]), "EX-10")


@rule("EX-11", "EX-17")
def test_many_tensors_share_a_file_at_any_offset(folder: Path) -> None:
    (folder / "w.bin").write_bytes(b"abc" + W.tobytes() + bytes(100))
    loads(folder, tensor(offset="3"))  # onnx.load reads to the end of the file and fails


@rule("EX-12")
def test_checksums_are_verified_when_asked(folder: Path) -> None:
    good = hashlib.sha1(W.tobytes()).hexdigest()
    loads(folder, tensor(checksum=good.upper()))
    assert onnx2jax.check(stored(folder, tensor(checksum=good.upper())), verify_checksums=True).ok
    bad = stored(folder, tensor(checksum="0" * 40))
    assert onnx2jax.check(bad).ok  # neither the onnx package nor onnxruntime ever verifies them
    assert rules_of(bad, verify_checksums=True) == {"EX-12"}
    with pytest.raises(ExternalDataError, match="EX-12"):
        onnx2jax.convert(bad, verify_checksums=True)


@rule("EX-13")
def test_external_data_is_not_inline_as_well(folder: Path) -> None:
    both = tensor()
    both.raw_data = W.tobytes()
    path = stored(folder, both)  # onnxruntime and onnx.load ignore the inline data
    with pytest.raises(ModelError, match="EX-13"):
        onnx2jax.convert(path)
    assert not onnx2jax.check(path).ok


@rule("EX-14")
def test_external_data_counts_only_with_the_flag(folder: Path) -> None:
    unflagged = tensor()
    unflagged.data_location = TensorProto.DEFAULT
    refused(folder, unflagged, "TD-13", ModelError)
    unflagged.raw_data = W.tobytes()
    loads(folder, unflagged)


@rule("EX-15")
def test_keys_are_known_and_unique(folder: Path) -> None:
    path = stored(folder, tensor(basepath="/etc"))
    same(onnx2jax.convert(path)(X), X + W)  # onnxruntime refuses unknown keys
    assert rules_of(path, "warning") == {"EX-15"}
    twice = tensor()
    twice.external_data.add(key="location", value="sub/w.bin")
    refused(folder, twice, "EX-15")  # the onnx package takes the last one


@rule("EX-16")
def test_small_types_are_packed_in_files_too(folder: Path) -> None:
    (folder / "w.bin").write_bytes(b"\x21\x8f\x07")
    path = stored(folder, tensor(TensorProto.INT4, [5]), "g () => (int4[5] w) { }")
    same(np.asarray(onnx2jax.convert(path)()).astype(int), [1, 2, -1, -8, 7])
    (folder / "w.bin").write_bytes(np.array([1.5], ml_dtypes.bfloat16).tobytes())
    path = stored(folder, tensor(TensorProto.BFLOAT16, [1]), "g () => (bfloat16[1] w) { }")
    same(np.asarray(onnx2jax.convert(path)()).astype(F), [1.5])
    refused(folder, tensor(TensorProto.STRING), "TD-12", ModelError)


@rule("EX-18")
def test_every_place_for_a_tensor(folder: Path) -> None:
    def constant() -> Any:
        return helper.make_node("Constant", [], ["k"], value=tensor(name="k"))

    def graph(name: str) -> Any:
        nodes = [constant(), helper.make_node("Add", ["v", "k"], [name])]
        return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(name, 1, [2])], [tensor(name="v")])

    function = helper.make_function(
        "l", "f", ["a"], ["r"], [constant(), helper.make_node("Add", ["a", "k"], ["r"])], [helper.make_opsetid("", 21)]
    )
    sparse = helper.make_sparse_tensor(tensor(name="s"), tensor(TensorProto.INT64, [2], "i", location="i.bin"), [2])
    (folder / "i.bin").write_bytes(np.array([0, 1]).tobytes())
    text = MAIN + " <bool c = {1}> { q = If (c)  p = l.f (q)  o = Add (p, s)  y = Add (o, x) }"
    proto = parse(text)
    proto.graph.node[0].attribute.extend(
        [helper.make_attribute("then_branch", graph("t")), helper.make_attribute("else_branch", graph("e"))]
    )
    proto.functions.append(function)
    proto.graph.sparse_initializer.append(sparse)
    info = proto.training_info.add()
    info.algorithm.CopyFrom(graph("step"))
    info.algorithm.initializer.append(tensor(name="gone", location="gone.bin"))
    (folder / "m.onnx").write_bytes(proto.SerializeToString())
    same(onnx2jax.convert(folder / "m.onnx")(X), X + 4 * W)
    (finding,) = onnx2jax.check(folder / "m.onnx").errors  # the helpers of the onnx package skip training graphs
    assert finding.rule == "EX-19" and "'gone.bin'" in finding.message


@rule("EX-19")
def test_a_missing_file_is_named_with_tensor_and_folder(folder: Path) -> None:
    refused(folder, tensor(location="nope.bin"), "EX-19", ExternalDataNotFoundError)
    with pytest.raises(FileNotFoundError) as caught:
        onnx2jax.convert(folder / "m.onnx")
    assert all(word in str(caught.value) for word in ("'w'", "nope.bin", str(folder)))


@rule("EX-20")
def test_tensors_in_memory_are_passed_by_location(folder: Path) -> None:
    path = stored(folder, tensor(location="#w"))
    for source in (path, path.read_bytes()):
        with pytest.raises(ExternalDataNotFoundError, match=r"buffers=\{'#w': array\}.*EX-20"):
            onnx2jax.convert(source)
        assert rules_of(source) == {"EX-20"}
        for buffer in (W, W.tobytes(), bytearray(W.tobytes()), np.frombuffer(W.tobytes(), np.uint8)):
            assert onnx2jax.check(source, buffers={"#w": buffer}).findings == ()
            model = onnx2jax.convert(source, buffers={"#w": buffer})
            same(model(X), X + W)
        again = onnx2jax.save(model, folder / "again.onnx")
        assert onnx2jax.check(again).ok  # the data is in a file now
        same(onnx2jax.convert(again)(X), X + W)


@rule("EX-20", "EX-10", "EX-11")
@pytest.mark.parametrize(
    ("buffer", "entries", "rule_id"),
    [
        (W[:1], {}, "EX-10"),
        (W, {"offset": "4"}, "EX-10"),
        (W, {"length": "4"}, "EX-11"),
        (W.astype(np.float64), {}, "EX-20"),
        (W.view(np.int32), {}, "EX-20"),
    ],
)
def test_a_buffer_has_to_match_the_tensor(folder: Path, buffer: Any, entries: Any, rule_id: str) -> None:
    path = stored(folder, tensor(location="#w", **entries))
    with pytest.raises(ExternalDataError, match=rule_id):
        onnx2jax.convert(path, buffers={"#w": buffer})
    assert rules_of(path, buffers={"#w": buffer}) == {rule_id}


@rule("EX-20")
def test_buffers_share_memory_and_replace_any_location(folder: Path) -> None:
    path = stored(folder, tensor(location="#all", offset="4"))
    same(onnx2jax.convert(path, buffers={"#all": F([9, 3, 4])})(X), X + W)
    same(onnx2jax.convert(stored(folder, tensor(location="gone.bin")), buffers={"gone.bin": W})(X), X + W)
    int4 = stored(folder, tensor(TensorProto.INT4, [5], location="#w"), "g () => (int4[5] w) { }")
    packed = onnx2jax.convert(int4, buffers={"#w": b"\x21\x8f\x07"})
    same(np.asarray(packed()).astype(int), [1, 2, -1, -8, 7])
