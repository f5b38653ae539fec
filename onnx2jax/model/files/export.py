"""Exports a model by ``jax.export``: a program that runs with jax alone, or portable StableHLO for other compilers."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import jax
import numpy as np
from jax import export as jax_export

from ... import compat, progress
from ...errors import (
    InputNameError,
    InputShapeError,
    InputValueError,
    KnownValueError,
    OnnxError,
    OperatorError,
    ShardingError,
    UnsupportedError,
)
from ...proto import atomic
from ...proto.files import path_of
from ...proto.types import TensorType, ValueInfo
from ...sharding.stages import Staged
from ..calls.dims import named_dims
from ..calls.outputs import exportable
from .extents import STEPS, free_dimensions, images, in_symbols, needed_multiples, symbolic, symbols_in
from .requirements import (
    PREFIX,
    explained,
    fixed_extents,
    node_of_primitive,
    requirements,
    suggested,
    without_internals,
)

ABOUT: Final = "about.json"
"""The order of inputs and outputs, which JAX sorts, and the checksum of the program."""
PROGRAM: Final = "program.bin"
"""The serialized ``jax.jax_export.Exported``: a function of weights by name, inputs by name and, if it draws, a key."""
WEIGHTS: Final = "weights.npz"
BYTECODE: Final = "program.mlirbc"
"""Portable StableHLO: a function ``main`` of positional arrays, which about.json lists."""
TEXT: Final = "program.mlir"
FILES: Final = (PROGRAM, BYTECODE, WEIGHTS, TEXT)
PLATFORMS: Final = ("cpu", "cuda", "rocm", "tpu")
MOST: Final = 16
"""The constraints that export finds by itself."""
SEARCH_SECONDS: Final = 20.0
"""Seconds after the first attempt in which another one, with more constraints, may start."""
WERE_SYMBOLIC: Final = " were symbolic"
"""In a note of advice that holds for any program; where the fix is known, it is left out."""
_LOGGER: Final = logging.getLogger("onnx2jax.export")
KEY: Final = "rng"
"""The argument of a model that draws random numbers: two words, ``jax.random.key_data`` of a threefry key."""


def export(
    model: Any,
    path: str | os.PathLike[str],
    dims: Mapping[str, int | str],
    constraints: Sequence[str],
    platforms: Sequence[str] | None,
    weights: Literal["beside", "inside"],
    text: bool,
    format: Literal["jax", "stablehlo"],
    vjp_order: int,
) -> Path:
    """Write a model as a program of ``jax.export``; see ``Exports.export``."""
    _check_arguments(format, platforms, weights, vjp_order)
    folder = path_of(path)
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{str(folder)!r} is a file; export writes a folder")
    _check(model)
    params = dict(model.params) if weights == "beside" else {}
    names = {"inputs": [v.name for v in model.inputs], "outputs": [v.name for v in model.outputs]}
    about: dict[str, Any] = {"format": format, **names, "constraints": [], "jax": jax.__version__}
    with compat.enable_x64(), explained(lambda: free_dimensions(model.inputs, dims)):
        if format == "stablehlo":
            shapes = symbolic(model.inputs, dims, in_symbols(model.inputs, dims, constraints))
            positional = _positional(model, *_function(model, params, shapes))
            exported = _lowered(model, positional, platforms or ("cpu",), shapes)
            name, program = BYTECODE, exported.mlir_module_serialized
            about |= _signature(model, exported, params)
        else:
            exported, multiples, bounds = _with_multiples(model, params, dims, constraints, platforms)
            name, program = PROGRAM, _serialized(exported, vjp_order)
            about |= {"constraints": bounds} | ({"multiples": multiples} if multiples else {})
    files: dict[str, atomic.Write] = {name: lambda file: file.write(program)}
    if params:
        files[WEIGHTS] = partial(_write_weights, params)
    if text:
        files[TEXT] = lambda file: file.write(exported.mlir_module().encode())
    _write(folder, {**about, "sha256": digest(names, program)}, files)
    return folder


def _check_arguments(format: str, platforms: Sequence[str] | None, weights: str, vjp_order: int) -> None:
    if format not in ("jax", "stablehlo"):
        raise InputNameError(f"format is {format!r}; it is 'jax' or 'stablehlo'")
    if format == "jax":
        compat.optional("flatbuffers", "export")
    if isinstance(platforms, str):
        raise InputNameError(f"platforms is {platforms!r}; it is a list, such as ['cpu', 'cuda']")
    if platforms is not None and (
        unknown := sorted(set(platforms) - set(PLATFORMS)) or (not platforms and ["nothing"])
    ):
        gpu = "; NVIDIA's GPUs are 'cuda', AMD's 'rocm'" if "gpu" in platforms else ""
        raise InputNameError(f"platforms names {unknown}; there are {', '.join(PLATFORMS)}{gpu}")
    if format == "stablehlo" and platforms is not None and len(platforms) > 1:
        raise InputNameError(f"platforms is {list(platforms)}; a StableHLO program is lowered for one: ['cpu']")
    if isinstance(vjp_order, bool) or not isinstance(vjp_order, int) or vjp_order < 0:
        raise InputValueError(f"vjp_order is {vjp_order!r}; it is a number of gradients: 0, 1, ...")
    if format == "stablehlo" and vjp_order:
        raise InputValueError("a StableHLO program has no gradient: leave out vjp_order=, or pass format='jax'")
    if weights not in ("beside", "inside"):
        raise InputNameError(f"weights is {weights!r}; it is 'beside' (a file next to the program) or 'inside'")


def _function(model: Any, params: Mapping[str, Any], shapes: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    """The model as a function of weights by name, inputs by name and perhaps a key; and the arguments' types."""

    def program(weights: Mapping[str, Any], inputs: Mapping[str, Any], *rng: Any) -> dict[str, Any]:
        results = model.apply(weights, *(inputs[v.name] for v in model.inputs), rng=rng[0] if rng else None)
        return {v.name: r for v, r in zip(model.outputs, exportable(model.outputs, results), strict=True)}

    program.__name__ = re.sub(r"\W", "_", model.graph.name) or "onnx_model"
    weights = {n: jax.ShapeDtypeStruct(np.shape(v), v.dtype) for n, v in params.items()}
    inputs = {v.name: jax.ShapeDtypeStruct(shapes[v.name], v.type.dtype) for v in model.inputs}
    keys = [jax.eval_shape(lambda: jax.random.key(0))] if model.graph.draws else []
    return program, [weights, inputs, *keys]


