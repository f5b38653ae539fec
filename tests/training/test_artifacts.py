"""Artifacts of onnxruntime's training: loss and gradient, optimizer, and damaged checkpoints."""

from __future__ import annotations

import contextlib
import struct
import sys
from pathlib import Path
from typing import Any

import flatbuffers
import jax
import numpy as np
import pytest
from flatbuffers import number_types
from onnx import TensorProto, helper

import onnx2jax
from onnx2jax.errors import ExternalDataError, ModelError, UnsupportedError
from onnx2jax.proto.tensors import to_array
from onnx2jax.training.artifacts import read_checkpoint
from tests.support.tiers import canaries

# Flatbuffers tables as dicts, slot -> value: str, dict (table), list of dicts, array (vector), NumPy scalar.


def build(builder: flatbuffers.Builder, fields: dict[int, Any]) -> int:
    """Writes a table after the objects that it refers to; returns its offset."""
    ready: dict[int, Any] = {}
    for slot, value in fields.items():
        if isinstance(value, str):
            ready[slot] = builder.CreateString(value)
        elif isinstance(value, dict):
            ready[slot] = build(builder, value)
        elif isinstance(value, list):
            items = [build(builder, item) for item in value]
            builder.StartVector(4, len(items), 4)
            for item in reversed(items):
                builder.PrependUOffsetTRelative(item)
            ready[slot] = builder.EndVector()
        elif isinstance(value, np.ndarray):
            ready[slot] = builder.CreateNumpyVector(value)
    builder.StartObject(max(fields, default=-1) + 1)
    for slot, value in fields.items():
        if slot in ready:
            builder.PrependUOffsetTRelativeSlot(slot, ready[slot], 0)
        else:
            kind = getattr(number_types, {"b": "BoolFlags", "i4": "Int32Flags"}.get(value.dtype.str[1:], "BoolFlags"))
            kind = {"int64": number_types.Int64Flags, "float32": number_types.Float32Flags}.get(value.dtype.name, kind)
            builder.PrependSlot(kind, slot, value.item(), None)
    return builder.EndObject()


def tensor(name: str, array: Any, code: int = 1) -> dict[int, Any]:
    array = np.asarray(array)
    return {0: name, 2: np.array(array.shape, np.int64), 3: np.int32(code), 4: np.frombuffer(array.tobytes(), np.uint8)}


def external(name: str, dims: tuple[int, ...], offset: int) -> dict[int, Any]:
    return {0: name, 2: np.array(dims, np.int64), 3: np.int32(1), 6: np.int64(offset)}


def write(path: Path, fields: dict[int, Any], identifier: bytes = b"ODTC") -> Path:
    builder = flatbuffers.Builder(64)
    builder.Finish(build(builder, fields), file_identifier=identifier)
    path.write_bytes(bytes(builder.Output()))
    return path


