"""``Model.export``: loaded in a process without onnx2jax, for all platforms, with symbolic dimensions; errors."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import iree.compiler.tools
import iree.runtime
import jax
import ml_dtypes
import numpy as np
import onnx
import pytest
from jax import export
from jax.extend import backend
from onnx import helper

import onnx2jax
from onnx2jax import cli
from onnx2jax.errors import (
    InputError,
    InputNameError,
    InputShapeError,
    InputTypeError,
    InputValueError,
    KnownValueError,
    ModelError,
    OnnxError,
    RandomKeyError,
    ShardingError,
    UnsupportedError,
)
from onnx2jax.model.files import export as exporting
from onnx2jax.model.files.export import _write as write
from onnx2jax.model.files.extents import needed_multiples, symbolic
from onnx2jax.model.files.requirements import requirements
from onnx2jax.ops import op
from onnx2jax.proto.types import TensorType, ValueInfo
from tests.support import decoders
from tests.support.decoders import HEADS, KV_HEADS, SIZE, Net
from tests.support.helpers import mesh
from tests.support.killed import killed
from tests.support.models import NP, cut_in_the_middle, mlp, model, text_model, value

RNG = np.random.default_rng(0)
FREE: dict[str, int | str] = {
    "total_sequence_length": "past_sequence_length + sequence_length",
    "past_sequence_length": "p - 1",
}
"""Relations between a decoder's extents; the past may be empty."""


def transformer() -> onnx.ModelProto:
    net = Net()

    def attend(net: Net, _: int, q: str, k: str, v: str) -> str:
        q, k, v = net.heads(q, HEADS), net.heads(k, KV_HEADS), net.heads(v, KV_HEADS)
        length = net.extent(q, 2)
        return net.attention(q, k, v, net.added(net.causal(length, length)))

    net.network(attend)
    return net.file().proto


def lstm() -> onnx.ModelProto:
    """x [seq, batch, 3], lengths [batch] -> y [seq, 2, batch, 5], y_h."""
    weights = {n: RNG.normal(size=(2, 20, k)).astype(np.float32) for n, k in (("w", 3), ("r", 5))}
    node = helper.make_node(
        "LSTM", ["x", "w", "r", "", "lengths"], ["y", "h:0"], hidden_size=5, direction="bidirectional"
    )
    inputs = [value("x", np.float32, ["seq", "batch", 3]), value("lengths", np.int32, ["batch"])]
    outputs = [value("y", np.float32, None), value("h:0", np.float32, None)]
    return model([node], inputs, outputs, weights)


def int8() -> onnx.ModelProto:
    """x [n, 8] -> y [n, 16], int8 weights and activations by QuantizeLinear and DequantizeLinear."""
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        helper.make_node("DequantizeLinear", ["w", "sw"], ["dw"], axis=1),
        helper.make_node("MatMul", ["d", "dw"], ["m"]),
        helper.make_node("QuantizeLinear", ["m", "s", "z"], ["y"]),
    ]
    weights = {
        "s": np.float32(0.03),
        "z": np.int8(3),
        "w": RNG.integers(-128, 128, (8, 16)).astype(np.int8),
        "sw": RNG.uniform(0.01, 0.02, 16).astype(np.float32),
    }
    return model(nodes, [value("x", np.float32, ["n", 8])], [value("y", np.int8, ["n", 16])], weights)


def narrow() -> onnx.ModelProto:
    """i [n] of int64, and bfloat16, float8 and int4 weights, which NumPy's format cannot store."""
    nodes = [
        helper.make_node("Mul", ["i", "k"], ["a/b:0"]),
        helper.make_node("Add", ["w", "w"], ["file"]),
        helper.make_node("Cast", ["e"], ["f"], to=1),
        helper.make_node("Cast", ["four"], ["g"], to=1),
    ]
    weights = {
        "k": np.array([2**40]),
        "w": np.array([[1.5, 2]], ml_dtypes.bfloat16),
        "e": np.array([[1.5, 3]], ml_dtypes.float8_e4m3fn),
        "four": np.arange(-8, 8).repeat(3).reshape(3, 16).astype(ml_dtypes.int4),
    }
    outputs = [value("a/b:0", np.int64, ["n"]), value("file", ml_dtypes.bfloat16, [1, 2])]
    return model(
        nodes,
        [value("i", np.int64, ["n"])],
        [*outputs, value("f", np.float32, [1, 2]), value("g", np.float32, [3, 16])],
        weights,
    )


def ids(*shape: int) -> np.ndarray:
    return RNG.integers(0, 60, shape)


def image(n: int) -> NP:
    return {"image": RNG.normal(size=(n, 1, 8, 8)).astype(np.float32)}


def step(batch: int, past: int, new: int, *, positions: bool = True) -> NP:
    """Inputs of a step of a decoder of one layer."""
    shape = batch, KV_HEADS, past, SIZE
    caches = {f"past_key_values.0.{n}": RNG.normal(size=shape).astype(np.float32) for n in ("key", "value")}
    feeds = {"input_ids": ids(batch, new), "attention_mask": np.ones((batch, past + new), np.int64), **caches}
    return feeds | ({"position_ids": np.arange(past, past + new)[None].repeat(batch, 0)} if positions else {})


def sequences(seq: int, *lengths: int) -> NP:
    return {"x": RNG.normal(size=(seq, len(lengths), 3)).astype(np.float32), "lengths": np.array(lengths, np.int32)}


CASES: dict[str, tuple[Callable[[], Any], dict[str, Any], list[NP]]] = {
    "cnn": (onnx2jax.demo_model, {}, [image(1), image(3)]),
    "cnn inside": (onnx2jax.demo_model, {"weights": "inside"}, [image(2)]),
    "transformer": (
        transformer,
        {"constraints": ["sequence_length <= 100"]},
        [{"input_ids": ids(1, 1)}, {"input_ids": ids(3, 7)}],
    ),
    "lstm": (lstm, {"dims": {"seq": 6}}, [sequences(6, 6, 2, 1), sequences(6, 5)]),
    "int8": (int8, {}, [{"x": RNG.normal(size=(5, 8)).astype(np.float32)}]),
    "decoder": (lambda: decoders.appending().proto, {"dims": FREE}, [step(2, 0, 5), step(1, 5, 1)]),
    "4 bits": (
        lambda: decoders.group_query(bits="symmetric").proto,
        {"dims": FREE, "constraints": ["p + sequence_length <= 129"]},  # the rows of its tables
        [step(2, 3, 4, positions=False)],
    ),
    "narrow": (narrow, {}, [{"i": np.array([2**20 + 1, -3, 0])}]),
}

