"""The public API: each name with its signature, in a table, so that changes show up in reviews.

python -m tests.face.test_public   # writes the table after an intended change: see docs/versions.md
"""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import is_dataclass
from enum import Enum
from typing import Any, get_origin

import pytest

import onnx2jax
from tests.support.helpers import ROOT

TABLE = ROOT / "tests" / "tables" / "public.txt"
RETURNED = {"Artifacts", "Beams", "Decoder", "ExportedModel", "Generation", "Model", "PreparedModel", "Report"}
"""Classes that only functions construct; their constructors are not public."""


class Something:
    """A default that is not a literal, in a signature."""

    def __repr__(self) -> str:
        return "..."


def names() -> Iterator[tuple[str, Any]]:
    """The public names and objects: ``onnx2jax.__all__``, and what the modules in it define."""
    for name in sorted(onnx2jax.__all__):
        value = getattr(onnx2jax, name)
        if not inspect.ismodule(value):
            yield name, value
            continue
        if (exported := getattr(value, "__all__", None)) is not None:
            yield from ((f"{name}.{inner}", getattr(value, inner)) for inner in exported)
            continue
        for inner, thing in sorted(vars(value).items()):
            is_own = getattr(thing, "__module__", "") == value.__name__ and not inner.startswith("_")
            if is_own and (inspect.isclass(thing) or name != "errors"):
                yield f"{name}.{inner}", thing


def members(value: type) -> dict[str, Any]:
    """The public members of a class and of its bases in this package; instance attributes map to None."""
    names: set[str] = set()
    for owner in (c for c in value.__mro__ if c.__module__.startswith("onnx2jax.")):
        names |= {*inspect.get_annotations(owner), *vars(owner)}
        if "__init__" in vars(owner) and owner.__init__.__module__ == owner.__module__ and not is_dataclass(owner):
            names |= attributes(owner.__init__)
    return {n: getattr(value, n, None) for n in sorted(names) if not n.startswith("_") or n == "__call__"}


def attributes(function: Any) -> set[str]:
    """The attributes of ``self`` that a function sets."""
    nodes = ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function))))
    stores = [n for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    return {n.attr for n in stores if isinstance(n.value, ast.Name) and n.value.id == "self"}


def parameters(value: Any) -> str:
    """Names, kinds and defaults. Types are omitted, because accepted types may be extended."""
    if not callable(value) or get_origin(value):  # a property or a type marker
        return ""
    signature = inspect.signature(value)
    literal = bool | int | float | str | tuple | type | None
    plain = [
        p.replace(annotation=p.empty, default=p.default if isinstance(p.default, literal) else Something())
        for p in signature.parameters.values()
        if p.name != "self"
    ]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))


def lines() -> Iterator[str]:
    """The lines of the table."""
    for name, value in names():
        if not inspect.isclass(value):
            yield name + parameters(value)
        elif issubclass(value, Exception):
            yield f"{name} < {', '.join(base.__name__ for base in value.__bases__)}"
        elif value.__name__ != name.split(".")[-1]:
            yield f"{name} = {value.__name__}"
        elif issubclass(value, Enum):  # whose signature differs between releases of Python
            yield f"{name} in {', '.join(value.__members__)}"
        else:
            yield name + ("" if value.__name__ in RETURNED else parameters(value))
            yield from (f"  .{member}{parameters(thing)}" for member, thing in members(value).items())


def test_the_table_of_public_names_is_current() -> None:
    told = TABLE.read_text().splitlines()
    assert list(lines()) == told, "if this change is intended: python -m tests.face.test_public"


def test_public_names_have_docstrings() -> None:
    every = {name: value for name, value in names() if not get_origin(value)}
    classes = {name: members(value) for name, value in every.items() if inspect.isclass(value)}
    every |= {f"{name}.{n}": member for name, of in classes.items() for n, member in of.items() if member is not None}
    assert len(every) > len(classes) > 1
    assert [name for name, value in every.items() if not inspect.getdoc(value)] == []


