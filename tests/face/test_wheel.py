"""The wheel, built from the source distribution and installed with its requirements only."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path, PurePosixPath

import pytest
from packaging.requirements import Requirement

from onnx2jax import __version__
from onnx2jax.model.reports.page import SCRIPTS
from tests.support.helpers import ROOT

DATA = {
    "ir/types.txt",
    "data/counting/model.onnx",
    "data/counting/tokenizer.json",
    "data/counting/tokenizer_config.json",
    *(f"model/reports/view/{name}" for name in ("page.html", "page.css", *SCRIPTS)),
    "data/digits.onnx",
    "data/digits_samples.npz",
    "proto/onnx.proto",
    "proto/onnx.binpb",
    "py.typed",
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution, and the wheel built from it."""
    folder = tmp_path_factory.mktemp("built")
    ran(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    return folder


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment with the wheel. Its requirements are links, because copies take a minute."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, symlinks=True)
    places = {"base": str(home), "platbase": str(home)}
    site = Path(sysconfig.get_path("purelib", "venv", places))
    for name in sorted(required("onnx2jax") - {"onnx2jax"}):
        link(importlib.metadata.distribution(name), site)
    (wheel,) = built.glob("*.whl")
    scripts = Path(sysconfig.get_path("scripts", "venv", places))
    ran(sys.executable, "-m", "pip", "--python", scripts / "python", "install", "--no-deps", "--no-index", wheel)
    return scripts


def ran(*command: str | Path, cwd: Path | None = None, status: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a program, and check its exit status."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    return done


def required(name: str) -> set[str]:
    """A distribution and its requirements, recursively, without extras."""
    needs = {name}
    for text in importlib.metadata.requires(name) or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            needs |= required(requirement.name)
    return needs


def link(distribution: importlib.metadata.Distribution, site: Path) -> None:
    """Link the folders and files of a distribution; several distributions share the folder ``google``."""
    for file in distribution.files or ():
        depth = 2 if file.parts[0] == "google" else 1
        if file.parts[0] in ("..", "__pycache__"):  # programs
            continue
        place = site.joinpath(*file.parts[:depth])
        place.parent.mkdir(parents=True, exist_ok=True)
        if not place.exists():
            place.symlink_to(Path(str(distribution.locate_file(PurePosixPath(*file.parts[:depth])))))


def test_wheel_and_sdist_contain_only_the_package(built: Path) -> None:
    files = (p for p in (ROOT / "onnx2jax").rglob("*") if p.is_file() and p.suffix != ".pyc")
    package = {str(PurePosixPath(p.relative_to(ROOT))) for p in files}
    assert {f"onnx2jax/{name}" for name in DATA} <= package

    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {n for n in names if not n.startswith(f"onnx2jax-{__version__}.dist-info")} == package

    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as source:
        files_there = {m.name.removeprefix(f"onnx2jax-{__version__}/") for m in source if not m.isdir()}
        assert not any(m.issym() for m in source)
    extra = {"CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml"}
    assert files_there - {".gitignore"} == package | extra


@pytest.mark.extended
def test_the_wheel_converts_differentiates_and_names_missing_packages(installed: Path) -> None:
    done = ran(installed / "python", "-I", ROOT / "tests" / "support" / "alone.py")
    assert done.stderr == ""
    assert done.stdout.startswith(f"onnx2jax {__version__}, ")


@pytest.mark.extended
def test_the_command_and_the_demo(installed: Path, tmp_path: Path) -> None:
    helped = ran(installed / "python", "-I", installed / "onnx2jax", "--help")
    assert helped.stderr == ""
    assert "generate" in helped.stdout

    demo = ran(installed / "python", "-I", "-m", "onnx2jax.demo", cwd=tmp_path, status=1)
    assert demo.stdout == ""
    assert demo.stderr.endswith("): pip install 'matplotlib>=3.10.7' 'rich>=13'\n")
    assert not list(tmp_path.iterdir())
