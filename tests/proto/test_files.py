"""Sources of models, and external data (rules MV-12, EX-01 to EX-20)."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

import onnx2jax
from onnx2jax.errors import ExternalDataError, ExternalDataNotFoundError, ModelError
from onnx2jax.proto.external import ExternalFiles
from onnx2jax.proto.messages import TensorProto as OurTensor
from onnx2jax.proto.tensors import to_array
from tests.support.models import model, one_node, value
from tests.support.tiers import extended

RELU = one_node("Relu", {"x": (np.float32, ["n"])})


def matmul_model(path: Path, shape: tuple[int, int], data: str = "weights.bin", offset: int = 0) -> None:
    """A MatMul whose weight is external data."""
    x, y = (value(name, np.float32, ["n", extent]) for name, extent in zip("xy", shape, strict=True))
    w = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=shape, data_location=TensorProto.EXTERNAL)
    for key, text in (("location", data), ("offset", str(offset)), ("length", str(4 * shape[0] * shape[1]))):
        w.external_data.add(key=key, value=text)
    made = model([helper.make_node("MatMul", ["x", "w"], ["y"])], [x], [y])
    made.graph.initializer.append(w)
    path.write_bytes(made.SerializeToString())


def test_every_kind_of_source(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    data = RELU.SerializeToString()
    path.write_bytes(data)
    x = np.float32([-1, 2])
    for source in (path, str(path), data, bytearray(data), memoryview(data), io.BytesIO(data), RELU):
        np.testing.assert_array_equal(onnx2jax.convert(source)(x), [0, 2])
    with path.open("rb") as file:
        np.testing.assert_array_equal(onnx2jax.convert(file)(x), [0, 2])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty"),
        (b"hello world, this is no model", "not an ONNX model"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b"PK\x03\x04" + bytes(60), "zip archive"),
        (b"<!DOCTYPE html>", "HTML page"),
        (b"\x0a\x09ONNXOPSET\x10\x07", "operator set document"),
        (RELU.SerializeToString()[:-20], "not an ONNX model"),
        (RELU.SerializeToString()[:2], "no graph"),
    ],
    ids=["empty", "text", "lfs", "zip", "html", "opset", "truncated", "header-only"],
)
def test_non_models_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        onnx2jax.convert(data)


def test_a_missing_file_raises_file_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        onnx2jax.convert(tmp_path / "none.onnx")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no FIFOs")
def test_files_that_are_not_regular_are_refused(tmp_path: Path) -> None:
    """A FIFO would wait for its writer; a folder says what it holds."""
    os.mkfifo(tmp_path / "fifo.onnx")
    for path in (tmp_path / "fifo.onnx", Path(os.devnull)):
        with pytest.raises(ModelError, match="is no regular file"):
            onnx2jax.convert(path)
    (tmp_path / "model.onnx").write_bytes(b"")
    with pytest.raises(
        IsADirectoryError, match=r"has fifo\.onnx, model\.onnx: choose one: convert\('.*model.onnx'\), or .*decoder"
    ):
        onnx2jax.convert(tmp_path)


def test_sources_of_other_types_raise_type_error() -> None:
    with pytest.raises(TypeError, match="path, bytes, a binary file"):
        onnx2jax.convert(3)
    with pytest.raises(TypeError, match="mode 'rb'"):
        onnx2jax.convert(io.StringIO("text"))


def test_external_weights_are_views_of_the_file(tmp_path: Path) -> None:
    weights = np.arange(12, dtype=np.float32).reshape(3, 4)
    (tmp_path / "weights.bin").write_bytes(b"\0" * 6 + weights.tobytes() + b"tail")
    matmul_model(tmp_path / "m.onnx", (3, 4), offset=6)  # not aligned, and the file goes on after it
    model = onnx2jax.convert(tmp_path / "m.onnx")
    assert not model.params["w"].flags.owndata and not model.params["w"].flags.writeable
    np.testing.assert_array_equal(model(np.eye(3, dtype=np.float32)), weights)


def test_external_data_of_a_model_without_a_file(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(bytes(48))
    matmul_model(tmp_path / "m.onnx", (3, 4))
    data = (tmp_path / "m.onnx").read_bytes()
    with pytest.raises(ExternalDataError, match="external_data_dir"):
        onnx2jax.convert(data)
    assert onnx2jax.convert(data, external_data_dir=tmp_path).params["w"].shape == (3, 4)


def external(**entries: str) -> Any:
    tensor = OurTensor(name="w", data_type=1, dims=[2], data_location=1)
    for key, text in entries.items():
        tensor.external_data.add(key=key, value=text)
    return tensor


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({}, "EX-02"),
        ({"location": "/etc/passwd"}, "EX-03"),
        ({"location": "../outside"}, "EX-04"),
        ({"location": "sub/../../outside"}, "EX-04"),
        ({"location": "data", "offset": "-1"}, "EX-09"),
        ({"location": "data", "offset": "x"}, "EX-09"),
        ({"location": "data", "offset": "4"}, "EX-10"),
        ({"location": "data", "offset": "9" * 30}, "EX-10"),
        ({"location": "data", "length": "4"}, "EX-11"),
        ({"location": "fifo"}, "EX-07"),
        ({"location": "sub"}, "EX-07"),
        ({"location": "link"}, "follow_links=True"),
    ],
    ids=lambda v: str(v)[:40],
)
def test_invalid_external_data_is_refused(tmp_path: Path, entries: dict[str, str], message: str) -> None:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "data").write_bytes(bytes(8))
    (tmp_path / "outside").write_bytes(bytes(8))
    (folder / "link").symlink_to(tmp_path / "outside")
    os.mkfifo(folder / "fifo")
    with pytest.raises(ExternalDataError, match=message):
        to_array(external(**entries), ExternalFiles(folder))


def test_links_are_followed_when_asked(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "blob").write_bytes(np.float32([1, 2]).tobytes())
    (folder / "data").symlink_to(tmp_path / "blob")
    files = ExternalFiles(folder, follow_links=True)
    np.testing.assert_array_equal(to_array(external(location="data"), files), [1, 2])


def test_a_missing_external_file_names_tensor_location_and_folder(tmp_path: Path) -> None:
    matmul_model(tmp_path / "m.onnx", (3, 4), data="gone.bin")
    with pytest.raises(ExternalDataNotFoundError, match=r"(?s)'w'.*'gone.bin'.*external_data_dir") as caught:
        onnx2jax.convert(tmp_path / "m.onnx")
    assert isinstance(caught.value, FileNotFoundError) and str(tmp_path) in str(caught.value)


LOAD = """
import resource, sys
import onnx2jax
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak()
model = onnx2jax.convert(sys.argv[1])
assert onnx2jax.check(sys.argv[1]).ok
loaded = peak()
import numpy as np
y = model(np.ones((1, model.inputs[0].type.shape[1]), np.float32))
assert float(y[0, 0]) == 0.0
assert not model.params["w"].flags.writeable
print(loaded - before, peak() - before)
"""


def test_large_weights_are_read_lazily_and_once(tmp_path: Path) -> None:
    size = 400 * 2**20
    side = 10240
    with (tmp_path / "weights.bin").open("wb") as file:
        file.truncate(size)
    matmul_model(tmp_path / "m.onnx", (side, size // 4 // side))
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path / "m.onnx")], capture_output=True, text=True, check=True
    )
    loaded, called = (int(word) * 1024 for word in done.stdout.split())
    assert loaded < 0.2 * size, f"loading took {loaded} bytes"
    assert called < 1.2 * size, f"loading and one call took {called} bytes"


SHORTENED = """
import os, sys, warnings
import numpy as np
import onnx2jax
from onnx2jax.errors import ModelError
path, data = sys.argv[1] + "/m.onnx", sys.argv[1] + "/weights.bin"
x = np.ones((1, 1024), np.float32)
uses = {
    "call": lambda model: model(x),
    "run": lambda model: model.run(None, {"x": x}),
    "apply": lambda model: model.apply({}, x),
    "params": lambda model: model.params["w"].sum(),
    "save": lambda model: onnx2jax.save(model, path + ".again"),
    "check": lambda _: onnx2jax.check(path, verify_checksums=True).raise_errors(),
    "convert": lambda _: onnx2jax.convert(path)(x),
}
def attempt(use, used_before):
    np.ones(1024 * 1024, np.float32).tofile(data)
    model = onnx2jax.convert(path)
    if used_before:
        uses[use](model)
    os.truncate(data, 4096)
    try:
        uses[use](model)
        print(used_before, use, "works")
    except ModelError as e:
        assert "EX-10" in str(e) and "weights.bin" in str(e), e
        print(used_before, use, "error")
