"""A path that a user gives: ``~`` is the user's home wherever something is read or written."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest

import onnx2jax
from onnx2jax import cli, training
from onnx2jax.model.reports.comparison import Comparison, Difference
from onnx2jax.proto.files import path_of
from onnx2jax.runtime import cache_folder
from tests.support.helpers import ROOT
from tests.support.models import mlp

FILE = str(onnx2jax.demo_model())
STATE = {"w": np.ones(2, np.float32)}
Writer = Callable[[onnx2jax.Model, str], Any]


def _adapter(model: onnx2jax.Model, path: str) -> None:
    tuner = onnx2jax.finetune(model, lambda outputs, _: outputs.sum(), optax.sgd(0.1), lora=2)
    tuner.save_adapter(path, tuner.init())


def _checkpoints(_: onnx2jax.Model, folder: str) -> None:
    with training.Checkpoints(folder) as kept:
        kept.save(1, STATE)


def _difference(_: onnx2jax.Model, path: str) -> None:
    Difference("n", "y", Comparison("y", "float32", "float32", None, None, False), STATE).save(path)


def _command(*words: str) -> Writer:
    return lambda _, path: cli.main([*words[:1], FILE, path, *words[1:]])


WRITERS: dict[str, Writer] = {
    "save.onnx": lambda model, path: onnx2jax.save(model, path),
    "exported": lambda model, path: model.export(path, dims={"batch": 2}, platforms=["cpu"]),
    "page.html": lambda model, path: model.draw(path),
    "source": lambda model, path: model.to_source(path),
    "state.safetensors": lambda _, path: training.save_checkpoint(path, STATE),
    "adapter.safetensors": _adapter,
    "difference.npz": _difference,
    "checkpoints": _checkpoints,
    "programs": lambda model, path: model.with_options(cache_dir=path)(np.zeros((2, 4), np.float32)),
    "run": lambda _, path: cli.main(["run", FILE, "--random", "--dim", "batch=1", "--output-dir", path]),
    "run.npz": lambda _, path: cli.main(["run", FILE, "--random", "--dim", "batch=1", "--output-file", path]),
    "command.html": _command("draw"),
    "command_source": _command("source"),
    "simplified.onnx": _command("simplify"),
}
"""The file or folder that each writer writes, of a path given as text."""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's home, which is not the current folder."""
    (tmp_path / "home").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="module")
def model() -> onnx2jax.Model:
    return onnx2jax.convert(mlp())


@pytest.mark.parametrize("name", WRITERS)
def test_every_writer_writes_to_a_new_folder_of_the_home(name: str, model: onnx2jax.Model, home: Path) -> None:
    WRITERS[name](model, f"~/new/{name}")
    written = home / "new" / name
    assert written.stat().st_size if written.is_file() else any(written.iterdir())
    assert list(Path().iterdir()) == []


def test_every_reader_reads_from_the_home(
    model: onnx2jax.Model, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    onnx2jax.save(model, home / "m.onnx", external_data=True, size_threshold=0)
    x = np.zeros((2, 4), np.float32)
    assert onnx2jax.check("~/m.onnx").ok
    np.testing.assert_array_equal(onnx2jax.convert("~/m.onnx")(x), model(x))
    (home / "moved").mkdir()
    (home / "m.onnx.data").rename(home / "moved" / "m.onnx.data")
    np.testing.assert_array_equal(onnx2jax.convert("~/m.onnx", external_data_dir="~/moved")(x), model(x))
    training.save_checkpoint("~/s.safetensors", STATE)
    assert training.load_checkpoint("~/s.safetensors", STATE)[0].keys() == STATE.keys()
    np.save(home / "x.npy", np.zeros((1, 1, 8, 8), np.float32))
    assert cli.main(["run", FILE, "--input", "image=~/x.npy"]) == 0
    with pytest.raises(FileNotFoundError, match=r"did you mean 'm\.onnx'"):
        onnx2jax.convert("~/mm.onnx")
    assert "float32[1, 10]" in capsys.readouterr().out


def test_the_variable_of_compiled_programs_may_begin_with_the_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache_folder.VARIABLE, "~/programs")
    assert cache_folder.folder(True) == home / "programs"


def test_a_folder_that_is_called_tilde_is_named_with_a_dot(home: Path) -> None:
    assert path_of("./~/m.onnx") == Path("~", "m.onnx")
    assert path_of(home / "~") == home / "~"


def test_no_function_takes_a_path_as_it_is_given() -> None:
    """Where an argument is annotated as a path of a user, ``path_of`` makes a Path of it."""
    wrong = []
    texts = {str(file): file.read_text(encoding="utf-8") for file in (ROOT / "onnx2jax").rglob("*.py")}
    for file, text in texts.items():
        for function in ast.walk(ast.parse(text)) if "PathLike" in text else ():
            if not isinstance(function, ast.FunctionDef) or function.name == "path_of":
                continue
            arguments = (*function.args.args, *function.args.kwonlyargs)
            paths = {a.arg for a in arguments if a.annotation and "PathLike" in ast.unparse(a.annotation)}
            for call in (n for n in ast.walk(function) if isinstance(n, ast.Call) and n.args):
                if ast.unparse(call.func) in ("Path", "open", "os.path.abspath") and ast.unparse(call.args[0]) in paths:
                    wrong.append(f"{file}: {ast.unparse(call)}")
    assert wrong == []
