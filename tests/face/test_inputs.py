"""Inputs on the command line: test data, images, texts, random numbers that fit given inputs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from PIL import Image

from onnx2jax import cli, demo_model
from onnx2jax.cli import inputs
from onnx2jax.data import demo_samples
from tests.support.models import model, value

Capture = pytest.CaptureFixture[str]


def same(path: Path, kind: Any, shape: list[Any], *more: Any) -> str:
    """An identity model."""
    nodes = [helper.make_node("Identity", [n], [f"{n}_again"]) for n in ("x", *(m.name for m in more))]
    outputs = [value(n.output[0], kind, shape) for n in nodes]
    onnx.save(model(nodes, [value("x", kind, shape), *more], outputs), path / "m.onnx")
    return str(path / "m.onnx")


def ran(capsys: Capture, *arguments: Any) -> dict[str, Any]:
    """The output of ``run --json``."""
    assert cli.main(["run", *map(str, arguments), "--json"]) == 0, capsys.readouterr().err
    outputs: dict[str, Any] = json.loads(capsys.readouterr().out)["outputs"]
    return outputs


def refused(capsys: Capture, *arguments: Any) -> str:
    assert cli.main(["run", *map(str, arguments)]) == 2
    return capsys.readouterr().err


def test_test_data_as_onnx_has_them(capsys: Capture, tmp_path: Path) -> None:
    image = demo_samples()["images"][:2]
    folder = tmp_path / "test_data_set_0"
    folder.mkdir()
    (folder / "input_0.pb").write_bytes(numpy_helper.from_array(image, "image").SerializeToString())
    by_folder = ran(capsys, demo_model(), "--input", tmp_path)
    by_file = ran(capsys, demo_model(), "--input", f"image={folder / 'input_0.pb'}")
    assert by_folder == by_file
    np.testing.assert_allclose(by_file["logits"]["values"], demo_samples()["logits"][:2], atol=1e-4)
    (folder / "input_0.pb").write_bytes(b"\xff")
    assert "contains no value for image" in refused(capsys, demo_model(), "--input", f"image={folder / 'input_0.pb'}")


@pytest.mark.parametrize(
    ("shape", "index"),
    [([1, 3, 2, None], np.s_[0, 2, 1, 3]), (["n", 2, 4, 3], np.s_[0, 1, 3, 2]), ([3, None, None], np.s_[2, 1, 3])],
)
def test_images_get_the_declared_layout(capsys: Capture, tmp_path: Path, shape: list[Any], index: Any) -> None:
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3) * 10
    Image.fromarray(pixels).save(tmp_path / "i.png")
    scaled = np.array(
        ran(capsys, same(tmp_path, np.float32, shape), "--input", f"x={tmp_path}/i.png")["x_again"]["values"]
    )
    assert scaled[index] == pytest.approx(pixels[1, 3, 2] / 255)
    options = ["--mean", "0.5,0.5,0.5", "--std", "0.1,0.2,0.4"]
    normal = ran(capsys, tmp_path / "m.onnx", "--input", f"x={tmp_path}/i.png", *options)["x_again"]["values"]
    assert np.array(normal)[index] == pytest.approx((pixels[1, 3, 2] / 255 - 0.5) / 0.4)


def test_images_get_the_declared_size_and_channels(capsys: Capture, tmp_path: Path) -> None:
    Image.new("RGB", (30, 20), (200, 200, 200)).save(tmp_path / "i.png")
    got = ran(capsys, same(tmp_path, np.uint8, [1, 1, 2, 5]), "--input", f"x={tmp_path}/i.png")["x_again"]
    assert got == {"type": "uint8[1, 1, 2, 5]", "values": [[[[200] * 5] * 2]]}
    (tmp_path / "odd.png").write_bytes(b"no image")
    assert "is not a readable image" in refused(capsys, tmp_path / "m.onnx", "--input", f"x={tmp_path}/odd.png")
    options = ["--mean", "1,2", "--input", f"x={tmp_path}/i.png"]
    assert "--mean has 2 numbers, and the image 3" in refused(capsys, same(tmp_path, np.float32, [3, 2, 5]), *options)
    ambiguous = refused(capsys, same(tmp_path, np.uint8, [1, 1, 2, 3]), "--input", f"x={tmp_path}/i.png")
    assert "may be channels first or last" in ambiguous
    assert "declares no axis of 1, 3 or 4 channels" in refused(capsys, same(tmp_path, np.float32, [7, 2, 9]), *options)


def test_pixels_are_the_numbers_that_the_model_takes(capsys: Capture, tmp_path: Path) -> None:
    Image.new("RGB", (2, 2), (255, 51, 0)).save(tmp_path / "i.png")
    flags = ["--input", f"x={tmp_path}/i.png"]

    def pixels(path: str, *options: str) -> Any:
        """By channel."""
        image = np.array(ran(capsys, path, *flags, *options)["x_again"]["values"])[0]
        return (image[:, 0, 0] if len(image) == 3 else image[0, 0]).tolist()

    path = same(tmp_path, np.float32, [1, 3, 2, 2])
    assert pixels(path, "--pixels", "0,255", "--bgr", "--mean", "1,2,3") == [-1, 49, 252]
    assert pixels(path, "--pixels=-1,1", "--std", "0.5") == pytest.approx([2, -1.2, -2])
    proto = onnx.load(path)
    for key, text in (("Image.BitmapPixelFormat", "BGR8"), ("Image.NominalPixelRange", "NominalRange_16_235")):
        proto.metadata_props.add(key=key, value=text)
    onnx.save(proto, tmp_path / "m.onnx")
    assert pixels(path) == pytest.approx([16, 59.8, 235])
    assert pixels(path, "--pixels", "0,1") == pytest.approx([0, 0.2, 1])
    assert pixels(same(tmp_path, np.uint8, [1, 2, 2, 3]), "--bgr") == [0, 51, 255]
    assert "--mean is for inputs of floats" in refused(capsys, path, *flags, "--mean", "1")
    assert "--bgr is for images, and no --input is one" in refused(capsys, path, "--random", "--bgr")


def test_the_largest_scores_of_a_classifier(capsys: Capture, tmp_path: Path) -> None:
    """Of an image, or with labels: in a file, the metadata, or config.json as Hugging Face's exports have it."""
    image = tmp_path / "i.png"
    Image.fromarray(np.full((2, 6), 51, np.uint8)).save(image)
    path, command = same(tmp_path, np.float32, [1, 12]), ["--input", f"x={tmp_path}/x.npy"]
    np.save(tmp_path / "x.npy", np.arange(12, dtype=np.float32)[None])

    def classes(*arguments: Any) -> Any:
        assert cli.main(["run", *map(str, arguments), "--json"]) == 0
        return json.loads(capsys.readouterr().out).get("classes")

    assert classes(path, *command) is None
    (tmp_path / "l.txt").write_text("\n".join("abcdefghijkl"))
    (rows,) = classes(path, *command, "--labels", tmp_path / "l.txt")["x_again"]
    assert [(row["class"], row["label"], row["score"]) for row in rows[:2]] == [(11, "l", 11), (10, "k", 10)]
    assert len(rows) == 5 and rows[0]["softmax"] == pytest.approx(0.6321, abs=1e-4)
    assert cli.main(["run", path, *command, "--labels", str(tmp_path / "l.txt")]) == 0
    assert "largest scores of x_again" in (said := capsys.readouterr().out) and " 11     l      11 " in said
    (tmp_path / "two.json").write_text('{"0": "a", "1": "b"}')
    for name, says in (("two.json", "has 2 labels, and no output"), ("i.onnx", "expected a label in each line")):
        (tmp_path / "i.onnx").touch()
        assert says in refused(capsys, path, *command, "--labels", tmp_path / name)

    flat = helper.make_node("Flatten", ["x"], ["y"], axis=1)
    proto = model([flat], [value("x", np.float32, [1, 1, 2, 6])], [value("y", np.float32, [1, 12])])
    onnx.save(proto, tmp_path / "m.onnx")
    flags = ["--input", f"x={image}"]
    assert classes(path, *flags)["y"][0][0] == {"class": 0, "score": pytest.approx(0.2)}
    labels = {str(i): f"label {i}" for i in range(12)}
    (tmp_path / "config.json").write_text(json.dumps({"id2label": labels}))
    assert classes(path, *flags)["y"][0][0]["label"] == "label 0"
    proto.metadata_props.add(key="names", value=str({i: f"name {i}" for i in range(12)}))
    onnx.save(proto, tmp_path / "m.onnx")
    assert classes(path, *flags)["y"][0][0]["label"] == "name 0"