RNG = np.random.default_rng(0)
PARAMS = {
    "fc.weight": RNG.normal(size=(4, 3)).astype(np.float32),
    "fc.bias": RNG.normal(size=3).astype(np.float32),
    "scale": np.float32(2),
}
MODULE = {0: [tensor(n, PARAMS[n]) for n in ("fc.weight", "fc.bias")], 1: [tensor("scale", PARAMS["scale"])]}
MOMENTS = {n: [np.full(PARAMS[n].shape, i, np.float32) for i in (5, 6)] for n in ("fc.weight", "fc.bias")}
GROUP = {
    **{0: "group0", 1: np.int64(7), 2: np.float32(0.25)},
    3: [{0: n, 1: [tensor(f"momentum{i}", m) for i, m in enumerate(ms)]} for n, ms in MOMENTS.items()],
}
BAG = {
    0: [{0: "epoch", 1: np.int64(2**40)}],
    1: [{0: "best", 1: np.float32(0.5)}],
    2: [{0: "note", 1: "grün"}],
}
CHECKPOINT = {0: np.int32(2), 1: MODULE, 2: [GROUP], 3: BAG}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Artifacts of a linear classifier in onnxruntime's layout: parameters are inputs of the models."""
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4]),
        helper.make_tensor_value_info("labels", TensorProto.INT64, ["batch"]),
        *(helper.make_tensor_value_info(n, TensorProto.FLOAT, list(p.shape)) for n, p in PARAMS.items()),
    ]
    nodes = [
        helper.make_node("Gemm", ["x", "fc.weight", "fc.bias"], ["h"]),
        helper.make_node("Mul", ["h", "scale"], ["logits"]),
        helper.make_node("SoftmaxCrossEntropyLoss", ["logits", "labels"], ["loss", "log_prob"]),
    ]
    graph = helper.make_graph(nodes, "g", inputs, [helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])])
    opsets = [helper.make_opsetid("", 17)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    (tmp_path / "eval_model.onnx").write_bytes(model.SerializeToString())

    names = ["learning_rate", "step", "params", "gradients", "m", "v"]
    settings = {"alpha": 0.75, "beta": 0.5, "epsilon": 2**-20, "weight_decay": 0.125, "adam_mode": 1, "correct_bias": 1}
    nodes = [
        helper.make_node("InplaceClipGradNorm", ["gradients"], ["clipped"], domain="com.microsoft", max_norm=2.0),
        helper.make_node(
            "AdamWOptimizer", [*names[:3], "clipped", *names[4:]], ["done"], domain="com.microsoft", **settings
        ),
    ]
    values = [helper.make_tensor_sequence_value_info(n, TensorProto.FLOAT, None) for n in names[2:]]
    rate = helper.make_tensor_value_info("learning_rate", TensorProto.FLOAT, [1])
    step = helper.make_tensor_value_info("step", TensorProto.INT64, [1])
    done = helper.make_tensor_value_info("done", TensorProto.BOOL, [1])
    graph = helper.make_graph(nodes, "g", [rate, step, *values], [done])
    model = helper.make_model(graph, opset_imports=[*opsets, helper.make_opsetid("com.microsoft", 1)], ir_version=9)
    (tmp_path / "optimizer_model.onnx").write_bytes(model.SerializeToString())
    write(tmp_path / "checkpoint", CHECKPOINT)
    return tmp_path


X = RNG.normal(size=(6, 4)).astype(np.float32)
LABELS = np.array([0, 1, 2, 2, 1, 0])


def by_hand(params: dict[str, Any]) -> Any:
    logits = (X @ params["fc.weight"] + params["fc.bias"]) * 2
    return -jax.nn.log_softmax(logits)[np.arange(6), LABELS].mean()


def test_loss_and_gradient(folder: Path) -> None:
    artifacts = onnx2jax.training.load_artifacts(folder)
    assert artifacts.trainable == ("fc.weight", "fc.bias")
    assert artifacts.params.keys() == {"fc.weight", "fc.bias"}
    assert artifacts.model.params.keys() == PARAMS.keys()
    assert [v.name for v in artifacts.model.inputs] == ["x", "labels"]

    def loss(params: Any) -> Any:
        return artifacts.model.apply(params, X, LABELS)

    both = jax.jit(lambda p: (jax.value_and_grad(loss)(p), jax.value_and_grad(by_hand)(p)))
    (value, gradients), (wanted, derivatives) = both(artifacts.params)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, derivatives[name], atol=1e-6)


def test_optimizer_and_its_state(folder: Path) -> None:
    artifacts = onnx2jax.training.load_artifacts(folder)
    adamw = {"alpha": 0.75, "beta": 0.5, "epsilon": 2**-20, "weight_decay": 0.125, "adam_mode": 1, "correct_bias": 1}
    assert artifacts.optimizer == {"InplaceClipGradNorm": {"max_norm": 2.0}, "AdamWOptimizer": adamw}
    assert list(artifacts.optimizer) == ["InplaceClipGradNorm", "AdamWOptimizer"]
    assert (artifacts.learning_rate, artifacts.step) == (0.25, 7)
    assert artifacts.properties == {"epoch": 2**40, "best": 0.5, "note": "grün"}
    for name, (first, second) in MOMENTS.items():
        np.testing.assert_array_equal(artifacts.moments[name]["momentum0"], first)
        np.testing.assert_array_equal(artifacts.moments[name]["momentum1"], second)


def test_without_optimizer(folder: Path) -> None:
    (folder / "optimizer_model.onnx").unlink()
    write(folder / "plain", {0: np.int32(1), 1: MODULE})
    artifacts = onnx2jax.training.load_artifacts(folder, checkpoint="plain")
    found = (artifacts.optimizer, artifacts.learning_rate, artifacts.step, artifacts.moments, artifacts.properties)
    assert found == ({}, None, 0, {}, {})


def test_trained_parameters_are_saved(folder: Path) -> None:
    artifacts = onnx2jax.training.load_artifacts(folder)
    trained = {name: value + 1 for name, value in artifacts.params.items()}
    again = onnx2jax.convert(onnx2jax.save(artifacts.model, folder / "trained.onnx", params=trained))
    np.testing.assert_array_equal(again(X, LABELS), artifacts.model.apply(trained, X, LABELS))


def test_large_parameters_in_an_external_file(folder: Path) -> None:
    weight = PARAMS["fc.weight"].tobytes()
    (folder / "checkpoint.data").write_bytes(b"12345678" + weight)
    module = {**MODULE, 0: [external("fc.weight", (4, 3), 8), MODULE[0][1]], 3: np.bool_(True)}
    write(folder / "checkpoint", {**CHECKPOINT, 1: module})
    np.testing.assert_array_equal(onnx2jax.training.load_artifacts(folder).params["fc.weight"], PARAMS["fc.weight"])
    (folder / "checkpoint.data").write_bytes(b"12345678" + weight[:-1])
    with pytest.raises(ExternalDataError, match=r"are outside 'checkpoint\.data'"):
        onnx2jax.training.load_artifacts(folder)
    (folder / "checkpoint.data").unlink()
    with pytest.raises(FileNotFoundError, match=r"no file 'checkpoint\.data'"):
        onnx2jax.training.load_artifacts(folder)


