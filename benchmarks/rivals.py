"""Implementations to compare: this compiler, hand-written JAX, onnxruntime; from NumPy to lists of NumPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
import onnxruntime

import onnx2jax

from .harness import Call, cores
from .networks import Network

OURS: Final = "onnx2jax"
BY_HAND: Final = "JAX by hand"
ORT: Final = "onnxruntime"


class Mismatch(AssertionError):
    """The results of two rivals differ, so their times cannot be compared."""


def session(model: str | Path | bytes) -> onnxruntime.InferenceSession:
    """An onnxruntime session with a thread for each core."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = cores()
    options.log_severity_level = 3
    source = model if isinstance(model, bytes) else str(model)
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def by_hand(function: Callable[..., Any], params: Any, feeds: Sequence[Any]) -> Call:
    """A function that calls hand-written JAX, compiled once."""
    jitted = jax.jit(function)

    def call() -> list[np.ndarray]:
        return [np.asarray(y) for y in jax.tree.leaves(jitted(params, *feeds))]

    return call


def difference(results: Sequence[Any], expected: Sequence[Any]) -> float:
    """The largest difference relative to the largest number of each output; infinite if shapes or NaNs differ.

    Sequences and maps, as classifiers return them, are compared number by number.
    """
    results, expected = jax.tree.leaves(list(results)), jax.tree.leaves(list(expected))
    if len(results) != len(expected):
        return float("inf")
    worst = 0.0
    for a, b in zip(results, expected, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        if a.shape != b.shape:
            return float("inf")
        if b.dtype.kind not in "fiub":
            worst = max(worst, 0.0 if np.array_equal(a, b) else float("inf"))
            continue
        a, b = a.astype(np.float64), b.astype(np.float64)
        finite = np.isfinite(b)
        if not (np.array_equal(np.isfinite(a), finite) and np.array_equal(a[~finite], b[~finite], equal_nan=True)):
            return float("inf")
        a, b = a[finite], b[finite]
        if b.size:
            worst = max(worst, float(np.max(np.abs(a - b))) / (float(np.max(np.abs(b))) or 1.0))
    return worst


def checked(calls: Mapping[str, Call], tolerance: float, name: str, reference: str = ORT) -> dict[str, Call]:
    """The calls, after checking their results against the reference.

    Raises:
        Mismatch: a result differs.
    """
    expected = calls[reference]()
    for rival, call in calls.items():
        found = difference(call(), expected)
        if not found <= tolerance:
            raise Mismatch(f"{name}: {rival} differs from {reference} by {found:.1e} of the largest number")
    return dict(calls)


def rivals(network: Network, only: Sequence[str] = (OURS, BY_HAND, ORT)) -> dict[str, Call]:
    """The selected rivals for a network, after checking that all agree with onnxruntime.

    Raises:
        Mismatch: they disagree.
    """
    feeds = dict(network.feeds)
    model = onnx2jax.convert(network.path)
    calls: dict[str, Call] = {
        OURS: partial(model.run, None, feeds),
        ORT: partial(session(network.path).run, None, feeds),
    }
    if network.by_hand is not None:
        calls[BY_HAND] = by_hand(network.by_hand, network.params, [*feeds.values()])
    found = checked(calls, network.tolerance, network.name)
    return {name: found[name] for name in only if name in found}
