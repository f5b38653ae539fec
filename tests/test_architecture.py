"""The architecture: layers and imports, a runtime without operator names, no changed global settings."""

from __future__ import annotations

import ast
import gc
import inspect
import subprocess
import sys
from collections import Counter
from functools import partial
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import onnx2jax
from onnx2jax.runtime.dispatch import BoundCall, DispatchCache
from onnx2jax.runtime.executable import Executable
from onnx2jax.runtime.jitted import PersistentJit
from onnx2jax.runtime.sections import Sections
from tests import quick
from tests.support.helpers import ROOT
from tests.support.house import LAYERS, modules, package_of
from tests.support.sources import sources

LAYER = {package: k for k, (_, packages) in enumerate(reversed(LAYERS)) for package in packages}


def inner_imports(module: str) -> set[str]:
    """What a module imports from the package, by names inside it."""
    prefix = "onnx2jax."
    return {name.removeprefix(prefix) for name in sources()[module].imports if name.startswith(prefix)}


def test_every_module_has_a_layer() -> None:
    assert {m.split(".")[0] for m in modules()} == LAYER.keys()


def test_imports_go_down() -> None:
    face = LAYERS[0][1]  # one package of several files
    wrong = [
        f"{module} imports {name}"
        for module in sources()
        for name in inner_imports(module)
        if (to := package_of(name)) not in (face if package_of(module) in face else {package_of(module)})
        and LAYER[to] >= LAYER[package_of(module)]
    ]
    assert wrong == []


def test_benchmarks_do_not_import_tests() -> None:
    files = [p.relative_to(ROOT) for p in (ROOT / "benchmarks").rglob("*.py")]
    wrong = {str(p): found for p in files if (found := {n for n in quick.imports(p) if n.split(".")[0] == "tests"})}
    assert files and wrong == {}


def test_packages_of_a_layer_do_not_import_each_other() -> None:
    assert LAYER["checker"] == LAYER["sharding"] == LAYER["runtime"]
    assert LAYER["eval"] == LAYER["jaxpr"]
    assert package_of("runtime.partition") == "runtime"
    assert "ir.graph.Graph" in inner_imports("runtime.partition")


def test_modules_do_not_import_each_other_in_circles() -> None:
    """Not for types either. A package imports its public names at their first use, and for type checkers before."""
    lazy = {"", "generation", "training"}

    def target(name: str) -> str:
        return name if name in modules() else name.rpartition(".")[0]

    imported = {m: {target(name) for name in inner_imports(m)} - {m, *lazy} for m in modules()}
    TopologicalSorter(imported).prepare()  # raises CycleError, which names them


def test_packages_inside_model_are_layered() -> None:
    order = ["calls", "changes", "files", "source", "reports", "devices"]
    place = {f"model.{package}": k for k, package in enumerate(order)}
    packages = {m.rpartition(".")[0] for m in modules() if m.count(".") == 2 and m.startswith("model.")}
    assert packages == place.keys()
    for module in (m for m in modules() if m.rpartition(".")[0] in packages):
        here = place[module.rpartition(".")[0]]
        inner = {".".join(name.split(".")[:2]) for name in inner_imports(module)}
        assert [i for i in inner if place.get(i, here) > here] == [], module


@pytest.mark.parametrize("package", ["ops", "proto"])
def test_top_level_links_are_no_packages(package: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"import {package}"], cwd=ROOT, capture_output=True, text=True)
    assert f"ImportError: import onnx2jax.{package}, not {package}" in done.stderr


def test_onnx_and_onnxruntime_are_not_imported() -> None:
    others = {"onnx", "onnxruntime", "torch", "tensorflow", "numba", "scipy"}
    roots = {module: {name.split(".")[0] for name in source.imports} for module, source in sources().items()}
    assert {module: found for module, names in roots.items() if (found := names & others)} == {}


def test_proto_does_not_import_jax() -> None:
    names = [m for m in modules() if package_of(m) == "proto"]
    assert names
    assert not any(i.split(".")[0] in ("jax", "jaxlib") for m in names for i in sources()[m].imports)


GUESSES = ["eval.abstract", "eval.known_values"]  # what an operator gives that they cannot evaluate
KNOWS_NO_OPERATOR = ["ir.analysis", "ir.graph", "model.calls.arguments", "model.model"]