def test_another_batch_than_the_files(capsys: Capture, tmp_path: Path) -> None:
    path = same(tmp_path, np.float32, [2, 3], value("more", np.float32, [4, 2]))
    for command, flag in (["run", "--random"], "--rebatch"), (["verify"], "onnx2jax run ... --rebatch"):
        assert cli.main([command[0], path, *command[1:], "--dim", "batch=4"]) == 1
        assert f"for other batch sizes: {flag}\n" in capsys.readouterr().err
    assert cli.main(["run", path, "--random", "--rebatch"]) == 1
    assert "Name them: --batch-axis NAME=AXIS" in capsys.readouterr().err
    axes = ["--batch-axis", "x=0", "--batch-axis", "more=1", "--batch-axis", "more_again=1"]
    outputs = ran(capsys, path, "--random", *axes, "--dim", "batch=6")
    assert [v["type"] for v in outputs.values()] == ["float32[6, 3]", "float32[4, 6]"]
    assert cli.main(["run", path, "--random", *axes, "--dim", "batch=3"]) == 1
    said = capsys.readouterr().err
    assert "a batch of 3 is no multiple of 2" in said and "InGroups" not in said


def test_files_that_are_written_are_said(capsys: Capture, tmp_path: Path) -> None:
    path = same(tmp_path, np.float32, [2])
    options = ["--output-dir", str(tmp_path / "out"), "--output-file", str(tmp_path / "all.npz")]
    assert cli.main(["run", path, "--random", *options]) == 0
    assert f"wrote {tmp_path}/out/x_again.npy, {tmp_path}/all.npz" in capsys.readouterr().out


