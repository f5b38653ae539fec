"""What stands above the functions of a module: its docstring, imports, files, and the type of its outputs."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final

import numpy as np

from ...proto.types import TensorType
from .calls import DEFAULT_WHY, Imports
from .code import layout, string
from .types import is_wide
from .values import Value, tuple_of

SAFETENSORS: Final = frozenset({"bool", "float16", "float32", "float64"}) | frozenset(
    f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)
)
"""Types that safetensors.numpy restores; others are stored as unsigned integers."""
_QUOTES: Final = str.maketrans({'"': "'", "\\": "/"})
"""Characters that could end a docstring, or mean others in it."""
ONCE: Final = (
    "def once(function, *attributes, **options):",
    '    """What an operator makes of its attributes."""',
    "    return function(*attributes, **options)",
)


@dataclass(frozen=True)
class Head:
    """The head of a module.

    Attributes:
        title: what the network is called.
        types: shapes and dtypes of parameters by name.
        imports: operators, by local name.
        used: the local names that the text has.
        constants: arrays of ``constants.safetensors``.
        attributes: of ``attributes.json``.
        outputs: the named tuple's fields, each with a comment; empty for a single output.
        wide: whether the model needs 64-bit types.
        deviations: where other implementations differ from ONNX.
    """

    title: str
    types: Mapping[str, TensorType]
    imports: Imports
    used: set[str]
    constants: Mapping[str, np.ndarray]
    attributes: Mapping[str, Any]
    outputs: Mapping[str, str]
    wide: bool
    deviations: Sequence[str]

    def lines(self, text: str) -> list[str]:
        """The lines above a text."""
        load, loaded, outputs = self._load(), self._loaded(), self._outputs()
        used = set(re.findall(r"(?<![\w.])(functools|json|np|lax|nn)\.", "\n".join([*load, *loaded, text])))
        registered, whys = self._registered()
        parts = ", ".join(sorted(used & {"lax", "nn"}))
        groups = [
            [f"import {m}" for m in ("functools", "json") if m in used]
            + ["from pathlib import Path", *(["from typing import NamedTuple"] if outputs else [])],
            ["import jax", "import jax.numpy as jnp", *(["import numpy as np"] if "np" in used else [])]
            + ([f"from jax import {parts}"] if parts else [])
            + [*self._operators(text), "from safetensors.numpy import load_file"],
            registered,
            whys,
            ['PARAMS = Path(__file__).with_name("params.safetensors")', *loaded],
        ]
        lines = self._docstring()
        for group in filter(None, groups):
            lines += ["", *group]
        for part in filter(None, (outputs, ONCE if "once=once" in text else (), load)):
            lines += ["", "", *part]
        return lines

    def _docstring(self) -> list[str]:
        count = sum(math.prod(d for d in t.shape or () if isinstance(d, int)) for t in self.types.values())
        lines = [f'"""{self.title} in JAX, written by `onnx2jax` to be read and edited.', ""]
        lines += [f"`model(params, ...)` is pure: for jit, grad, vmap. `load_params()` reads its {count:,} parameters."]
        if self.wide:
            lines += [
                "",
                "Values of 64 bits are such as in the ONNX file: `in_64_bits` is a scope of `jax.enable_x64`.",
            ]
        if self.deviations:
            lines += ["", "Other implementations differ from ONNX, which the module follows:"]
            for text in self.deviations:
                lines += textwrap.wrap(f"- {text}".translate(_QUOTES), 118, subsequent_indent="  ")
        return [*lines, '"""']

    def _operators(self, text: str) -> Iterator[str]:
        """Imports of operators."""
        members: dict[str, list[str]] = {"onnx2jax.compat": ["in_64_bits"]} if self.wide else {}
        if "with inside(" in text:
            members["onnx2jax.errors"] = ["inside"]
        for (module, function), name in self.imports.members.items():
            if name in self.used:
                members.setdefault(module, []).append(f"{function} as {name}" if name != function else function)
        if not self.used.isdisjoint(self.imports.registered.values()):
            members["onnx2jax.ops.registry"] = ["resolve"]
        for module, names in sorted(members.items()):
            yield from _imported(module, names)

    def _registered(self) -> tuple[list[str], list[str]]:
        """Lines that look operators up, and comments that say why operators are called."""
        lines: list[str] = []
        for (domain, operator, since), name in sorted(self.imports.registered.items(), key=itemgetter(1)):
            if name in self.used:
                lines += layout(f"{name} = resolve({string(domain)}, {string(operator)}, {since}).function", 0)
        comments = ["# Operators that are no single expression of jax.numpy or jax.nn, and what is beyond it:"]
        names: dict[str, list[str]] = {}
        for name in sorted(self.used):
            names.setdefault(self.imports.whys[name], []).append(name)
        for why, several in sorted(names.items(), key=lambda item: (item[0] == DEFAULT_WHY, item[1])):
            text = f"{', '.join(several)}: {why}"
            comments += textwrap.wrap(text, 118, initial_indent="#   ", subsequent_indent="#     ")
        return lines, comments if names else []

    def _loaded(self) -> list[str]:
        """Lines that read constants and attributes."""
        lines = ['CONSTANTS = load_file(Path(__file__).with_name("constants.safetensors"))'] if self.constants else []
        kinds = {n: v.dtype for n, v in self.constants.items() if v.dtype.name not in SAFETENSORS}
        lines += [f"CONSTANTS[{string(n)}] = CONSTANTS[{string(n)}].view(jnp.{d.name})" for n, d in kinds.items()]
        if self.attributes:
            lines.append('ATTRIBUTES = json.loads(Path(__file__).with_name("attributes.json").read_text())')
        return lines

    def _load(self) -> list[str]:
        """The function that reads the parameters."""
        restored: dict[str, list[str]] = {}
        for name, kind in self.types.items():
            if kind.dtype.name not in SAFETENSORS:
                restored.setdefault(kind.dtype.name, []).append(name)
        wide = any(is_wide(Value(dtype=t.dtype)) for t in self.types.values())
        lines = ["@jax.enable_x64(True)"] if wide else []
        lines += ["def load_params(path: str | Path = PARAMS) -> dict[str, jax.Array]:"]
        lines += ['    """The parameters by ONNX name."""']
        if not restored:
            return [*lines, "    return {name: jnp.asarray(value) for name, value in load_file(path).items()}"]
        lines.append("    params = load_file(path)")
        for dtype, names in restored.items():
            lines += _tuple_lines("for name in", names, ":")
            lines.append(f"        params[name] = params[name].view(jnp.{dtype})")
        return [*lines, "    return {name: jnp.asarray(value) for name, value in params.items()}"]

    def _outputs(self) -> list[str]:
        """The named tuple of several outputs."""
        if not self.outputs:
            return []
        lines = ["class Outputs(NamedTuple):", '    """What `model` returns."""', ""]
        return lines + [f"    {field}: jax.Array  # {kind}" for field, kind in self.outputs.items()]


