"""The commands ``run`` and ``inspect``: output, saved files, errors and exit statuses."""

from __future__ import annotations

import gzip
import json
import re
import shlex
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper

from onnx2jax import cli, demo_decoder, demo_model, progress
from onnx2jax.cli.terminal import noted_warnings
from onnx2jax.data import demo_samples
from tests.support.models import model, value

MODEL = str(demo_model())
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Run the command line in this process: exit status, standard output, standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        status = cli.main([str(a) for a in arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def saved(path: Path, nodes: list[Any], shape: list[Any] | None, dtype: Any = np.float32, **options: Any) -> Path:
    """A model file of nodes from x to the last one's output."""
    x, y = (value(name, dtype, shape) for name in ("x", nodes[-1].output[0]))
    onnx.save(model(nodes, [x], [y], **options), path)
    return path


def test_run_on_a_file_saves_what_onnxruntime_gives(command: Command, tmp_path: Path) -> None:
    box = demo_samples()
    np.save(tmp_path / "in.npy", box["images"])
    status, out, err = command(
        "run", MODEL, "--input", f"image={tmp_path / 'in.npy'}", "--output-dir", tmp_path / "new" / "results"
    )
    assert (status, err) == (0, "")
    assert "float32[16, 1, 8, 8]" in out
    assert "float32[16, 10]" in out
    np.testing.assert_allclose(np.load(tmp_path / "new" / "results" / "logits.npy"), box["logits"], atol=1e-4)


def test_run_reads_and_writes_npz(command: Command, tmp_path: Path) -> None:
    box = demo_samples()
    np.savez(tmp_path / "in.npz", image=box["images"][:3])
    status, _, _ = command("run", MODEL, "--input", tmp_path / "in.npz", "--output-file", tmp_path / "out.npz")
    assert status == 0
    with np.load(tmp_path / "out.npz") as out:
        np.testing.assert_allclose(out["logits"], box["logits"][:3], atol=1e-4)


def test_random_is_seeded_and_free_dimensions_are_given_by_name(command: Command) -> None:
    first, again, other = (command("run", MODEL, "--random", "--dim", "batch=3", "--seed", s)[1] for s in (1, 1, 2))
    assert "float32[3, 10]" in first
    assert first == again != other
    assert "float32[1, 10]" in command("run", MODEL, "--random")[1]


@pytest.mark.parametrize("name", ["a/b:0", "file"])
def test_any_output_name_can_be_saved(command: Command, tmp_path: Path, name: str) -> None:
    node = helper.make_node("Identity", ["x"], [name])
    path = saved(tmp_path / "m.onnx", [node], [2])
    status, _, _ = command("run", path, "--random", "--output-dir", tmp_path / "d", "--output-file", tmp_path / "o.npz")
    assert status == 0
    (file,) = (tmp_path / "d").iterdir()
    with np.load(tmp_path / "o.npz") as archive:
        np.testing.assert_array_equal(archive[name], np.load(file))


@pytest.mark.parametrize(
    ("dtype", "array"),
    [
        (ml_dtypes.bfloat16, np.array([1.5, -2], ml_dtypes.bfloat16)),
        (np.object_, np.array(["one", "två"])),
        (np.int64, np.array([2**62 + 1, -1])),
    ],
)
def test_element_types_that_files_do_not_keep(command: Command, tmp_path: Path, dtype: Any, array: np.ndarray) -> None:
    path = saved(tmp_path / "m.onnx", [helper.make_node("Identity", ["x"], ["y"])], [2], dtype)
    np.save(tmp_path / "x.npy", array)
    status, _, err = command("run", path, "--input", f"x={tmp_path / 'x.npy'}", "--output-dir", tmp_path)
    assert (status, err) == (0, "")
    assert (tmp_path / "y.npy").read_bytes() == (tmp_path / "x.npy").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["run", "absent.onnx"], 1, "error: absent.onnx: No such file or directory"),
        (["run", MODEL], 2, "input image: float32[batch, 1, 8, 8] is missing: --input image=FILE.npy, or --random"),
        (["run", MODEL, "--input", "image"], 2, "expected NAME=FILE"),
        (["run", MODEL, "--input", "absent.npy"], 2, "--input absent.npy: there is no such file; expected NAME=FILE"),
        (["run", MODEL, "--input", "image={double}"], 1, "is given as float64[1, 1, 8, 8]"),
        (["run", MODEL, "--input", "picture={npy}"], 2, "no input 'picture'; it has 'image'"),
        (["run", MODEL, "--input", "image={text}"], 2, "it is not a tensor of strings"),
        (["run", MODEL, "--input", "image={other}"], 2, "not a readable .npy or .npz file"),
        (["run", MODEL, "--input", "image={npy}"], 1, "has rank 4, not 2"),
        (["run", MODEL, "--random", "--dim", "width=8"], 1, "'width'"),
        (["run", MODEL, "--random", "--dim", "batch=many"], 2, "'many' is not a whole number"),
        (
            ["run", MODEL, "--input", "image={text}.npy"],
            2,
            "x.txt.npy is not a readable .npy or .npz file: it has",
        ),
        (["inspect", "{text}"], 1, "not an ONNX model"),
        (["inspect", "-"], 1, "-: No such file or directory: standard input is not read; write it to a file"),
        (["inspect", "file:///no/m.onnx"], 1, "file:///no/m.onnx: No such file or directory: it is a URL; pass the"),
        (["inspect", "https://no/m.onnx"], 1, "https://no/m.onnx: No such file or directory: it is a URL, and nothing"),
        (["inspect", "{gzip}"], 1, "it is compressed by gzip; decompress it\n"),
        (["inspect", "/dev/null"], 1, "is no regular file; copy it first: cat '/dev/null' > model.onnx"),
        (["inspect", "{npy}"], 1, "x.npy' is not an ONNX model: it is a NumPy array"),
        (["inspect", "{short}"], 1, "its 9,999 bytes do not parse to the end; was the copy complete?"),
        (["draw", MODEL, "{folder}"], 1, "{folder}: Is a directory"),
        (["draw", MODEL, "{text}/page.html"], 1, "x.txt/page.html: Not a directory"),
    ],
)
def test_errors_are_one_clean_message(
    command: Command, tmp_path: Path, arguments: list[str], status: int, text: str
) -> None:
    np.save(tmp_path / "x.npy", np.zeros((1, 3), np.float32))  # an extent of 1, which is not the problem
    for name in ("x.txt", "x.bin"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "x.txt.npy").write_text("{}")
    np.save(tmp_path / "double.npy", np.zeros((1, 1, 8, 8)))
    short = tmp_path / "short.onnx"
    short.write_bytes(Path(MODEL).read_bytes()[:9999])
    (tmp_path / "gzip").write_bytes(gzip.compress(b""))
    files = {
        "short": short,
        "gzip": tmp_path / "gzip",
        "double": tmp_path / "double.npy",
        "npy": tmp_path / "x.npy",
        "text": tmp_path / "x.txt",
        "other": tmp_path / "x.bin",
        "folder": tmp_path,
    }
    got, out, err = command(*(a.format(**files) for a in arguments))
    assert got == status
    assert out == ""
    assert err.startswith("error: ")
    assert text.format(**files) in err if "{folder}" in text else text in err
    assert "Traceback" not in err
    assert "extents of 1" not in err


