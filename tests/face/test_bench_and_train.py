"""The commands ``bench``, ``train`` and ``operators``."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import onnx2jax
from onnx2jax import cli, demo_model, demo_training_model
from onnx2jax.cli import bench
from onnx2jax.data import demo_samples
from tests.support.models import mlp, model, value

MODEL = str(demo_model())
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    """Eight images with their digits."""
    box = demo_samples()
    np.savez(tmp_path / "digits.npz", image=box["images"][:8], label=box["labels"][:8].astype(np.int64))
    return tmp_path / "digits.npz"


# ------------------------------------------------------------------------------------------------------ bench


def test_bench_times_both_in_turn(capsys: Capture, tmp_path: Path) -> None:
    onnx.save(mlp(), tmp_path / "m.onnx")
    assert cli.main(["bench", str(tmp_path / "m.onnx"), "--rounds", "1", "--dim", "batch=3", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["seconds"].keys() == {"onnx2jax", "onnxruntime"}
    assert all(0 < t["median"] < 1 and len(t["rounds"]) == 1 for t in facts["seconds"].values())
    assert facts["first_call"] > facts["seconds"]["onnx2jax"]["median"]


def test_blocks_alternate_and_rotate_between_rounds() -> None:
    order: list[str] = []
    times = bench.measured({n: (lambda n=n: order.append(n)) for n in "ab"}, 3, block=0, warm=0)  # type: ignore[misc]
    assert {n: len(t) for n, t in times.items()} == {"a": 3, "b": 3}
    assert "".join(order) == "ab" + "aabb" + "bbaa" + "aabb"


def test_models_with_differing_outputs_are_not_timed(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    class Session:
        def run(self, _: Any, feeds: Any) -> list[np.ndarray]:
            return [np.zeros((len(feeds["image"]), 10), np.float32)]

        def get_outputs(self) -> list[Any]:
            return [helper.make_tensor_value_info("logits", 1, None)]

    monkeypatch.setattr(bench, "_session", lambda *_: Session())
    assert cli.main(["bench", MODEL]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "output 'logits' differs from onnxruntime's" in said.err and "--alone" in said.err


def test_bench_without_onnxruntime(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert cli.main(["bench", MODEL, "--rounds", "1"]) == 0
    said = capsys.readouterr()
    assert "needs the extra verify " in said.err
    assert "onnx2jax" in said.out and "onnxruntime" not in said.out


# ------------------------------------------------------------------------------------------------------ train


@pytest.mark.usefixtures("standard_promotion")
def test_a_resumed_run_ends_like_an_uninterrupted_one(capsys: Capture, tmp_path: Path) -> None:
    onnx.save(mlp(), tmp_path / "m.onnx")
    x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    np.savez(tmp_path / "d.npz", x=x, label=(x[:, 0] > 0).astype(np.int64))

    def train(output: str, *more: str) -> list[dict[str, Any]]:
        command = ["train", "m.onnx", "d.npz", output, "--loss", "cross_entropy", "--batch-size", "4", "--json"]
        places = [str(tmp_path / a) if a.endswith((".onnx", ".npz", ".safetensors")) else a for a in (*command, *more)]
        assert cli.main([*places, "--learning-rate", "0.1"]) == 0
        epochs: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["epochs"]
        return epochs

    straight = train("straight.onnx", "--epochs", "2")
    train("half.onnx", "--epochs", "1", "--checkpoint", "c.safetensors")
    assert train("resumed.onnx", "--epochs", "2", "--checkpoint", "c.safetensors", "--resume") == straight[1:]
    assert straight[1]["loss"] < straight[0]["loss"]
    assert 0 <= straight[1]["accuracy"] <= 1
    before, one, other = (onnx2jax.convert(tmp_path / f"{n}.onnx").params for n in ("m", "straight", "resumed"))
    assert all((one[n] == other[n]).all() and (one[n] != before[n]).any() for n in before)


def test_a_file_trains_by_its_training_info(capsys: Capture, tmp_path: Path) -> None:
    images = np.random.default_rng(0).uniform(0, 16, (32, 64)).astype(np.float32)
    np.savez(tmp_path / "d.npz", image=images, label=np.full(32, 3))
    output = tmp_path / "t.onnx"
    assert cli.main(["train", str(demo_training_model()), str(tmp_path / "d.npz"), str(output), "--epochs", "3"]) == 0
    losses = [float(line.split("loss ")[1]) for line in capsys.readouterr().out.splitlines() if "loss" in line]
    assert losses[0] > losses[1] > losses[2]
    assert onnx2jax.TrainingModel(output).algorithms  # training can continue


@pytest.mark.usefixtures("standard_promotion")
def test_mean_squares_and_adapters(capsys: Capture, tmp_path: Path) -> None:
    onnx.save(mlp(), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=np.ones((4, 4), np.float32), wanted=np.zeros((4, 2), np.float32))
    arguments = ["train", str(tmp_path / "m.onnx"), str(tmp_path / "d.npz"), str(tmp_path / "t.onnx")]
    assert cli.main([*arguments, "--loss", "mse", "--lora", "1", "--optimizer", "sgd", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["epochs"][0]["loss"] > 0


@pytest.mark.filterwarnings("default")
def test_a_loss_that_is_nan_is_noted_once_with_its_step(capsys: Capture, tmp_path: Path) -> None:
    images = np.zeros((32, 64), np.float32)
    images[0, 0] = np.nan
    np.savez(tmp_path / "d.npz", image=images, label=np.full(32, 3))
    command = ["train", str(demo_training_model()), str(tmp_path / "d.npz"), str(tmp_path / "t.onnx"), "--epochs", "2"]
    assert cli.main(command) == 0
    assert re.findall("warning: .* is NaN in step (.):", capsys.readouterr().err) == ["1"]


@pytest.mark.usefixtures("standard_promotion")
def test_cross_entropy_normalises_once(capsys: Capture, tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["scores"]), helper.make_node("Softmax", ["scores"], ["y"])]
    x, w = np.random.default_rng(0).normal(size=(2, 4, 4)).astype(np.float32)
    ends = (value(n, np.float32, ["n", 4]) for n in "xy")
    onnx.save(model(nodes, *([v] for v in ends), {"w": w}), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=x, label=[0, 1, 2, 3])
    before = onnx2jax.convert(tmp_path / "m.onnx")
    arguments = ["train", str(tmp_path / "m.onnx"), str(tmp_path / "d.npz"), str(tmp_path / "t.onnx")]
    assert cli.main([*arguments, "--loss", "cross_entropy", "--json"]) == 0
    said = capsys.readouterr()
    loss = json.loads(said.out)["epochs"][0]["loss"]
    np.testing.assert_allclose(loss, -np.log(np.diag(before(x))).mean(), rtol=1e-5)
    assert "cross_entropy of 'scores', the logits before the Softmax of 'y'" in said.err
    after = onnx2jax.convert(tmp_path / "t.onnx")
    np.testing.assert_allclose(after(x).sum(-1), 1, rtol=1e-5)  # the trained file keeps its Softmax
    assert (after.params["w"] != before.params["w"]).any()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "the file has no training_info: --loss cross_entropy|mse|next_token"),
        (["--loss", "mse", "--target", "nothing"], "--target nothing: the data has ['image', 'label']"),
        (["--loss", "mse", "--of", "nothing"], "no output 'nothing'; it has ['logits']"),
        (["--loss", "mse", "--resume"], "--resume needs --checkpoint"),
        (["--loss", "mse", "--algorithm", "a"], "no --algorithm to choose"),
    ],
)
@pytest.mark.usefixtures("standard_promotion")
def test_invalid_options_of_train_are_errors(
    capsys: Capture, tmp_path: Path, digits: Path, options: list[str], says: str
) -> None:
    assert cli.main(["train", MODEL, str(digits), str(tmp_path / "t.onnx"), *options]) == 2
    assert says in capsys.readouterr().err


def test_invalid_data_is_an_error(capsys: Capture, tmp_path: Path) -> None:
    def said(*arguments: str) -> str:
        assert cli.main(["train", MODEL, str(tmp_path / "d.npz"), *arguments, "--loss", "mse"]) == 2
        return capsys.readouterr().err

    (tmp_path / "d.npz").write_bytes(b"not a file of arrays")
    assert "not a readable .npy or .npz file" in said(str(tmp_path / "t.onnx"))
    assert "cannot be written" in said(str(tmp_path))
    assert "cannot be written" in said(str(tmp_path / "t.onnx"), "--checkpoint", str(tmp_path / "no" / "c"))
    np.savez(tmp_path / "d.npz", image=np.zeros((4, 1, 8, 8)), label=np.zeros(3))
    assert "{'image': 4, 'label': 3}" in said(str(tmp_path / "t.onnx"))
    np.savez(tmp_path / "d.npz", image=np.zeros((0, 1, 8, 8)), label=np.zeros(0))
    assert "contains no samples: {'image': (0, 1, 8, 8), 'label': (0,)}" in said(str(tmp_path / "t.onnx"))
    (tmp_path / "d.npz").write_bytes((tmp_path / "d.npz").read_bytes()[:-100])  # truncated
    assert "not a readable .npy or .npz file" in said(str(tmp_path / "t.onnx"))
    with open(tmp_path / "d.npz", "wb") as file:
        np.save(file, np.zeros(4))
    assert "one unnamed array" in said(str(tmp_path / "t.onnx"))


@pytest.mark.usefixtures("standard_promotion")
def test_an_error_inside_a_step_is_one_sentence(capsys: Capture, tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", image=np.zeros((2, 1, 8, 8)), label=[0, 1])
    arguments = ["train", MODEL, str(tmp_path / "d.npz"), str(tmp_path / "t.onnx"), "--loss", "cross_entropy"]
    assert cli.main(arguments) == 1
    said = capsys.readouterr().err
    assert "float32[batch, 1, 8, 8] is given as float64[2, 1, 8, 8]" in said
    assert "JAX" not in said  # JAX's note about the filtered traceback is omitted


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    ("labels", "says"), [([0, 10], "classes 0 to 10; the output has classes 0 to 9"), ([0.0, 1.0], "float64")]
)
def test_invalid_classes_are_errors(capsys: Capture, tmp_path: Path, labels: list[Any], says: str) -> None:
    np.savez(tmp_path / "d.npz", image=np.zeros((2, 1, 8, 8), np.float32), label=labels)
    arguments = ["train", MODEL, str(tmp_path / "d.npz"), str(tmp_path / "t.onnx"), "--loss", "cross_entropy"]
    assert cli.main(arguments) == 2
    assert says in capsys.readouterr().err


def test_training_info_excludes_loss_options(capsys: Capture, tmp_path: Path, digits: Path) -> None:
    arguments = ["train", str(demo_training_model()), str(digits), str(tmp_path / "t.onnx"), "--loss", "mse"]
    assert cli.main(arguments) == 2
    assert "the file has training_info, which defines what --loss would" in capsys.readouterr().err


# -------------------------------------------------------------------------------------------------- operators


def test_operators_are_listed_by_domain_and_name(capsys: Capture) -> None:
    assert cli.main(["operators", "--domain", "ai.onnx", "--name", "softmax*", "--json"]) == 0
    operators = json.loads(capsys.readouterr().out)
    assert {o["name"] for o in operators} == {"Softmax", "SoftmaxCrossEntropyLoss"}
    assert operators[0] == {"domain": "ai.onnx", "name": "Softmax", "since": [1, 13]}
    assert cli.main(["operators", "--name", "Softmacks"]) == 2
    assert "no supported operator matches --name 'Softmacks' --domain '*'" in capsys.readouterr().err


def test_operators_of_a_file(capsys: Capture, tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["a"]), helper.make_node("Odd", ["a"], ["y"], domain="com.example")]
    x, y = (value(n, np.float32, [2]) for n in "xy")
    onnx.save(model(nodes, [x], [y], opsets={"com.example": 1}), tmp_path / "m.onnx")
    assert cli.main(["operators", str(tmp_path / "m.onnx")]) == 3
    out = capsys.readouterr().out
    assert "2 operators in m.onnx, 1 unsupported" in out
    assert ["com.example", "Odd", "1", "1", "unsupported"] in [line.split() for line in out.splitlines()]
    assert cli.main(["operators", str(tmp_path / "m.onnx"), "--domain", "ai.onnx"]) == 0
