"""Rules MV, ME and QA: the model container, its versions, metadata and quantization annotations."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import onnx
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from onnx import helper

import onnx2jax
from onnx2jax.errors import ModelError, UnsupportedError, UnsupportedOperatorError
from tests.support.cases import (
    MAIN,
    F,
    X,
    clean,
    parse,
    refused,
    refused_when_strict,
    rule,
    rules_of,
    run,
    same,
    warned,
)


@rule("MV-01")
@pytest.mark.parametrize("version", [None, 0, -1])
def test_ir_version_is_set_and_positive(version: int | None) -> None:
    # onnxruntime and the reference evaluator run these.
    proto = parse()
    proto.ClearField("ir_version") if version is None else setattr(proto, "ir_version", version)
    with pytest.raises(ModelError, match="ir_version"):
        onnx2jax.convert(proto)
    assert rules_of(proto) == {"MV-01"}


@rule("MV-02")
@pytest.mark.parametrize("version", range(1, 15))
def test_every_ir_version_up_to_the_newest_runs(version: int) -> None:
    proto = parse(ir_version=version)
    if version < 3:
        del proto.opset_import[:]
    else:
        proto.opset_import[0].version = 7
    same(clean(proto, X) if version >= 3 else run(proto, X), [0, 2])


@rule("MV-02")
@pytest.mark.parametrize("version", [15, 99])
def test_newer_ir_versions_are_refused(version: int) -> None:
    refused(parse(ir_version=version), "MV-02", match=f"{version}.*14", error=UnsupportedError)


@rule("MV-03")
def test_opset_imports_require_ir_3() -> None:
    old = parse(MAIN + " <float[1] b = {1}> { y = Add <axis = 0, broadcast = 1> (x, b) }", ir_version=2)
    del old.opset_import[:]
    same(run(old, X), [0, 3])
    refused(parse(edit=lambda m: m.ClearField("opset_import")), "MV-03", error=ModelError)
    # The checker of the onnx package refuses imports below IR 3; onnxruntime runs them, as we do.
    assert "MV-03" in rules_of(parse(ir_version=2), "warning")


@rule("MV-04")
def test_a_model_has_a_graph_with_a_name() -> None:
    refused(parse(edit=lambda m: m.ClearField("graph")), "MV-04", error=ModelError)
    unnamed = refused_when_strict(parse(edit=lambda m: m.graph.ClearField("name")), "MV-04")  # onnxruntime runs it
    same(unnamed(X), [0, 2])


@rule("MV-05")
@pytest.mark.parametrize("domain", ["", "com.example", "no reverse DNS !"])
def test_any_model_domain_is_accepted(domain: str) -> None:
    same(clean(parse(domain=domain), X), [0, 2])


@rule("MV-06")
@pytest.mark.parametrize(
    ("version", "text"),
    [
        (0x0001000200000159, "1.2.345"),
        (7, "7"),
        (0x100, "256"),
        (2**32 - 1, "4294967295"),
        (2**32, "0.1.0"),
        (-1, "65535.65535.4294967295"),
    ],
)
def test_model_version_is_a_count_or_packed(version: int, text: str) -> None:
    proto = parse(model_version=version)
    assert onnx2jax.convert(proto).metadata["model_version"] == text
    same(clean(proto, X), [0, 2])


@rule("MV-07", "GR-26", "AT-14", "ME-01", "ME-07")
def test_descriptive_fields_do_not_affect_results() -> None:
    plain = parse(MAIN + " { y = Elu <alpha = 2.0> (x) }")

    def describe(m: Any) -> None:
        m.producer_name, m.producer_version, m.doc_string = "p", "1", "<b>html</b><script>x</script>"
        m.graph.doc_string = m.graph.node[0].doc_string = m.graph.node[0].attribute[0].doc_string = "d"
        helper.set_model_props(m, {"model_author": "me", "model_license": "MIT", "empty": ""})

    told = parse(MAIN + " { y = Elu <alpha = 2.0> (x) }", describe)
    a, b = onnx2jax.convert(plain), onnx2jax.convert(told)
    assert str(jax.make_jaxpr(a.apply)({}, X)) == str(jax.make_jaxpr(b.apply)({}, X))
    expected = {"producer_name": "p", "model_author": "me", "model_license": "MIT", "empty": ""}
    assert expected.items() <= b.metadata.items()
    assert b.metadata["doc_string"].startswith("<b>")
    assert onnx2jax.check(told).findings == ()


@rule("MV-08")
def test_inference_is_pure() -> None:
    m = onnx2jax.convert(parse(MAIN + " <float[2] w = {3, 4}> { s = Softmax (x)  y = Mul (s, w) }"))
    before = dict(jax.config.values), {n: v.tobytes() for n, v in m.params.items()}
    call = jax.jit(m.apply)
    first = np.asarray(call(m.params, X)).tobytes()
    call(m.params, X + 1)
    assert np.asarray(call(m.params, X)).tobytes() == np.asarray(m(X)).tobytes() == first
    assert (dict(jax.config.values), {n: v.tobytes() for n, v in m.params.items()}) == before


@rule("MV-09")
def test_training_information_is_ignored_by_inference() -> None:
    proto = parse()
    proto.training_info.add().algorithm.node.add(op_type="Unknown", domain="nowhere", output=["t"])
    same(run(proto, X), run(parse(), X))


@rule("MV-10", "OR-08")
def test_all_unsupported_operators_are_listed_before_anything_runs() -> None:
    proto = parse(MAIN + " { a = relu (x)  b = Frob (a)  y = l.Frob (b) }")
    with pytest.raises(
        UnsupportedOperatorError, match=r"(?s)3 operators.*21: Frob.*21: relu.*did you mean Relu.*l 1: Frob"
    ):
        onnx2jax.convert(proto)
    assert rules_of(proto) == {"OR-08"}
    assert rules_of(proto, "warning") == {"MV-10"}  # a custom operator may be legal


@rule("MV-11")
def test_unknown_fields_are_skipped_and_kept(tmp_path: Path) -> None:
    data = parse().SerializeToString() + b"\xba\x3e\x03abc"  # field 999
    same(clean(data, X), [0, 2])
    again = onnx2jax.save(onnx2jax.convert(data), tmp_path / "again.onnx").read_bytes()
    assert again.endswith(b"\xba\x3e\x03abc")
    same(clean(again, X), [0, 2])


@rule("MV-11")
def test_missing_fields_have_their_defaults() -> None:
    bare = onnx.ModelProto(ir_version=1)
    bare.graph.name = "g"
    bare.graph.node.add(op_type="Identity", input=["x"], output=["y"])
    bare.graph.input.append(helper.make_tensor_value_info("x", 1, [2]))
    bare.graph.output.append(helper.make_tensor_value_info("y", 1, [2]))
    same(clean(bare, X), X)
    assert onnx2jax.convert(bare).metadata == {}


@rule("MV-12")
@pytest.mark.parametrize(
    "data",
    [
        b"",
        parse().SerializeToString()[: len(parse().SerializeToString()) // 2],
        b"\x0a\x09ONNXOPSET\x10\x07",
        b"plain text",
        b"\xff" * 100,
        b"<html>",
    ],
    ids=["empty", "half", "operator set", "text", "noise", "html"],
)
def test_non_models_are_refused(data: bytes) -> None:
    with pytest.raises(ModelError, match="not an ONNX model"):
        onnx2jax.convert(data)
    assert not onnx2jax.check(data).ok


@rule("MV-13")
def test_weights_above_2_gib_are_external(tmp_path: Path) -> None:
    side = 2**15
    proto = parse("g (float[N, 32768] x, int64[1] i) => (y) { y = Gather (w, i) }")
    w = proto.graph.initializer.add(name="w", data_type=1, dims=[side, side], data_location=1)
    w.external_data.add(key="location", value="w.bin")
    with (tmp_path / "w.bin").open("wb") as file:
        file.truncate(4 * side * side)  # a sparse file of 4 GiB
    onnx.save(proto, tmp_path / "m.onnx")
    m = onnx2jax.convert(tmp_path / "m.onnx")
    assert m.graph.initializers["w"].nbytes == 2**32 and not m.graph.initializers["w"].flags.owndata  # not yet read
    assert onnx2jax.check(tmp_path / "m.onnx").errors[0].rule == "GR-16"  # y is undeclared; the data is all right


@rule("MV-14", "GR-06", "GR-07")
def test_initializers_need_not_be_inputs_from_ir_4_on() -> None:
    text = MAIN + " <float[2] w = {1, 1}> { y = Add (x, w) }"
    same(clean(parse(text, ir_version=4, edit=lambda m: setattr(m.opset_import[0], "version", 9)), X), [0, 3])
    # onnxruntime and the reference evaluator do not look at ir_version.
    same(refused_when_strict(parse(text, ir_version=3), "GR-06")(X), [0, 3])


@rule("GR-06")
def test_below_ir_4_weights_among_the_inputs_are_no_inputs_of_the_function() -> None:
    proto = parse("g (float[2] x, float[2] w) => (float[2] y) <float[2] w = {1, 1}> { y = Add (x, w) }", ir_version=3)
    same(clean(proto, X), [0, 3])
    assert [v.name for v in onnx2jax.convert(proto).inputs] == ["x"]


@rule("MV-15")
def test_one_reader_reads_both_variants_of_the_format(tmp_path: Path) -> None:
    """The core variant has a description of its own: what it writes reads the same."""
    source = (Path(onnx.__file__).parent / "onnx.proto").read_text(encoding="utf-8")
    core = _message_of(source.replace("package onnx;", "package core;"), "core.ModelProto", tmp_path)
    text = MAIN + " <float[2] w = {1, 1}> { y = Add (x, w) }"
    written = core.FromString(parse(text).SerializeToString())
    assert len(written.graph.node) == 1 and not written.FindInitializationErrors()
    same(clean(written.SerializeToString(), X), clean(parse(text), X))
    ml = 'g (float[1, 2] x) => (float[1, 2] y) { y = ai.onnx.ml.Normalizer <norm = "L1"> (x) }'
    same(clean(parse(ml), F([[-1, 3]])), F([[-0.25, 0.75]]))


def _message_of(source: str, name: str, folder: Path) -> Any:
    (folder / "core.proto").write_text(source, encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        f"-I{folder}",
        f"--descriptor_set_out={folder / 'core.binpb'}",
    ]
    subprocess.run([*command, "core.proto"], check=True)
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString((folder / "core.binpb").read_bytes()).file:
        pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))


@rule("MV-16")
def test_newer_fields_in_older_files_are_tolerated() -> None:
    f = '\n<domain: "l", opset_import: ["" : 21]> f <al: float = 1.0> (a) => (r) { r = Elu <alpha: float = @al> (a) }'
    text = MAIN + " { y = l.f (x) }" + f
    for version in (7, 8):  # functions since 8, defaults of their attributes since 9
        same(warned(parse(text, ir_version=version), "MV-16")(X), clean(parse(text), X))


# ------------------------------------------------------------------------------------------------ metadata


@rule("ME-02")
def test_metadata_keys_are_distinct() -> None:
    def twice(m: Any) -> None:
        m.metadata_props.add(key="k", value="1")
        m.metadata_props.add(key="k", value="2")

    assert refused_when_strict(parse(edit=twice), "ME-02").metadata["k"] == "2"


@rule("ME-03", "ME-04")
def test_metadata_is_everywhere_and_unprefixed_keys_are_kept() -> None:
    def annotate(m: Any) -> None:
        for message in (m.graph, m.graph.node[0], m.graph.input[0], m):
            message.metadata_props.add(key="whatever", value="v")

    same(clean(parse(edit=annotate), X), [0, 2])
    m = onnx2jax.convert(parse(edit=annotate))
    for metadata in (m.metadata, m.graph.metadata, m.graph.nodes[0].metadata):
        assert metadata["whatever"] == "v"


@rule("ME-05")
def test_image_metadata_is_case_insensitive() -> None:
    def annotate(m: Any) -> None:
        props = {"image.bitmappixelformat": "BGR8", "Image.NominalPixelRange": "NominalRange_0_255"}
        helper.set_model_props(m, props | {"Image.ColorSpaceGamma": "own", "image.other": "BGR8"})
        m.graph.input[0].type.denotation = "IMAGE"

    metadata = onnx2jax.convert(parse(edit=annotate)).metadata
    assert metadata["Image.BitmapPixelFormat"] == "Bgr8"
    assert metadata["Image.NominalPixelRange"] == "NominalRange_0_255"
    assert metadata["Image.ColorSpaceGamma"] == "own" and metadata["image.other"] == "BGR8"  # nothing is known of these
    same(clean(parse(edit=annotate), X), [0, 2])


@rule("ME-06")
def test_names_of_nodes_are_scopes_of_the_program() -> None:
    m = onnx2jax.convert(parse(edit=lambda m: setattr(m.graph.node[0], "name", "the_only_one")))
    assert "the_only_one" in jax.jit(m.apply).lower({}, X).as_text(debug_info=True)


# ----------------------------------------------------------------------------------------- quantization


def annotated(m: Any, tensor: str = "w", key: str = "SCALE_TENSOR", scale: str = "s") -> None:
    a = m.graph.quantization_annotation.add(tensor_name=tensor)
    a.quant_parameter_tensor_names.add(key=key, value=scale)


QUANTISED = MAIN + " <float[2] w = {1, 1}, float s = {0.5}> { y = Add (x, w) }"


@rule("QA-01", "QA-03")
@pytest.mark.parametrize("key", ["SCALE_TENSOR", "FOO"])
def test_annotations_change_nothing(key: str) -> None:
    proto = parse(QUANTISED, lambda m: annotated(m, key=key))
    same(clean(proto, X), run(parse(QUANTISED), X))
    assert onnx2jax.convert(proto).graph.quantization == {"w": {key: "s"}}


@rule("QA-02")
@pytest.mark.parametrize("names", [{"tensor": "nope"}, {"scale": "nope"}])
def test_dangling_annotations_are_a_warning(names: dict[str, str]) -> None:
    same(warned(parse(QUANTISED, lambda m: annotated(m, **names)), "QA-02")(X), [0, 3])


@rule("QA-04")
def test_an_unused_annotated_scale_is_kept() -> None:
    m = onnx2jax.convert(parse(QUANTISED, annotated))
    same(m(X), [0, 3])
    assert m.graph.initializers[m.graph.quantization["w"]["SCALE_TENSOR"]] == np.float32(0.5)
