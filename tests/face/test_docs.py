"""The code and output on the pages are correct: README.md, CONTRIBUTING.md and the site."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

import onnx2jax
from onnx2jax.cli import COMMANDS
from onnx2jax.data import demo_samples
from onnx2jax.model.options import Options
from onnx2jax.ops import registry
from tests.ops import test_branches, test_gradients, test_opset_matrix
from tests.support import pages
from tests.support.helpers import ROOT
from tests.support.models import model, value
from tests.support.tiers import extended

pytestmark = pytest.mark.usefixtures("standard_promotion")  # optax


EXPENSIVE = {
    "convert", "export", "finetune", "generate", "lora", "recipes", "serve", "several_processes", "solvers", "speed",
}  # fmt: skip
"""Pages whose code takes a second or more."""


@functools.cache
def shared(make: Any, source: Path) -> Any:
    """Convert a bundled model once for all pages."""
    return make(source)


@pytest.fixture
def box(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty folder, and bundled models that pages share."""
    monkeypatch.chdir(tmp_path)
    others = {key: one for key, one in registry._OPERATORS.items() if key[0] != "com.example"}
    monkeypatch.setattr(registry, "_OPERATORS", others)  # without operators that other pages have registered
    for make in (onnx2jax.convert, onnx2jax.decoder):

        def made(source: Any, make: Any = make, **told: Any) -> Any:
            return shared(make, source) if isinstance(source, Path) and not told else make(source, **told)

        monkeypatch.setattr(onnx2jax, make.__name__, made)


@pytest.mark.usefixtures("box")
@pytest.mark.parametrize(
    "page",
    [extended(p) if p.stem in EXPENSIVE else p for p in pages.SITE],
    ids=lambda p: str(p.relative_to(ROOT / "docs")),
)
def test_a_page_runs(page: Path) -> None:
    pages.run(page)


@pytest.mark.usefixtures("box")
def test_readme() -> None:
    names = pages.run(ROOT / "README.md")
    assert names["logits"].shape == (4, 10)
    np.testing.assert_array_equal(names["logits"], names["same"])
    assert names["by_weight"].params.keys() == names["model"].params.keys()
    assert names["by_pixel"].shape == names["images"].shape
    labels = demo_samples()["labels"][:4]
    np.testing.assert_array_equal(names["model"](demo_samples()["images"][:4]).argmax(-1), labels)


WIDEST = 88
"""Columns of code that a page shows at a window of 1280 pixels (docs/site.css)."""


@pytest.mark.parametrize("page", [ROOT / "README.md", *pages.SITE], ids=lambda p: str(p.relative_to(ROOT)))
def test_code_on_pages_is_not_cut_off(page: Path) -> None:
    code = [line for block in pages.blocks(page) if block.kind != "text" for line in block.body.splitlines()]
    assert [line for line in code if len(line) > WIDEST] == []


def test_commands_name_the_extras_that_they_need() -> None:
    lines = (ROOT / "docs" / "guides" / "terminal.md").read_text().splitlines()
    needed = {"run": "image", "verify": "verify", "train": "train", "export": "export", "source": "checkpoint"}
    for command, extra in needed.items():
        assert any(s.startswith(f"onnx2jax {command} ") and s.endswith(f"(extra {extra})") for s in lines), command


def test_keywords_of_convert_stand_in_the_same_groups_everywhere() -> None:
    """In the signature, in the docstring, in the options of a model, and on the page."""
    sections = re.split(r"^    Args: (\w+)\n", inspect.getsource(onnx2jax.convert), flags=re.MULTILINE)[1:]
    texts = [text.partition("\n    Returns:")[0] for text in sections[1::2]]
    documented = [re.findall(r"^        (\w+): ", text, re.MULTILINE) for text in texts]
    names = [name for group in documented for name in group]
    assert names == [n for n in inspect.signature(onnx2jax.convert).parameters if n not in ("source", "reading")]
    assert names == [f.name for f in dataclasses.fields(Options) if f.name in names]
    text = (ROOT / "docs" / "guides" / "convert.md").read_text()
    rows = [re.search(rf"^\| {group.lower()} \| (.+?) \|", text, re.MULTILINE) for group in sections[::2]]
    shown = [re.findall(r"`(\w+)`", row[1])[: len(group)] for row, group in zip(rows, documented, strict=True) if row]
    assert shown == documented