ALONE = """
import json, sys
from pathlib import Path
import jax, numpy as np
from jax import export

for folder, calls in json.loads(Path(sys.argv[1]).read_text()).items():
    exported = export.deserialize(Path(folder, "program.bin").read_bytes())
    types = jax.tree.unflatten(exported.in_tree, exported.in_avals)[0][0]
    weights = {}
    if types:
        with np.load(f"{folder}/weights.npz") as file:
            weights = {name: file[name].view(type.dtype) for name, type in types.items()}
    for call in calls:
        with np.load(call) as file, jax.enable_x64(True):
            outputs = exported.call(weights, dict(file))
        names = json.loads(Path(folder, "about.json").read_text())["outputs"]
        arrays = [np.asarray(outputs[n]) for n in names]
        np.savez(f"{call}.out.npz", *(a.astype(np.float32) if a.dtype.kind == "V" else a for a in arrays))
assert not {"onnx2jax", "onnx"} & sys.modules.keys()
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[onnx2jax.Model, Path]]:
    """Each case, exported for all platforms on a machine that has one of them."""
    made = {}
    with jax.numpy_dtype_promotion("strict"):
        for name, (source, options, _) in CASES.items():
            m = onnx2jax.convert(source())
            made[name] = m, m.export(tmp_path_factory.mktemp("exported") / name, **options)
    return made


@pytest.fixture(scope="module")
def alone(folders: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[np.ndarray]]]:
    """The results of a process that imports jax alone, by case and call."""
    place = tmp_path_factory.mktemp("alone")
    calls: dict[str, list[str]] = {}
    for name, (_, folder) in folders.items():
        for k, feeds in enumerate(CASES[name][2]):
            np.savez(place / f"{name} {k}.npz", **feeds)
        calls[str(folder)] = [str(place / f"{name} {k}.npz") for k in range(len(CASES[name][2]))]
    (place / "calls.json").write_text(json.dumps(calls))
    command = [sys.executable, "-c", ALONE, place / "calls.json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=place)
    assert done.returncode == 0, done.stderr[-2000:]
    results = {}
    for name, (_, folder) in folders.items():
        results[name] = []
        for call in calls[str(folder)]:
            with np.load(f"{call}.out.npz") as file:
                results[name].append([file[n] for n in file.files])
    return results


@pytest.mark.parametrize("name", CASES)
def test_a_process_with_jax_alone_matches(folders: Any, alone: Any, name: str) -> None:
    m, _ = folders[name]
    for feeds, results in zip(CASES[name][2], alone[name], strict=True):
        for want, got in zip(m.run(None, feeds), results, strict=True):
            assert got.dtype == (np.float32 if want.dtype.kind == "V" else want.dtype)
            np.testing.assert_allclose(got, want.astype(got.dtype), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("in_32_bits")
def test_load_exported_matches_the_model(folders: Any, name: str) -> None:
    m, folder = folders[name]
    loaded = onnx2jax.load_exported(folder)
    assert [v.name for v in loaded.inputs] == [v.name for v in m.inputs]
    assert [v.type.dtype for v in loaded.inputs] == [v.type.dtype for v in m.inputs]
    assert loaded.outputs == tuple(v.name for v in m.outputs)
    assert loaded.platforms == ("cpu", "cuda", "tpu")
    feeds = CASES[name][2][-1]
    want, got = m(**feeds), loaded(*(feeds[v.name] for v in m.inputs))
    assert getattr(got, "_fields", None) == getattr(want, "_fields", None)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(np.asarray(b, np.float64), np.asarray(a, np.float64), rtol=2e-5, atol=2e-5)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(loaded(feeds)), strict=True):  # called as the model is
        np.testing.assert_array_equal(a, b)


def test_loading_what_is_no_folder(artifact: Path) -> None:
    with pytest.raises(ModelError, match=r"about\.json' is a file; give the folder that export wrote"):
        onnx2jax.load_exported(artifact / "about.json")
    with pytest.raises(ModelError, match="none' does not exist"):
        onnx2jax.load_exported(artifact / "none")


def test_a_program_without_weights_is_small(folders: Any) -> None:
    sizes = {name: (folder / "program.bin").stat().st_size for name, (_, folder) in folders.items()}
    assert max(sizes.values()) < 1e6, sizes


def test_each_platform_has_its_own_lowering(folders: Any) -> None:
    """A multi-platform module selects the lowering by platform index."""
    program = onnx2jax.load_exported(folders["cnn"][1]).exported
    assert "_platform_index" in program.mlir_module()


def test_symbols_are_checked_in_calls(folders: Any) -> None:
    loaded = onnx2jax.load_exported(folders["transformer"][1])
    said = r"input_ids: .* has 101 on axis 1, and the program requires sequence_length <= 100, .*that it takes is 100"
    with pytest.raises(InputShapeError, match=said):
        loaded(ids(1, 101))
    with pytest.raises(InputShapeError, match="batch_size"):
        loaded(ids(0, 3))
    with pytest.raises(InputTypeError, match="float32"):
        loaded(np.zeros((1, 2), np.float32))
    with pytest.raises(InputNameError, match="input_ids"):
        loaded(wrong=ids(1, 1))
    decoder = onnx2jax.load_exported(folders["decoder"][1])
    feeds = step(1, 5, 1)
    with pytest.raises(
        InputShapeError, match=r"attention_mask: .* has 5 on axis 1, and the program takes .*, which is 6"
    ):
        decoder(**feeds | {"attention_mask": np.ones((1, 5), np.int64)})


def test_an_exported_model_inside_a_jit(folders: Any) -> None:
    m, folder = folders["cnn"]
    loaded, x = onnx2jax.load_exported(folder), image(2)["image"]
    np.testing.assert_allclose(jax.jit(lambda x: loaded(x) + 1)(x), m(x) + 1, rtol=1e-5, atol=1e-5)
    call = jax.jit(lambda loaded, x: loaded(x) + 1)
    np.testing.assert_allclose(call(loaded, x), m(x) + 1, rtol=1e-5, atol=1e-5)
    doubled = jax.tree.map(lambda v: 2 * v, loaded)
    assert doubled.params.keys() == loaded.params.keys() == m.params.keys()
    assert np.any(call(doubled, x) != call(loaded, x)) and call._cache_size() == 1


def test_gradients_and_vmap_of_an_exported_model(artifact: Path, tmp_path: Path) -> None:
    """Their errors have a fix that works."""
    m, plain = onnx2jax.convert(mlp()), onnx2jax.load_exported(artifact)
    (name,) = plain.outputs
    x = RNG.normal(size=(3, *m.inputs[0].shape[1:])).astype(np.float32)
    np.testing.assert_array_equal(plain.run(None, {"x": x})[0], plain(x))
    assert [type(v) for v in plain.run(name, {"x": x})] == [np.ndarray]
    with pytest.raises(InputNameError, match=f"no output 'z'; the program's outputs are .*{name}"):
        plain.run("z", {"x": x})
    with pytest.raises(InputTypeError, match="swapped"):
        plain.run({"x": x}, None)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=r"cannot map .* jax\.lax\.map"):
        jax.vmap(lambda row: plain(row[None]))(x)
    np.testing.assert_allclose(jax.lax.map(lambda row: plain(row[None])[0], x), plain(x), rtol=1e-5)
    for differentiate in (jax.grad, lambda f: jax.jit(jax.grad(f))):
        with pytest.raises(UnsupportedError, match=r"no gradient: .*export\(\.\.\., vjp_order=1\)"):
            differentiate(lambda program: program(x).sum())(plain)
    program = onnx2jax.load_exported(m.export(tmp_path, vjp_order=1, platforms=["cpu"]))
    by_x, by_weights = jax.grad(lambda x, p: p(x).sum(), (0, 1))(x, program)
    wanted, weights = jax.grad(lambda x, p: m.apply(p, x).sum(), (0, 1))(x, m.params)
    np.testing.assert_allclose(by_x, wanted, rtol=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), by_weights.params, weights)


@op("Halved", domain="com.example")
def halved_below_one(x: Any) -> Any:
    return jax.lax.while_loop(lambda x: jax.numpy.max(x) > 1, lambda x: x / 2, x)


def test_a_gradient_that_jax_cannot_export_is_named(tmp_path: Path) -> None:
    proto = text_model("g (float[3] x) => (float[3] y) { y = com.example.Halved(x) }")
    proto.opset_import.append(onnx.helper.make_opsetid("com.example", 1))
    with pytest.raises(UnsupportedError, match=r"cannot export the gradient: .*while_loop(.|\n)*vjp_order=0"):
        onnx2jax.convert(proto).export(tmp_path, platforms=["cpu"], vjp_order=1)


# ------------------------------------------------------------------------------------------------- symbols

SYMBOLS: list[tuple[list[tuple[Any, ...]], dict[str, Any], str]] = [
    ([("batch", 3), ("batch",)], {}, "batch 3 | batch"),
    ([("batch", 3), ("batch",)], {"batch": 8}, "8 3 | 8"),
    ([("batch", "past + 1")], {"past + 1": 4}, "batch 4"),
    ([("batch", "past + 1")], {}, "batch past___1"),
    ([("s0", "(s0-1)//2 + 1")], {"s0": "2*k"}, "2*k k"),
    ([("past", "past + 1")], {}, "past past+1"),
    ([("past", "past + 1")], {"past": 4}, "4 5"),
    ([("past", "total")], {"past": "p - 1", "total": "2*p"}, "p-1 2*p"),
    ([("past", "total")], {"past": "p - 1", "total": "past + new"}, "p-1 p+new-1"),
    ([("a", "b")], {"a": "2*a", "b": "a"}, "2*a 2*a"),
    ([("a", "total")], {"a": 3, "total": "a + b"}, "3 b+3"),
    ([(None, 2), (None,)], {}, "x0_0 2 | x1_0"),
    ([(None, "x0_0")], {}, "x0_0_ x0_0"),
    ([("batch size", "unk_1", "unk.1")], {"batch size": 2}, "2 unk_1 unk_1_"),
    ([("max", "7", "a,b", "_", "é")], {}, "dim_max dim_7 a_b dim_ é"),
]


@pytest.mark.parametrize(("shapes", "dims", "expected"), SYMBOLS)
def test_symbols(shapes: Any, dims: Any, expected: str) -> None:
    inputs = [ValueInfo(f"x{i}", TensorType(np.dtype(np.float32), s)) for i, s in enumerate(shapes)]
    found = symbolic(inputs, dims, ())
    assert " | ".join(" ".join(str(d).replace(" ", "") for d in found[v.name]) for v in inputs) == expected


# ------------------------------------------------------------------------------------------------- refusals

REFUSED: list[tuple[Callable[[], Any], dict[str, Any], type[Exception], str]] = [
    (mlp, {"dims": {"bath": 8}}, InputNameError, r"\['bath'\]; the model.s dimension variables are \['batch'\]"),
    (mlp, {"dims": {"batch": -1}}, InputValueError, "'batch': -1"),
    (mlp, {"dims": {"batch": 1.5}}, InputValueError, "'batch': 1.5"),
    (mlp, {"dims": {"batch": "2 k"}}, InputShapeError, "'batch', '2 k', is no expression.*syntax"),
    (mlp, {"constraints": ["batch <"]}, InputShapeError, "constraints"),
    (mlp, {"platforms": ["cpu", "xpu"]}, InputNameError, r"\['xpu'\]; there are cpu, cuda, rocm, tpu"),
    (mlp, {"platforms": []}, InputNameError, "nothing"),
    (mlp, {"platforms": "cpu"}, InputNameError, r"it is a list, such as \['cpu', 'cuda'\]"),
    (mlp, {"platforms": ["gpu"]}, InputNameError, "NVIDIA's GPUs are 'cuda'"),
    (mlp, {"weights": "outside"}, InputNameError, "it is 'beside' .a file next to the program. or 'inside'"),
    (cut_in_the_middle, {}, KnownValueError, "NonZero"),
]


@pytest.mark.parametrize(("source", "options", "error", "match"), REFUSED)
def test_invalid_arguments_are_rejected(tmp_path: Path, source: Any, options: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        onnx2jax.convert(source()).export(tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_string_inputs_and_meshes_are_rejected(tmp_path: Path) -> None:
    texts = model(
        [helper.make_node("StringNormalizer", ["t"], ["y"])], [value("t", object, ["n"])], [value("y", object, ["n"])]
    )
    with pytest.raises(UnsupportedError, match=r"input t: string.*no tensor of numbers.*static"):
        onnx2jax.convert(texts).export(tmp_path)
    ranks = model(
        [helper.make_node("Neg", ["x"], ["y"])], [value("x", np.float32, None)], [value("y", np.float32, None)]
    )
    with pytest.raises(UnsupportedError, match=r"input x.*no declared rank"):
        onnx2jax.convert(ranks).export(tmp_path)
    bits = model(
        [helper.make_node("Cast", ["x"], ["y"], to=1)],
        [value("x", ml_dtypes.uint2, [3])],
        [value("y", np.float32, [3])],
        opset=25,
        ir_version=13,
    )
    with pytest.raises(UnsupportedError, match=r"uint2.*cannot store"):
        onnx2jax.convert(bits).export(tmp_path)
    with pytest.raises(ShardingError, match="mesh"):
        onnx2jax.convert(mlp(), mesh=mesh(data=2)).export(tmp_path)


def test_exporting_to_a_file_path_raises(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(NotADirectoryError, match="is a file"):
        onnx2jax.convert(mlp()).export(tmp_path / "out")


def test_inconclusive_dimensions_raise_with_the_fix(tmp_path: Path) -> None:
    """A mask's length is independent of the past and the new tokens."""
    m = onnx2jax.convert(decoders.appending().proto)
    with pytest.raises(OnnxError) as caught:
        m.export(tmp_path)
    notes = "\n".join(caught.value.__notes__)
    assert "dims={'total': 'past + sequence'}" in notes
    assert "traceback" not in notes.lower()


