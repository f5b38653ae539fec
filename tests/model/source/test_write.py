"""Writing a module's folder: edited files are kept, and keywords of ``convert`` are explained."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

import onnx2jax
from onnx2jax import cli
from onnx2jax.errors import InputNameError
from tests.support.models import mlp

MODEL = onnx2jax.convert(mlp())


def test_a_module_as_written_is_replaced(tmp_path: Path) -> None:
    MODEL.to_source(tmp_path / "new" / "mlp")
    doubled = MODEL.with_params({n: 2 * v for n, v in MODEL.params.items()})
    path = doubled.to_source(tmp_path / "new" / "mlp")
    stored = safetensors.numpy.load_file(path.with_name("params.safetensors"))
    np.testing.assert_array_equal(stored["w1"], 2 * MODEL.params["w1"])


@pytest.mark.parametrize("edited", ["model.py", "params.safetensors", "someone's model.py"])
def test_edited_files_are_kept(edited: str, tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    if edited == "someone's model.py":
        path.write_text("model = None\n")
    else:
        MODEL.to_source(tmp_path)
    if edited == "model.py":
        path.write_text(path.read_text().replace("nn.relu", "nn.gelu"))
    elif edited == "params.safetensors":  # trained values, as the module's own documentation saves them
        safetensors.numpy.save_file({"w1": np.ones(2, np.float32)}, tmp_path / edited)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(FileExistsError, match=r"model\.py.*, edited or .*to_source\(folder, overwrite=True\)"):
        MODEL.to_source(tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    MODEL.to_source(tmp_path, overwrite=True)
    assert path.read_text() == MODEL.source
    MODEL.to_source(tmp_path)


def test_the_command_keeps_edited_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text("model = None\n")
    words = ["source", str(onnx2jax.demo_model()), str(tmp_path)]
    assert cli.main(words) == 1
    assert "replace these files: --overwrite" in capsys.readouterr().err
    assert cli.main([*words, "--overwrite"]) == 0


def test_keywords_of_convert_are_explained(tmp_path: Path) -> None:
    with pytest.raises(InputNameError, match=r"to_source: .* dims, one of convert: model\.with_options\(dims=\.\.\.\)"):
        MODEL.to_source(tmp_path, dims={"batch": 2})
    path = MODEL.with_options(dims={"batch": 2}).to_source(tmp_path)
    assert "float32[2, 4]" in path.read_text()
    with pytest.raises(InputNameError, match="did you mean 'overwrite'"):
        MODEL.to_source(tmp_path, overwriet=True)