def _with_multiples(
    model: Any,
    params: Mapping[str, Any],
    dims: Mapping[str, int | str],
    constraints: Sequence[str],
    platforms: Sequence[str] | None,
) -> tuple[jax_export.Exported, dict[str, int], list[str]]:
    """The program, the numbers of which free dimensions are multiples (powers of two up to STEPS), and constraints.

    JAX refuses what some extents refuse. Sizes of images, which are axes from the third on, then get coarser steps:
    those that ``needed_multiples`` finds, and where JAX does not see that they suffice, coarser ones. Bounds and equal
    extents are read from messages (see requirements.py).
    """
    if model.spec.groups is None:
        multiples = needed_multiples(model.spec.with_static, model.inputs, dims, constraints)
    else:
        multiples = model.spec.groups.multiples(dims)
    if multiples:
        _LOGGER.info("%s, as nodes refuse others", _steps(multiples))
    candidates, learnt = images(model.inputs, dims), list[str]()
    free = free_dimensions(model.inputs, dims)
    first: Exception | None = None
    deadline: float | None = None
    while True:
        bounds = [*in_symbols(model.inputs, dims, constraints, multiples), *learnt]
        shapes = symbolic(model.inputs, dims, bounds, multiples)
        try:
            function, types = _function(model, params, shapes)
            names = platforms or ("cpu", "cuda", "tpu")
            under = f", with {len(bounds)} constraint{'s' * (len(bounds) > 1)} on dimensions" if bounds else ""
            with progress.stage(f"lowering for {', '.join(names)}{under}"):
                return _lowered(model, (jax.jit(function), types), names, shapes), multiples, bounds
        except (UnsupportedError, OperatorError, KnownValueError) as e:
            first = first or e
            if fixes := _fixes(str(e), model.inputs, free, multiples):
                e.message = f"{e.message}\n{fixes}"
                vars(e)["__notes__"] = [n for n in e.__notes__ if WERE_SYMBOLIC not in n]
                raise
            deadline = deadline or time.monotonic() + SEARCH_SECONDS
            if time.monotonic() > deadline:
                names = [*candidates] or [*free.values()]
                first.add_note(
                    f"export looked {SEARCH_SECONDS:.0f} s for constraints, and found {bounds}: fix these dimensions: "
                    f"dims={dict.fromkeys(names, 64)} or {' '.join(f'--dim {n}=64' for n in names)}"
                )
                raise first from first.__cause__
            new = requirements(str(e), free, bounds)
            if new and len(learnt) < MOST:
                learnt, first = learnt + new, None
                _LOGGER.info("another attempt, which requires %s", ", ".join(new))
                continue
            named = _named(str(e), candidates) or _named("\n".join(e.__notes__), candidates)
            steps = {n: 2 * multiples.get(n, 1) for n in named}
            if isinstance(e, KnownValueError) or not steps or max(steps.values()) > STEPS:
                raise first from first.__cause__
            multiples, learnt = multiples | steps, []  # bounds are of symbols, which count other steps now
            _LOGGER.info("another attempt, with %s", _steps(steps))