for use in uses:
    for used_before in (False, True):
        child = os.fork()
        if child == 0:
            try:
                attempt(use, used_before)
            finally:
                sys.stdout.flush()
                os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            print(used_before, use, "died of signal", os.WTERMSIG(status))
"""


@pytest.mark.extended
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks to survive what it looks for")
def test_a_truncated_file_is_an_error_not_a_crash(tmp_path: Path) -> None:
    """Between conversion and first use, and between two uses: reading a memory map of it would end the process."""
    matmul_model(tmp_path / "m.onnx", (1024, 1024))
    command = [sys.executable, "-c", SHORTENED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    expected = set()
    for use in ("call", "run", "apply", "params", "save", "check", "convert"):
        in_memory = use in ("call", "run", "apply", "params")
        expected |= {f"False {use} error", f"True {use} {'works' if in_memory else 'error'}"}
    assert set(done.stdout.splitlines()) == expected, done.stderr


def test_a_rewritten_file_is_an_error(tmp_path: Path) -> None:
    """Even if its size is the same: its weights may be those of another model."""
    matmul_model(tmp_path / "m.onnx", (256, 256))
    weights = np.ones((256, 256), np.float32)
    weights.tofile(tmp_path / "weights.bin")
    os.utime(tmp_path / "weights.bin", ns=(1, 1))
    model = onnx2jax.convert(tmp_path / "m.onnx")
    with (tmp_path / "weights.bin").open("r+b") as file:
        file.write((weights * 2).tobytes())
    with pytest.raises(ExternalDataError, match=r"'weights\.bin' was changed after the model was converted"):
        model(np.ones((1, 256), np.float32))
    again = onnx2jax.convert(tmp_path / "m.onnx")
    assert again(np.ones((1, 256), np.float32))[0, 0] == 512


BESIDE = """
import {first}
import {second}
import onnx, onnx2jax, numpy as np
from onnx2jax.proto.messages import ModelProto
from onnx import helper
x = helper.make_tensor_value_info("x", 1, [2]); y = helper.make_tensor_value_info("y", 1, [2])
model = helper.make_model(helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y]), ir_version=10)
assert type(model) is not ModelProto
assert onnx2jax.convert(model)(np.float32([-1, 2])).tolist() == [0, 2]
onnx.checker.check_model(model)
"""


@pytest.mark.parametrize(("first", "second"), [("onnx", "onnx2jax"), extended("onnx2jax", "onnx")])
def test_it_coexists_with_the_onnx_package(first: str, second: str) -> None:
    subprocess.run([sys.executable, "-c", BESIDE.format(first=first, second=second)], check=True)


PARSE = """
import sys, google.protobuf
assert google.protobuf.__version__.startswith(sys.argv[1] + "."), google.protobuf.__version__
import onnx2jax
print(onnx2jax.convert(onnx2jax.demo_model()).inputs[0].name)
"""


@pytest.mark.extended
@pytest.mark.parametrize("major", [5, 6, 7])
def test_every_supported_protobuf(major: int, tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]
    subprocess.run([*pip, "--target", str(tmp_path), f"protobuf=={major}.*"], check=True)
    done = subprocess.run(
        [sys.executable, "-c", PARSE, str(major)],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(onnx2jax.__file__).parents[1]}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "image"


PROTO = Path(onnx2jax.__file__).parent / "proto"


def compiled(folder: Path) -> Any:
    """The descriptor of onnx.proto; ``folder`` is for protoc's output."""
    from google.protobuf import descriptor_pb2
    from grpc_tools import protoc  # type: ignore[import-untyped]

    made = folder / "made.binpb"
    assert protoc.main(["protoc", f"-I{PROTO}", f"--descriptor_set_out={made}", "onnx.proto"]) == 0
    (file,) = descriptor_pb2.FileDescriptorSet.FromString(made.read_bytes()).file
    return file