def test_export_of_a_partitioned_model_names_the_node(tmp_path: Path) -> None:
    with pytest.raises(KnownValueError) as caught:
        onnx2jax.convert(cut_in_the_middle()).export(tmp_path)
    assert "explain()" in "".join(caught.value.__notes__)


EIG = "g (float[3, 3] x) => (float[3] y) { y = com.example.Eig(x) }"
CHOSEN = """g (float[n, 2] x) => (float[n, 2] y) {
    s = Shape<end = 1>(x)
    c = Equal(s, five)
    y = If(c) <then_branch = t () => (float[n, 2] a) { a = Neg(x) },
               else_branch = e () => (float[n, 2] b) { b = Abs(x) }>
}"""


@op("Eig", domain="com.example")
def eig(x: Any) -> Any:
    return jax.numpy.linalg.eigvals(x).real


@pytest.mark.parametrize(
    ("text", "said", "note"),
    [
        (
            CHOSEN,
            r"^node 'c' \(Equal, opset 21\): whether n .* 5 depends on extents\noperands",
            "export(dims={'n': 512})",
        ),
        (EIG, r"^node 'y' \(com\.example\.Eig, opset 1\): JAX has no 'eig' for .*tpu.*platforms=\[", ""),
        (
            "g (float[n, 3] x) => (float[n, 3] h, seq(map(int64, float)) y) { h = Neg(x) a = Abs(h) "
            "y = ai.onnx.ml.ZipMap<classlabels_int64s = [4, 5, 6]>(a) }",
            r"ZipMap.* must be known",
            "leave out what depends on it: model.cut(outputs=['h', 'a'])",
        ),
    ],
)
def test_messages_of_jax_are_in_terms_of_the_model(tmp_path: Path, text: str, said: str, note: str) -> None:
    """What JAX says of symbolic scopes, primitives and its own traceback is for those who write in JAX."""
    proto = text_model(text, **({"five": np.int64([5])} if "five" in text else {}))
    proto.opset_import.extend([onnx.helper.make_opsetid("com.example", 1), onnx.helper.make_opsetid("ai.onnx.ml", 3)])
    with pytest.raises(OnnxError, match=said) as caught:
        onnx2jax.convert(proto).export(tmp_path)
    notes = "\n".join(getattr(caught.value, "__notes__", ()))
    assert note in f"{caught.value}\n{notes}"
    assert not re.search("Symbolic dimension|symbolic scope|primitive|JAX has removed", f"{caught.value}\n{notes}")


