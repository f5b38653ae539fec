"""Configuration files beside a decoder: file names, stop tokens, padding token, context length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest

import onnx2jax
from onnx2jax.errors import ModelError
from onnx2jax.generation.files import tokenizer_beside
from tests.support import decoders

PROTO = decoders.group_query().proto
TABLES = decoders.CONTEXT


def folder(path: Path, files: dict[str, Any], name: str = "model.onnx") -> Path:
    onnx.save(PROTO, path / name)
    for file, facts in files.items():
        (path / file).write_text(json.dumps(facts))
    return path


GENAI = {"model": {"eos_token_id": [3, 4], "pad_token_id": 9, "context_length": 77, "decoder": {"filename": "m.onnx"}}}


@pytest.mark.parametrize(
    ("files", "name", "stop", "pad", "context"),
    [
        ({}, "model.onnx", (), 0, TABLES),
        ({"genai_config.json": GENAI}, "m.onnx", ((3,), (4,)), 9, 77),
        ({"generation_config.json": {"eos_token_id": 5}}, "model.onnx", ((5,),), 5, TABLES),
        ({"config.json": {"eos_token_id": 5, "max_position_embeddings": 50}}, "model.onnx", ((5,),), 5, 50),
        ({"config.json": {"n_positions": 1000, "pad_token_id": 0}}, "model.onnx", (), 0, TABLES),
        (
            {"config.json": {"eos_token_id": 5}, "generation_config.json": {"eos_token_id": [6, 7], "pad_token_id": 8}},
            "decoder_model_merged.onnx", ((6,), (7,)), 8, TABLES,
        ),
        ({"config.json": {"eos_token_id": None, "pad_token_id": None}}, "model.onnx", (), 0, TABLES),
    ],
    ids=["nothing", "genai", "generation_config", "config", "n_positions", "both", "null"],
)  # fmt: skip
def test_configurations(tmp_path: Path, files: Any, name: str, stop: Any, pad: int, context: int) -> None:
    source = folder(tmp_path, files, name)
    for path in (source, str(source), source / name):
        decoder = onnx2jax.decoder(path)
        assert (decoder.stop, decoder.pad, decoder.context) == (stop, pad, context)


def test_arguments_override_configuration(tmp_path: Path) -> None:
    folder(tmp_path, {"genai_config.json": GENAI}, "m.onnx")
    decoder = onnx2jax.decoder(tmp_path, stop=[[1, 2]], pad=0, context=20)
    assert (decoder.stop, decoder.pad, decoder.context) == (((1, 2),), 0, 20)
    assert onnx2jax.decoder(tmp_path, stop=()).stop == ()


def test_two_files_in_a_folder(tmp_path: Path) -> None:
    onnx.save(decoders.after_an_encoder(first=False).file().proto, tmp_path / "decoder_with_past_model.onnx")
    onnx.save(decoders.after_an_encoder(first=True).file().proto, tmp_path / "decoder_model.onnx")
    decoder = onnx2jax.decoder(tmp_path)
    assert decoder.first is not decoder.model
    assert decoder.others == ("encoder_hidden_states",)


def test_a_folder_without_a_decoder_raises(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no model\.onnx or decoder_with_past_model\.onnx"):
        onnx2jax.decoder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is not valid JSON"):
        onnx2jax.decoder(tmp_path)
    with pytest.raises(FileNotFoundError, match="pass token ids"):
        tokenizer_beside(tmp_path)
