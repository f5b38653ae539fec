"""The demo: correct results, a picture, and a clear message if its extras are missing."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from PIL import Image
from rich.console import Console

from onnx2jax import cli, demo, demo_model

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def findings() -> demo.Findings:
    return demo.compute()


@pytest.fixture
def computed(findings: demo.Findings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the computation by its results."""
    monkeypatch.setattr(demo, "compute", lambda: findings)


def test_the_bundled_model() -> None:
    model = onnx.load(demo_model())
    onnx.checker.check_model(model, full_check=True)
    metadata = {p.key: p.value for p in model.metadata_props}
    assert float(metadata["test_accuracy"]) > 0.98
    assert demo_model().stat().st_size < 200_000


def test_numbers(findings: demo.Findings) -> None:
    box = findings.samples
    assert findings.reference_difference < 1e-4
    assert findings.vmap_difference < 1e-4
    assert (findings.predictions == box.labels).mean() > 0.9
    np.testing.assert_array_equal(findings.predictions, box.logits.argmax(-1))
    np.testing.assert_allclose(findings.probabilities.sum(-1), 1, rtol=1e-5)
    assert findings.saliency.shape == box.images.shape
    assert findings.gradient == pytest.approx(findings.finite_difference, rel=0.02)
    assert abs(findings.gradient) > 0.1
    assert all(seconds > 0 for seconds in findings.timings)


def test_picture(findings: demo.Findings, tmp_path: Path) -> None:
    demo.draw(findings, tmp_path / "picture.png")
    with Image.open(tmp_path / "picture.png") as picture:
        assert picture.width > 800
        assert len(picture.convert("RGB").getcolors(1 << 24) or ()) > 100


@pytest.mark.parametrize("colour", [True, False])
def test_terminal(findings: demo.Findings, colour: bool) -> None:
    text = io.StringIO()
    demo.show(
        findings, Console(file=text, force_terminal=colour, color_system="truecolor" if colour else None, width=80)
    )
    shown = text.getvalue()
    assert ("▀" in shown) == colour
    assert ("█" in shown) != colour
    for word in ("trace", "compile", "steady", "onnxruntime", "jax.grad", "jax.vmap"):
        assert word in shown
    if not colour:
        assert max(map(len, shown.splitlines())) <= 80
        assert f"{findings.predictions[0]}  {findings.probabilities[0].max():.1%}" in shown


@pytest.mark.usefixtures("without_rich")
@pytest.mark.parametrize("main", [demo.main, lambda options: cli.main(["demo", *options])], ids=["module", "command"])
def test_without_extras(capsys: Capture, tmp_path: Path, main: Callable[[list[str]], int]) -> None:
    assert main(["--output", str(tmp_path / "demo.png")]) == 1
    err = capsys.readouterr().err
    assert err.startswith("The demo draws with matplotlib and rich (")
    assert err.endswith("): pip install 'matplotlib>=3.10.7' 'rich>=13'\n")
    assert not (tmp_path / "demo.png").exists()


@pytest.mark.usefixtures("without_rich", "computed")
def test_json_needs_no_extras(capsys: Capture) -> None:
    assert cli.main(["demo", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["right"] >= 15


@pytest.mark.usefixtures("computed")
def test_from_end_to_end(capsys: Capture, tmp_path: Path) -> None:
    assert demo.main(["--output", str(tmp_path / "demo.png")]) == 0
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert "picture: " in capsys.readouterr().out