SHAPES = {
    "shape": "int64[2] y) { y = Shape(x)",
    "size": "int64 y) { y = Size(x)",
    "arithmetic": "int64 y) { s = Size(x) y = Mul(s, two)",
    "declared int32": "int32[2] y) { s = Shape(x) y = Cast<to = 6>(s)",
    "beside numbers": "float[b,3] z, int64[2] y) { z = Relu(x) y = Shape(x)",
    "sequence": "seq(int64[2]) y) { s = Shape(x) y = SequenceConstruct(s, s)",
}


def test_outputs_that_are_symbolic_shapes(tmp_path: Path) -> None:
    """A program for all extents returns those of the call, in the declared type."""
    x = np.ones((5, 3), np.float32)
    for name, rest in SHAPES.items():
        converted = onnx2jax.convert(text_model(f"g (float[b, 3] x) => ({rest} }}", two=np.int64(2)))
        exported = onnx2jax.load_exported(converted.export(tmp_path / name, platforms=["cpu"]))
        got, want = jax.tree.leaves(exported(x)), jax.tree.leaves(converted(x))
        for a, b in zip(got, want, strict=True):
            assert a.dtype == b.dtype, name
            np.testing.assert_array_equal(a, b, err_msg=name)


def test_models_without_numbers(tmp_path: Path) -> None:
    """Without inputs or outputs there is a program; strings and, in StableHLO, sequences are refused by name."""
    w, s = np.float32([1, 2]), np.array(["a"], object)
    none = onnx2jax.convert(text_model("g () => (float[2] y) { y = Add(w, w) }", w=w))
    np.testing.assert_array_equal(onnx2jax.load_exported(none.export(tmp_path / "a"))(), [2, 4])
    nothing = onnx2jax.convert(text_model("g (float[2] x) => () { y = Identity(x) }"))
    assert onnx2jax.load_exported(nothing.export(tmp_path / "b"))(w) == ()
    nothing.export(tmp_path / "c", format="stablehlo")
    text = onnx2jax.convert(text_model("g () => (string[1] t) { t = Identity(s) }", s=s))
    both = onnx2jax.convert(text_model("g () => (string[1] t, float[2] y) { t = Identity(s) y = Add(w, w) }", w=w, s=s))
    formats: tuple[Any, ...] = ("jax", "stablehlo")
    for format in formats:
        with pytest.raises(UnsupportedError, match=r"output t: string\[1\] holds strings, which an exported program"):
            text.export(tmp_path / "d", format=format)
        with pytest.raises(KnownValueError, match=r"'t' holds strings.*or leave that output out: model\.cut\(outputs="):
            both.export(tmp_path / "d", format=format)
    some = onnx2jax.convert(text_model("g () => (seq(float[2]) y) { y = SequenceConstruct(w, w) }", w=w))
    assert len(onnx2jax.load_exported(some.export(tmp_path / "e"))()) == 2
    with pytest.raises(UnsupportedError, match=r"output y: .* is a sequence, and a StableHLO program returns arrays"):
        some.export(tmp_path / "f", format="stablehlo")


def test_flatbuffers_is_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    with pytest.raises(ImportError, match=r"needs the extra export .*pip install"):
        onnx2jax.convert(mlp()).export(tmp_path)


# ------------------------------------------------------------------------------------------------- artifacts


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return onnx2jax.convert(mlp()).export(tmp_path_factory.mktemp("mlp") / "out", platforms=["cpu"])


@pytest.fixture
def artifact(exported: Path, tmp_path: Path) -> Path:
    """A copy, which tests may change."""
    return shutil.copytree(exported, tmp_path / "out")


@pytest.mark.parametrize("file", ["program.bin", "weights.npz", "about.json"])
def test_damaged_artifacts_are_rejected(artifact: Path, file: str) -> None:
    path = artifact / file
    data = path.read_bytes()
    for end in (0, len(data) // 2, len(data) - 4):
        path.write_bytes(data[:end])
        with pytest.raises(ModelError, match=file):
            onnx2jax.load_exported(artifact)
    path.unlink()
    with pytest.raises(ModelError, match=file):
        onnx2jax.load_exported(artifact)


def test_names_of_another_program_are_rejected(artifact: Path) -> None:
    about = json.loads((artifact / "about.json").read_text())
    (artifact / "about.json").write_text(json.dumps(about | {"inputs": ["z"]}))
    with pytest.raises(ModelError, match="damaged"):
        onnx2jax.load_exported(artifact)


WEIGHTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"w1": np.zeros((4, 9), np.float32)}, InputShapeError, r"'w1' has shape \[4, 9\], the program takes \[4, 8\]"),
    ({"w1": np.zeros((4, 8))}, InputTypeError, "'w1' is float64, and the program takes float32"),
    ({"w3": np.zeros(3)}, InputNameError, r"\['w3'\]"),
    ({"w1": None}, ModelError, "no weight 'w1'"),
]


@pytest.mark.parametrize(("change", "error", "match"), WEIGHTS)
def test_mismatched_weights_are_rejected(artifact: Path, change: Any, error: Any, match: str) -> None:
    params = {n: w for n, w in {**onnx2jax.convert(mlp()).params, **change}.items() if w is not None}
    np.savez(artifact / "weights.npz", **params)
    with pytest.raises(error, match=match):
        onnx2jax.load_exported(artifact)


def test_weights_can_be_replaced(artifact: Path) -> None:
    m, x = onnx2jax.convert(mlp()), np.ones((2, 4), np.float32)
    doubled = m.with_params({"b2": m.params["b2"] * 2})
    np.savez(artifact / "weights.npz", **doubled.params)
    np.testing.assert_allclose(onnx2jax.load_exported(artifact)(x), doubled(x), rtol=1e-6)


def test_weight_names_that_npz_cannot_store_are_rejected(tmp_path: Path) -> None:
    """``np.load`` calls both w.npy.npy and w.npy "w.npy"."""
    nodes = [helper.make_node("Add", ["x", "w"], ["a"]), helper.make_node("Add", ["a", "w.npy"], ["y"])]
    weights = {"w": np.ones(2, np.float32), "w.npy": np.zeros(2, np.float32)}
    m = onnx2jax.convert(model(nodes, [value("x", np.float32, [2])], [value("y", np.float32, [2])], weights))
    with pytest.raises(UnsupportedError, match="inside"):
        m.export(tmp_path / "out")
    loaded = onnx2jax.load_exported(m.export(tmp_path / "out", weights="inside", platforms=["cpu"]))
    np.testing.assert_array_equal(loaded(np.zeros(2, np.float32)), [1, 1])


