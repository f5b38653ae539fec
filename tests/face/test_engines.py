"""The guide "A million inputs" in one process, on Ray Data and on Apache Beam, with a worker that is killed.

`make test-engines` runs all of it, in an environment with both engines. Scripts run apart from pytest: the folder
`proto` of this checkout hides a package of that name, which Beam imports.
"""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from onnx2jax.data import demo_samples
from tests.support import pages
from tests.support.helpers import ROOT
from tests.support.tiers import extended

BLOCKS = [b.body for b in pages.blocks(ROOT / "docs" / "guides" / "many_inputs.md") if b.kind == "python"]
WORKER, PARTS, FILES, LOOP, RAY, BEAM = BLOCKS
KILLED = """
import signal

class Killed(Digits):
    calls = os.path.abspath("calls")

    def __call__(self, rows):
        made = len(os.listdir(self.calls))
        open(f"{self.calls}/{made}", "x").close()
        if made == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(rows)

os.makedirs("calls", exist_ok=True)
Digits, path = Killed, str(onnx2jax.demo_model())
"""
"""Each call adds a file; the fourth of all kills its process."""
INPUTS = """
import pyarrow
from pyarrow import parquet
os.makedirs("inputs")
for name in os.listdir("parts"):
    rows = read(name)[1]
    image = pyarrow.FixedShapeTensorArray.from_numpy_ndarray(rows["image"])
    parquet.write_table(pyarrow.table({"id": rows["id"], "image": image}), f"inputs/{name}.parquet")
"""
SCORES = """
scored = parquet.read_table("scores")
np.savez("results/all.npz", id=scored["id"].to_numpy(), digit=scored["digit"].to_numpy())
"""


def needs(name: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(name) is None
    return pytest.mark.skipif(missing, reason=f"{name} is not installed; `make test-engines` installs it")


def run(folder: Path, *blocks: str) -> subprocess.CompletedProcess[str]:
    """Run blocks as a script in a folder."""
    script = folder / "script.py"
    script.write_text("\n".join(["import os", *blocks]))
    return subprocess.run([sys.executable, "-I", script], cwd=folder, capture_output=True, text=True, timeout=540)


def check(folder: Path) -> None:
    """Each of the 500 inputs has its result, once."""
    predictions = []
    for file in (folder / "results").iterdir():
        with np.load(file) as rows:
            predictions += zip(rows["id"].tolist(), rows["digit"].tolist(), strict=True)
    digits = np.resize(demo_samples()["logits"].argmax(-1), 50).tolist()
    assert sorted(predictions) == [*enumerate(digits * 10)]


@pytest.mark.parametrize(
    "engine", [extended(LOOP), pytest.param(BEAM, marks=needs("apache_beam"))], ids=["loop", "beam"]
)
def test_a_killed_script_continues_with_missing_parts(tmp_path: Path, engine: str) -> None:
    killed = run(tmp_path, WORKER, PARTS, FILES, KILLED, engine)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert 0 < len([p for p in (tmp_path / "results").iterdir() if p.suffix == ".npz"]) < 10
    again = run(tmp_path, WORKER, FILES, KILLED, engine)
    assert again.returncode == 0, again.stderr
    assert len([*(tmp_path / "calls").iterdir()]) == 11  # each part, and the one that was killed
    check(tmp_path)


@needs("ray")
def test_a_killed_actor_of_ray_loses_and_repeats_nothing(tmp_path: Path) -> None:
    done = run(tmp_path, WORKER, PARTS, FILES, INPUTS, KILLED, RAY, SCORES)
    assert done.returncode == 0, done.stderr
    assert len([*(tmp_path / "calls").iterdir()]) > 4
    check(tmp_path)