def _steps(multiples: Mapping[str, int]) -> str:
    return ", ".join(f"{n} a multiple of {k}" for n, k in multiples.items())


def _fixes(message: str, inputs: Sequence[ValueInfo], free: Mapping[str, str], multiples: Mapping[str, int]) -> str:
    """The dimensions that have to be fixed, and how, if shapes in a message agree for few of their extents."""
    lines = []
    for symbol, fits in fixed_extents(message, free).items():
        name = free[symbol]
        axes = [(v.name, i) for v in named_dims(inputs) for i, d in enumerate(v.shape or ()) if d == name]
        where = ", ".join(f"axis {i} of input {of!r}" for of, i in axes)
        factor = multiples.get(name, 1)
        least, greatest, extent = (factor * n for n in (fits[0], fits[-1], suggested(fits)))
        between = f"{least} to {greatest}" if len(fits) > 1 else f"{least}"
        lines.append(
            f"the model needs a fixed dimension {name!r} ({where}), of {between}: dims={{{name!r}: {extent}}}, or "
            f"--dim {name}={extent}"
        )
    return "\n".join(lines)


def _named(text: str, symbols: Mapping[str, str]) -> list[str]:
    """The dimensions whose symbols a message contains."""
    words = set(re.findall(r"\w+", text))
    return [n for n, symbol in symbols.items() if symbol in words]


def _lowered(
    model: Any, program: tuple[Any, Sequence[Any]], platforms: Sequence[str], shapes: Mapping[str, Any]
) -> jax_export.Exported:
    """The exported program of a model's jitted function and its arguments' types; call it in 64-bit mode."""
    function, arguments = program
    try:
        return jax_export.export(function, platforms=platforms)(*arguments)
    except KnownValueError as e:
        e.add_note("export writes a model that is one program; model.explain() shows its stages after a call")
        raise
    except (OnnxError, ValueError, TypeError, NotImplementedError, jax.errors.InconclusiveDimensionOperation) as e:
        error = e if isinstance(e, OnnxError) else UnsupportedError(f"{PREFIX}{without_internals(str(e))}")
        vars(error)["__notes__"] = [*getattr(e, "__notes__", ())]
        if error is not e and (where := node_of_primitive(str(e), function, arguments, model.graph)):
            error.add_note(where)
        if symbols := _symbolic(shapes):
            error.add_note(_advice(symbols, free_dimensions(model.inputs, {})))
        if error is e:
            raise
        raise error from e


def _advice(extents: Sequence[str], names: Mapping[str, str]) -> str:
    """What may be done about symbolic extents, of dimensions whose ``names`` are given by symbol."""
    words = dict.fromkeys(word for extent in extents for word in sorted(symbols_in(extent)))
    free = [names.get(word, word) for word in words]
    fixed = next((n for n in free if n in names.values()), "batch")
    return (
        f"dimensions {', '.join(free)}{WERE_SYMBOLIC}: fix some (dims={{{fixed!r}: 64}}, --dim {fixed}=64), express "
        "some by others (dims={'total': 'past + sequence'}) or as multiples (dims={'height': '32*height'}), or add "
        "constraints (constraints=['sequence <= 512'])"
    )


def _check(model: Any) -> None:
    """Raise for models that no exported program can represent."""
    if model.placement is not None:
        option = "stages=" if isinstance(model.placement, Staged) else "mesh="
        raise ShardingError(f"the model is on several devices, and a program is for one: convert it without {option}")
    for info in model.inputs:
        if not isinstance(info.type, TensorType) or info.type.dtype.hasobject:
            fix = f": fix it, convert(..., static={{{info.name!r}: strings}})" if info.shape is not None else ""
            raise UnsupportedError(f"input {info} is no tensor of numbers; an exported program takes only those{fix}")


def _serialized(exported: jax_export.Exported, vjp_order: int) -> bytes:
    try:
        return bytes(exported.serialize(vjp_order=vjp_order))
    except KeyError as e:
        raise UnsupportedError(f"an input or output is of {e.args[0]}, which jax.export cannot store") from None
    except (OnnxError, ValueError, TypeError, NotImplementedError, jax.errors.InconclusiveDimensionOperation) as e:
        if not vjp_order:
            raise
        reason = e.message if isinstance(e, OnnxError) else without_internals(str(e))
        raise UnsupportedError(
            f"JAX cannot export the gradient: {reason}\nexport the model without it, vjp_order=0, or with fixed extents"
        ) from e