INVALID: list[tuple[dict[str, Any], str]] = [
    ({"format": "tflite"}, "format is 'tflite'; it is 'jax' or 'stablehlo'"),
    ({"format": "stablehlo", "platforms": ["cpu", "tpu"]}, "lowered for one"),
    ({"format": "stablehlo", "platforms": []}, "there are cpu, cuda"),
    ({"vjp_order": -1}, "vjp_order is -1; it is a number of gradients"),
    ({"format": "stablehlo", "vjp_order": 1}, "has no gradient: leave out vjp_order="),
    ({"format": "stablehlo"}, r"dimensions batch are free.*dims=\{'batch': 1\}"),
]


@pytest.mark.parametrize(("keywords", "match"), INVALID)
def test_invalid_formats_are_rejected(tmp_path: Path, keywords: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        onnx2jax.convert(onnx2jax.demo_model()).export(tmp_path / "out", **keywords)
    assert not (tmp_path / "out").exists()


def run_stablehlo(folder: Path, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run a StableHLO program as docs/guides/export.md says, by jax without this library."""
    about = json.loads((folder / "about.json").read_text())
    stored = np.load(folder / "weights.npz") if (folder / "weights.npz").exists() else {}
    arrays = [
        (stored if a["kind"] == "weight" else feeds)[a["name"]].view(jax.dtypes.canonicalize_dtype(a["dtype"]))
        for a in about["arguments"]
    ]
    assert [list(a.shape) for a in arrays] == [a["shape"] for a in about["arguments"]]
    client = backend.get_backend("cpu")
    program = (folder / "program.mlirbc").read_bytes()
    compiled = client.compile_and_load(program, tuple(jax.devices("cpu")[:1]), backend.get_compile_options(1, 1))
    results = compiled.execute([jax.device_put(a) for a in arrays])
    assert [[*r.shape] for r in results] == [r["shape"] for r in about["results"]]
    assert [str(r.dtype) for r in results] == [r["dtype"] for r in about["results"]]
    return {r["name"]: np.asarray(v) for r, v in zip(about["results"], results, strict=True)}


@pytest.mark.parametrize("weights", ["beside", "inside"])
def test_stablehlo_runs_without_this_library(artifact: Path, weights: Any) -> None:
    """The folder may contain another program; an unused input stays an argument."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Erf", ["h"], ["y"])]
    nodes += [helper.make_node("TopK", ["h", "k"], ["values", "indices"])]
    params = {"w": np.arange(12, dtype=np.float32).reshape(3, 4) / 8, "k": np.array([2])}
    ends = [value("unused", np.int32, [1]), value("x", np.float32, ["n", 3])]
    outs = [
        value("values", np.float32, ["n", 2]),
        value("indices", np.int64, ["n", 2]),
        value("y", np.float32, ["n", 4]),
    ]
    m = onnx2jax.convert(model(nodes, ends, outs, params))
    m.export(artifact, format="stablehlo", dims={"n": 2}, weights=weights)
    files = {"about.json", "program.mlirbc"} | ({"weights.npz"} if weights == "beside" else set())
    assert {p.name for p in artifact.iterdir()} == files
    feeds = {"unused": np.zeros(1, np.int32), "x": np.float32([[1, 2, 3], [-1, 0, 1]])}
    found = run_stablehlo(artifact, feeds)
    for name, wanted in zip(found, m.run(None, feeds), strict=True):
        np.testing.assert_allclose(found[name], wanted, rtol=1e-5)
    with pytest.raises(ModelError, match=r"is a StableHLO program.*format='jax'"):
        onnx2jax.load_exported(artifact)


@pytest.mark.extended
def test_stablehlo_runs_in_iree(tmp_path: Path) -> None:
    """Another compiler reads the bytecode: an LSTM, whose loop is a while, and 64-bit indices."""
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["x"]),
        helper.make_node("LSTM", ["x", "w", "r", "b"], ["h", "last"], hidden_size=5),
        helper.make_node("ArgMax", ["last"], ["y"], axis=2),
    ]
    shapes = {"table": (9, 3), "w": (1, 20, 3), "r": (1, 20, 5), "b": (1, 40)}
    params = {n: rng.normal(size=shape).astype(np.float32) for n, shape in shapes.items()}
    outs = [value("h", np.float32, None), value("last", np.float32, None), value("y", np.int64, None)]
    m = onnx2jax.convert(model(nodes, [value("ids", np.int64, ["t", "n"])], outs, params))
    m.export(tmp_path / "out", format="stablehlo", dims={"t": 4, "n": 2}, weights="inside")
    binary = iree.compiler.tools.compile_file(
        str(tmp_path / "out" / "program.mlirbc"),
        input_type="stablehlo",
        target_backends=["llvm-cpu"],
        extra_args=["--iree-llvmcpu-target-cpu=host"],
    )
    context = iree.runtime.SystemContext(config=iree.runtime.Config("local-sync"))
    module = iree.runtime.VmModule.copy_buffer(context.instance, binary)
    context.add_vm_module(module)
    ids = rng.integers(9, size=(4, 2))
    found = context.modules[module.name]["main"](ids)
    for ours, wanted in zip(found, m.run(None, {"ids": ids}), strict=True):
        assert ours.to_host().dtype == wanted.dtype
        np.testing.assert_allclose(ours.to_host(), wanted, rtol=1e-5, atol=1e-6)


def test_stablehlo_takes_the_words_of_a_random_key(tmp_path: Path) -> None:
    nodes = [helper.make_node("RandomUniformLike", ["x"], ["r"]), helper.make_node("Add", ["x", "r"], ["y"])]
    m = onnx2jax.convert(model(nodes, [value("x", np.float32, [8])], [value("y", np.float32, [8])]))
    m.export(tmp_path / "out", format="stablehlo")
    x, key = np.zeros(8, np.float32), jax.random.key(3)
    found = run_stablehlo(tmp_path / "out", {"x": x, "rng": np.asarray(jax.random.key_data(key))})
    np.testing.assert_allclose(found["y"], m(x, rng=key), rtol=1e-6)


def test_stablehlo_without_functions_of_xla(tmp_path: Path) -> None:
    """A determinant by LAPACK on a CPU, which another compiler cannot call."""
    m = onnx2jax.convert(
        model([helper.make_node("Det", ["x"], ["y"])], [value("x", np.float32, [4, 4])], [value("y", np.float32, [])])
    )
    with pytest.raises(UnsupportedError, match=r"calls lapack_sgetrf_ffi.*platforms=\['tpu'\]"):
        m.export(tmp_path / "out", format="stablehlo")


def test_the_command_writes_stablehlo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "export",
        str(onnx2jax.demo_model()),
        str(tmp_path / "out"),
        "--format",
        "stablehlo",
        "--dim",
        "batch=2",
    ]
    assert cli.main(arguments) == 0
    assert "main(image: float32[2, 1, 8, 8], 17 weights) -> (logits)" in capsys.readouterr().out
    assert cli.main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["results"] == [{"name": "logits", "dtype": "float32", "shape": [2, 10]}]