def test_a_folder_names_paths_that_can_be_passed(command: Command, tmp_path: Path) -> None:
    for name in ("b.onnx", "c.onnx", "a.onnx"):
        (tmp_path / name).write_bytes(Path(MODEL).read_bytes())
        _, _, err = command("inspect", tmp_path)
        assert command("inspect", re.findall("'(.*?)'", err.partition("pass ")[2])[0])[0] == 0
    assert "has a.onnx, b.onnx, c.onnx: choose one: pass" in err and "generate" not in err
    (tmp_path / "model.onnx").write_bytes(demo_decoder().read_bytes())
    _, _, err = command("inspect", tmp_path)
    model, folder = re.findall("'(.*?)'", err.partition("pass ")[2])
    assert "generate" in err and Path(model).parent == Path(folder) == tmp_path
    assert command("generate", folder, "--prompt-ids", "110,105", "--max-new-tokens", "1")[0] == 0


@pytest.mark.parametrize("name", ["double.npy", "doubles.npz"])
def test_an_array_of_another_type_is_converted_by_the_command_in_its_error(
    command: Command, tmp_path: Path, name: str
) -> None:
    images, path = demo_samples()["images"][:1].astype(np.float64), tmp_path / name
    if name.endswith("npy"):
        np.save(path, images)
    else:
        np.savez(path, image=images)
    option = f"image={path}" if name.endswith("npy") else path
    status, _, err = command("run", MODEL, "--input", option)
    assert status == 1 and "nothing is cast silently. Convert it: python -c" in err
    exec(shlex.split(err.partition("Convert it: ")[2])[2])
    assert command("run", MODEL, "--input", option)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["inspect", ""], "argument model: the path is empty"),
        (["run", MODEL, "--random", "--output-file", "o.txt"], "'o.txt' is written as an .npz file: name it o.npz"),
    ],
)
def test_paths_that_mislead_are_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], text: str) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert (end.value.code, text in capsys.readouterr().err) == (2, True)


def test_check_of_a_cut_off_file_ends_its_question(command: Command, tmp_path: Path) -> None:
    (tmp_path / "short.onnx").write_bytes(Path(MODEL).read_bytes()[:9999])
    status, out, _ = command("check", str(tmp_path / "short.onnx"))
    assert status == 1 and "was the copy complete? Pass a file" in out


def test_each_command_that_reads_a_file_has_the_options_of_reading() -> None:
    commands: Any = cli._parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    assert commands.keys() == cli.COMMANDS.keys()
    for name, parser in commands.items():
        if name not in ("cache", "demo"):
            options = {"--external-data-dir", "--follow-links", "--allow-newer-opset"}
            assert options <= parser._option_string_actions.keys(), name