def _write(folder: Path, about: Mapping[str, Any], files: Mapping[str, atomic.Write]) -> None:
    def described(placed: Mapping[Path, Path]) -> bytes:
        provisional = {path.name: copy.name for path, copy in placed.items() if copy != path}
        return json.dumps({**about} | ({"files": provisional} if provisional else {}), indent=2).encode()

    folder.mkdir(parents=True, exist_ok=True)
    older = {*FILES, *files_of(folder).values()}
    atomic.replace_all(folder / ABOUT, {folder / name: write for name, write in files.items()}, described)
    for name in older - files.keys():  # of an older program
        (folder / name).unlink(missing_ok=True)


def files_of(folder: Path) -> dict[str, str]:
    """The names of an exported program's files; about.json has provisional ones if a write was killed."""
    try:
        names = dict(json.loads((folder / ABOUT).read_text())["files"])
    except (OSError, ValueError, KeyError, TypeError):
        names = {}
    return {n: names[n] if atomic.is_provisional(str(names.get(n)), n) else n for n in FILES}


def digest(names: Mapping[str, Sequence[str]], program: bytes) -> str:
    """The checksum of a program and the names of its inputs and outputs."""
    return hashlib.sha256(json.dumps([names["inputs"], names["outputs"]]).encode() + program).hexdigest()


def _write_weights(params: Mapping[str, Any], file: Any) -> None:
    atomic.write_npz(file, params)
    file.seek(0)
    with np.load(file) as written:
        # NumPy finds an array by its name with and without ".npy", and truncates it at NUL.
        if invalid := [n for n in params if n not in written.files or f"{n}.npy" in params]:
            raise UnsupportedError(f"weights cannot be called {invalid} in an .npz file: export(..., weights='inside')")


def _positional(model: Any, program: Callable[..., dict[str, Any]], types: Sequence[Any]) -> tuple[Any, list[Any]]:
    """A model as a jitted function of inputs, a key's words if it draws, and weights; and the arguments' types.

    Args:
        model: the model.
        program, types: it as a function of weights by name, inputs by name and perhaps a key, and their types.

    Raises:
        InputShapeError: an extent is symbolic.
    """
    weights, inputs, *keys = types
    if names := _symbolic({name: kind.shape for name, kind in inputs.items()}):
        raise InputShapeError(
            f"dimensions {', '.join(names)} are free, and a StableHLO program has fixed extents: "
            f"export(..., format='stablehlo', dims={{{', '.join(f'{n!r}: 1' for n in names)}}})"
        )
    words = [jax.ShapeDtypeStruct((2,), "uint32") for _ in keys]

    def main(*arrays: Any) -> tuple[Any, ...]:
        rest = iter(arrays)
        feeds = {name: next(rest) for name in inputs}
        rng = [jax.random.wrap_key_data(next(rest), impl="threefry2x32") for _ in words]
        results = program({name: next(rest) for name in weights}, feeds, *rng)
        for info in model.outputs:
            if isinstance(results[info.name], list):
                raise UnsupportedError(
                    f"output {info} is a sequence, and a StableHLO program returns arrays: format='jax' returns it, "
                    "or leave it out, model.cut(outputs=[...])"
                )
        return tuple(results[v.name] for v in model.outputs)

    return jax.jit(main, keep_unused=True), [*inputs.values(), *words, *weights.values()]


def _signature(model: Any, exported: jax_export.Exported, params: Mapping[str, Any]) -> dict[str, Any]:
    """The function's arguments and results, for about.json.

    Raises:
        UnsupportedError: the program calls functions of XLA.
    """
    if calls := sorted(set(re.findall(r"custom_call @([\w.$]+)", exported.mlir_module()))):
        raise UnsupportedError(
            f"the program calls {', '.join(calls)}, which XLA for {exported.platforms[0]} has and StableHLO has not: "
            "export(..., platforms=['tpu']) may do without, and format='jax' keeps them"
        )
    names = [("input", v.name) for v in model.inputs] + [("key", KEY)] * bool(model.graph.draws)
    names += [("weight", name) for name in params]
    return {
        "function": "main",
        "platform": exported.platforms[0],
        "arguments": [
            {"name": name, "kind": kind, "dtype": aval.dtype.name, "shape": aval.shape}
            for (kind, name), aval in zip(names, exported.in_avals, strict=True)
        ],
        "results": [
            {"name": v.name, "dtype": aval.dtype.name, "shape": aval.shape}
            for v, aval in zip(model.outputs, exported.out_avals, strict=True)
        ],
    }


def _symbolic(shapes: Mapping[str, Sequence[Any]]) -> list[str]:
    """The extents that are symbolic, in order."""
    return list(dict.fromkeys(str(d) for shape in shapes.values() for d in shape if not isinstance(d, int)))