@pytest.mark.parametrize("code", [1, 5, 7, 9, 10, 11, 12, 14, 16, 17])
def test_element_types(code: int, tmp_path: Path) -> None:
    array = np.array([[1, 0], [1, 1]]).astype(onnx2jax.proto.types.to_dtype(code))
    path = write(tmp_path / "c", {0: np.int32(2), 1: {0: [tensor("t", array, code)]}})
    (message,) = read_checkpoint(path).trained
    np.testing.assert_array_equal(to_array(message), array, strict=True)


def changed(fields: dict[int, Any], *path: int, to: Any) -> Any:
    if not path:
        return to
    copy: Any = fields.copy()
    copy[path[0]] = changed(copy[path[0]] if path[1:] else None, *path[1:], to=to)  # type: ignore[arg-type]
    return copy


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (changed(CHECKPOINT, 0, to=np.int32(3)), r"its version is 3; supported are \(1, 2\)"),
        ({0: np.int32(2)}, "without values"),
        (changed(CHECKPOINT, 1, to={**MODULE, 2: np.bool_(True)}), "nominal checkpoint"),
        (
            changed(CHECKPOINT, 1, 0, 0, 4, to=np.zeros(47, np.uint8)),
            "'fc.weight' with dims .* needs 48 bytes, but has 47",
        ),
        (changed(CHECKPOINT, 1, 0, 0, 3, to=np.int32(99)), "'fc.weight' has element type 99"),
        (changed(CHECKPOINT, 1, 0, 0, 2, to=np.array([-4, -3])), r"'fc.weight' has .* dims \[-4, -3\]"),
        (
            changed(CHECKPOINT, 1, 0, 0, 0, to="fc.w"),
            "the checkpoint has 'fc.w', but eval_model.onnx has no such input",
        ),
        (
            changed(CHECKPOINT, 1, 0, 0, 2, to=np.array([3, 4])),
            r"dims \[3, 4\] in the checkpoint, but .* dims \[4, 3\]",
        ),
    ],
)
def test_checkpoints_that_do_not_match_raise(fields: Any, message: str, folder: Path) -> None:
    write(folder / "checkpoint", fields)
    with pytest.raises(ModelError, match=message):
        onnx2jax.training.load_artifacts(folder)


def test_several_groups_are_unsupported(folder: Path) -> None:
    write(folder / "checkpoint", changed(CHECKPOINT, 2, to=[GROUP, {**GROUP, 0: "group1"}]))
    with pytest.raises(UnsupportedError, match=r"2 groups of parameters \(\['group0', 'group1'\]\)"):
        onnx2jax.training.load_artifacts(folder)


def test_missing_and_foreign_files_raise(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"has no file 'other': .*generate_artifacts.*its checkpoint: checkpoint='checkpoint'$"
    ):
        onnx2jax.training.load_artifacts(folder, checkpoint="other")
    with pytest.raises(
        FileNotFoundError, match=r"'/nope' has no file 'eval_model.onnx': .*generate_artifacts has writ"
    ):
        onnx2jax.training.load_artifacts("/nope")
    with pytest.raises(ModelError, match="is not a checkpoint of onnxruntime: its identifier is"):
        onnx2jax.training.load_artifacts(folder, checkpoint="eval_model.onnx")
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    with pytest.raises(ImportError, match=r"needs the extra artifacts .*pip install"):
        onnx2jax.training.load_artifacts(folder)


def read(data: bytes, path: Path) -> Any:
    path.write_bytes(data)
    content = read_checkpoint(path)
    return [(t.name, t.raw_data) for t in content.trained + content.frozen], content.properties


def test_every_truncation_raises(folder: Path) -> None:
    data = (folder / "checkpoint").read_bytes()
    for size in range(len(data) - 8):  # the last bytes may be padding
        with pytest.raises(ModelError):
            read(data[:size], folder / "truncated")


@pytest.mark.parametrize("value", canaries([0, 0x7F, 0x80, 0xFF], [0xFF]))
def test_damage_raises_model_error_or_is_harmless(value: int, folder: Path) -> None:
    data = (folder / "checkpoint").read_bytes()
    for at in range(8, len(data)):
        with contextlib.suppress(ModelError):
            read(data[:at] + bytes([value]) + data[at + 1 :], folder / "damaged")


def test_an_offset_outside_the_file_raises(folder: Path) -> None:
    with pytest.raises(ModelError, match="has its fields at byte -"):
        read(struct.pack("<I4sii", 8, b"ODTC", 100, 0), folder / "damaged")
