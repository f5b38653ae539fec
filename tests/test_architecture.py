"""The storeys of the house, the loop that knows no operator, and global settings left alone."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import onnx2jax

PACKAGE = Path(onnx2jax.__file__).parent
STOREYS = {"proto": 0, "ops": 1, "cli": 3, "__main__": 3, "demo": 3}
"""Imports go down, or stay on a storey. Whatever is not named is the compiler: storey 2."""


def _modules() -> dict[str, ast.Module]:
    """Dotted name inside the package -> syntax tree."""
    files = {".".join(p.relative_to(PACKAGE).with_suffix("").parts): p for p in PACKAGE.rglob("*.py")}
    return {name.removesuffix(".__init__"): ast.parse(p.read_text(), str(p)) for name, p in files.items()}


def _imports(module: str, tree: ast.Module) -> Iterator[str]:
    """Absolute names of what a module imports, wherever in the file."""
    is_package = (PACKAGE / module.replace(".", "/")).is_dir() or module == "__init__"
    here = ["onnx2jax", *(module.split(".") if module != "__init__" else [])]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            up = node.level - is_package
            base = here[: len(here) - up] if node.level else []
            path = ".".join([*base, *([node.module] if node.module else [])])
            yield path
            yield from (f"{path}.{a.name}" for a in node.names)


def _storey(name: str) -> int:
    """The storey of a dotted name inside the package; its own name stands for the public names."""
    return STOREYS.get(name.split(".")[0], 2)


MODULES = _modules()


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_go_down(module: str) -> None:
    inner = {i.removeprefix("onnx2jax.") for i in _imports(module, MODULES[module]) if i.startswith("onnx2jax.")}
    up = sorted(i for i in inner if _storey(i) > _storey(module))
    if module == "__main__":
        up = [i for i in up if not i.startswith("cli")]
    assert up == []


@pytest.mark.parametrize("module", sorted(MODULES))
def test_onnx_and_its_runtimes_are_no_dependencies(module: str) -> None:
    roots = {i.split(".")[0] for i in _imports(module, MODULES[module])}
    assert not roots & {"onnx", "onnxruntime", "torch", "tensorflow", "numba", "scipy"}


def test_proto_does_without_jax() -> None:
    names = [m for m in MODULES if m.split(".")[0] == "proto"]
    assert names
    assert not any(i.split(".")[0] in ("jax", "jaxlib") for m in names for i in _imports(m, MODULES[m]))


@pytest.mark.parametrize("module", ["trace", "plan", "model", "graph", "calling"])
def test_the_loop_names_no_operator(module: str) -> None:
    operators = {name for names in onnx2jax.supported().values() for name in names}
    texts = {n.value for n in ast.walk(MODULES[module]) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    assert texts & operators == set()


def test_global_settings_stay_as_they_are() -> None:
    script = """
import os, warnings
import jax, numpy as np
bits = jax.numpy.zeros(1).dtype
before = dict(jax.config.values), np.geterr(), list(warnings.filters), dict(os.environ)
import onnx2jax
model = onnx2jax.convert(onnx2jax.demo_model())
x = np.zeros((1, 1, 8, 8), np.float32)
model.run(None, {"image": x})
jax.jit(lambda x: model.apply(model.params, x))(x)
jax.grad(lambda x: model.apply(model.params, x).sum())(x)
assert (dict(jax.config.values), np.geterr(), list(warnings.filters), dict(os.environ)) == before
assert jax.numpy.zeros(1).dtype == bits
import sys
assert not {"onnx", "onnxruntime"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True)
