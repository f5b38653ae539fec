"""What of an export works here: its outputs at each size, jit and gradients in 32 bits, seconds to be ready."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime

import onnx2jax

from .case import Case, Export

_NO_PEER = "onnxruntime: "
_NOT_FINITE = "not finite: "
FLOATS = (np.float16, np.float32, np.float64)


@dataclass
class Record:
    """A line of docs/exporters.md. A text where something failed, "" where there is nothing to say.

    Attributes:
        stages: 1 for one program.
        reasons: why there are several.
        peer: largest difference from onnxruntime's outputs, of the largest element; or why there is none.
        framework: the same from the framework's own.
        jit: ``jax.jit(model.apply)`` in 32-bit mode: "yes" or the error.
        grad: ``jax.jit(jax.grad(...))`` in 32-bit mode: difference from the framework's, "finite" where there is
            no framework to compare with, "" where nothing is floating, or the error.
        ready, peer_ready: seconds of processor time for conversion and first call; the same of onnxruntime.
    """

    family: str
    name: str
    exporter: str
    nodes: int = 0
    stages: int = 0
    reasons: str = ""
    peer: float | str = ""
    framework: float | str = ""
    jit: str = ""
    grad: float | str = ""
    ready: float = 0.0
    peer_ready: float = 0.0


def judge(case: Case, export: Export) -> tuple[Record, list[str]]:
    """The record of an export, and what is wrong with it that ``case.known`` does not excuse."""
    record = Record(case.family, case.name, case.exporter)
    began = time.process_time()
    with _as_users_compile():
        model = onnx2jax.convert(export.path)
        ours = [_plain(model.run(None, export.inputs[0]))]
    record.ready = round(time.process_time() - began, 2)
    record.nodes = len(model.graph.nodes)
    ours += [_plain(model.run(None, inputs)) for inputs in export.inputs[1:]]
    rows = [line for line in model.explain().splitlines() if not line.startswith(" ")]  # others go on with one
    record.stages = len(rows) - 1 if not model.jitted else 1
    record.reasons = "" if model.jitted else model.explain()
    peers = _peer(export, record)
    if peers is not None:
        record.peer = _mistyped(ours, peers) or _apart(ours, peers)
    if export.expected is not None:
        record.framework = _apart(ours, [_plain(o) for o in export.expected])
    if model.jitted:
        record.jit = _attempt(lambda: _jitted(model, export, ours, case.tolerance))
        record.grad = _attempt(lambda: _slopes(model, export, ours[0]))
        if str(record.grad).startswith(_NOT_FINITE):
            # without its optimisations XLA computes the operand of max twice, differently: jax.grad of max is NaN
            with _as_users_compile():
                record.grad = _attempt(lambda: _slopes(model, export, ours[0]))
    return record, list(_faults(case, record))


def _faults(case: Case, record: Record) -> Iterator[str]:
    """What is wrong: outputs that are neither onnxruntime's nor the framework's, jit or gradients that fail."""
    near = [d for d in (record.peer, record.framework) if isinstance(d, float)]
    other = any(isinstance(d, str) and d and not d.startswith(_NO_PEER) for d in (record.peer, record.framework))
    far = other or not near or min(near) > case.tolerance or np.isnan(near).any()
    if far and "outputs" not in case.known:
        yield f"outputs: {record.peer} from onnxruntime's, {record.framework} from the framework's"
    if len(near) == 2 and max(near) > case.tolerance and "outputs" not in case.known:
        yield f"outputs: onnxruntime ({record.peer}) and the framework ({record.framework}) differ; known= says why"
    if record.jit not in ("", "yes") and "jit" not in case.known:
        yield f"jit: {record.jit}"
    wrong = record.grad > case.slope if isinstance(record.grad, float) else record.grad not in ("", "finite")
    if (wrong or record.grad != record.grad) and "grad" not in case.known:
        yield f"grad: {record.grad}"


@contextmanager
def _as_users_compile() -> Iterator[None]:
    """With XLA's optimisations, which the tests switch off."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