def test_a_second_export_removes_files_of_the_first(artifact: Path) -> None:
    (artifact / "notes.txt").write_text("mine")
    onnx2jax.convert(mlp()).export(artifact, weights="inside", platforms=["cpu"], text=True)
    assert {p.name for p in artifact.iterdir()} == {"about.json", "program.bin", "program.mlir", "notes.txt"}
    assert "stablehlo" in (artifact / "program.mlir").read_text()


def test_export_is_atomic_when_killed(artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    m = onnx2jax.convert(mlp())
    other = m.with_params({"b2": m.params["b2"] + 1})
    about, program = json.loads((artifact / "about.json").read_text()), (artifact / "program.bin").read_bytes()
    files = {
        "program.bin": lambda file: file.write(program),
        "weights.npz": lambda file: np.savez(file, **other.params),
        "program.mlir": lambda file: file.write(b"module {}"),
    }
    met = set()
    for at in range(99):
        folder = shutil.copytree(artifact, tmp_path / str(at))

        def export_new(folder: Path = folder) -> None:
            write(folder, about, files)

        ended = killed(monkeypatch, at, export_new)
        met.add(float((onnx2jax.load_exported(folder).params["b2"] - m.params["b2"]).max()))
        if not ended:
            break
    assert met == {0, 1}
    assert {p.name for p in folder.iterdir()} == {"about.json", "program.bin", "program.mlir", "weights.npz"}


def test_about_json_cannot_name_other_files(artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"")
    about = json.loads((artifact / "about.json").read_text())
    for files in ({"program.bin": "../elsewhere"}, ["program.bin"], 3):
        (artifact / "about.json").write_text(json.dumps(about | {"files": files}))
        assert onnx2jax.load_exported(artifact).outputs == ("y",)


def test_a_program_for_another_platform_is_rejected(artifact: Path) -> None:
    onnx2jax.convert(mlp()).export(artifact, platforms=["tpu"])
    with pytest.raises(UnsupportedError, match=r"for tpu, and this machine has cpu.*platforms=\['cpu'\]"):
        onnx2jax.load_exported(artifact)(np.zeros((1, 4), np.float32))


def test_random_numbers_come_from_the_key(tmp_path: Path) -> None:
    """Also if an input is called ``rng``."""
    nodes = [helper.make_node("RandomNormalLike", ["rng"], ["r"]), helper.make_node("Add", ["r", "rng"], ["y"])]
    m = onnx2jax.convert(model(nodes, [value("rng", np.float32, ["n"])], [value("y", np.float32, ["n"])]))
    loaded = onnx2jax.load_exported(m.export(tmp_path, platforms=["cpu"]))
    x, key = np.zeros(3, np.float32), jax.random.key(7)
    np.testing.assert_array_equal(loaded(x, rng=key), m(x, rng=key))
    np.testing.assert_array_equal(loaded(x, rng=7), m(x, rng=key))
    with pytest.raises(RandomKeyError, match=r"rng=jax\.random\.key"):
        loaded(x)
    alone = export.deserialize((tmp_path / "program.bin").read_bytes())
    np.testing.assert_array_equal(alone.call({}, {"rng": x}, key)["y"], m(x, rng=key))


def test_new_parameters_and_static_inputs_are_exported(tmp_path: Path) -> None:
    m = onnx2jax.convert(mlp()).replace({"h": jax.numpy.negative})
    x = np.ones((2, 4), np.float32)
    loaded = onnx2jax.load_exported(m.export(tmp_path, platforms=["cpu"]))
    np.testing.assert_allclose(loaded(x), m(x), rtol=1e-6)


# ------------------------------------------------------------------------------------------------- at a terminal


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--dim", "batch=2", "--platforms", "cpu,cuda", "--text"]
    assert cli.main(["export", str(onnx2jax.demo_model()), str(tmp_path / "out"), *options]) == 0
    said = capsys.readouterr().out
    assert "image: float32[2, 1, 8, 8]" in said
    assert "cpu, cuda" in said
    assert all(f in said for f in ("program.bin", "program.mlir", "weights.npz", "about.json"))


def test_the_command_fixes_inputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(text_model("g (float[6] x, int64[1] s) => (float[k] y) { y = Reshape(x, s) }"), tmp_path / "m.onnx")
    command = ["export", str(tmp_path / "m.onnx"), str(tmp_path / "out"), "--platforms", "cpu"]
    assert cli.main(command) == 1
    assert "it is computed from: 's': --static s=VALUE" in capsys.readouterr().err
    assert cli.main([*command, "--static", "s=[6]"]) == 0
    assert cli.main([*command, "--static", "s=six"]) == 2
    text = "g (float[6] x, int64[1] s) => (float[k] y) { c = Cast<to = 7>(x) t = Min(s, c) y = Reshape(x, t) }"
    onnx.save(text_model(text), tmp_path / "m.onnx")
    assert cli.main(command) == 1
    assert "it is computed from: 's', 'x': --static s=VALUE" in capsys.readouterr().err  # not images or sounds


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        (["--dim", "batch"], 2, "expected NAME=SIZE"),
        (["--dim", "n=2"], 1, "'batch'"),
        (["--platforms", "xpu"], 1, "xpu"),
    ],
)
def test_the_command_rejects_invalid_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], status: int, said: str
) -> None:
    assert cli.main(["export", str(onnx2jax.demo_model()), str(tmp_path / "out"), *options]) == status
    assert said in capsys.readouterr().err


SKIP = """<ir_version: 10, opset_import: ["": 21]>
g (float[n, 2, h, w] x) => (float[n, 4, a, b] y) <float[2, 2, 1, 1] k = {1, 0.5, 2, 3}, float[4] s = {1, 1, 2, 2}>
{ p = MaxPool<strides = [2, 2], pads = [1, 1, 1, 1], kernel_shape = [3, 3]>(x)
  q = Conv<strides = [2, 2]>(p, k)
  u = Resize<mode = "nearest", coordinate_transformation_mode = "asymmetric", nearest_mode = "floor">(q, , s)
  y = Concat<axis = 1>(u, p) }"""


