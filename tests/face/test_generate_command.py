"""The command ``generate``: streamed tokens or text, and stop conditions."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import onnx2jax
from onnx2jax import Decoder, cli, demo_decoder
from onnx2jax.cli import generate

PROMPT = "nineteen twenty "
IDS = ",".join(str(ord(c)) for c in PROMPT)
WANTED = "twenty-one twenty-two twenty-three "


class Letters:
    """A tokenizer of ASCII; é is two tokens, as bytes are in larger vocabularies."""

    def encode(self, text: str, add_special_tokens: bool = True) -> Any:  # noqa: ARG002
        return SimpleNamespace(ids=list(text.encode("latin-1")))

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:  # noqa: ARG002
        text = bytes(ids).decode("latin-1")
        return text.replace("ty", "é").removesuffix("t") + ("\N{REPLACEMENT CHARACTER}" if text.endswith("t") else "")


@pytest.fixture(scope="module")
def counting() -> Decoder:
    return onnx2jax.decoder(demo_decoder(), tokenizer=Letters())


@pytest.fixture
def compiled(counting: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces conversion by a decoder that is already compiled."""
    monkeypatch.setattr(generate, "decoder", lambda _, **__: counting)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The demo decoder with a tokenizer beside it."""
    shutil.copy(demo_decoder(), tmp_path / "model.onnx")
    (tmp_path / "tokenizer.json").write_text("{}")
    fake = SimpleNamespace(Tokenizer=SimpleNamespace(from_file=lambda _: Letters()))
    monkeypatch.setitem(sys.modules, "tokenizers", fake)
    return tmp_path


def test_tokens_in_a_process_of_its_own() -> None:
    command = [sys.executable, "-m", "onnx2jax", "generate", str(demo_decoder()), "--prompt-ids", IDS]
    done = subprocess.run([*command, "--max-new-tokens", "11"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(ord(c)) for c in WANTED[:11]]


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--max-new-tokens", "24"], WANTED[:24]),
        (["--max-new-tokens", "24", "--top-k", "1", "--temperature", "2", "--seed", "5"], WANTED[:24]),
        (["--stop", "two"], "twenty-one twenty-two"),
        (["--stop", "never", "--stop", "e t"], "twenty-one t"),
    ],
    ids=["greedy", "drawn", "stop", "stop across words"],
)
def test_text(folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], text: str) -> None:
    assert cli.main(["generate", str(folder), "--prompt", PROMPT, *options]) == 0
    assert capsys.readouterr().out == text.replace("ty", "é") + "\n"


@pytest.mark.usefixtures("compiled")
def test_characters_are_printed_complete(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[str] = []
    monkeypatch.setattr("builtins.print", lambda *values, **_: pieces.extend(values))
    assert cli.main(["generate", str(folder), "--prompt", PROMPT, "--max-new-tokens", "12"]) == 0
    assert [p for p in pieces if p] == ["tw", "e", "n", "é", *"-one ", "\N{REPLACEMENT CHARACTER}"]


def test_stop_tokens_of_the_file_end_the_text(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "decoder", functools.cache(onnx2jax.decoder))
    monkeypatch.setitem(sys.modules, "tokenizers", SimpleNamespace())  # token ids do not need the tokenizer's file
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ord("-")}))
    assert cli.main(["generate", str(folder), "--prompt-ids", IDS, "--stop", "120,120"]) == 0
    assert capsys.readouterr().out.split() == [str(ord(c)) for c in "twenty-"]
    assert cli.main(["generate", str(folder), "--prompt-ids", IDS, "--stop", f"{ord('w')},{ord('e')}"]) == 0
    assert capsys.readouterr().out.split() == [str(ord(c)) for c in "twe"]


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        ([], 2, "one of the arguments --prompt --prompt-ids is required"),
        (["--prompt", "a", "--prompt-ids", "1"], 2, "not allowed with argument"),
        (["--prompt-ids", "1,b"], 2, "'1,b' is not a list of tokens such as 1,2,3"),
        (["--prompt-ids", "1", "--stop", "end"], 2, "argument --stop: 'end' is not a list of tokens"),
        (["--prompt-ids", "128"], 1, "tokens are 0 to 127"),
        (["--prompt-ids", "1", "--top-p", "0"], 1, "at most 1; --temperature 0 takes the likeliest token\n"),
        (["--prompt-ids", "1", "--temperature", "-1"], 1, "temperature is -1"),
        (["--prompt-ids", "1", "--max-new-tokens", "256"], 1, "257 tokens, and the model supports 256"),
        (["--prompt", ""], 1, "prompt 0 is"),
    ],
)
def test_invalid_arguments_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, says: str
) -> None:
    try:
        got = cli.main(["generate", str(demo_decoder()), *arguments])
    except SystemExit as end:
        got = end.code  # type: ignore[assignment]
    assert got == status
    assert says in capsys.readouterr().err


def test_without_tokenizers(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert cli.main(["generate", str(folder), "--prompt", "a"]) == 1
    said = capsys.readouterr().err
    assert "needs the extra text " in said
    assert "--prompt-ids" in said
    (folder / "tokenizer.json").unlink()
    assert cli.main(["generate", str(folder), "--prompt", "a"]) == 1
    assert "pass token ids (at a terminal: --prompt-ids 1,2,3)" in capsys.readouterr().err


@pytest.mark.usefixtures("compiled")
def test_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", str(folder), "--prompt-ids", IDS, "--stop", f"{ord('-')}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"tokens": [ord(c) for c in "twenty-"]}
    assert cli.main(["generate", str(folder), "--prompt", PROMPT, "--stop", "-", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["text"] == "twené-"
    assert said["tokens"] == [ord(c) for c in "twenty-"]