def _peer(export: Export, record: Record) -> list[list[Any]] | None:
    """onnxruntime's outputs for each set of inputs."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # others wait by spinning, which counts as processor time
    options.log_severity_level = 4
    began = time.process_time()
    try:
        session = onnxruntime.InferenceSession(export.path, options, providers=["CPUExecutionProvider"])
        results = []
        for inputs in export.inputs:
            results.append(_plain(session.run(None, dict(inputs))))
            record.peer_ready = record.peer_ready or round(time.process_time() - began, 3)
        return results
    except Exception as error:
        record.peer = f"{_NO_PEER}{_line(error)}".replace(str(export.path), export.path.name)
        return None


def _plain(value: Any) -> Any:
    """Arrays, sequences and maps of NumPy's and Python's."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return np.asarray(value)


def _mistyped(ours: Any, theirs: Any) -> str:
    """The first element type that is not onnxruntime's, "" where all are; frameworks may compute in wider ones."""
    a, b = ([_type(v) for v in _leaves(value)] for value in (ours, theirs))
    return next((f"{x} instead of {y}" for x, y in zip(a, b, strict=False) if x != y), "")


def _type(value: Any) -> str:
    dtype = np.asarray(value).dtype
    return "strings" if dtype.kind in "OUST" else dtype.name


def _leaves(value: Any) -> list[Any]:
    """The arrays and the scalars of maps in a value; none for what is missing."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [leaf for v in value for leaf in _leaves(v)]
    return [] if value is None else [value]


def _apart(ours: Any, theirs: Any) -> float | str:
    """The largest difference of any output, of its largest element; a text where they can't be compared."""
    if isinstance(ours, list) and isinstance(theirs, list):
        if len(ours) != len(theirs):
            return f"{len(ours)} values instead of {len(theirs)}"
        return _worst(_apart(a, b) for a, b in zip(ours, theirs, strict=True))
    if isinstance(ours, dict) and isinstance(theirs, dict):
        if ours.keys() != theirs.keys():
            return f"keys {sorted(ours)} instead of {sorted(theirs)}"
        return _worst(_apart(ours[k], theirs[k]) for k in ours)
    if ours is None or theirs is None:
        return 0.0 if ours is theirs else "an optional value is missing"
    a, b = np.asarray(ours), np.asarray(theirs)
    if a.shape != b.shape:
        return f"shape {a.shape} instead of {b.shape}"
    if a.dtype.kind in "OUSb" or b.dtype.kind in "OUSb":
        return 0.0 if np.array_equal(a.astype(str), b.astype(str)) else "different strings or booleans"
    a, b = a.astype(np.float64), b.astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if same.all():
        return 0.0
    largest = np.max(np.abs(b), where=np.isfinite(b), initial=1e-6)
    return float(f"{np.max(np.abs(a - b)[~same]) / largest:.1e}")


def _worst(differences: Iterator[float | str]) -> float | str:
    worst = 0.0
    for difference in differences:
        if isinstance(difference, str):
            return difference
        worst = difference if difference > worst or difference != difference else worst
    return worst


def _attempt(attempt: Callable[[], float | str]) -> float | str:
    """What it returns, or its error in a line."""
    try:
        return attempt()
    except Exception as error:
        return _line(error)


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def _jitted(model: onnx2jax.Model, export: Export, ours: Sequence[Any], tolerance: float) -> str:
    """``jax.jit(model.apply)`` at the last size, in the caller's 32-bit mode."""
    results = jax.jit(model.apply)(model.params, **export.inputs[-1], rng=_key(model))
    difference = _apart(_plain(_listed(results, model)), ours[-1])
    if isinstance(difference, str) or difference > tolerance:
        return f"differs from the plain call: {difference}"
    return "yes"


