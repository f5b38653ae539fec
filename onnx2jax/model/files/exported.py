"""Loads programs that ``Model.export`` wrote."""

from __future__ import annotations

import copy
import json
import os
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import export
from jax.tree_util import DictKey

from ... import compat
from ...errors import (
    InputShapeError,
    InputTypeError,
    ModelError,
    OnnxError,
    RandomKeyError,
    UnsupportedError,
)
from ...eval.values import to_host
from ...printed import Printed
from ...proto.files import path_of
from ...proto.mapped import owned
from ...proto.types import TensorType, ValueInfo
from ..calls import arguments
from ..calls.outputs import bundled, field_names, positions
from .export import ABOUT, BYTECODE, PROGRAM, WEIGHTS, digest, files_of
from .extents import check_extents


class ExportedModel(Printed):
    """A program that ``Model.export`` wrote, called like the model; created by ``load_exported``.

    A pytree of its weights by name, as a Model is; all else is static.

    Attributes:
        inputs: in order; each has ``name`` and ``type`` (``dtype``, ``shape`` with symbolic dimensions as strings).
        outputs: the names of the outputs, in order.
        platforms: the platforms that it was lowered for.
        exported: the ``jax.export.Exported``; ``exported.mlir_module()`` is its StableHLO.
    """

    def __init__(self, exported: export.Exported, about: Mapping[str, Any], params: Mapping[str, Any]) -> None:
        (_, types, *keys), _ = jax.tree.unflatten(exported.in_tree, exported.in_avals)
        self.inputs: tuple[ValueInfo, ...] = tuple(ValueInfo(n, _as_type(types[n])) for n in about["inputs"])
        self.outputs: tuple[str, ...] = tuple(about["outputs"])
        self.platforms: tuple[str, ...] = tuple(exported.platforms)
        self.exported: export.Exported = exported
        self._draws, self._constraints = bool(keys), about.get("constraints", ())
        self._fields = field_names(self.outputs)
        self._jitted = jax.jit(exported.call if exported.has_vjp() else _without_vjp(exported))
        self._names = tuple(params)
        self._static = copy.copy(self)  # compared by identity; without weights, which JAX would keep alive with it
        self._params = {n: owned(v) for n, v in params.items()}
        with compat.enable_x64(), compat.outside():
            self._weights = {n: jax.device_put(v) for n, v in self._params.items()}

    @property
    def params(self) -> dict[str, Any]:
        """The weights by name: a new dict of arrays that nobody can write; empty if the program contains them."""
        return dict(self._params)

    def __call__(self, /, *args: Any, rng: Any = None, **named: Any) -> Any:
        """Run the program.

        Args:
            *args: inputs in order, or a dict of them by name.
            rng: random key, or a seed for one; required when the model draws random numbers, and only then.
            **named: inputs by name.

        Returns:
            As for a Model: the output, or a named tuple when there are several, of JAX arrays.

        Raises:
            InputError: the arguments do not match ``inputs``, or extents violate its constraints.
            RandomKeyError: ``rng`` is missing.
            UnsupportedError: the program was not lowered for this machine; ``jax.vmap`` maps the call, or ``jax.grad``
                differentiates a program without a gradient, ``export(..., vjp_order=1)``.
        """
        results = self._results(args, named, rng)
        return bundled(self._fields, [results[n] for n in self.outputs])

    def run(self, output_names: str | Sequence[str] | None, feeds: Mapping[str, Any], *, rng: Any = None) -> list[Any]:
        """Run the program as ``Model.run`` does: NumPy in, a list of NumPy out.

        Args:
            output_names: names of the outputs to return, in order, or one name; None for all.
            feeds: inputs by name.
            rng: as for a call.

        Raises:
            InputError, RandomKeyError, UnsupportedError: as for a call; an output is unknown.
        """
        wanted = range(len(self.outputs)) if output_names is None else positions(output_names, self.outputs)
        results = self._results((feeds,), {}, rng)
        return [to_host(results[self.outputs[i]]) for i in wanted]

    def _results(self, args: Sequence[Any], named: dict[str, Any], rng: Any) -> dict[str, Any]:
        """The outputs by name."""
        if self._draws and rng is None:
            raise RandomKeyError("the model draws random numbers: pass a key, rng=jax.random.key(0)")
        self._check_platform()
        with compat.enable_x64():
            if rng is not None and not self._draws:
                named, rng = {**named, "rng": rng}, None  # it may be an input
            values = arguments.bind(self.inputs, {}, args, named)
            check_extents(self.inputs, values, self._constraints)
            keys = [arguments.as_key(rng)] if self._draws else []
            try:
                return self._jitted(self._weights, values, *keys)
            except ValueError as e:
                shapes = ", ".join(f"{n}: {list(np.shape(v))}" for n, v in values.items())
                where = "".join(f", where {c}" for c in self._constraints)  # missing in JAX's message
                raise InputShapeError(f"the exported program is {self!r}{where}, and is given {shapes}: {e}") from None
            except NotImplementedError as e:
                if "call_exported" not in str(e):
                    raise
                raise UnsupportedError(
                    "jax.vmap cannot map an exported program: call it with the batch, or, on samples one by one, by "
                    "jax.lax.map in place of jax.vmap"
                ) from None

    def __repr__(self) -> str:
        inputs = ", ".join(map(str, self.inputs))
        return f"ExportedModel: ({inputs}) -> ({', '.join(self.outputs)}) for {', '.join(self.platforms)}"

    def _check_platform(self) -> None:
        backend = jax.default_backend()
        if backend not in self.platforms and not (backend == "gpu" and {"cuda", "rocm"}.intersection(self.platforms)):
            raise UnsupportedError(
                f"the program is for {', '.join(self.platforms)}, and this machine has {backend}: "
                f"export(..., platforms=[{backend!r}])"
            )