def test_the_descriptor_is_compiled_from_the_proto_file(tmp_path: Path) -> None:
    new = compiled(tmp_path)
    assert type(new).FromString((PROTO / "onnx.binpb").read_bytes()) == new, "python -m tests.proto.test_files"


def test_field_numbers_match_the_onnx_package() -> None:
    from google.protobuf import descriptor_pb2

    file = descriptor_pb2.FileDescriptorProto.FromString((PROTO / "onnx.binpb").read_bytes())

    def fields(message: Any, prefix: str = "") -> dict[str, Any]:
        found = {f"{prefix}{message.name}.{f.name}": (f.number, f.label, f.type) for f in message.field}
        for nested in message.nested_type:
            found |= fields(nested, f"{prefix}{message.name}.")
        return found

    ours = {k: v for m in file.message_type for k, v in fields(m).items()}
    theirs: dict[str, Any] = {}
    from onnx import onnx_data_pb2, onnx_ml_pb2, onnx_operators_ml_pb2

    for module in (onnx_ml_pb2, onnx_operators_ml_pb2, onnx_data_pb2):
        proto = descriptor_pb2.FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(proto)
        theirs |= {k: v for m in proto.message_type for k, v in fields(m).items()}
    assert ours == theirs


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        (PROTO / "onnx.binpb").write_bytes(compiled(Path(temporary)).SerializeToString())