@pytest.fixture(scope="module")
def halved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network that halves an image twice, and joins its second half to its first."""
    model = onnx2jax.convert(onnx.parser.parse_model(SKIP))
    return model.export(tmp_path_factory.mktemp("halved") / "out", platforms=["cpu"])


def test_sizes_of_images_become_the_multiples_that_a_model_needs(halved: Path) -> None:
    model, program = onnx2jax.convert(onnx.parser.parse_model(SKIP)), onnx2jax.load_exported(halved)
    assert json.loads((halved / "about.json").read_text())["multiples"] == {"h": 4, "w": 4}
    assert program.inputs[0].shape == ("n", 2, "4*h", "4*w")
    x = np.random.default_rng(0).standard_normal((3, 2, 8, 12)).astype(np.float32)
    np.testing.assert_allclose(program(x), model(x), rtol=1e-6)


@pytest.mark.parametrize("h, fix", [(6, 8), (0, 4), (33, 36)])
def test_other_sizes_are_rejected_by_axis(halved: Path, h: int, fix: int) -> None:
    program = onnx2jax.load_exported(halved)
    with pytest.raises(InputShapeError, match=rf"has {h} on axis 2, .* multiples of 4 there: pad or .* to {fix}$"):
        program(np.zeros((1, 2, h, 8), np.float32))
    assert program(np.zeros((1, 2, fix, 8), np.float32)).shape == (1, 4, fix // 2, 4)


def test_constraints_name_dimensions_of_the_file(tmp_path: Path) -> None:
    """And symbols of ``dims``; the error of a call names the axis and the nearest extent."""
    proto = model(
        [helper.make_node("Add", ["x", "z"], ["y"])],
        [value("x", np.float32, ["n.1", 1, "rows.2"]), value("z", np.float32, ["p", "rows.2"])],
        [value("y", np.float32, None)],
    )
    m = onnx2jax.convert(proto)
    dims = {"rows.2": "8*w"}
    for constraint, said in [
        ("width <= 9", r"\['width'\].*there are \['n.1', 'n_1', 'p', 'rows.2', 'w'\]"),
        ("w", "compares nothing"),
    ]:
        with pytest.raises(InputError, match=said):
            m.export(tmp_path, dims=dims, constraints=[constraint], platforms=["cpu"])
    constraints = ["w >= 2", "rows.2 <= 80", "n.1 <= p"]
    folder = m.export(tmp_path, dims=dims, constraints=constraints, platforms=["cpu"])
    assert json.loads((folder / "about.json").read_text())["constraints"] == ["w >= 2", "(8*w) <= 80", "n_1 <= p"]
    program = onnx2jax.load_exported(folder)

    def call(n: int, p: int, rows: int) -> Any:
        return program(np.ones((n, 1, rows), np.float32), np.ones((p, rows), np.float32))

    for rows, nearest in [(8, 16), (88, 80), (1000, 80)]:
        with pytest.raises(
            InputShapeError, match=f"has {rows} on axis 2, .*requires .*w is .* that it takes is {nearest}$"
        ):
            call(1, 1, rows)
        assert call(1, 1, nearest).shape == (1, 1, nearest)
    with pytest.raises(
        InputShapeError,
        match=r"has 3 on axis 0, and the program requires n_1 <= p, where n_1 is 3 and p is 2: .* is 2$",
    ):
        call(3, 2, 16)


def test_multiples_are_found_without_symbolic_extents(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """JAX compares the terms of strided layers for most of a minute."""
    attempts: list[dict[str, int]] = []
    monkeypatch.setattr(exporting, "symbolic", lambda *args: attempts.append(args[-1]) or symbolic(*args))
    onnx2jax.convert(onnx.parser.parse_model(SKIP)).export(tmp_path, platforms=["cpu"])
    assert attempts == [{"h": 4, "w": 4}]


def test_layers_that_round_up_and_down_need_multiples_too() -> None:
    """They take 511 to 514, but neither 516 nor 533."""
    halve = "MaxPool<strides = [2, 2], kernel_shape = [2, 2]>"
    text = f"""g (float[n, 1, h, w] x) => (float[n, 1, a, b] y) <float[4] s = {{1, 1, 2, 2}}>
    {{ c = MaxPool<strides = [2, 2], pads = [1, 1, 1, 1], kernel_shape = [3, 3]>(x)
       p = {halve}(c)  q = {halve}(p)  u = Resize<mode = "nearest">(q, , s)  y = Add(u, p) }}"""
    m = onnx2jax.convert(text_model(text))
    assert needed_multiples(m.graph, m.inputs, {}, ()) == {"h": 8, "w": 8}


@pytest.mark.parametrize(
    "body",
    [
        "float[n, 1, h, w] x) => (float[n, 1, a, b] y) { y = MaxPool<strides=[2, 2], kernel_shape=[3, 3]>(x) }",
        "float[n, 1, h, w] x) => (float[n, 1, a, b] y) { y = Add(x, few) }",
    ],
    ids=["any size", "one size"],
)
def test_sizes_that_are_no_multiples_need_none(body: str) -> None:
    constants = {"few": np.ones((48, 1), np.float32)} if "few" in body else {}
    m = onnx2jax.convert(text_model(f"g ({body}", **constants))
    assert needed_multiples(m.graph, m.inputs, {}, ()) == {}


def test_multiples_may_be_given(tmp_path: Path) -> None:
    model = onnx2jax.convert(onnx.parser.parse_model(SKIP))
    folder = model.export(tmp_path, dims={"h": "32*h", "w": 8}, platforms=["cpu"])
    assert onnx2jax.load_exported(folder).inputs[0].shape == ("n", 2, "32*h", 8)
    assert "multiples" not in json.loads((folder / "about.json").read_text())


def test_the_command_says_the_multiples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(onnx.parser.parse_model(SKIP), tmp_path / "skip.onnx")
    assert cli.main(["export", str(tmp_path / "skip.onnx"), str(tmp_path / "out"), "--platforms", "cpu"]) == 0
    assert "h must be a multiple of 4" in capsys.readouterr().err


@pytest.mark.parametrize("axes", ["n, 3, h, w", "h, w"])
def test_what_no_multiple_solves_names_dimension_node_and_cure(tmp_path: Path, axes: str) -> None:
    text = f"""<ir_version: 10, opset_import: ["": 21]>
    g (float[{axes}] x, float[{axes.replace("h", "m")}] z) => (float[{axes}] y) {{ y = Max(x, z) }}"""
    with pytest.raises(OnnxError) as caught:
        onnx2jax.convert(onnx.parser.parse_model(text)).export(tmp_path, platforms=["cpu"])
    said = "\n".join((str(caught.value), *caught.value.__notes__))
    assert "(Max, opset 21)" in said and "h, w" in said and "--dim" in said and "dims={'height': '32*height'}" in said
    assert "docs.jax.dev" not in said


def test_the_numbers_in_windows_follow_from_symbolic_extents(tmp_path: Path) -> None:
    """An average at the border is of fewer numbers; how many depends on the size."""
    text = """<ir_version: 10, opset_import: ["": 21]>
    g (float[1, 1, h, w] x) => (float[1, 1, a, b] y)
    { y = AveragePool<strides = [2, 2], pads = [1, 1, 1, 1], kernel_shape = [3, 3]>(x) }"""
    model = onnx2jax.convert(onnx.parser.parse_model(text))
    program = onnx2jax.load_exported(model.export(tmp_path, platforms=["cpu"]))
    steps = [int(str(d).partition("*")[0]) if "*" in str(d) else 1 for d in program.inputs[0].shape[2:]]
    for times in (1, 3):
        x = np.random.default_rng(0).standard_normal((1, 1, *(times * k for k in steps))).astype(np.float32)
        np.testing.assert_allclose(program(x), model(x), rtol=1e-6)


def test_a_table_of_positions_bounds_the_length(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["": 21]>
    g (float[n, s, 2] x) => (float[n, s, 2] y) <float[3, 2] table = {1, 2, 3, 4, 5, 6}, int64[1] zero = {0}>
    { shape = Shape<start = 1, end = 2>(x)
      first = Slice(table, zero, shape, zero)
      y = Add(x, first) }"""
    model = onnx2jax.convert(onnx.parser.parse_model(text))
    folder = model.export(tmp_path, platforms=["cpu"])
    assert json.loads((folder / "about.json").read_text())["constraints"] == ["s <= 3"]
    program, x = onnx2jax.load_exported(folder), np.ones((2, 3, 2), np.float32)
    np.testing.assert_array_equal(program(x), model(x))
    with pytest.raises(InputShapeError, match="has 4 on axis 1, and the program requires s <= 3"):
        program(np.ones((2, 4, 2), np.float32))