MOST_MODULES = 86
"""Modules of this package that converting the demo's model imports; each takes about a millisecond."""
FIRST_USE = """
import importlib, sys, onnx2jax
assert not {"jax", "numpy"} & {*sys.modules}
onnx2jax.errors.InputError
assert "jax" not in sys.modules

model = onnx2jax.convert(onnx2jax.demo_model())
imported = sorted(name for name in sys.modules if name.split(".")[0] == "onnx2jax")
later = "cli training generation session runtime.partition runtime.compile eval.interpreter jaxpr checker.check"
later += " model.reports model.files.export model.runtime sharding.plans ops.attention ops.ml ops.microsoft"
assert not [n for n in imported if any(f"{n}.".startswith(f"onnx2jax.{start}.") for start in later.split())], imported
assert not {"jax.extend", "google.protobuf.descriptor_pb2", "google.protobuf.descriptor_pool"} & {*sys.modules}
print(len(imported))

from concurrent.futures import ThreadPoolExecutor
from onnx2jax.ops import index, registry
described = sum("_operator" in vars(v) for versions in registry._OPERATORS.values() for v in versions)
assert 0 < described < 12, described  # of 200 in the modules that the file needs
with ThreadPoolExecutor(8) as threads:
    resolved = [list(threads.map(lambda key: registry.resolve(*key), index.MODULES)) for _ in range(2)]
assert None not in resolved[0] and all(a is b and registry.is_built_in(a) for a, b in zip(*resolved))
"""


def test_modules_are_imported_at_first_use() -> None:
    """The public names, and, of operators, passes and reports, what a file and a call need."""
    done = subprocess.run([sys.executable, "-c", FIRST_USE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= MOST_MODULES, "which new import does a conversion need?"


def test_type_checkers_and_python_find_the_same_names() -> None:
    """A package says where a name is defined twice: for type checkers, and for the first use."""
    for package in (onnx2jax, onnx2jax.training, onnx2jax.generation):
        block = next(n for n in ast.parse(inspect.getsource(package)).body if isinstance(n, ast.If))
        typed = {a.name: n.module for n in ast.walk(block) if isinstance(n, ast.ImportFrom) for a in n.names}
        modules = {name for name, module in typed.items() if module is None}
        assert {n: m for n, m in typed.items() if n not in modules} == package._MODULES
        assert {*typed} == {*package.__all__} <= {*dir(package)}


def test_the_top_level_is_small() -> None:
    """A reader finds a name among what README and the guides call; the rest is in the module that it is about."""
    assert len(onnx2jax.__all__) <= 30


def test_names_of_inner_modules_are_found() -> None:
    for name, module in (("InferenceSession", "session"), ("op", "ops"), ("DeviationWarning", "errors")):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'; it is in onnx2jax.{module}$"):
            getattr(onnx2jax, name)


def test_methods_of_models_and_decoders_are_found() -> None:
    for name, holder in (("export", "Model"), ("verify", "Model"), ("generate", "Decoder")):
        text = f"no attribute '{name}'; a {holder} has it: {holder.lower()}.{name}$"
        with pytest.raises(AttributeError, match=text):
            getattr(onnx2jax, name)


def test_unknown_names_are_attribute_errors() -> None:
    for name in ("convrt", "_hidden", "__wrapped__"):
        with pytest.raises(AttributeError, match=f"module 'onnx2jax' has no attribute '{name}'$"):
            getattr(onnx2jax, name)


def with_options() -> Iterator[tuple[str, Any, list[str]]]:
    """Public functions with keyword-only options and no others, and these options."""
    everything = {**dict(names()), "FineTuning.fit": onnx2jax.training.FineTuning.fit}
    everything |= {f"Model.{n}": getattr(onnx2jax.Model, n) for n in dir(onnx2jax.Model)}
    unlike = {
        "training.Checkpoints",
        "Decoder",
        "OnnxFile",
        "Model.run",
    }  # made elsewhere, orbax's, or hot
    for name, value in everything.items():
        if (
            "._" in name
            or name.startswith("errors.")
            or name in unlike
            or not callable(value)
            or (inspect.isclass(value) and (is_dataclass(value) or issubclass(value, Enum)))
        ):
            continue
        try:
            parameters = inspect.signature(value).parameters.values()
        except (TypeError, ValueError):
            continue
        options = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        if options and not any(p.kind is p.VAR_KEYWORD for p in parameters):
            yield name, value, options


def test_a_misspelt_option_is_answered_with_the_right_one(subtests: pytest.Subtests) -> None:
    cases = [(name, function, option) for name, function, options in with_options() for option in options]
    assert cases
    for name, function, option in cases:
        with subtests.test(name, option=option), pytest.raises(TypeError, match=f"did you mean '{option}'"):
            function(**{f"{option}x": 1})


if __name__ == "__main__":
    TABLE.write_text("\n".join(lines()) + "\n")
