"""The module: imports, docstrings, the model's functions, and the files beside it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import Any, Final

import numpy as np

from ... import compat
from ...errors import DeviationWarning, UnsupportedError
from ...eval.abstract import without_data
from ...eval.values import to_host
from ...ir import loops
from ...proto import atomic
from ...proto.files import path_of
from ...proto.messages import unused_name
from ...proto.types import TensorType, ValueInfo
from ..calls.outputs import field_names
from ..spec import Spec
from .code import EXTENT, FUNCTION, Block, layout, live, mark, references, string, substituted
from .control import FORMS
from .emitter import SAMPLE, Emitter, Scope
from .head import SAFETENSORS, Head, plain, table, title
from .layers import Loop, rolled
from .render import FIXED, Renderer, dimension, distinct, identifier, tidy
from .schedule import called, has_wide, nest, scheduled, texts
from .types import is_wide
from .values import Value, constant, extent, stored

MODEL: Final = FUNCTION + "model"
MODULE: Final = "model.py"
PARAMS: Final = "params.safetensors"
CONSTANTS: Final = "constants.safetensors"
ATTRIBUTES: Final = "attributes.json"
DIGEST: Final = "onnx2jax.model.py"
"""Metadata of the parameters' file: the digest of the module that was written beside it."""
MODULES: Final = frozenset({"np", "jnp", "nn", "lax", "jax", "json", "functools", "Path", "inside"})
"""Names of imports that no value may have."""


@dataclass(frozen=True)
class SourceModule:
    """A module and the files beside it.

    Attributes:
        text: of ``model.py``.
        constants: arrays of ``constants.safetensors``.
        attributes: of ``attributes.json``.
        deviations: the texts of DeviationWarnings, which the module itself does not issue.
    """

    text: str
    constants: Mapping[str, np.ndarray]
    attributes: Mapping[str, Mapping[str, Any]]
    deviations: Sequence[str]


def source(spec: Spec) -> SourceModule:
    """A model as source; its deviations from other implementations are warnings, and in the docstring.

    Raises:
        UnsupportedError: it is no single program, or a node has no form in source.
    """
    module = _ModuleWriter(spec).module()
    for text in module.deviations:
        warnings.warn(text, DeviationWarning, stacklevel=3)
    return module


def write(spec: Spec, params: Mapping[str, Any], folder: str | os.PathLike[str], overwrite: bool) -> Path:
    """Write ``model.py`` and the files beside it; the path of the module.

    Raises:
        UnsupportedError: as ``source``.
        FileExistsError: the folder has such files that were edited, or not written by this function.
        ImportError: safetensors is not installed.
    """
    library = compat.optional("safetensors.numpy", "checkpoint")
    folder = path_of(folder)
    present = [n for n in (MODULE, PARAMS, CONSTANTS, ATTRIBUTES) if (folder / n).exists()]
    if present and not overwrite and not _is_as_written(folder):
        raise FileExistsError(
            f"{str(folder)!r} has {', '.join(present)}, edited or not written by to_source: choose another folder, or "
            "replace these files: to_source(folder, overwrite=True)"
        )
    module = source(spec)
    text = module.text.encode()

    def save(name: str, arrays: Mapping[str, Any], metadata: dict[str, str] | None = None) -> None:
        stored = {n: _storable(np.asarray(to_host(v), order="C")) for n, v in arrays.items()}
        with atomic.replacing(folder / name) as file:
            library.save_file(stored, file.name, metadata)

    save(PARAMS, params, {DIGEST: _digest(text)})
    if module.constants:
        save(CONSTANTS, module.constants)
    if module.attributes:
        with atomic.replacing(folder / ATTRIBUTES) as file:
            file.write(json.dumps(module.attributes, default=np.ndarray.tolist).encode())
    path = folder / MODULE
    with atomic.replacing(path) as file:
        file.write(text)
    return path


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def _is_as_written(folder: Path) -> bool:
    """Whether a folder's module is the one whose digest is in the parameters' file."""
    library = compat.optional("safetensors", "checkpoint")
    try:
        with library.safe_open(folder / PARAMS, "numpy") as file:
            digest = (file.metadata() or {}).get(DIGEST)
        return bool(digest == _digest((folder / MODULE).read_bytes()))
    except (OSError, library.SafetensorError):
        return False


