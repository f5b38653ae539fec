"""pyproject.toml, constraints and CI agree with each other."""

from __future__ import annotations

import tomllib

from tests import versions
from tests.support.helpers import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_top_level_links_point_into_the_package() -> None:
    for package in ("ops", "proto"):
        assert (ROOT / package).is_symlink()
        assert (ROOT / package).resolve() == ROOT / "onnx2jax" / package


def test_runtime_dependencies_are_few() -> None:
    names = {requirement.split(">")[0] for requirement in PROJECT["dependencies"]}
    assert names == {"jax", "jaxlib", "ml_dtypes", "numpy", "protobuf"}


def test_listed_python_versions_match_requires_python() -> None:
    told = [c.split(" :: ")[-1] for c in PROJECT["classifiers"] if c.startswith("Programming Language :: Python :: 3.")]
    assert PROJECT["requires-python"] == f">={told[0]}"
    assert f"| Python | {', '.join(told)} |" in (ROOT / "docs" / "versions.md").read_text()


def test_the_lowest_constraints_match_the_dependencies() -> None:
    constraints = dict(line.split("==") for line in versions.lowest())
    assert constraints.keys() >= {"jax", "jaxlib", "ml_dtypes", "numpy", "protobuf", "optax", "matplotlib"}
    assert not constraints.keys() & {"pytest", "ruff", "torch"}  # tools
    assert f"jax>={constraints['jax']}" in PROJECT["dependencies"]
    assert constraints["protobuf"] == "6.31.1"  # the lowest version that onnx, a test dependency, allows


def test_ci_runs_make_targets() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    commands = [line for line in script.read_text().splitlines() if line and not line.startswith("#")]
    assert commands[-3:] == ["make test", "make gate LIMIT=0.7", "make test-newest"]