def test_texts_fill_the_declared_shape(capsys: Capture, tmp_path: Path) -> None:
    path = same(tmp_path, np.object_, ["n", 1])
    (tmp_path / "t.txt").write_text("one\ntwå\n")
    assert ran(capsys, path, "--input", f"x={tmp_path}/t.txt")["x_again"]["values"] == [["one"], ["twå"]]
    assert ran(capsys, path, "--text", "x=a=b")["x_again"]["values"] == [["a=b"]]
    assert "does not take 1 texts" in refused(capsys, same(tmp_path, np.object_, [2]), "--text", "x=a")
    assert "takes no text" in refused(capsys, same(tmp_path, np.float32, [2]), "--text", "x=a")


def test_texts_become_tokens_and_their_masks(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = SimpleNamespace(ids=[7, 8, 9], attention_mask=[1, 1, 1], type_ids=[0, 0, 0])
    monkeypatch.setattr(inputs, "tokenizer_beside", lambda _: SimpleNamespace(encode=lambda _: said))
    path = same(tmp_path, np.int64, ["batch", "tokens"], value("attention_mask", np.int64, ["batch", "tokens"]))
    got = ran(capsys, path, "--text", "x=some words")
    assert got["x_again"]["values"] == [[7, 8, 9]]
    assert got["attention_mask_again"]["values"] == [[1, 1, 1]]


def test_random_inputs_share_extents_with_given_ones(capsys: Capture, tmp_path: Path) -> None:
    path = same(tmp_path, np.float32, ["n", 2], value("more", np.float32, [3, "n"]))
    np.save(tmp_path / "x.npy", np.full((5, 2), np.nan, np.float32))
    got = ran(capsys, path, "--input", f"x={tmp_path}/x.npy", "--random")
    assert got["more_again"]["type"] == "float32[3, 5]"
    assert got["x_again"]["values"] == [["nan", "nan"]] * 5  # JSON has no such number


def test_files_of_one_array_and_of_several_are_distinguished(capsys: Capture, tmp_path: Path) -> None:
    path = same(tmp_path, np.float32, [2])
    np.savez(tmp_path / "several.npz", x=np.ones(2, np.float32))
    assert "contains named arrays" in refused(capsys, path, "--input", f"x={tmp_path}/several.npz")
    with open(tmp_path / "one.npz", "wb") as file:
        np.save(file, np.ones(2, np.float32))
    assert "one unnamed array" in refused(capsys, path, "--input", f"{tmp_path}/one.npz")


def test_verify_takes_inputs_too(capsys: Capture, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", demo_samples()["images"][:3])
    assert cli.main(["verify", str(demo_model()), "--input", f"image={tmp_path}/x.npy"]) == 0
    assert "float32[3, 10]" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["run", "verify", "bench", "profile", "summary"])
def test_sizes_that_are_chosen_are_said(capsys: Capture, tmp_path: Path, command: str) -> None:
    """A network whose convolution needs more than one pixel: the flags come with its error."""
    weights = {"k": np.ones((1, 1, 3, 3), np.float32), "s": np.int64([1, -1])}
    nodes = [helper.make_node("Conv", ["x", "k"], ["c"]), helper.make_node("Reshape", ["c", "s"], ["y"])]
    inputs = [value("x", np.float32, [1, 1, "h", None])]  # the second is called by its input and axis
    proto = model(nodes, inputs, [value("y", np.float32, [1, None])], weights)
    onnx.save(proto, tmp_path / "m.onnx")
    options = {"run": ["--random"], "bench": ["--alone", "--rounds", "1"], "profile": ["--calls", "1"]}
    arguments = [command, str(tmp_path / "m.onnx"), *options.get(command, [])]
    assert cli.main(arguments) == 1
    (fix,) = re.findall("extents of 1 may be too small: (.*)", capsys.readouterr().err.lower())
    assert fix == "--dim h=64 --dim x_3=64"
    assert cli.main([*arguments, *fix.split()]) == 0
    assert "taken as 1" not in capsys.readouterr().err
    if command in ("run", "verify"):
        path = same(tmp_path, np.float32, ["n + 1", "m"])  # names that a shell would split are quoted
        assert cli.main([command, path, *options.get(command, []), "--dim", "m=2"]) == 0
        assert "taken as 1: n + 1; other sizes: --dim 'n + 1=SIZE'" in capsys.readouterr().err