@pytest.mark.parametrize(
    ("body", "constraint"),
    [
        ("float[a, 2] x, float[b, 3] z) => (float[c, 5] y) { y = Concat<axis = 1>(x, z) }", "b == a"),
        (
            "float[1, 1, w] x) => (float[1, 1, u] y) <float[1, 1, 3] k = {1, 2, 3}> { y = Conv(x, k) }",
            "w >= 3",
        ),
        ("float[1, 1, w] x) => (float[1, 1, u] y) { y = MaxPool<kernel_shape = [2], strides = [2]>(x) }", "w >= 2"),
        (
            "float[w] x) => (float[u] y) <int64[2] p = {4, 0}> { y = Pad<mode = \"reflect\">(x, p) }",
            "w >= 5",
        ),
    ],
)  # fmt: skip
def test_equal_extents_and_lower_bounds_are_found(tmp_path: Path, body: str, constraint: str) -> None:
    model = onnx2jax.convert(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g ({body}'))
    folder = model.export(tmp_path, platforms=["cpu"])
    assert constraint in json.loads((folder / "about.json").read_text())["constraints"]
    inputs = [np.ones([d if isinstance(d, int) else 8 for d in v.shape or ()], np.float32) for v in model.inputs]
    np.testing.assert_allclose(onnx2jax.load_exported(folder)(*inputs), model(*inputs), rtol=1e-6)


POOLED = "g (float[n,1,h,w] x) => (float[n,c,1,w] y) { a = AveragePool<kernel_shape=[4,1], strides=[4,1]>(x)"


@pytest.mark.parametrize(
    ("body", "said", "fits"),
    [
        ("b = ReduceMax(x, two) y = Concat<axis=1>(a, b) }", "of 4 to 7: .*--dim h=4", 4),
        ("y = Add(a, rows) }", "of 12 to 15: .*--dim h=12", 12),
        ("y = Concat<axis=1>(a, rows) }", "of 12 to 15: .*--dim h=12", 0),
        ("t = Transpose<perm=[0,1,3,2]>(a) y = MatMul(t, m) }", "of 12 to 15: .*--dim h=12", 12),
    ],
)
def test_a_dimension_that_must_be_fixed_is_named_with_an_extent(
    tmp_path: Path, body: str, said: str, fits: int
) -> None:
    """The height of a text recogniser, whose image becomes a row of letters."""
    constants = {"two": np.int64([2]), "rows": np.ones((1, 1, 3, 1), np.float32), "m": np.ones((3, 4), np.float32)}
    source = text_model(f"{POOLED} {body}", **{n: v for n, v in constants.items() if f" {n})" in body})
    recogniser = onnx2jax.convert(source)
    with pytest.raises(OnnxError) as caught:
        recogniser.export(tmp_path, platforms=["cpu"])
    assert re.search(rf"\nthe model needs a fixed dimension 'h' \(axis 2 of input 'x'\).*{said}", str(caught.value))
    assert "inputs given here" not in str(caught.value) and "\n".join(caught.value.__notes__) == ""
    if fits:
        loaded = onnx2jax.load_exported(recogniser.export(tmp_path, platforms=["cpu"], dims={"h": fits}))
        x = np.ones((2, 1, fits, 5), np.float32)
        np.testing.assert_allclose(loaded(x), recogniser(x))


def test_several_symbols_are_bounded_one_by_one() -> None:
    """JAX took minutes to compare under a constraint of several long terms."""
    size = "n*floordiv(w - 1, 2)*floordiv(h - 4, 3) + n*floordiv(h - 4, 3) + n*floordiv(w - 1, 2) + n"
    assert requirements(f"Symbolic dimension comparison '{size}' >= '0' is inconclusive", ["n", "w", "h"]) == ["h >= 4"]


def test_top_k_of_the_least_of_an_extent_and_a_number(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["": 21]> g (float[n, m] x) => (float[n, k] y, int64[n, k] i)
    <int64[1] three = {3}> { shape = Shape<start = 1>(x)  k = Min(shape, three)  y, i = TopK(x, k) }"""
    model = onnx2jax.convert(onnx.parser.parse_model(text))
    program = onnx2jax.load_exported(model.export(tmp_path, platforms=["cpu"]))
    for extent in (2, 5):
        x = np.random.default_rng(0).standard_normal((2, extent)).astype(np.float32)
        np.testing.assert_array_equal(program(x)[0], model(x)[0])


def test_constraints_are_sought_for_a_limited_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnx2jax.model.files.export.SEARCH_SECONDS", -1.0)
    text = """<ir_version: 10, opset_import: ["": 21]>
    g (float[1, 1, w] x) => (float[1, 1, u] y) <float[1, 1, 3] k = {1, 2, 3}> { y = Conv(x, k) }"""
    m = onnx2jax.convert(onnx.parser.parse_model(text))
    with pytest.raises(UnsupportedError) as e:
        m.export(tmp_path, platforms=["cpu"])
    assert "dims={'w': 64} or --dim w=64" in e.value.__notes__[-1]
    assert onnx2jax.load_exported(m.export(tmp_path, platforms=["cpu"], dims={"w": 64})).inputs[0].shape == (1, 1, 64)


def test_vectors_joined_along_their_axis_have_no_requirement() -> None:
    assert requirements("concatenating along dimension 0 for shapes (a,), (b,).", ["a", "b"]) == []


def test_a_known_array_is_sliced_by_symbolic_bounds(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["": 21]>
    g (int64[n, s] x) => (int64[n, s] y) <int64[1] zero = {0}>
    { table = Constant<value_ints = [3, 1, 4, 1, 5]>()
      shape = Shape<start = 1, end = 2>(x)
      first = Slice(table, zero, shape, zero)
      y = Add(x, first) }"""
    model, x = onnx2jax.convert(onnx.parser.parse_model(text)), np.zeros((2, 3), np.int64)
    program = onnx2jax.load_exported(model.export(tmp_path, platforms=["cpu"]))
    np.testing.assert_array_equal(program(x), [[3, 1, 4]] * 2)


@pytest.mark.parametrize("writer", ["ScatterElements", pytest.param("TensorScatter", marks=pytest.mark.extended)])
def test_a_step_that_writes_one_slot_is_exported_for_any_batch(tmp_path: Path, writer: str) -> None:
    m = onnx2jax.convert(decoders.static(16, writer=writer).proto)
    exported = onnx2jax.load_exported(m.export(tmp_path / "step", dims={"sequence_length": 1}))
    rng = np.random.default_rng(0)
    for batch in (1, 3):
        dims = {"sequence_length": 1, "batch_size": batch}
        shapes = {v.name: tuple(dims.get(str(d), d) for d in v.shape or ()) for v in m.inputs}
        feeds = {n: rng.normal(size=shape).astype(np.float32) for n, shape in shapes.items() if "past" in n}
        feeds |= {n: np.full(shape, 1) for n, shape in shapes.items() if "past" not in n}
        for ours, wanted in zip(exported(**feeds), m(**feeds), strict=True):
            np.testing.assert_allclose(ours, wanted, rtol=1e-5, atol=1e-5)
