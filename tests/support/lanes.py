"""Every way to evaluate a model, which have to agree: a call, ``run``, a caller's jit, in the background, constants."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import onnx
from onnx import compose, numpy_helper

import onnx2jax
from onnx2jax import compat
from onnx2jax.errors import KnownValueError, OnnxError
from onnx2jax.eval.values import to_host
from onnx2jax.ops import registry
from tests.support import emitters
from tests.support.drawing import is_float
from tests.support.edges import Edge

TOLERANCE = {"float32": 2e-4, "complex64": 2e-4, "float64": 1e-9, "complex128": 1e-9, "float16": 4e-3}
"""Relative to each value, and a hundredth of it to the largest finite one, by which sums are rounded; else 4e-2."""
MOST_TRIPS = 1000


def constants(edge: Edge, names: set[str] | None = None) -> tuple[onnx.ModelProto, dict[str, Any]]:
    """The model with its tensors, or those of some names, as initializers; and the inputs that are left."""
    proto = onnx.ModelProto()
    proto.CopyFrom(edge.proto)
    tensors = {n: x for n, x in edge.feeds.items() if isinstance(x, np.ndarray) and (names is None or n in names)}
    kept = [v for v in proto.graph.input if v.name not in tensors]
    del proto.graph.input[:]
    proto.graph.input.extend(kept)
    proto.graph.initializer.extend(numpy_helper.from_array(np.asarray(x, order="C"), n) for n, x in tensors.items())
    return proto, {v.name: edge.feeds[v.name] for v in kept}


def _answer(call: Callable[[], Any]) -> Any:
    """The outputs on the host, or an error of ours; any other exception is a failure."""
    try:
        return leaves(call())
    except OnnxError as error:
        return error


def leaves(results: Any) -> list[Any]:
    """The arrays and other values of nested outputs."""
    results = list(results) if isinstance(results, list | tuple) else [results]
    return [np.asarray(x) for x in jax.tree.leaves(to_host(results))]


def answers(edge: Edge) -> dict[str, Any]:
    """What each lane gives: arrays, or an error of ours; "convert" alone for a model that is refused."""
    try:
        model = onnx2jax.convert(edge.proto, max_trips=MOST_TRIPS)
    except OnnxError as error:
        return {"convert": error}
    feeds = dict(edge.feeds)
    background = onnx2jax.convert(edge.proto, max_trips=MOST_TRIPS, background_compile=True)
    lanes: dict[str, Callable[[], Any]] = {
        "first run": lambda: model.run(None, feeds),
        "run": lambda: model.run(None, feeds),  # of tiny programs, all runs but the first are NumPy's
        "call": lambda: model(feeds),
        "background": lambda: background.run(None, feeds),
        "constants": lambda: _constant(edge),
        "jit": lambda: _jitted(model, feeds),
    }
    with emitters.newer():
        return {name: _answer(lane) for name, lane in lanes.items() if name != "jit" or _takes_jit(model, edge)}


def _takes_jit(model: onnx2jax.Model, edge: Edge) -> bool:
    """Whether a caller may jit the model, whose operands JAX has to know."""
    return model.jitted and not any(
        str(getattr(x, "dtype", "")).startswith(("float6", "object")) for x in edge.feeds.values()
    )


def _constant(edge: Edge) -> Any:
    proto, feeds = constants(edge)
    return onnx2jax.convert(proto, max_trips=MOST_TRIPS).run(None, feeds)


def _jitted(model: onnx2jax.Model, feeds: Mapping[str, Any]) -> Any:
    with compat.enable_x64():
        return jax.jit(model.apply, compiler_options=dict(emitters.NEWER))(model.params, feeds)


def together(able: Sequence[Edge]) -> dict[str, Any]:
    """The answers of each lane to one model of all edges, which share their operator sets and answer alone.

    Operands that have to be known are initializers in every lane.
    """
    proto = onnx.ModelProto(ir_version=able[0].proto.ir_version, opset_import=able[0].proto.opset_import)
    proto.graph.name = "edges"
    feeds, sizes = {}, set()
    for n, edge in enumerate(able):
        graph = compose.add_prefix(edge.proto, f"{n}/").graph
        for field in ("node", "input", "output"):
            getattr(proto.graph, field).extend(getattr(graph, field))
        feeds |= {f"{n}/{name}": x for name, x in edge.feeds.items()}
        sizes |= {f"{n}/{name}" for name in edge.sizes}
    return answers(Edge("edges", *constants(Edge("", proto, feeds), sizes)))


def answers_alone(edge: Edge) -> bool:
    """Whether a model answers known operands and, with sizes known, traced ones as one program."""
    return refusals(edge) == (None, None)


def refusals(edge: Edge) -> tuple[OnnxError | None, OnnxError | None]:
    """The errors of traced operands, but for known sizes, as one program, and of known ones; None for an answer."""
    proto, feeds = constants(edge, edge.sizes)
    traced = known = None
    try:
        model = onnx2jax.convert(proto, max_trips=MOST_TRIPS)
        if not _takes_jit(model, edge):
            raise KnownValueError("no caller may jit the model")
        with compat.enable_x64():
            jax.eval_shape(_numbers(model), model.params, *([feeds] if feeds else []))
    except OnnxError as error:
        traced = error
    try:
        with emitters.newer():
            _constant(edge)
    except OnnxError as error:
        known = error
    return traced, known


def _numbers(model: onnx2jax.Model) -> Callable[..., Any]:
    """``model.apply``, with an error of ours for strings, which no function that JAX traces returns."""

    def apply(*args: Any) -> Any:
        results = model.apply(*args)
        if any(isinstance(x, np.ndarray) and x.dtype.hasobject for x in jax.tree.leaves(results)):
            raise KnownValueError("an output has strings")
        return results

    return apply


def differences(ours: Sequence[Any], theirs: Sequence[Any]) -> Iterator[str]:
    """What differs between two lists of outputs, output by output."""
    if len(ours) != len(theirs):
        yield f"{len(ours)} and {len(theirs)} values"
        return
    for n, (x, y) in enumerate(zip(ours, theirs, strict=True)):
        if "O" in x.dtype.kind + y.dtype.kind:
            if [*map(str, x.flat)] != [*map(str, y.flat)]:
                yield f"output {n} is {x.tolist()} and {y.tolist()}"
        elif (x.dtype, x.shape) != (y.dtype, y.shape):
            yield f"output {n} is {x.dtype}{[*x.shape]} and {y.dtype}{[*y.shape]}"
        elif not (same := _same(x, y)).all():
            places = np.flatnonzero(~same)[:3]
            yield f"output {n}, {x.dtype} at {places.tolist()}: {x.flat[places].tolist()} and {y.flat[places].tolist()}"


def _same(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Where two arrays agree: floats up to rounding, all others exactly."""
    if x.dtype.kind != "c" and not is_float(x.dtype):
        return np.asarray(x == y)
    wide = np.complex128 if x.dtype.kind == "c" else np.float64
    tolerance = TOLERANCE.get(x.dtype.name, 4e-2)
    with np.errstate(all="ignore"):
        a, b = x.astype(wide), y.astype(wide)
        largest = np.abs(b[np.isfinite(b)]).max(initial=0)
        return np.asarray(np.isclose(a, b, tolerance, tolerance * largest / 100, equal_nan=True))


