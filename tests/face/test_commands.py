"""The commands ``verify``, ``summary``, ``join`` and ``simplify``: what they print, save and return."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
import onnx.parser
import onnxruntime
import pytest

from onnx2jax import __version__, cli, convert, demo_decoder, demo_model, load_exported
from onnx2jax.errors import InputValueError
from tests.support.registered import spoil

MODEL = str(demo_model())
HALF = ("--dtype", "float16")


def test_verify_a_correct_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["verify", MODEL, "--dim", "batch=2", "--operands", str(tmp_path / "x.npz")]) == 0
    assert "1 outputs compared with onnxruntime, 0 differ" in (out := capsys.readouterr().out)
    assert "float32[2, 10]" in out
    assert not list(tmp_path.iterdir())


def test_verify_a_wrong_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(X: Any) -> Any:
        return abs(X)

    spoil(monkeypatch, "", "Relu", wrong)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["verify", MODEL, "--against", "reference", "--json"]) == 1
    said = capsys.readouterr()
    facts = json.loads(said.out)
    assert (facts["ok"], facts["first"]["value"]) == (False, "relu1.out")
    assert {c["value"] for c in facts["nodes"]["inputs"] if not c["ok"]} == {"relu1.out", "relu2.out", "relu3.out"}
    assert "digits-difference.npz" in said.err
    with np.load("digits-difference.npz") as saved:
        assert {"bn1.out", "ours|relu1.out", "theirs|relu1.out"} == set(saved.files)


def test_verify_says_which_inputs_are_random(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A threshold of -0.65 is invalid to onnxruntime."""
    parsed = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 13]> g (float[1] threshold) => (int64[n, 3] y)
        <float[1, 1, 4] boxes = {0, 0, 1, 1}, float[1, 1, 1] scores = {1}, int64[1] most = {1}>
        { y = NonMaxSuppression(boxes, scores, most, threshold) }"""
    )
    onnx.save(parsed, tmp_path / "m.onnx")
    command = ["verify", str(tmp_path / "m.onnx")]
    assert cli.main([*command, "--seed", "4"]) == 1
    said = capsys.readouterr().err
    assert "inputs are random numbers, which may be invalid in this model; others: --input threshold=FILE.npy" in said
    np.save(tmp_path / "t.npy", np.float32([0.5]))
    assert cli.main([*command, "--input", f"threshold={tmp_path}/t.npy"]) == 0


def test_closed_streams_print_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by ``>&- 2>&-``."""
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert cli.main(["inspect", MODEL]) == 0
    assert cli.main(["verify", MODEL, "--against", "nothing"]) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["verify", "--rtol", "nan"], "argument --rtol: 'nan' is not a number of at least 0"),
        (["verify", "--atol=-1"], "argument --atol: '-1' is not a number of at least 0"),
        (["train", "data.npz", "out.onnx", "--learning-rate", "inf"], "'inf' is not a number of at least 0"),
        (["train", "data.npz", "out.onnx", "--batch-size", "0"], "--batch-size must be at least 1"),
        (["export", "folder", "--dim", "batch=-3"], "an extent is an integer of at least 0"),
    ],
)
def test_numbers_out_of_range_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with suppress(SystemExit):
        cli.main([words[0], str(demo_model()), *words[1:]])
    assert message in capsys.readouterr().err


def test_a_tolerance_is_a_number() -> None:
    with pytest.raises(InputValueError, match="rtol is nan; it is a finite number, 0 or more"):
        convert(demo_model()).verify(against="onnxruntime", rtol=float("nan"))


def test_verify_infers_a_decoders_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", str(demo_decoder())]) == 0
    said = capsys.readouterr()
    assert "; inferred: total_sequence_length=2; other sizes: --dim batch_size=SIZE" in said.err
    assert "0 differ" in said.out


def test_invalid_options_of_verify_are_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", MODEL, "--against=nobody"]) == 1
    assert "against is 'nobody'" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "summary", "verify", "bench", "profile", "export"])
def test_commands_parse_extents_alike(capsys: pytest.CaptureFixture[str], command: str) -> None:
    arguments = [command, MODEL, *(["folder"] if command == "export" else [])]
    assert cli.main([*arguments, "--dim", "batch"]) == 2
    assert capsys.readouterr().err == "error: --dim batch: expected NAME=SIZE\n"
    if command != "export":  # there it may be an expression
        assert cli.main([*arguments, "--dim", "batch=many"]) == 2
        assert capsys.readouterr().err == "error: --dim batch=many: 'many' is not a whole number\n"


def test_a_missing_package_is_an_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert cli.main(["verify", MODEL]) == 1
    assert "needs the extra verify " in capsys.readouterr().err


def test_a_closed_pipe_ends_the_command() -> None:
    command = f"{sys.executable} -m onnx2jax operators | head -2"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert "operators; opsets at which" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("command", list(cli.COMMANDS))