def _key(model: onnx2jax.Model) -> Any:
    """For models that draw random numbers, whose outputs are then what holds of any of them."""
    return jax.random.key(0) if model.graph.draws else None


def _listed(results: Any, model: onnx2jax.Model) -> list[Any]:
    return list(results) if len(model.outputs) > 1 else [results]


def _slopes(model: onnx2jax.Model, export: Export, outputs: Sequence[Any]) -> float | str:
    """Gradients by floating inputs and parameters of the sum of floating outputs, each times a cotangent."""
    cotangents = [_cotangent(o) if _is_floating(o) else None for o in outputs]
    inputs = {n: v for n, v in export.inputs[0].items() if v.dtype in FLOATS}
    names = _names(model, export)
    params = {n: model.params[n] for n in (names or model.params) if np.asarray(model.params[n]).dtype in FLOATS}
    if all(c is None for c in cotangents) or not (inputs or params):
        return ""

    def loss(params: dict[str, Any], inputs: dict[str, Any]) -> Any:
        values = {**export.inputs[0], **inputs}
        results = _listed(model.apply({**model.params, **params}, **values, rng=_key(model)), model)
        pairs = [(jnp.asarray(c), o) for c, o in zip(cotangents, results, strict=True) if c is not None]
        return sum(jnp.vdot(c, o.astype(c.dtype)).astype(jnp.float32) for c, o in pairs)

    by_params, by_inputs = jax.jit(jax.grad(loss, (0, 1)))(params, inputs)
    slopes = {n: np.asarray(g) for n, g in by_inputs.items()}
    for name, g in by_params.items():
        known, flipped = names.get(name, (name, False))
        slopes[known] = slopes.get(known, 0) + (np.asarray(g).T if flipped else np.asarray(g))
    if not all(np.isfinite(g).all() for g in slopes.values()):
        return _NOT_FINITE + ", ".join(n for n, g in slopes.items() if not np.isfinite(g).all())[:200]
    if export.gradients is None:
        return "finite"
    theirs = export.gradients(export.inputs[0], [c for c in cotangents if c is not None])
    common = slopes.keys() & theirs.keys()  # what the exporter folded into another weight is in one of them only
    assert common, f"no gradient to compare: {sorted(slopes)[:5]} and {sorted(theirs)[:5]}"
    largest = {n: max(_largest(slopes[n]), _largest(theirs[n])) for n in sorted(common)}
    # what is zero but for rounding, as by the bias of an attention's keys, has no digits to compare
    return _worst(_apart(slopes[n], theirs[n]) for n, v in largest.items() if v > 1e-6 * max(largest.values()))


def _largest(value: np.ndarray) -> float:
    return float(np.max(np.abs(value), initial=0))


def _is_floating(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype in FLOATS and value.size > 0


def _cotangent(output: np.ndarray) -> np.ndarray:
    """Numbers between -1 and 1 that no symmetry cancels."""
    return np.cos(np.arange(output.size, dtype=np.float64)).reshape(output.shape).astype(output.dtype)


def _names(model: onnx2jax.Model, export: Export) -> dict[str, tuple[str, bool]]:
    """Names of parameters in the file -> the framework's name, and whether the file has it transposed.

    An exporter keeps the names, or folds a transposition into a weight and numbers it, or keeps the name and folds a
    normalisation into the numbers: so the numbers must be the same, and those of a numbered weight say what it is.
    A weight that is used twice may be there twice.
    """
    stored = {n: np.asarray(v) for n, v in model.params.items()}
    names = {n: (n, False) for n, v in export.params.items() if n in stored and np.array_equal(stored[n], v)}
    telling = {n: v for n, v in export.params.items() if v.size > 64 and np.ptp(v) > 0}
    for other, value in stored.items():
        for name, own in telling.items() if other not in names else ():
            for flipped in (False, True):
                if value.dtype == own.dtype and np.array_equal(value, own.T if flipped else own):
                    names[other] = (name, flipped)
    return names
