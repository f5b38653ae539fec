"""The architecture: layers and imports, a runtime without operator names, no changed global settings."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

import onnx2jax
from benchmarks.house import LAYERS, imports, modules, package_of
from tests.support.helpers import ROOT

MODULES = modules()
LAYER = {package: k for k, (_, packages) in enumerate(reversed(LAYERS)) for package in packages}


def test_every_module_has_a_layer() -> None:
    assert {m.split(".")[0] for m in MODULES} == LAYER.keys()


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_go_down(module: str) -> None:
    inner = {i.removeprefix("onnx2jax.") for i in imports(module, MODULES[module]) if i.startswith("onnx2jax.")}
    here = package_of(module)
    packages = [package_of(i) for i in inner]
    beside = LAYERS[0][1] if here in LAYERS[0][1] else (here,)  # the face is one package of several files
    assert [r for r in packages if r not in beside and LAYER[r] >= LAYER[here]] == []


def test_packages_of_a_layer_do_not_import_each_other() -> None:
    assert LAYER["checker"] == LAYER["sharding"] == LAYER["runtime"]
    assert package_of("runtime.partition") == "runtime"
    assert "onnx2jax.ir.graph.Graph" in set(imports("runtime.partition", MODULES["runtime.partition"]))


def test_packages_inside_model_are_layered() -> None:
    order = ["calls", "changes", "files", "reports", "devices"]
    place = {f"model.{package}": k for k, package in enumerate(order)}
    packages = {m.rpartition(".")[0] for m in MODULES if m.count(".") == 2 and m.startswith("model.")}
    assert packages == place.keys()
    for module in (m for m in MODULES if m.rpartition(".")[0] in packages):
        here = place[module.rpartition(".")[0]]
        inner = {".".join(i.split(".")[1:3]) for i in imports(module, MODULES[module]) if i.startswith("onnx2jax.")}
        assert [i for i in inner if place.get(i, here) > here] == [], module


@pytest.mark.parametrize("package", ["ops", "proto"])
def test_top_level_links_are_no_packages(package: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"import {package}"], cwd=ROOT, capture_output=True, text=True)
    assert f"ImportError: import onnx2jax.{package}, not {package}" in done.stderr


@pytest.mark.parametrize("module", sorted(MODULES))
def test_onnx_and_onnxruntime_are_not_imported(module: str) -> None:
    roots = {i.split(".")[0] for i in imports(module, MODULES[module])}
    assert not roots & {"onnx", "onnxruntime", "torch", "tensorflow", "numba", "scipy"}


def test_proto_does_not_import_jax() -> None:
    names = [m for m in MODULES if package_of(m) == "proto"]
    assert names
    assert not any(i.split(".")[0] in ("jax", "jaxlib") for m in names for i in imports(m, MODULES[m]))


KNOWS_NO_OPERATOR = ["ir.analysis", "ir.graph", "model.calls.arguments", "model.model"]


@pytest.mark.parametrize("module", [*KNOWS_NO_OPERATOR, *(m for m in sorted(MODULES) if package_of(m) == "runtime")])
def test_the_interpreter_names_no_operator(module: str) -> None:
    operators = {name for names in onnx2jax.supported().values() for name in names}
    constants = [n for n in ast.walk(ast.parse(MODULES[module].read_text())) if isinstance(n, ast.Constant)]
    assert not {n.value for n in constants if isinstance(n.value, str)} & operators


FIELDS = {"eqns", "invars", "outvars", "constvars", "primitive", "source_info", "debug_info"}
CLASSES = {"ClosedJaxpr", "Jaxpr", "JaxprEqn", "Literal", "Var", "primitives"}


READERS = sorted(m for m in MODULES if package_of(m) != "compat" and m != "runtime.cpu.jaxpr_rewrite")


@pytest.mark.parametrize("module", READERS)
def test_jaxprs_are_read_and_built_in_one_module(module: str) -> None:
    """So a renamed field in a JAX release affects that module and compat only."""
    nodes = list(ast.walk(ast.parse(MODULES[module].read_text())))
    assert not {n.attr for n in nodes if isinstance(n, ast.Attribute)} & FIELDS
    from_jax = [n for n in nodes if isinstance(n, ast.ImportFrom) and str(n.module).startswith("jax.extend.core")]
    assert not {a.name for n in from_jax for a in n.names} & CLASSES
    assert "jax.extend.core.primitives" not in {n.module for n in from_jax}


def test_global_settings_are_unchanged() -> None:
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