def test_help_has_an_example_and_the_statuses(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([command, "--help"])
    assert end.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith(f"usage: onnx2jax {command} ")
    assert f"example:\n  onnx2jax {command} " in said
    assert "exit status:\n  0  success" in said
    assert "--json" in said


def test_summary_is_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["summary", MODEL, "--dim", "batch=2"]) == 0
    out = capsys.readouterr().out
    assert "12 nodes; 33,882 parameters, 135,528 bytes" in out
    assert "float32[2, 10]" in out
    assert cli.main(["summary", MODEL, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["nodes"][-1]["outputs"] == {"logits": "float32[1, 10]"}


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"onnx2jax {__version__}, jax {jax.__version__}\n"


def test_join_writes_one_file_of_two(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    second, both = tmp_path / "second.onnx", tmp_path / "both.onnx"
    onnx.save(
        onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 22]>
            top (float[n, 10] x, float[n, 10] y) => (float[n, 10] p) { p = Mul(x, y) }"""),
        second,
    )
    arguments = ["join", MODEL, str(second), str(both), "--json"]
    assert cli.main([*arguments, "--join", "logits=x", "--join", "logits=y"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["path"], facts["bytes"]) == (str(both), both.stat().st_size)
    assert facts["outputs"] == [{"name": "p", "type": "float32[batch, 10]", "shape": ["batch", 10]}]
    images = np.random.default_rng(0).random((2, 1, 8, 8), np.float32)
    session = onnxruntime.InferenceSession(both)
    np.testing.assert_allclose(session.run(None, {"image": images})[0], convert(MODEL)(images) ** 2, rtol=1e-4)


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ([], "map some of the outputs ['logits'] to some of the inputs ['image']"),
        (["--join", "logits"], "--join logits: expected OUTPUT=INPUT"),
        (["--join", "logit=image"], "the first model has no output 'logit'; it has ['logits']"),
    ],
)
def test_join_errors_list_inputs_and_outputs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, said: list[str], text: str
) -> None:
    assert cli.main(["join", MODEL, MODEL, str(tmp_path / "both.onnx"), *said]) == 2
    assert text in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_source_writes_a_module(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = str(demo_model())
    assert cli.main(["source", model, str(tmp_path / "digits"), "--dim", "batch=2", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    text = (tmp_path / "digits" / "model.py").read_text()
    assert facts == {"path": str(tmp_path / "digits" / "model.py"), "lines": len(text.splitlines())}
    assert "reshape(2, 1024)" in text


def test_simplify_writes_a_smaller_file_and_counts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model, small = tmp_path / "model.onnx", tmp_path / "small.onnx"
    onnx.save(
        onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 22]>
            scaled (float[n, 2] x) => (float[n, 2] y) <float[2, 2] w = {1, 2, 3, 4}, float two = {2}>
            { s = Shape(x) o = ConstantOfShape(s) v = Mul(w, two) h = MatMul(x, v) y = Add(h, o) }"""),
        model,
    )
    assert cli.main(["simplify", str(model), str(small), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["path"], facts["bytes"]) == (str(small), small.stat().st_size)
    assert [(facts[k]["nodes"], facts[k]["parameters"], facts[k]["parameter bytes"]) for k in ("before", "after")] == [
        (5, 2, 20),
        (4, 1, 16),
    ]
    assert cli.main(["simplify", str(model), str(small), "--dim", "n=3"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["nodes", "5", "2"] in rows
    assert ["Shape", "1", "0"] in rows
    assert not any(row[:1] == ["MatMul"] for row in rows)
    assert [d.dim_value for d in onnx.load(small).graph.input[0].type.tensor_type.shape.dim] == [3, 2]


@pytest.mark.usefixtures("standard_promotion")  # optax
def test_commands_take_a_dtype(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """It reaches the model: results are rounded, weights take half the bytes, and tolerances are its own."""

    def out(*arguments: str) -> str:
        assert cli.main([*arguments]) == 0
        return capsys.readouterr().out

    values = {}
    for dtype in ("float32", "bfloat16"):
        facts = json.loads(out("run", MODEL, "--random", "--json", "--dtype", dtype))
        values[dtype] = np.array(facts["outputs"]["logits"]["values"])
        folder = tmp_path / dtype
        out("export", MODEL, str(folder), "--platforms", "cpu", "--dtype", dtype)
        assert load_exported(folder).params["conv1.weight"].dtype == dtype
    error = abs(values["bfloat16"] - values["float32"]).max()
    assert 0 < error < 0.05 * abs(values["float32"]).max()
    assert "1 outputs compared with onnxruntime, 0 differ" in out("verify", MODEL, "--dtype", "bfloat16")
    facts = json.loads(out("bench", MODEL, "--rounds", "1", "--dtype", "bfloat16", "--json"))
    assert {"onnx2jax", "onnxruntime"} == facts["seconds"].keys()  # which are timed if outputs agree
    prompt = ",".join(map(str, b"nineteen "))
    tokens = out("generate", str(demo_decoder()), "--prompt-ids", prompt, "--max-new-tokens", "6", *HALF)
    assert bytes(map(int, tokens.split())) == b"twenty"
    np.savez(tmp_path / "data.npz", image=np.ones((8, 1, 8, 8), np.float32), label=np.zeros(8, int))
    trained = tmp_path / "trained.onnx"
    out("train", MODEL, str(tmp_path / "data.npz"), str(trained), "--loss", "cross_entropy", *HALF)
    assert convert(trained).params["fc.weight"].dtype == np.float32
    assert "conv1" in out("profile", MODEL, "--calls", "1", "--dtype", "bfloat16")


def test_other_dtypes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["run", MODEL, "--dtype", "int8"])
    assert "invalid choice: 'int8'" in capsys.readouterr().err
