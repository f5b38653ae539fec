"""What is shipped: one package with its data, under the version the changelog tells of."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path, PurePosixPath

import pytest

from tests.support.helpers import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DATA = {
    "ir/types.txt",
    "data/counting.onnx",
    "data/digits.onnx",
    "data/digits_samples.npz",
    "proto/onnx.proto",
    "proto/onnx.binpb",
    "py.typed",
}


def test_rooms_at_the_top_are_links_into_the_package() -> None:
    for room in ("ops", "proto"):
        assert (ROOT / room).is_symlink()
        assert (ROOT / room).resolve() == ROOT / "onnx2jax" / room


def test_run_time_needs_little() -> None:
    names = {requirement.split(">")[0] for requirement in PROJECT["dependencies"]}
    assert names == {"jax", "jaxlib", "ml_dtypes", "numpy", "protobuf"}


def test_ci_runs_the_commands_that_people_run() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    commands = [line for line in script.read_text().splitlines() if line and not line.startswith("#")]
    assert commands[-2:] == ["make test", "make gate LIMIT=0.7"]


@pytest.mark.long
def test_wheel_and_sdist_hold_the_package_alone(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "build", "--outdir", tmp_path, ROOT], check=True, capture_output=True)
    package = {
        str(PurePosixPath(p.relative_to(ROOT)))
        for p in (ROOT / "onnx2jax").rglob("*")
        if p.is_file() and p.suffix != ".pyc"
    }
    assert {f"onnx2jax/{name}" for name in DATA} <= package

    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    info = f"onnx2jax-{PROJECT['version']}.dist-info"
    assert {n for n in names if not n.startswith(info)} == package

    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as source:
        files = {m.name.removeprefix(f"onnx2jax-{PROJECT['version']}/") for m in source if not m.isdir()}
        assert not any(m.issym() for m in source)
    extra = {"CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml"}
    assert files - {".gitignore"} == package | extra