def _storable(array: np.ndarray) -> np.ndarray:
    """An array as safetensors.numpy saves it: of unsigned integers of the same width where it lacks the type."""
    return array if array.dtype.name in SAFETENSORS else array.view(f"u{min(array.dtype.itemsize, 8)}")


class _ModuleWriter:
    """Writes one model."""

    def __init__(self, spec: Spec) -> None:
        if spec.settings.dtype is not None or spec.placement is not None:
            raise UnsupportedError("source is of one device and the file's types: convert without dtype= and mesh=")
        if spec.groups is not None:
            raise UnsupportedError("source is of one group of samples: jax.vmap it, and convert without rebatch=")
        if spec.settings.loop_cond != "onnx" and (ignored := list(loops.ignored_conditions(spec.graph))):
            raise UnsupportedError(f"{ignored[0]} ends by the condition of its body: source has ONNX's meaning alone")
        self.spec, self.graph = spec, spec.called
        self.emitter = Emitter(spec.types, spec.changes, FORMS)
        self.inputs = [*spec.inputs, *spec.optional.values()]
        for value in self.inputs:
            if not isinstance(value.type, TensorType) or value.type.dtype.hasobject:
                raise UnsupportedError(f"input {value} has no form in source, which takes arrays of numbers")
        for value in spec.outputs:
            if isinstance(value.type, TensorType) and value.type.dtype.hasobject:
                raise UnsupportedError(f"output {value} has no form in source, which computes arrays of numbers")
        wanted = [identifier(v.name) or f"x{i if i else ''}" for i, v in enumerate(self.inputs)]
        self.arguments = distinct([unused_name(w, {"params", "rng", *MODULES, *FIXED.values()}) for w in wanted])
        self.wanted = {f"input {i}": argument for i, argument in enumerate(self.arguments)}
        """Names of inputs and outputs, by reference."""
        self.values: list[Value] = []
        """The inputs."""
        self.extents: dict[str, str] = {}
        """Names of dimension variables, by reference."""
        self.deviations: list[str] = []
        self.places: dict[str, tuple[int, int]] = {}
        """Input and axis of a dimension variable, by reference."""

    # ---------------------------------------------------------------------------------------------- the statements

    def _block(self) -> tuple[Block, list[Value]]:
        """The model as a function, and its results."""
        block = Block(MODEL, "model", "")
        results: list[Value] = []

        def run() -> None:
            scope = Scope(self.emitter, self.graph, {}, {}, block.statements)
            for reference, info, shape in zip(self.wanted, self.inputs, self._shapes(), strict=True):
                self.values.append(Value(mark(reference), shape=shape, dtype=_dtype(info)))
                scope.bind(info.name, self.values[-1])
            for name, array in self.spec.static.items():
                scope.bind(name, constant(np.asarray(array), name))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", DeviationWarning)
                results.extend(scope.run())
            self.deviations = list(dict.fromkeys(str(w.message) for w in caught))

        without_data(run)
        returned = []
        for value, info in zip(results, self.spec.outputs, strict=True):
            text = self.emitter.array(value)
            if value.host:  # without a dtype it may be a sequence
                is_array = value.known is not None or value.dtype is not None
                text = f"jnp.asarray({text})" if is_array else f"jax.tree.map(jnp.asarray, {text})"
            returned.append(text)
            if not value.host:
                self.wanted.setdefault(references(value.text)[0], identifier(info.name) or "h")
        block.result = returned[0] if len(returned) == 1 else f"Outputs({', '.join(returned)})"
        return block, results

    def _shapes(self) -> list[tuple[Any, ...] | None]:
        """The shapes of inputs, with one symbol for each dimension variable."""
        extents = self.emitter.evaluation.extents
        shapes: list[tuple[Any, ...] | None] = []
        wanted = []
        for i, info in enumerate(self.inputs):
            declared = info.shape or ()
            shape = extents.shape(info.name, declared)
            for axis, (d, variable) in enumerate(zip(shape, declared, strict=True)):
                if not isinstance(variable, int) and str(d) not in self.emitter.sizes:
                    self.places[f"{EXTENT}{d}"] = (i, axis)
                    self.emitter.sizes[str(d)] = SAMPLE * (len(self.emitter.sizes) + 2)
                    wanted.append(dimension(variable, axis, len(shape)))
            shapes.append(None if info.shape is None else shape)
        wanted = [f"{w}_size" if w in self.arguments else w for w in wanted]
        self.extents = dict(zip(self.places, distinct(wanted), strict=True))
        return shapes

    # -------------------------------------------------------------------------------------------------- the module

    def module(self) -> SourceModule:
        """The text and the files."""
        spec, imports = self.spec, self.emitter.imports
        block, results = self._block()
        returned, tables = references(block.result), dict[str, tuple[str, ...]]()
        block.statements = scheduled(live(block.statements, returned), returned, spec.types)
        block.statements = rolled(block.statements, returned, spec.types, tables)
        layers = [s.layer for s in block.statements if isinstance(s, Loop)]
        read = called([block, *layers], self.emitter.functions)
        functions = [*(f for f in self.emitter.functions if f.reference in read), *layers]
        for function in [*functions, block]:
            nest(function, self.wanted, self.extents, is_model=function is block)
        unpacked, read = self._unpacked(block)
        arrays = {a: text for i, (a, text) in enumerate(self._arrays().items()) if f"input {i}" in read}
        everything = "\n".join([*texts([*functions, block]), *arrays.values()])
        used = {n for n in imports.whys if re.search(rf"\b{n}\(", everything)}
        wide = any(map(has_wide, [*functions, block])) or any(map(is_wide, self.values))
        head = Head(
            title(self.graph.name),
            spec.types,
            imports,
            used,
            {n: v for n, v in self.emitter.constants.items() if stored(n) in everything},
            {n: v for n, v in self.emitter.attributes.items() if f"ATTRIBUTES[{string(n)}]" in everything},
            self._fields(results) if len(spec.outputs) > 1 else {},
            wide or any(is_wide(replace(v, host=False)) for v in results),
            self.deviations,
        )
        taken = used | MODULES | {*self.arguments, *self.extents.values()}
        names = distinct([unused_name(identifier(f.hint) or "function", taken) for f in functions])
        of = dict(zip([f.reference for f in functions], names, strict=True)) | {MODEL: "model"}
        renderer = Renderer(of, self.extents, self.wanted, used | MODULES)
        lines: list[str] = []
        for function in functions:
            lines += ["", "", *tidy([*renderer.function(function)])]
        opening = [line for a, text in arrays.items() for line in layout(f"{a} = {renderer.text(text)}", 4)]
        model = self._model(block, renderer, results, [*opening, *unpacked])
        lines += ["", "", *(["@in_64_bits"] if head.wide else []), *model]
        lines += ["", "", *table(tables)] if tables else []
        above = head.lines("\n".join(lines))
        return SourceModule("\n".join([*above, *lines]) + "\n", head.constants, head.attributes, self.deviations)

    def _fields(self, results: Sequence[Value]) -> dict[str, str]:
        """The fields of the named tuple of outputs, and their types."""
        fields = [re.sub(r"^_", "output_", f) for f in field_names(v.name for v in self.spec.outputs)]
        return dict(zip(fields, map(self._described, self.spec.outputs, results), strict=True))

    def _arrays(self) -> dict[str, str]:
        """The arrays that arguments become; the file's value for an optional one that is left out."""
        arrays = {}
        for argument, info in zip(self.arguments, self.inputs, strict=True):
            arrays[argument] = f"jnp.asarray({argument}, {_jnp(_dtype(info))})"
            if info.name in self.spec.optional:
                default = self.emitter.array(self.emitter.initializer(self.graph, info.name))
                arrays[argument] = f"{default} if {argument} is None else {arrays[argument]}"
        return arrays

    def _model(self, block: Block, renderer: Renderer, results: Sequence[Value], opening: Sequence[str]) -> list[str]:
        """The function ``model``; ``opening``: its lines that read the arguments."""
        defaults = {v.name: " | None = None" for v in self.spec.optional.values()}
        pairs = zip(self.arguments, self.inputs, strict=True)
        formals = ["params: dict[str, jax.Array]", *(f"{a}: jax.Array{defaults.get(v.name, '')}" for a, v in pairs)]
        formals += ["*", "rng: jax.Array"] if self.emitter.draws else []
        signature = f"({', '.join(formals)}) -> {'Outputs' if len(results) > 1 else 'jax.Array'}:"
        docstring = [f"    {line}".rstrip() for line in self._docstring(results)]
        names = {f"input {i}": argument for i, argument in enumerate(self.arguments)} | self.extents
        block.formals = "".join(map(mark, names))
        return tidy([*renderer.function(block, signature, [*docstring, *opening], names)])

    def _unpacked(self, block: Block) -> tuple[list[str], set[str]]:
        """Lines that name the extents that the model reads; references that are read, those of the inputs included."""
        read = block.used
        read |= {f"input {k}" for r, (k, _) in self.places.items() if r in read}
        lines = []
        for i, argument in enumerate(self.arguments):
            axes = {axis: self.extents[r] for r, (k, axis) in self.places.items() if k == i and r in read}
            if len(axes) == 1:
                ((axis, name),) = axes.items()
                lines.append(f"    {name} = {argument}.shape[{axis}]")
            elif axes:
                rank = len(self.inputs[i].shape or ())
                lines.append(f"    {', '.join(axes.get(a, '_') for a in range(rank))} = {argument}.shape")
        return lines, read

    def _docstring(self, results: Sequence[Value]) -> list[str]:
        lines = ['"""Apply the network.', "", *self._conditional(), "Args:"]
        lines += ["    params: by ONNX name, as `load_params` returns them."]
        for argument, info, value in zip(self.arguments, self.inputs, self.values, strict=True):
            default = "; the file's value when left out" if info.name in self.spec.optional else ""
            lines.append(f"    {argument}: {self._described(info, value)}{default}.")
        if self.emitter.draws:
            lines.append("    rng: a random key.")
        lines += ["", "Returns:"]
        single = self._described(self.spec.outputs[0], results[0])
        lines.append(f"    {single if len(results) == 1 else 'Outputs, a named tuple'}.")
        return [*lines, '"""']

    def _conditional(self) -> list[str]:
        """What the docstring says of Ifs whose branches are both traced."""
        if not (deciding := self.emitter.conditional):
            return []
        (name, *others), inputs = deciding, dict.fromkeys(n for names in deciding.values() for n in names)
        static = ", ".join(f"'{plain(n)}': value" for n in inputs)
        return [
            f"JAX traces both branches of If '{plain(name)}'{f' and {len(others)} more' if others else ''}.",
            "Where one does not support the shapes of a call, fix the condition before writing the source:",
            f"convert(..., static={{{static if 0 < len(static) <= 80 else '...'}}}).",
            "",
        ]

    def _described(self, info: ValueInfo, value: Value) -> str:
        """The type of an input or an output, with the names that the file declares for extents."""
        if not isinstance(info.type, TensorType):
            return "as the model declares it" if info.type is None else str(info.type)
        dtype = info.type.dtype if value.dtype is None else value.dtype
        computed: Any = info.shape if value.shape is None else value.shape
        if computed is None:
            return str(dtype)
        declared = info.shape if info.shape is not None and len(info.shape) == len(computed) else repeat(None)
        names = {(self.inputs[k].shape or ())[axis]: self.extents[r] for r, (k, axis) in self.places.items()}
        shape = []
        for d, name in zip(computed, declared, strict=False):
            text = names.get(name, "") if name else ""
            if not text and value.shape is not None:
                text = substituted(extent(d), self.extents.__getitem__)
            shape.append(str(d) if isinstance(d, int) else text if 0 < len(text) <= 40 else "?")
        return f"{dtype}[{', '.join(shape)}]"


def _jnp(dtype: np.dtype) -> str:
    return "bool" if dtype == np.bool_ else f"jnp.{dtype.name}"


def _dtype(value: ValueInfo) -> np.dtype:
    assert isinstance(value.type, TensorType)
    return value.type.dtype