def test_the_interpreter_names_no_operator() -> None:
    operators = {name for names in onnx2jax.supported().values() for name in names}
    rooms = (m for m in modules() if package_of(m) in ("runtime", "eval", "jaxpr") and m not in GUESSES)
    named = [*KNOWS_NO_OPERATOR, *rooms]
    assert {m: found for m in named if (found := sources()[m].strings & operators)} == {}


FIELDS = {"eqns", "invars", "outvars", "constvars", "primitive", "source_info", "debug_info"}
CLASSES = {"ClosedJaxpr", "Jaxpr", "JaxprEqn", "Literal", "Var", "primitives"}


def test_jaxprs_are_read_and_built_in_one_module() -> None:
    """So a renamed field in a JAX release affects that module and compat only."""
    readers = [m for m in sources() if package_of(m) != "compat" and m != "jaxpr.program"]

    def reads(module: str) -> set[str]:
        imported = {name for name in sources()[module].imports if name.startswith("jax.extend.core")}
        return sources()[module].attributes & FIELDS | {name for name in imported if name.split(".")[-1] in CLASSES}

    assert {m: names for m in readers if (names := reads(m))} == {}


KEYS = {"runtime.dispatch", "compat", "compat.config"}
"""Modules that read JAX's configuration for keys; ``model.runtime`` compares it with that of a key."""


def test_keys_of_programs_are_made_in_one_module() -> None:
    readers = {m for m in sources() if "trace_context" in sources()[m].text}
    assert readers - KEYS == {"model.runtime"}


PROGRAMS = (BoundCall, Executable, PersistentJit, Sections, jax.stages.Compiled, type(jax.jit(abs)))


def is_program(value: Any) -> bool:
    """Whether a value is a compiled program or a jitted function, bound to arguments or not."""
    if isinstance(value, partial):
        return is_program(value.func)
    if isinstance(value, tuple) and not isinstance(value, BoundCall):
        return any(map(is_program, value))
    return isinstance(value, PROGRAMS)


def test_compiled_programs_are_in_dispatch_caches_alone() -> None:
    """Whatever runs: models, decoders, training steps, and functions over several devices."""
    model = onnx2jax.convert(onnx2jax.demo_model(), cache_dir=None)
    model(np.zeros((1, 1, 8, 8), np.float32))
    decoder = onnx2jax.decoder(onnx2jax.demo_decoder())
    decoder.generate(list(b"one "), 2)
    trainer = onnx2jax.TrainingModel(onnx2jax.demo_training_model())
    trainer.train_step(image=np.ones((2, 64), np.float32), label=np.zeros(2, np.int64))
    found: dict[str, type] = {}
    for owner in gc.get_objects():
        if not str(getattr(type(owner), "__module__", "")).startswith("onnx2jax."):
            continue
        for name, table in getattr(owner, "__dict__", {}).items():
            if isinstance(table, dict) and any(map(is_program, list(table.values()))):
                found[f"{type(owner).__name__}.{name}"] = type(table)
    assert found.pop("Jitted._functions") is dict  # functions, of which JAX caches programs
    assert found.keys() >= {"DeviceParams.bound", "Subprogram.executables", "Programs._programs"}
    assert {*found.values()} == {DispatchCache}, found


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


def test_a_class_has_a_name_of_its_own() -> None:
    trees = [ast.parse(p.read_text()) for p in (ROOT / "onnx2jax").rglob("*.py")]
    classes = [node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    assert [name for name, count in Counter(classes).items() if count > 1] == []


def test_first_and_later_calls_pass_few_functions_of_ours() -> None:
    """Without operators and what rewrites programs, which depend on the network."""
    model, x = onnx2jax.convert(onnx2jax.demo_model(), cache_dir=None), np.zeros((1, 1, 8, 8), np.float32)
    package = str(Path(onnx2jax.__file__).parent)
    others = tuple(f"{package}/{room}/" for room in ("ops", "jaxpr"))
    passed: list[set[Any]] = [set(), set()]
    for codes in passed:

        def note(frame: Any, event: str, _: Any, codes: set[Any] = codes) -> None:
            code = frame.f_code
            if event == "call" and code.co_flags & inspect.CO_NEWLOCALS and not code.co_name.startswith("<"):
                codes |= {code} if code.co_filename.startswith(package) else set()

        sys.setprofile(note)
        try:
            model(x)
        finally:
            sys.setprofile(None)
    first, later = ({c for c in codes if not c.co_filename.startswith(others)} for codes in passed)
    assert len(first) <= 138 and len({c.co_filename for c in first}) <= 34
    assert len(later) <= 12, sorted(c.co_qualname for c in later)