def table(tables: Mapping[str, Sequence[str]]) -> list[str]:
    """The names of parameters that do not count up with the layers."""
    lines = ["WEIGHTS = {"]
    for name, values in tables.items():
        lines += _tuple_lines(f'"{name}":', values, ",")
    return [*lines, "}", '"""Parameters by layer."""']


def plain(name: str) -> str:
    """A name of the file for a docstring: at most 60 characters, none of which could end it."""
    return re.sub(r"[^\w .:/-]", "", name)[:60].strip(" .")


def title(name: str) -> str:
    """What a graph is called; "The network" where exporters give one name to all.

    >>> title("torch-jit-export"), title("digits")
    ('The network', "The network 'digits'")
    """
    name = plain(name)
    generic = not name or re.fullmatch(r"(torch|main|tf2onnx|onnx)?[-_.:]?(jit|graph|model|export)?(-export)?", name)
    return "The network" if generic else f"The network {name!r}"


def _tuple_lines(before: str, names: Sequence[str], after: str) -> list[str]:
    """A tuple of strings, indented: on one line, or one line for each string."""
    strings = [*map(string, names)]
    line = f"    {before} {tuple_of(strings)}{after}"
    return [line] if len(line) <= 120 else [f"    {before} (", *(f"        {s}," for s in strings), f"    ){after}"]


def _imported(module: str, members: Sequence[str]) -> list[str]:
    """Imports of one module, as ruff sorts and formats them: those under another name on lines of their own."""
    plain = sorted(m for m in members if " as " not in m)
    lines = {m: [f"from {module} import {m}"] for m in members if " as " in m}
    if plain:
        line = f"from {module} import {', '.join(plain)}"
        lines[plain[0]] = (
            [line] if len(line) <= 120 else [f"from {module} import (", *(f"    {m}," for m in plain), ")"]
        )
    return [line for _, group in sorted(lines.items()) for line in group]
