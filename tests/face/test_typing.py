"""The user's program that `make lint` type-checks also runs, and pyright accepts it."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import onnx2jax
from tests.support import typed_use
from tests.support.tiers import extended

pytestmark = pytest.mark.usefixtures("standard_promotion")  # optax
ROOT = Path(onnx2jax.__file__).parents[1]
PUBLIC = ("onnx2jax", *(f"onnx2jax.{n}" for n in ("backend", "errors", "generation", "ops", "session", "training")))


@pytest.mark.parametrize(
    "example",
    [extended(e) if e is typed_use.generate else e for e in typed_use.EXAMPLES],
    ids=lambda example: example.__name__,
)
def test_a_typed_program_runs(example: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    example()


def pyright(*arguments: str | Path) -> Any:
    """Its report. A process of its own: it is a program of Node.js."""
    pytest.importorskip("pyright", reason="needs pyright")
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", *arguments]
    # It looks for packages in paths, not in editable installations.
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return json.loads(done.stdout)


def test_pyright_accepts_the_typed_program_and_finds_typos(tmp_path: Path) -> None:
    typos = tmp_path / "typos.py"
    lines = ["import onnx2jax", "onnx2jax.convrt", "onnx2jax.training.FineTunin", "onnx2jax.Model.cutt"]
    typos.write_text("\n".join(lines))
    diagnostics = pyright(typed_use.__file__, typos)["generalDiagnostics"]
    errors = [(Path(e["file"]).name, e["range"]["start"]["line"]) for e in diagnostics if e["severity"] == "error"]
    assert errors == [("typos.py", 1), ("typos.py", 2), ("typos.py", 3)], diagnostics


@pytest.mark.extended
def test_every_public_name_has_a_complete_type() -> None:
    """Of classes, all attributes and methods that they define or inherit, and the types of those."""
    entries = pyright("--verifytypes", "onnx2jax", "--ignoreexternal")["typeCompleteness"]["symbols"]
    symbols = {n: s for s in entries for n in (s["name"], *s.get("alternateNames", ()))}
    for module in map(importlib.import_module, PUBLIC):
        for name in getattr(module, "__all__", [n for n in vars(module) if f"{module.__name__}.{n}" in symbols]):
            value = getattr(module, name)
            if isinstance(value, type(sys)):
                continue
            symbol = symbols[f"{module.__name__}.{name}"]
            assert symbol["isTypeKnown"] and not symbol["isTypeAmbiguous"], (name, symbol["diagnostics"])
