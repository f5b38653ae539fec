"""Files and paths that people try: each error is a sentence that says what it is, and what to do."""

from __future__ import annotations

import gzip
import io
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest

import onnx2jax
from onnx2jax.errors import ExternalDataError, ModelError
from onnx2jax.proto import files

MODEL = onnx2jax.demo_model().read_bytes()


def archive(*names: str) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as file:
        for name in names:
            file.writestr(name, MODEL if name.endswith(".onnx") else "x")
    return data.getvalue()


HEADER = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
FILES = {
    "m.onnx.gz": (gzip.compress(MODEL), r"compressed by gzip; decompress it, or pass gzip\.open\(path\)\.read\(\)"),
    "m.onnx.xz": (b"\xfd7zXZ\0" + bytes(9), r"pass lzma\.open\(path\)"),
    "m.onnx.bz2": (b"BZh9" + bytes(9), r"pass bz2\.open\(path\)"),
    "m.onnx.zst": (b"\x28\xb5\x2f\xfd" + bytes(9), "zstd -d"),
    "m.zip": (
        archive("readme", "a/m.onnx"),
        r"zip archive with a/m\.onnx; .* zipfile\.ZipFile\(path\)\.open\('a/m.onnx'\)",
    ),
    "other.zip": (archive("readme"), r"zip archive without an \.onnx file"),
    "cut.zip": (archive("readme")[:40], "zip archive, of PyTorch perhaps"),
    "m.tar": (bytes(257) + b"ustar" + bytes(99), "tar archive; unpack it"),
    "m.keras": (
        archive("config.json", "model.weights.h5"),
        r"Keras model; .* model\.export\('model\.onnx', format='onnx'\)",
    ),
    "m.h5": (b"\x89HDF\r\n\x1a\n" + bytes(9), r"HDF5 file.* model\.export"),
    "m.pt": (archive("m/data.pkl", "m/data/0"), r"PyTorch file; .* torch\.onnx\.export"),
    "m.pth": (pickle.dumps([1]), r"a pickle.* torch\.onnx\.export.* skl2onnx"),
    "m.npz": (archive("a.npy"), "NumPy archive"),
    "m.safetensors": (
        len(HEADER).to_bytes(8, "little") + HEADER + bytes(4),
        "safetensors file, weights without a graph",
    ),
    "m.gguf": (b"GGUF\3" + bytes(30), "GGUF file of llama.cpp; export the original checkpoint: optimum-cli"),
    "m.tflite": (b"\x1c\0\0\0TFL3" + bytes(30), "TensorFlow Lite model; .* tf2onnx.convert --tflite"),
    "m.mlmodel": (b"\x08\x09\x12\x1e" + b"x" * 9, "Core ML model"),
    "saved_model.pb": (b"\x08\x01\x12\xc8\x01x", "tf2onnx.convert --saved-model"),
    "page.onnx": (b"<!DOCTYPE html>", "HTML page, perhaps of a failed download"),
    "m.json": (b"{}", "text, not protobuf"),
    "answer.onnx": (b"\nEntry not found\n", "text, not protobuf: 'Entry not found'; .* failed download"),
    "ir.xml": (b'<?xml version="1.0"?>\n<net name="m">', "model of OpenVINO"),
    "m.7z": (b"7z\xbc\xaf\x27\x1c" + bytes(30), "7z archive; unpack it"),
    "m.engine": (b"ftrt" + bytes(30), "TensorRT engine"),
}


@pytest.mark.parametrize("name", FILES)
def test_files_of_other_formats(tmp_path: Path, name: str) -> None:
    data, says = FILES[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ModelError, match=f"is not an ONNX model: it is .*{says}") as error:
        onnx2jax.convert(tmp_path / name)
    assert "\n" not in str(error.value)


def test_what_the_messages_suggest_works(tmp_path: Path) -> None:
    image = np.zeros((1, 1, 8, 8), np.float32)
    (tmp_path / "m.zip").write_bytes(archive("a/m.onnx"))
    with zipfile.ZipFile(tmp_path / "m.zip") as found, found.open("a/m.onnx") as file:
        inside = onnx2jax.convert(file)
    (tmp_path / "m.gz").write_bytes(gzip.compress(MODEL))
    with gzip.open(tmp_path / "m.gz") as found:
        unpacked = onnx2jax.convert(found.read())
    np.testing.assert_array_equal(inside(image), unpacked(image))


def test_large_files_are_not_read_for_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_LIMIT", 1000)
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + bytes(2000))
    with pytest.raises(ModelError, match="GGUF"):
        onnx2jax.convert(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match="protobuf's limit is 2 GiB"):
        onnx2jax.convert(bytes(2000))


def test_folders(tmp_path: Path) -> None:
    (tmp_path / "onnx").mkdir()
    (tmp_path / "onnx" / "model.onnx").write_bytes(MODEL)
    with pytest.raises(
        IsADirectoryError, match=r"has onnx/model\.onnx: convert\('.*model\.onnx'\), or onnx2jax\.decoder"
    ):
        onnx2jax.convert(tmp_path)
    for file, says in (
        ("none", r"has no \.onnx file; pass the path"),
        ("model.safetensors", "weights without a graph; export it: optimum-cli"),
        ("saved_model.pb", "SavedModel; convert it first: python -m tf2onnx"),
    ):
        folder = tmp_path / file.partition(".")[0]
        folder.mkdir()
        (folder / file).touch()
        for call in (onnx2jax.convert, onnx2jax.check):
            with pytest.raises(IsADirectoryError, match=says):
                call(folder)
        with pytest.raises(ModelError, match=says):
            onnx2jax.decoder(folder)


def test_a_git_lfs_pointer_in_place_of_external_data(tmp_path: Path) -> None:
    path = onnx2jax.save(MODEL, tmp_path / "m.onnx", external_data=True)
    (tmp_path / "m.onnx.data").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(ExternalDataError, match=r"'m\.onnx\.data' of 63 bytes; it is a Git LFS pointer; .*lfs pull"):
        onnx2jax.convert(path)


def test_paths_that_lead_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.onnx").write_bytes(MODEL)
    (tmp_path / "exports").mkdir()
    for path, says in {
        "https://example.org/m.onnx": "it is a URL, and nothing is downloaded; download the file",
        "s3://bucket/m.onnx": "it is a URL",
        "file:///tmp/m.onnx": "pass the path, '/tmp/m.onnx'",
        "modle.onnx": r"did you mean 'model\.onnx'",
        "nothere.onnx": r"directory: 'nothere\.onnx'",  # not model.onnx
        "gpt2": "nothing is downloaded: .* hf download gpt2",
        "openai-community/gpt2": "optimum-cli export onnx --model openai-community/gpt2",
        "folder/m.onnx": "No such file or directory: 'folder/m.onnx'",
        "exprots/m.onnx": "there is no folder 'exprots'; did you mean 'exports'",
    }.items():
        for call in (onnx2jax.convert, onnx2jax.check, onnx2jax.decoder):
            with pytest.raises(FileNotFoundError, match=says if "folder/" not in path else "No such file or directory"):
                call(path)