def test_extras_are_installed_from_the_clone() -> None:
    """The package is in no index yet."""
    files = [ROOT / "README.md", *pages.SITE, *(ROOT / "notebooks").glob("*.ipynb"), ROOT / "notebooks" / "README.md"]
    commands = r"pip\s+install\s+[^`\n]*onnx2jax"
    assert [str(f) for f in files if re.search(commands, f.read_text(encoding="utf-8"))] == []


def test_every_command_is_on_its_page() -> None:
    shown = re.findall(r"^onnx2jax (\w+)", (ROOT / "docs" / "guides" / "terminal.md").read_text(), re.MULTILINE)
    assert {*shown} == COMMANDS.keys()


def test_links_of_the_readme_resolve() -> None:
    """Links of the site are checked when it is built."""
    links = re.findall(r"\]\(([^)#]+)", (ROOT / "README.md").read_text())
    assert [link for link in links if not link.startswith("https://") and not (ROOT / link).exists()] == []


def test_every_public_name_is_in_the_reference_once() -> None:
    text = "".join(p.read_text() for p in (ROOT / "docs" / "reference").glob("*.md"))
    packages = [getattr(onnx2jax, name) for name in ("training", "generation", "ops", "session")]
    named = {f"{p.__name__}.{name}" for p in packages for name in p.__all__} | {"onnx2jax.errors", "onnx2jax.backend"}
    named |= {f"onnx2jax.{name}" for name in onnx2jax.__all__ if not inspect.ismodule(getattr(onnx2jax, name))}
    shown = re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)
    assert sorted(n for n in shown if n.count(".") < 2 or n in named) == sorted(named)


def test_the_site_builds_without_warnings_and_network(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]  # --quiet hides warnings
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    reference = (tmp_path / "reference" / "model.html").read_text()
    assert '<span class="gp">' in reference and "<blockquote>" not in reference  # examples of docstrings are code
    gallery = (tmp_path / "notebooks" / "index.html").read_text()
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        assert gallery.count(f'href="{notebook.stem}.html"') > 1  # in the table and in the navigation
        assert f'src="pictures/{notebook.stem}_0.png"' in (tmp_path / "notebooks" / f"{notebook.stem}.html").read_text()
    for page in tmp_path.rglob("*.html"):
        loads = re.findall(r"<(?:script|link|img)\b[^>]*?(?:src|href)=.?((?:https?:)?//[^\s\"'>]+)", page.read_text())
        assert loads == [], page


def run_contributing() -> dict[str, Any]:
    registry._OPERATORS.pop(("com.example", "SoftClip"), None)
    return pages.run(ROOT / "CONTRIBUTING.md")


def test_the_row_of_contributing() -> None:
    """The table row of CONTRIBUTING's operator passes the tests that rows generate."""
    row = run_contributing()["soft_clip_row"]
    test_opset_matrix.check_rows([row])
    assert test_branches.folds(row)
    test_branches.check_rows([row])
    assert test_gradients.check_row(row)


def test_the_operator_of_contributing() -> None:
    run_contributing()
    *inputs, output = (value(name, np.float32, [3]) for name in ("x", "limit", "y"))
    node = helper.make_node("SoftClip", ["x", "limit"], ["y"], domain="com.example", alpha=0.5)
    clip = onnx2jax.convert(model([node], inputs, [output], opsets={"com.example": 1}))
    x, limit = np.array([[-2, 0, 4], [1, 1, 3]], np.float32)
    np.testing.assert_allclose(clip(x, limit), np.tanh(x / 2) * limit, rtol=1e-6)