def _without_vjp(exported: export.Exported) -> Callable[..., Any]:
    """The program as a function whose differentiation raises where it starts, rather than in a backward pass."""

    def reject(*_: Any) -> Any:
        raise UnsupportedError(
            "the exported program has no gradient: export the model with it, export(..., vjp_order=1)"
        )

    call = jax.custom_vjp(lambda *arguments: exported.call(*arguments))
    call.defvjp(reject, reject)
    return call


def _of_leaves(static: ExportedModel, leaves: Iterable[Any]) -> ExportedModel:
    """The program with other weights, which are checked when it is called."""
    model, weights = copy.copy(static), dict(zip(static._names, leaves, strict=True))
    vars(model).update(_static=static, _params=weights, _weights=weights)
    return model


jax.tree_util.register_pytree_with_keys(
    ExportedModel,
    lambda model: ([(DictKey(n), v) for n, v in model._weights.items()], model._static),
    _of_leaves,
    lambda model: (tuple(model._weights.values()), model._static),
)


def load_exported(path: str | os.PathLike[str]) -> ExportedModel:
    """Read a program that ``Model.export`` wrote.

    Args:
        path: the folder. The values in its ``weights.npz`` may be replaced, with the same types and shapes.

    Raises:
        ModelError: a file in the folder is missing or damaged.
        InputNameError, InputTypeError, InputShapeError: the weights do not match the program.
        ImportError: flatbuffers is not installed.

    >>> import onnx2jax, tempfile
    >>> model = onnx2jax.convert(onnx2jax.demo_model())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     onnx2jax.load_exported(model.export(folder, dims={"batch": 8}, platforms=["cpu"]))
    ExportedModel: (image: float32[8, 1, 8, 8]) -> (logits) for cpu
    """
    compat.optional("flatbuffers", "export")
    folder = path_of(path)
    files = files_of(folder)
    if (folder / files[BYTECODE]).is_file() and not (folder / files[PROGRAM]).is_file():
        raise ModelError(f"{str(folder)!r} is a StableHLO program for other compilers: export(..., format='jax')")
    if not folder.is_dir():
        what = "is a file; give the folder that export wrote" if folder.exists() else "does not exist"
        raise ModelError(f"{str(folder)!r} {what}")
    if missing := [n for n in (ABOUT, files[PROGRAM]) if not (folder / n).is_file()]:
        raise ModelError(f"{str(folder)!r} is no exported model: it has no {missing[0]}")
    program = (folder / files[PROGRAM]).read_bytes()
    try:
        about = json.loads((folder / ABOUT).read_text())
        intact = about["sha256"] == digest(about, program)
    except (ValueError, KeyError, TypeError) as e:
        raise ModelError(f"{str(folder / ABOUT)!r} is damaged ({e!r})") from None
    if not intact:  # JAX does not check: a truncated program may deserialize as another
        raise ModelError(
            f"{str(folder / files[PROGRAM])!r} ({len(program)} bytes) is damaged, or not the program of {ABOUT}"
        )
    with compat.enable_x64():
        exported = export.deserialize(bytearray(program))
    types = jax.tree.unflatten(exported.in_tree, exported.in_avals)[0][0]
    return ExportedModel(exported, about, _weights(folder / files[WEIGHTS], types) if types else {})


def _weights(path: Path, types: Mapping[str, Any]) -> dict[str, np.ndarray]:
    if not path.is_file():
        raise ModelError(f"there is no {str(path)!r}, which has the program's weights")
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            arguments.check_names(dict.fromkeys(file.files), types)
            if missing := [n for n in types if n not in file.files]:
                raise ModelError(f"{str(path)!r} has no weight {missing[0]!r}")
            return {n: _checked(n, file[n], kind) for n, kind in types.items()}
    except OnnxError:
        raise
    except (zipfile.BadZipFile, EOFError, ValueError, TypeError) as e:
        raise ModelError(f"{str(path)!r} is damaged ({e})") from None


def _checked(name: str, array: np.ndarray, kind: Any) -> np.ndarray:
    if array.dtype.kind == "V" and array.dtype.itemsize == kind.dtype.itemsize:
        array = array.view(kind.dtype)  # NumPy's format has no bfloat16
    if array.dtype != kind.dtype:
        raise InputTypeError(f"weight {name!r} is {array.dtype}, and the program takes {kind.dtype}")
    if array.shape != kind.shape:
        raise InputShapeError(f"weight {name!r} has shape {list(array.shape)}, the program takes {list(kind.shape)}")
    return array


def _as_type(aval: Any) -> TensorType:
    return TensorType(np.dtype(aval.dtype), tuple(d if isinstance(d, int) else str(d) for d in aval.shape))
