"""pyproject.toml, constraints and CI agree with each other."""

from __future__ import annotations

import tomllib
from email.message import Message
from pathlib import Path

import onnx2jax
from tests import release, versions
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
    assert commands[-4:] == ["make test", "make test-extended", "make gate LIMIT=0.7", "make test-newest"]


def test_version_and_supported_pythons_are_the_same_everywhere() -> None:
    assert f"version: {onnx2jax.__version__}" in (ROOT / "CITATION.cff").read_text()
    told = [c.split(" :: ")[-1] for c in PROJECT["classifiers"] if c.startswith("Programming Language :: Python :: 3.")]
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text()
    quoted = ", ".join(f'"{version}"' for version in told)
    assert f"python: [{quoted}]" in workflow
    assert "run: make test-all" in workflow


def test_release_checks_metadata_and_links(tmp_path: Path) -> None:
    whole = Message()
    for field in ("Name", "Version", "Summary", "License-Expression", "Requires-Python", "Project-URL"):
        whole[field] = "text"
    whole["Description-Content-Type"] = "text/markdown"
    assert not [*release.problems(whole)]
    del whole["Project-URL"]
    whole.replace_header("Description-Content-Type", "text/plain")
    assert len([*release.problems(whole)]) == 2
    page = tmp_path / "page.md"
    page.write_text("[a](page.md) [b](gone.md#part) [c](https://example.org) [d](#here)")
    assert release.dead_links(page) == ["gone.md"]
    for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"):
        assert not release.dead_links(ROOT / name)