def _raises_if_known(error: OnnxError) -> bool:
    """Whether docs/operators.md says that the operator of an error raises if it knows what it rejects."""
    found = re.match(r"node .* \((?:(\S+)\.)?(\w+), opset (\d+)\)", str(error))
    operator = found and registry.resolve(found[1] or "", found[2], int(found[3]))
    return operator is not None and "if known" in operator.limits


def problems(found: Mapping[str, Any]) -> list[str]:
    """What lanes say otherwise than ``run``.

    Some operators raise only if they know what they reject, such as an index; a caller's jit knows no values. Otherwise
    all answer, or all raise.
    """
    said, run = [], found.get("run")
    for lane, answer in found.items():
        raises = isinstance(answer, OnnxError), isinstance(run, OnnxError)
        if raises == (True, True) or run is None:
            continue
        if raises == (True, False):
            excused = KnownValueError if lane == "jit" else ()
            if not isinstance(answer, excused) and not (lane == "constants" and _raises_if_known(answer)):
                said.append(f"{lane} raises where run answers: {answer}")
        elif raises == (False, True):
            if not isinstance(run, KnownValueError):
                said.append(f"{lane} answers where run raises: {run}")
        else:
            said += [f"run and {lane}: {difference}" for difference in differences(run or [], answer)]
    return said