def test_external_data_of_operators_and_join(command: Command, tmp_path: Path) -> None:
    node, ends = helper.make_node("Add", ["x", "w"], ["y"]), (value(n, np.float32, [2]) for n in "xy")
    proto = model([node], *([v] for v in ends), {"w": np.ones(2, np.float32)})
    path, data = tmp_path / "m.onnx", tmp_path / "data"
    onnx.save(proto, path, save_as_external_data=True, location="weights", size_threshold=0)
    data.mkdir()
    (tmp_path / "weights").rename(data / "weights")
    for words in (["operators", path], ["join", path, path, tmp_path / "joined.onnx", "--join", "y=x"]):
        status, _, err = command(*words)
        assert status == 1 and "beside the model or pass --external-data-dir FOLDER (rule EX-19)" in err
        assert command(*words, "--external-data-dir", data)[0] == 0


def test_check_advises_flags(command: Command, tmp_path: Path) -> None:
    path = saved(tmp_path / "m.onnx", [helper.make_node("Relu", ["x"], ["y"])], [2], opset=99)
    for name in ("check", "inspect"):
        status, out, err = command(name, path)
        assert status == 1 and "To run it as opset" in out + err
        assert "allow_newer_opset" not in out + err and "--allow-newer-opset" in out + err
    assert command("inspect", path, "--allow-newer-opset")[0] == 0


def test_a_warning_is_one_line_on_standard_error(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path / "m.onnx", [helper.make_node("Relu", ["x"], ["y"])], [3])
    proto = onnx.load(path)
    proto.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 7
    onnx.save(proto, path)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        status, out, err = command("run", path, "--random", "--json")
        with noted_warnings([]):
            for text in ("a", "b: convert(..., rebatch=True)", "a"):
                warnings.warn(text, stacklevel=1)
    text = "output y: float32[7] is computed as float32[3] (rule GR-18); the computed value is returned"
    assert (status, err) == (0, f"warning: {text}\n")
    assert json.loads(out)["outputs"]["y"]["type"] == "float32[3]"
    assert capsys.readouterr().err == "warning: a\nwarning: b: onnx2jax run ... --rebatch\n"


def test_an_input_without_a_shape_cannot_be_random(command: Command, tmp_path: Path) -> None:
    path = saved(tmp_path / "m.onnx", [helper.make_node("Identity", ["x"], ["y"])], None)
    status, _, err = command("run", path, "--random")
    assert status == 2
    assert "--input x=FILE.npy" in err


def test_inspect_prints_the_contents_of_a_file(command: Command) -> None:
    status, out, err = command("inspect", MODEL)
    assert (status, err) == (0, "")
    for text in ("ai.onnx 22", "float32[batch, 1, 8, 8]", "float32[batch, 10]", "fc.weight", "BatchNormalization"):
        assert text in out
    assert "none unsupported" in out
    assert "the 12 largest" in out
    assert "bn1.bias" not in out
    assert "bn1.bias" in command("inspect", MODEL, "--all")[1]


def test_inspect_as_json(command: Command) -> None:
    facts = json.loads(command("inspect", MODEL, "--json")[1])
    assert facts["opsets"] == {"ai.onnx": 22}
    assert facts["inputs"] == [{"name": "image", "type": "float32[batch, 1, 8, 8]", "shape": ["batch", 1, 8, 8]}]
    stored = {t.name: 4 * int(np.prod(t.dims)) for t in onnx.load(MODEL).graph.initializer}
    assert {p["name"]: p["bytes"] for p in facts["parameters"]} == stored
    assert {o["name"]: o["count"] for o in facts["operators"]} == {
        "BatchNormalization": 3,
        "Conv": 3,
        "Flatten": 1,
        "Gemm": 1,
        "MaxPool": 1,
        "Relu": 3,
    }


def test_inspect_names_unsupported_operators_and_run_fails(command: Command, tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Frobnicate", ["x"], ["a"], name="first", domain="com.example"),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Frobnicate", ["b"], ["y"], name="second", domain="com.example"),
    ]
    path = saved(tmp_path / "m.onnx", nodes, [2], opsets={"com.example": 1})
    status, out, _ = command("inspect", path)
    assert status == 3
    assert "1 unsupported" in out
    (row,) = (line.split() for line in out.splitlines() if "Frobnicate" in line)
    assert row == ["com.example", "Frobnicate", "1", "2", "unsupported"]

    status, _, err = command("run", path, "--random")
    assert status == 1
    for text in ("Frobnicate", "com.example", "'first'", "'second'"):
        assert text in err


def test_progress_is_shown_on_a_terminal(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """See tests/test_progress.py for what is drawn."""
    begun: list[str] = []
    enter = progress._entered
    monkeypatch.setattr(progress, "_entered", lambda text: (begun.append(text), enter(text))[1])
    assert command("inspect", MODEL)[2] == ""
    assert begun[0] == "loading digits.onnx"


def test_a_table_on_a_terminal(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert "┃" in command("inspect", MODEL)[1]


@pytest.mark.usefixtures("without_rich")
def test_a_terminal_without_rich(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    status, out, _ = command("inspect", MODEL)
    assert status == 0
    assert "┃" not in out
    assert "BatchNormalization" in out
